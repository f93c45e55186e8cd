"""Telling a regression from noise: exact counters, and versions of a program timed in turns."""
