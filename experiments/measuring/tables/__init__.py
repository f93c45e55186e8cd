"""What tables of timed steps share: cells, sentences of the paper, and how far a replay may be off."""
