"""A backward in two halves: I finds what the stage before waits for, W what only the optimizer needs."""
