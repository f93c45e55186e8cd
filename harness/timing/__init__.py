"""How things are timed side by side: the order of their turns, who else used the machine, paired numbers."""
