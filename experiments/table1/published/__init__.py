"""Table 1 as published: every combination of what the paper leaves open, and what fits under each."""
