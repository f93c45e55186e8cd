"""One stage of a pipeline: its layers, what it keeps, and what a recomputation must not change."""
