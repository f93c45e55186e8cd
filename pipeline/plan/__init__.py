"""Schedules as data, their simulation in time, and the partition of a model into stages.

Nothing here needs more than the standard library.
"""
