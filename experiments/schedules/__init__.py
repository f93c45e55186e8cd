"""Schedules beyond GPipe's: published rates replayed, all of them side by side, and timed against torch's."""
