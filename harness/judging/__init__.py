"""How our numbers are held against the paper's: published values, units, bands and verdicts."""
