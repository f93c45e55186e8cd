"""How cases are run: one after the other or beside each other, resumed, and shown while they run."""
