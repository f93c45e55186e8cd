"""Turns models that are no nn.Sequential into sequences of layers, without changing the models or their
names.
"""
