"""A tested reason: one choice of what is not known, and what our numbers are under it.

A difference may only be explained by a setting of the same model that was tried, beside all others that were
tried; so an experiment hands over every choice with its numbers, and the table of them says what each
explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpipe_bench.harness.records.record import Scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """One choice of settings.

    Args:
        name: in words, as a footnote would give it
        values: our number for each (table, row, column) of paper.csv that it is about, in the unit that is
            printed there
        settings: what was chosen, by the names of results/unknowns.toml where they stand there
    """

    name: str
    values: Mapping[tuple[str, str, str], float]
    settings: Mapping[str, Scalar]
