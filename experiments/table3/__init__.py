"""Table 3: throughput without a fast interconnect."""
