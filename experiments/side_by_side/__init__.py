"""Engines measured in turns: our own cost, and other engines beside ours."""
