"""Seconds and bytes of layers, measured or by a roofline."""
