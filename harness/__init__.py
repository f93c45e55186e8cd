"""Measure, remember, judge: records of runs, the paper's numbers, and verdicts between the two.

The package knows nothing about pipelines or models, so it can hold any experiment to any published table.
"""
