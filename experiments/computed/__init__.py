"""What the paper claims and what follows without a run."""
