"""One file per table or figure of the paper, and the command line, `python -m experiments`."""
