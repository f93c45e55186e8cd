"""What a machine with a GPU runs: a list of steps that fit into minutes, taken one after another."""
