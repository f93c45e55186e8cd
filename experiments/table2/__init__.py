"""Table 2: throughput over partitions and micro-batches."""
