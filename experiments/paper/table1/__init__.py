"""Table 1: the largest model that fits."""
