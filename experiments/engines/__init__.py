"""Engines under test: the protocol that an engine follows, known engines, and the cases that check one."""
