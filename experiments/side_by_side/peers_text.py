"""The side-by-side table: every engine's step, ours against it, and what was asked of that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from gpipe_bench.experiments.side_by_side.control import Target, measured, state_of, verdict
from gpipe_bench.experiments.side_by_side.peers_models import MODELS
from gpipe_bench.harness.record import Quantity, Record, Scalar
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.units import convert, show
from gpipe_bench.harness.verdict import Comparison

# (where, remat, M) -> ours must be so many times as fast as the peers.
TARGETS: dict[tuple[str, str, int], float] = {
    ("processes", "never", 8): 1.0,
    ("processes", "except_last", 4): 1.12,
    ("processes", "except_last", 16): 1.04,
    ("one process", "never", 4): 1.0,
    ("one process", "except_last", 4): 1.0,
}
PEERS = ("torch-gpipe", "torch-1f1b", "torchgpipe")
SAME_SCHEDULE = {"torch-1f1b": "ours-1f1b"}
"""Who of ours is set against an engine where both ran; otherwise it is ours with GPipe's schedule."""
MIN_ACTION_MS = 5.0
LEAST_ROUNDS = 5
"""With which an interval of 95 % is one. That of two rounds holds the truth every second time, that of three
three times in four; so one engine under two names often looked like two in a smoke run.
"""


def tables(records: Sequence[Record], comparisons: Sequence[Comparison]) -> str:
    """One block per case, then what holds for all."""
    if not records:
        return "Engines side by side: nothing on record"
    return "\n\n".join([_heading(records), *(_block(record) for record in records), _notes(records)])


def _heading(records: Sequence[Record]) -> str:
    shown = {str(record.case["model"]) for record in records}
    models = "; ".join(words for name, (_, _, _, words) in MODELS.items() if name in shown)
    return f"Engines side by side, K = 2, float32, one thread per process (measured)\n{models}"


def _block(record: Record) -> str:
    title = title_of(record.case)
    faulty = record.details.get("faulty", {})
    if record.status != "done" and not faulty:
        return f"{title}: {record.status}: {record.reason}"
    target = TARGETS.get((str(record.case["where"]), str(record.case["remat"]), _count(record.case)))
    word, _ = _state(record)
    lines = []
    for arm in record.details["engines"]:
        if arm in faulty:
            lines.append([arm, "-", "-", "", f"failed: {faulty[arm]}"])
            continue
        if arm in record.details["refused"]:
            lines.append([arm, "-", "-", "", f"skipped: {record.details['refused'][arm]}"])
            continue
        step = record.quantity(f"step of {arm}")
        ratio = record.quantity(f"{SAME_SCHEDULE.get(arm, 'ours')} against {arm}")
        ratio = ratio or record.quantity(f"ours against {arm}")
        assert step is not None, "every engine that was not refused has been timed"
        line = [arm, measured(step), "" if ratio is None else measured(ratio), "", ""]
        if ratio is not None and arm in PEERS and target is not None:
            wanted = Target("", {}, ratio.name, True, target)
            line[3:] = [f">= {target:.2f}", word or verdict(wanted, ratio, record.quantity("control"))]
        lines.append(line)
    headings = ["engine", "ms per step [95 %]", "our speed / its [95 %]", "target", "holds?"]
    table = Grid(columns=headings, lines=lines).text()
    return "\n".join([f"{title}\n{table}", *_among(record), _conditions(record)])


def _state(record: Record) -> tuple[str, str]:
    """Whether anything of the case may be judged, in words, and a sentence about it; see `state_of`."""
    control = record.quantity("control")
    if control is not None and len(control.samples) < LEAST_ROUNDS:
        return "too few rounds", (
            f"too few rounds: {len(control.samples)}, whose interval is none; from {LEAST_ROUNDS} on, as in "
            "the profile short, engines are judged"
        )
    return state_of(record)


def speed_of(record: Record, engine: str, other: str) -> Quantity | None:
    """How many times as fast an engine is as another one, whichever of the two is on record."""
    found = record.quantity(f"{engine} against {other}")
    if found is not None:
        return found
    inverse = record.quantity(f"{other} against {engine}")
    if inverse is None or not inverse.value or not inverse.low or not inverse.high:
        return None
    return replace(
        inverse, name=f"{engine} against {other}", value=1 / inverse.value, low=1 / inverse.high,
        high=1 / inverse.low, samples=(), key={},
    )  # fmt: skip


