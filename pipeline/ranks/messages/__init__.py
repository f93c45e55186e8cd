"""Messages between two ranks: what both know of them, and buffers and sends on their way."""
