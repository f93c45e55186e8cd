"""Table 4: where the time of a step goes."""
