"""What is done with all gradients of a step together."""
