"""Sequences of layers made of models that are none, without a change to the models or their names."""
