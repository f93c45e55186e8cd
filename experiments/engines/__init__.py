"""Engines under test: the protocol, those that are known, and what each is checked for."""
