"""What is decided before anything runs: schedules as data, their layout in time, the model's cuts.

Nothing here needs more than the standard library.
"""
