"""What the text says about Table 3, held against ours: without a fast link the speed-up is similar to that
with one, and what the link adds to a step is marginal.

The speed-up with a fast link is the same steps laid out over a free one.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.measuring.tables.replay_error import next_error
from gpipe_bench.experiments.measuring.tables.sentences import TABLE, computed, quotient, sentence, word
from gpipe_bench.experiments.measuring.tables.step_text import SMOKE, published
from gpipe_bench.harness.record import Quantity, Record, find
from gpipe_bench.harness.verdict import Entry, about

MANY = 8  # stages
NAMES = {"amoebanet": "AmoebaNet-D", "transformer": "Transformer"}
FREE_LINK = "free link"
MARGINAL = "The paper does not say how small a marginal overhead is, so no number decides the sentence."


def sentences(records: Sequence[Record]) -> list[Entry]:
    """An entry for each sentence that the records suffice for."""
    found: list[Entry] = []
    added: list[tuple[Quantity, str, Record]] = []
    for model, name in NAMES.items():
        record = find(records, "done", part="steps", model=model)
        if record is None:
            continue
        error = next_error(records, model)
        slow = record.quantity("normalised throughput", link=record.details["judged"], K=MANY)
        fast = record.quantity("normalised throughput", link=FREE_LINK, K=MANY)
        row = "speed-up from 2 to 8 without a fast link over that with one"
        cell = published(TABLE)["paper", row, name]
        found += sentence(
            row, name, quotient("speed-up without over with", slow, fast), error,
            allowed=about(cell, word("about")), record=record,
            note="K = 8 over K = 2 over the slowed link, over the same over a free link",
            not_comparable=SMOKE if record.profile == "smoke" else "",
        )  # fmt: skip
        over, free = (
            record.quantity("throughput", link=link, K=MANY) for link in (record.details["judged"], FREE_LINK)
        )
        ratio = quotient("throughput over the link over that over a free one", over, free)
        samples = () if ratio is None else ratio.samples or (ratio.value,)
        share = computed(
            f"{name}, K={MANY}", [100 * (1 - each) for each in samples if each is not None], "%", "replayed"
        )
        if share is not None:
            added.append((share, model, record))
    if added:
        most, model, record = max(added, key=lambda each: each[0].value or 0.0)
        found += sentence(
            "share of the step that the link adds", "any K", most, next_error(records, model), record=record,
            note=f"the largest of the two models: {most.name}, over PCIe slowed down as its computation",
            not_comparable=MARGINAL,
        )  # fmt: skip
    return found
