"""Engines under test: the protocol of an engine, known engines, and the cases that check one."""
