"""How far predictions are off where others published the numbers: torchgpipe, zero bubble, a count."""
