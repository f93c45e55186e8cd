"""The deliberate mistakes of `mutants`, a file for each part of the code."""
