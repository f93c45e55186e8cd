"""Answers to look at."""
