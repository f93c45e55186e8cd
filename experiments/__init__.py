"""One file per table or figure of the paper, and the command line that runs them (`python -m
experiments`).
"""
