"""Keyword arguments of layers."""
