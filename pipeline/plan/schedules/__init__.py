"""Schedules of workers that hold several stages, and schedules that split the backward."""
