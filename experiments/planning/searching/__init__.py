"""Which plans there are, and which is best."""
