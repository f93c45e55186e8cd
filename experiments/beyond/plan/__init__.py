"""Whether `plan` is right: its predictions against steps that ran, and what its choice cost."""
