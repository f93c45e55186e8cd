"""What must be recomputed, chosen for the least time under a cap of memory."""
