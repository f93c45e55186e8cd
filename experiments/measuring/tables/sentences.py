"""Sentences of the paper's text that a few of our numbers can contradict.

"Almost linear", "main contributor", "relatively constant": a sentence is tested by one number that it is
about and by what its words admit. Which reading of a word is meant is an unknown like any other, so the
limits come from the file of unknowns.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.measuring.tables.replay_error import UNKNOWN, replayed_spread
from gpipe_bench.harness.record import Provenance, Quantity, Record
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.harness.unknowns import Unknown, load_unknowns
from gpipe_bench.harness.verdict import Allowed, Entry

TABLE = "claims-text"


def word(setting: str) -> Unknown:
    """How far a word of the text may reach, from the file of unknowns."""
    return load_unknowns().find("claims", setting)


def quotient(
    name: str, over: Quantity | None, under: Quantity | None, divisor: float = 1.0
) -> Quantity | None:
    """One number of ours over another and over `divisor`, turn by turn where both were measured in turns.

    A drift of the machine moves both numbers of a turn, so their quotient keeps out of it. None where either
    has no value, or is zero below the line.
    """
    if over is None or under is None or over.value is None or not under.value:
        return None
    if len(over.samples) == len(under.samples) > 1 and all(under.samples):
        ratios = [a / b / divisor for a, b in zip(over.samples, under.samples, strict=True)]
        return from_samples(name, ratios, "ratio", provenance=over.provenance)
    return Quantity(
        name=name, value=over.value / under.value / divisor, unit="ratio", provenance=over.provenance
    )


def computed(name: str, samples: Sequence[float], unit: str, provenance: Provenance) -> Quantity | None:
    """A number that was worked out turn by turn; None without turns."""
    return from_samples(name, samples, unit, provenance=provenance) if samples else None


def sentence(
    row: str,
    column: str,
    quantity: Quantity | None,
    error: tuple[float, float] | None,
    *,
    note: str,
    allowed: Allowed | None = None,
    record: Record | None = None,
    not_comparable: str = "",
) -> list[Entry]:
    """The entry of a sentence, or none where the records do not have what it is about.

    Args:
        row: of the table of sentences
        column: likewise
        quantity: the replayed number that the sentence is about
        error: of the replay, see `next_error`
        note: what the number is
        allowed: what its words admit, where the paper's file does not say it by itself
        record: the one it comes from
        not_comparable: why the number can't decide it
    """
    if quantity is None:
        return []
    spread = replayed_spread(quantity, error, "either way")
    return [
        Entry(
            table=TABLE,
            row=row,
            column=column,
            quantity=quantity,
            spread=spread,
            allowed=allowed,
            record=record,
            note=note,
            not_comparable=not_comparable or ("" if spread else UNKNOWN),
        )
    ]
