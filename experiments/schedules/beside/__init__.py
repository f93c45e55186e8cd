"""Schedules that take turns with each other and with those of torch."""
