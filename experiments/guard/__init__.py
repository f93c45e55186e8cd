"""What the guard measures: the counters, the benchmarks and the processes that take turns."""
