"""How ranks get to know one another, connect before the first step, and part after the last."""
