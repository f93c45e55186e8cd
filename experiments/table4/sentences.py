"""What the text says about Table 4's overheads, held against ours: recomputation is the largest of them, and
the bubble is slightly smaller than by the formula.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.measuring.tables.replay_error import next_error
from gpipe_bench.experiments.measuring.tables.sentences import computed, sentence
from gpipe_bench.experiments.measuring.tables.step_text import SMOKE
from gpipe_bench.harness.record import Quantity, Record, find
from gpipe_bench.harness.verdict import Entry

MODEL = "resnet101"
STAGES = (2, 4)  # of which v1, section 4.2, says both
OVERHEADS = ("bubble", "load imbalance", "communication", "setup", "weight update")


def sentences(records: Sequence[Record], share: str, num_microbatches: int) -> list[Entry]:
    """An entry for each sentence about the breakdown of ResNet-101 that its record suffices for.

    Args:
        records: of Table 4
        share: the name of the shares of the step
        num_microbatches: that they are laid out for
    """
    record = find(records, "done", model=MODEL)
    if record is None:
        return []
    error = next_error(records, MODEL)
    smoke = SMOKE if record.profile == "smoke" else ""

    def samples(part: str, num_stages: int) -> tuple[float, ...]:
        found = record.quantity(share, part=part, K=num_stages, M=num_microbatches)
        return () if found is None else found.samples or ((found.value,) if found.value is not None else ())

    timed = {facts["num_stages"] for facts in record.details["cells"].values()}
    stages = sorted(timed & set(STAGES))
    over_theory, over_next = [], []
    for num_stages in stages:
        formula = 100 * (num_stages - 1) / (num_microbatches + num_stages - 1)
        name = f"K={num_stages}, M={num_microbatches}"
        over_theory.append(
            computed(
                name, [bubble / formula for bubble in samples("bubble", num_stages)], "ratio", "replayed"
            )
        )
        overheads = zip(*(samples(part, num_stages) for part in OVERHEADS), strict=True)
        most = [max(turn) for turn in overheads]
        recompute = samples("recompute", num_stages)
        over_next.append(
            computed(name, [ours / other for ours, other in zip(recompute, most, strict=True)], "ratio",
                     "replayed")
        )  # fmt: skip
    largest, least = _most(over_theory), _most(over_next, least=True)
    return [
        *sentence(
            "bubble observed over (K-1)/(M+K-1)", "ResNet-101", largest, error, record=record,
            note=f"share of K x step over the formula's, the larger: {largest.name if largest else ''}",
            not_comparable=smoke,
        ),
        *sentence(
            "recomputation over the next largest overhead", "ResNet-101", least, error, record=record,
            note=f"the smaller: {least.name if least else ''}", not_comparable=smoke,
        ),
    ]  # fmt: skip


def _most(found: Sequence[Quantity | None], *, least: bool = False) -> Quantity | None:
    known = [each for each in found if each is not None]
    return (min if least else max)(known, key=lambda each: each.value or 0.0) if known else None
