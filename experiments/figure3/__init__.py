"""Figure 3 of the paper's first version: speed-ups over partitions."""
