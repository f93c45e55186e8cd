"""`plan`: how to train a model on given machines, and how long a step takes."""
