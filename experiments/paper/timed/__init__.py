"""What the paper's timed tables share: workloads, steps measured in processes, replays, evidence."""
