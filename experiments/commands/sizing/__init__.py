"""What the verb `size` answers about a given model."""
