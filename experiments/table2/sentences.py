"""What the text says about Table 2, held against our Table 2: how throughput grows with K and with M, and
whether the bubble is negligible at M >= 4K.

Tested are this machine's numbers with the mini-batch as the paper chose it, fitted to a memory cap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from gpipe_bench.experiments.measuring.tables.replay_error import next_error
from gpipe_bench.experiments.measuring.tables.sentences import computed, quotient, sentence, word
from gpipe_bench.experiments.measuring.tables.step_text import SMOKE
from gpipe_bench.experiments.measuring.timed_actions import TimedActions, take_apart
from gpipe_bench.harness.record import Quantity, Record, find
from gpipe_bench.harness.verdict import Entry, at_least, at_most, within_factor
from gpipe_bench.pipeline.plan.links import Link

FEW, MANY = 2, 8  # stages
ONE, MOST = 1, 32  # micro-batches
LINEAR = MANY / FEW

_SPEED_UP = "normalised throughput with 8 stages over that with 2, scaled models, mini-batch fitted"


def sentences(records: Sequence[Record], batch: str) -> list[Entry]:
    """An entry for each sentence about Table 2 that the records suffice for."""
    of = {
        model: record
        for model in ("amoebanet", "transformer")
        if (record := find(records, "done", model=model, batch=batch)) is not None
    }
    found: list[Entry] = []
    for model, record in of.items():
        error = next_error(records, model)
        smoke = SMOKE if record.profile == "smoke" else ""
        constant = quotient("K=8 / K=2, M=1", _at(record, MANY, ONE), _at(record, FEW, ONE))
        titles = {"amoebanet": "AmoebaNet-D (18, 256)", "transformer": "Transformer-48"}
        found += sentence(
            "throughput without pipelining, over the accelerators",
            f"{titles[model]}: K=8 / K=2, M=1",
            constant,
            error,
            allowed=within_factor(word("relatively_constant_ratio")),
            record=record,
            note=_SPEED_UP,
            not_comparable=smoke,
        )
        speed_up = quotient("K=8 / K=2, M=32", _at(record, MANY, MOST), _at(record, FEW, MOST))
        share = quotient(
            "share of a linear speed-up", _at(record, MANY, MOST), _at(record, FEW, MOST), LINEAR
        )
        if model == "transformer":
            found += sentence(
                "Transformer-48: speed-up with four times the accelerators", "K=8 / K=2, M=32", speed_up,
                error, record=record, note=_SPEED_UP, not_comparable=smoke,
            )  # fmt: skip
            found += sentence(
                "Transformer-48: share of a linear speed-up at M >> K", "K=8 over K=2, M=32", share, error,
                allowed=at_least(word("near_linear_share")), record=record, note=_SPEED_UP,
                not_comparable=smoke,
            )  # fmt: skip
        else:
            found += sentence(
                "AmoebaNet-D: share of a linear speed-up", "K=8 over K=2, M=32", share, error, record=record,
                note=_SPEED_UP, not_comparable=smoke,
            )  # fmt: skip
    return found + _more_microbatches(records, of) + _bubble(records, of)


def _at(record: Record, num_stages: int, num_microbatches: int) -> Quantity | None:
    return record.quantity("normalised throughput", K=num_stages, M=num_microbatches)


def _configurations(record: Record) -> list[dict[str, Any]]:
    return list(record.details["cells"].values())


def _more_microbatches(records: Sequence[Record], of: Mapping[str, Record]) -> list[Entry]:
    """The least gain from a number of micro-batches to the next, over both models and all K."""
    gains: list[tuple[Quantity, str, Record]] = []
    for model, record in of.items():
        for num_stages in sorted({facts["num_stages"] for facts in _configurations(record)}):
            counts = sorted(
                f["num_microbatches"] for f in _configurations(record) if f["num_stages"] == num_stages
            )
            for fewer, more in pairwise(counts):
                gain = quotient(
                    f"K={num_stages}, M={more} / M={fewer}",
                    _at(record, num_stages, more),
                    _at(record, num_stages, fewer),
                )
                if gain is not None:
                    gains.append((gain, model, record))
    if not gains:
        return []
    least, model, record = min(gains, key=lambda each: each[0].value or 0.0)
    return sentence(
        "more micro-batches, more throughput", "the smallest quotient of neighbours in M, K fixed", least,
        next_error(records, model), record=record, note=f"the least of {len(gains)} is {model}, {least.name}",
        not_comparable=SMOKE if record.profile == "smoke" else "",
    )  # fmt: skip


def _bubble(records: Sequence[Record], of: Mapping[str, Record]) -> list[Entry]:
    """The largest bubble of the steps with at least four micro-batches for each stage."""
    bubbles: list[tuple[Quantity, str, Record]] = []
    for model, record in of.items():
        for facts in _configurations(record):
            if facts["num_microbatches"] < 4 * facts["num_stages"] or "actions" not in facts:
                continue
            link = record.details["link"]
            over = Link(link["name"], link["latency_s"], link["bandwidth_bytes_per_s"])
            timed = replace(
                TimedActions.from_data(facts["actions"]), num_microbatches=facts["num_microbatches"]
            )
            share = 100 * float(take_apart(timed, over).shares["bubble"])
            name = f"K={facts['num_stages']}, M={facts['num_microbatches']}"
            bubble = computed(name, [share], "%", "replayed")
            if bubble is not None:
                bubbles.append((bubble, model, record))
    if not bubbles:
        return []
    largest, model, record = max(bubbles, key=lambda each: each[0].value or 0.0)
    limit = at_most(word("negligible_share")).scaled(100, 0)
    return sentence(
        "bubble at M >= 4K", "largest over K", largest, next_error(records, model), allowed=limit,
        record=record, note=f"share of K x step of {model}, {largest.name}, the largest of {len(bubbles)}",
        not_comparable=SMOKE if record.profile == "smoke" else "",
    )  # fmt: skip
