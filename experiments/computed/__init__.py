"""What the paper and write-ups about it claim and what follows without a run."""
