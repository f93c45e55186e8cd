"""Pipelines beside each other: what the grid of a job costs and saves."""
