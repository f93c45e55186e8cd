"""Consistent training: the same network, whatever the partition."""
