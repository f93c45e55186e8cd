"""Verbs for what other people bring or take with them: their engine, and records that travel."""
