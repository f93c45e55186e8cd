"""How the layers of a stage run: one after the other, compiled or as they are."""
