"""The regression guard: exact counters, benchmarks, and the processes that take turns."""
