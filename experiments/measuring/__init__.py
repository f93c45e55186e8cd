"""Timing steps and actions, laying them out on more devices, and the models that are timed."""
