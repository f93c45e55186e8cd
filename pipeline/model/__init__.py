"""Turns models into sequences of layers, without changing the models or their names."""
