"""Sentences of the paper that need training, tried in miniature: their direction alone."""
