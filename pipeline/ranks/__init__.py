"""A pipeline over processes: one rank per stage, messages between them, and one failure known to all."""
