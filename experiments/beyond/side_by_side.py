"""The one way to time things in turns: variants of a step, in the same processes, judged under a control.

Processes live through all rounds, so that neither start-up nor a cold allocator is measured, and every round
runs all variants there and back in an order drawn anew (`harness/rounds.py`); only numbers of one round are
set against each other.

A case's control is one variant against itself, its first sample of each round over its second. Where the
interval excludes 1 the machine did not hold still, and the case is void. It is measured once more with more
rounds; void again, it is contaminated, and nothing of it is judged. The control's reach is the noise floor: a
ratio that is no further from 1 than identical code was is within the noise, whatever its own interval says,
because an interval of rounds does not see what differs between variants for as long as they live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.paper import show
from gpipe_bench.harness.record import Metric, Record, from_samples
from gpipe_bench.harness.rounds import (
    Times,
    Usage,
    against_itself,
    repeats_for,
    slowest,
    turns,
    used_by_others,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

MORE_ROUNDS = 2  # times the rounds when a case is measured again
CALIBRATION_STEPS = 2

Steps = Mapping[str, Callable[[], object] | None]
"""One training step of each variant, or None in a process that has no part in it."""


class Found(NamedTuple):
    """Findings of one process of a case: seconds per step by variant, two samples per round; what the process
    used meanwhile and how it was set up; and what else there is to tell.
    """

    times: dict[str, list[float]]
    usage: Usage
    conditions: dict[str, str]
    details: dict[str, Any]


def take_turns(
    steps: Steps, layers: Sequence[nn.Module], num_rounds: int, seed: int, device: torch.device | None = None
) -> Found:
    """Runs in each process of a case: times all variants, which train the same `layers` on `device`, or on
    the CPU.

    All processes must call; each begins every turn with the others and keeps its own times, of which the
    slowest process's count. Every variant has warmed up.
    """
    import torch
    from torch import distributed as dist

    from gpipe_bench.pipeline.clock import conditions
    from gpipe_bench.planner.probes import CPU, settle, time_step

    timed = partial(time_step, layers=layers, device=device or CPU)

    def repeats(step: Callable[[], object] | None) -> int:
        """Steps per sample, in every process as many as the slowest needs to fill a sample."""
        step_s = torch.tensor([timed(step, repeats=CALIBRATION_STEPS)], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(step_s, dist.ReduceOp.MAX)
        return repeats_for([float(step_s)])

    num_steps = {variant: repeats(step) for variant, step in steps.items()}
    settle()
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    start = Usage.now()
    for variant in turns(list(steps), num_rounds, seed):
        times[variant].append(timed(steps[variant], repeats=num_steps[variant]))
    return Found(times, Usage.now().since(start), conditions(), {})


def side_by_side(
    take: Callable[[int], Sequence[Found]],
    numbers: Callable[[Times, Sequence[Found]], Outcome],
    rounds: int,
    *,
    control: str = "ours",
    again: bool = True,
) -> Outcome:
    """A case in which variants take turns.

    Args:
        take: what its processes find in so many rounds (`take_turns`)
        numbers: what that says, given the seconds of the slowest process
        rounds: of two samples of every variant
        control: the variant that is set against itself
        again: measure once more, in `MORE_ROUNDS` as many rounds, where the control voids the case. The
            second outcome stands, whatever its control says; `details["before"]` says what voided the first
    """

    def measured(rounds: int) -> Outcome:
        found = take(rounds)
        times = slowest([each.times for each in found])
        outcome = numbers(times, found)
        note = "our first sample of a round / second"
        metrics = [*outcome.metrics, *conditions_of(found, against_itself(times, control), note)]
        details = {"rounds": rounds, **outcome.details, **facts_of(found, metrics)}
        details["cpu_s"] = [each.usage.cpu_s for each in found]
        return replace(outcome, metrics=tuple(metrics), details=details)

    first = measured(rounds)
    if not again or first.status != "done" or "void" not in first.details:
        return first
    second = measured(MORE_ROUNDS * rounds)
    return replace(second, details={**second.details, "before": first.details["void"]})


def conditions_of(found: Sequence[Found], ratios: Sequence[float], note: str) -> list[Metric]:
    """Metrics that tell how far a case can be trusted: the control's ratios, and what else ran meanwhile."""
    share = "share of the machine's cores that other programs used meanwhile"
    others = used_by_others([each.usage for each in found])
    return [
        from_samples("control", ratios, "ratio", note=note),
        Metric("used by others", others, "ratio", "measured", note=share),
    ]


def facts_of(found: Sequence[Found], metrics: Sequence[Metric]) -> dict[str, Any]:
    """Facts for a record's details: how the processes were set up, and `void`, why the numbers may not be
    judged, where the control says so.
    """
    void = void_by(next(metric for metric in metrics if metric.name == "control"))
    facts = {name: [each.conditions[name] for each in found] for name in ("pinned_cores", "threads")}
    return facts | ({"void": void} if void else {})


def lacks_gpus(device: str, count: int) -> str:
    """Why there is no GPU for each of so many processes, where they are to have one; or nothing."""
    from gpipe_bench.pipeline import devices

    found = count if device == "cpu" else devices.count(device)
    return f"needs {count} GPUs; torch sees {found}" if found < count else ""


# Judgements about the numbers


def void_by(control: Metric | None) -> str:
    """Why a case's numbers can't be judged, or nothing: the interval of the control excludes 1."""
    if control is None or control.low is None or control.high is None or control.low <= 1 <= control.high:
        return ""
    return f"the control is {measured(control)}, not 1"


def state_of(record: Record) -> tuple[Literal["", "void", "contaminated"], str]:
    """Whether a case's numbers may be judged, in a word, and a sentence about it; both empty where all was
    well at once.
    """
    void, before = void_by(record.metric("control")), str(record.details.get("before", ""))
    if void and before:
        return "contaminated", f"contaminated: {void}, and before, in half the rounds: {before}"
    if void:
        return "void", f"void: {void}: the machine changed while it measured; measure again"
    if before:
        return "", f"measured again with {MORE_ROUNDS} times the rounds, because at first {before}"
    return "", ""


def trust_of(record: Record) -> list[str]:
    """How far a record can be trusted: `control 1.000 [0.990, 1.010]`, `used by others 0.012`."""
    found = [record.metric(name) for name in ("control", "used by others")]
    return [f"{each.name} {measured(each)}" for each in found if each is not None]


def is_faster(ratio: Metric, control: Metric | None) -> bool | None:
    """Whether the first of two variants is the faster one by the ratio of their speeds. None where that is
    within the noise: the interval holds 1, or the median lies within the noise floor, which is the further
    end of the control's interval.
    """
    low, high = ratio.low, ratio.high
    if not ratio.value or low is None or high is None or low <= 1 <= high:
        return None
    ends = (control.low, control.high) if control is not None else ()
    floor = max((abs(math.log(end)) for end in ends if end), default=0.0)
    return None if abs(math.log(ratio.value)) < floor else ratio.value > 1


def measured(metric: Metric) -> str:
    """`0.951 [0.947, 0.956]`."""

    def text(value: float) -> str:
        return f"{value:.3f}" if metric.unit == "ratio" else show(value, metric.unit, 3)

    assert metric.value is not None, "measured metrics have a value"
    if metric.low is None or metric.high is None:
        return text(metric.value)
    return f"{text(metric.value)} [{text(metric.low)}, {text(metric.high)}]"
