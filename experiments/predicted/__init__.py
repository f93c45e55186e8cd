"""Predictions of the paper's tables for its own accelerators."""
