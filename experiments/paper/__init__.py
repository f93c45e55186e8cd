"""The tables and figures of the paper, each an experiment, and what they share."""
