"""Configurations that others measured, in the order of our predictions."""
