"""Profiles of layers of any size, from those of two or of one."""
