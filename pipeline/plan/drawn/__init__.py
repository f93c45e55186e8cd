"""Schedules and timelines to look at."""