def _among(record: Record) -> list[str]:
    """Each engine against every other one, and what each needs in every process."""
    engines = [arm for arm in record.details["engines"] if record.quantity(f"step of {arm}") is not None]
    word, _ = _state(record)
    pairs = []
    for first, second in itertools.combinations(engines, 2):
        if (ratio := speed_of(record, first, second)) is not None:
            pairs.append([first, second, measured(ratio), word or _faster(record, ratio)])
    found = []
    if pairs:
        found += ["", Grid(columns=["engine", "against", "its speed [95 %]", "it is"], lines=pairs).text()]
    peaks = [[arm, peak] for arm in engines if (peak := _peak(record, arm))]
    if peaks:
        found += ["", Grid(columns=["engine", "peak memory of a step, by process"], lines=peaks).text()]
    return [*found, ""] if found else []


def _faster(record: Record, ratio: Quantity) -> str:
    """Whether the first of two engines is faster than the second: only what is certain under the control."""
    assert ratio.value is not None, "measured quantities have a value"
    wanted = Target("", {}, ratio.name, at_least=ratio.value >= 1, bound=1.0)
    if "within the noise" in verdict(wanted, ratio, record.quantity("control")):
        return "within the noise"
    return "faster" if ratio.value > 1 else "slower"


def _peak(record: Record, arm: str) -> str:
    """`1.20 MiB, 0.81 MiB`: of every process."""
    found = [each for each in record.quantities if each.name == f"peak memory of {arm}"]
    return ", ".join(
        "not seen" if each.value is None else show(convert(each.value, each.unit, "MiB"), "MiB", 3)
        for each in found
    )


def title_of(case: dict[str, Scalar]) -> str:
    """`amoebanet, two processes, re-materialized, M = 4`."""
    remat = "not re-materialized" if case["remat"] == "never" else f"re-materialized ({case['remat']})"
    where = "one process per stage" if case["where"] == "processes" else "both stages in one process"
    return f"{case['model']}, {where}, {remat}, M = {_count(case)}"


def _count(case: dict[str, Scalar]) -> int:
    count = case["num_microbatches"]
    assert isinstance(count, int)
    return count


def _conditions(record: Record) -> str:
    """What this case's numbers can be trusted for, in one line."""
    parts = []
    action = record.quantity("shortest action")
    if action is not None and action.value is not None:
        short = "" if action.value >= MIN_ACTION_MS else f", below {MIN_ACTION_MS:g} ms: overheads show"
        parts.append(f"shortest action {show(action.value, 'ms', 2)}{short}")
    for name in ("control", "used by others"):
        quantity = record.quantity(name)
        if quantity is not None:
            parts.append(f"{name} {measured(quantity)}")
    line = "; ".join(parts)
    _, why = _state(record)
    return f"{line}\n{why}" if why else line


def _notes(records: Sequence[Record]) -> str:
    lines = [
        "Every engine was checked before and after: M micro-batches ran forward and backward in each stage,",
        "stages were recomputed as asked, gradients are the plain model's. Counts are in the records.",
        "control: our first sample of a round over the second. Where its interval excludes 1, the machine",
        "did not hold still, and nothing is judged; nothing is certain that is no further from its bound",
        "than the control's interval from 1.",
        "peak memory: bytes alive of what a step's operations make (activations, gradients, messages).",
    ]
    if any("ours-1f1b" in record.details.get("engines", ()) for record in records):
        lines += [
            "torch-1f1b is set against ours-1f1b where that ran: this schedule keeps fewer micro-batches,",
            "whose activations stay in the caches. Our speed with GPipe's schedule against it is on record.",
        ]
    if any(record.case["remat"] == "except_last" for record in records):
        lines += [
            "except_last: ours and torchgpipe recompute M - 1 micro-batches; torch's stages are wrapped in",
            "torch.utils.checkpoint and recompute all M, inside the backward. `ours, recomputing all` does",
            "the same work as they.",
        ]
    return "\n".join(lines)
