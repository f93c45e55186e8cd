"""Experiments beyond the paper: engines side by side, schedules, grids of processes, and plans."""
