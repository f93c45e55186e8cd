"""Table 3's numbers from action times, measured or modelled: laid out over PCIe, over a free link, and how
fast a link must be.

What a scaled model on this machine and the paper's model on a P100 share is the schedule and the balance of
the stages, not how long a message takes beside an action. So the scaled model's link is slowed down by as
much as its actions are, per byte; that factor needs the P100's speed, which is modelled, and the share of its
peak that real programs reach, which is assumed: what the ends of that range do to a number is a part of its
spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.measuring.bandwidths import hidden_from, same_share
from gpipe_bench.experiments.measuring.step_results import Throughputs, by_turn, joined, normalised
from gpipe_bench.experiments.measuring.timed_actions import TimedActions, balanced, lay_out
from gpipe_bench.experiments.published.walk import points
from gpipe_bench.harness.record import Provenance, Quantity, Scalar
from gpipe_bench.harness.rounds import used_by_others
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.pipeline.plan.links import FREE, LINKS, Link
from gpipe_bench.pipeline.plan.schedule import Kind

if TYPE_CHECKING:
    from gpipe_bench.experiments.measuring.configuration import Configuration
    from gpipe_bench.experiments.measuring.step_timing import Found
    from gpipe_bench.experiments.published.estimate import Estimate
    from gpipe_bench.experiments.table3.slow_link_steps import LinkFound

PCIE = LINKS["pcie3-host"]


def shares_of_peak() -> tuple[float, float, float]:
    """What real programs reach of a device's arithmetic, from the file of unknowns: middle, low and high."""
    low, middle, high = points(load_unknowns().find("table3-amoebanet", "share_of_peak"))
    return float(middle), float(low), float(high)


def assumption() -> str:
    """The same in words."""
    middle, low, high = shares_of_peak()
    return (
        f"a P100's programs are taken to run at {middle:.0%} of its arithmetic, {low:.0%} to {high:.0%} as "
        "the range, and no faster than its memory allows"
    )


Rounds = Mapping[int, Sequence[TimedActions]]  # by K


def modelled(
    paper: Estimate, stages: Sequence[int], num_microbatches: int, batch_size: int
) -> tuple[list[Quantity], dict[str, Any]]:
    """The paper's size on its own hardware over PCIe."""
    middle, *ends = shares_of_peak()
    rounds = {k: [paper.actions(k, num_microbatches, middle)] for k in stages}
    base = stages[0]
    quantities = _throughputs(rounds, {"PCIe": PCIE, "free link": FREE}, batch_size, "modelled", base)
    quantities += _bounds(rounds, PCIE, "modelled", base) + _hidden(rounds, PCIE.latency_s, "modelled")
    for share in ends:
        at = {k: [paper.actions(k, num_microbatches, share)] for k in stages}
        for k, values in _normalised_throughput(at, PCIE, base).items():
            key: dict[str, Scalar] = {"link": "PCIe", "share_of_peak": share, "K": k}
            quantities.append(_number("normalised throughput", key, values, "modelled"))
    return quantities, {
        "batch_size": batch_size, "assumption": assumption(), "num_parameters": paper.num_parameters,
        "judged": "PCIe", "stages": {f"K={k}": _facts(each) for k, each in rounds.items()},
    }  # fmt: skip


def replayed(
    plan: Sequence[Configuration], found: Sequence[Found], num_microbatches: int, paper: Estimate
) -> tuple[list[Quantity], dict[str, Any]]:
    """Actions of this machine over PCIe as it is, and over PCIe slowed down as much as they are."""
    rounds: dict[int, list[TimedActions]] = {}
    for index, configuration in enumerate(plan):
        timed = by_turn([each.steps[index] for each in found])
        if timed:
            rounds[configuration.num_stages] = [
                replace(each, num_microbatches=num_microbatches) for each in timed
            ]
    if not rounds:
        raise MemoryError(next(filter(None, (each.out_of_memory for each in found[0].steps))))
    base = plan[0].num_stages
    batch_size = num_microbatches * plan[0].microbatch_size
    share_of_peak, *ends = shares_of_peak()
    slowed = _slowed(rounds, paper, share_of_peak)
    links = {"PCIe": PCIE, "PCIe, same share": slowed, "free link": FREE}
    quantities = _throughputs(rounds, links, batch_size, "replayed", base)
    quantities += _bounds(rounds, slowed, "replayed", base) + _hidden(rounds, 0.0, "replayed")
    whole = {k: [joined(each)] for k, each in rounds.items()}
    middle, *edges = [
        _normalised_throughput(whole, _slowed(rounds, paper, share), base) for share in (share_of_peak, *ends)
    ]
    return quantities, {
        "batch_size": batch_size,
        "assumption": assumption(),
        "judged": "PCIe, same share",
        "share_of_peak": {f"K={k}": _factors([edge[k][0] / middle[k][0] for edge in edges]) for k in middle},
        "slowed_link": {"latency_s": slowed.latency_s, "bandwidth_bytes_per_s": slowed.bandwidth_bytes_per_s},
        "stages": {f"K={k}": _facts(each) for k, each in rounds.items()},
        "counts": {f"K={c.num_stages}": found[0].steps[i].counts for i, c in enumerate(plan)},
        "out_of_memory": {
            f"K={c.num_stages}": steps.out_of_memory
            for c, steps in zip(plan, found[0].steps, strict=True)
            if steps.out_of_memory
        },
        "processes": len(found),
        "conditions": [each.conditions for each in found],
        "used_by_others": used_by_others([each.usage for each in found]),
    }


def _factors(edges: Sequence[float]) -> list[float]:
    """The least and the most of them, and 1, which they are factors on."""
    return [min(1.0, *edges), max(1.0, *edges)]


def over_link(
    multiples: Sequence[float | None], found: Sequence[LinkFound]
) -> tuple[list[Quantity], dict[str, Any]]:
    """Steps over the limited link beside the replay over a link with its measured numbers, turn by turn."""
    quantities, points = [], []
    turns = [joined([each.timed[number] for each in found]) for number in range(len(found[0].timed))]
    for index, multiple in enumerate(multiples):
        rate = found[0].rates[index]
        key = {"messages_per_forward": multiple}
        at = [found[0].measured[number][index] for number in range(len(turns))]
        real_s = [max(each.measured[number][index].step_s for each in found) for number in range(len(turns))]
        links = [Link("measured", each.latency_s, each.bandwidth_bytes_per_s) for each in at]
        laid_out_s = [lay_out(timed, link).makespan_s for timed, link in zip(turns, links, strict=True)]
        free_s = [lay_out(timed).makespan_s for timed in turns]
        errors = [ours / real - 1 for ours, real in zip(laid_out_s, real_s, strict=True)]
        quantities += [
            from_samples("bandwidth", [each.bandwidth_bytes_per_s / 1e6 for each in at], "MB/s", key=key),
            from_samples("latency", [1e6 * each.latency_s for each in at], "us", key=key),
            from_samples("real step", [1e3 * s for s in real_s], "ms", key=key, higher_is_better=False),
            from_samples(
                "step", [1e3 * s for s in laid_out_s], "ms", key=key, provenance="replayed",
                higher_is_better=False,
            ),
            from_samples(
                "replay error", errors, "ratio", key=key,
                note="replayed step / measured step - 1, turn by turn",
            ),
        ]  # fmt: skip
        points.append(
            {
                "rate_bytes_per_s": rate, "multiple": multiple,
                "bandwidth_bytes_per_s": median(each.bandwidth_bytes_per_s for each in at),
                "throughput": median(free / real for free, real in zip(free_s, real_s, strict=True)),
            }
        )  # fmt: skip
    return quantities, {
        "points": points,
        "actions": joined(turns).to_data(),
        "used_by_others": used_by_others([each.usage for each in found]),
        "congestion_control": found[0].congestion_control,
    }


def _slowed(rounds: Rounds, paper: Estimate, share_of_peak: float) -> Link:
    """PCIe for this machine's model: see `same_share`. Times are those of all stages, bytes of all cuts."""
    slower, larger = [], []
    for num_stages, several in rounds.items():
        timed = joined(several)
        theirs = paper.actions(num_stages, timed.num_microbatches, share_of_peak)
        slower.append(_compute_s(timed) / _compute_s(theirs))
        larger.append(sum(timed.activation_bytes) / sum(theirs.activation_bytes))
    return same_share(PCIE, mean(slower), mean(larger))


def _compute_s(timed: TimedActions) -> float:
    """Seconds of one micro-batch through all stages, there and back."""
    return sum(timed.medians_s().values())


def _throughputs(
    rounds: Rounds, links: Mapping[str, Link], batch_size: int, provenance: Provenance, base: int
) -> list[Quantity]:
    """Relative to `base` stages, where there are such steps."""
    quantities: list[Quantity] = []
    for name, link in links.items():
        throughput: Throughputs = [
            ({"link": name, "K": k}, [batch_size / lay_out(timed, link).makespan_s for timed in several])
            for k, several in rounds.items()
        ]
        relative_to = next((samples for key, samples in throughput if key["K"] == base), None)
        quantities += normalised("throughput", throughput, relative_to, provenance)
    return quantities


def _normalised_throughput(rounds: Rounds, link: Link, base: int) -> dict[int, list[float]]:
    steps = {k: [lay_out(timed, link).makespan_s for timed in several] for k, several in rounds.items()}
    if base not in steps:
        return {}
    first = steps[base]
    return {k: [one / step for one, step in zip(first, each, strict=True)] for k, each in steps.items()}


def _bounds(rounds: Rounds, link: Link, provenance: Provenance, base: int) -> list[Quantity]:
    """Even stages and a free link, relative to our K = `base`, and how much of that a step over `link`
    reaches.
    """
    quantities = []
    base_s = [lay_out(timed, link).makespan_s for timed in rounds.get(base, ())]
    for k, several in rounds.items():
        bound_s = [balanced(timed).makespan_s for timed in several]
        step_s = [lay_out(timed, link).makespan_s for timed in several]
        reached = [even / step for even, step in zip(bound_s, step_s, strict=True)]
        if base_s:
            limits = [one / even for one, even in zip(base_s, bound_s, strict=True)]
            quantities.append(_number("normalised bound", {"K": k}, limits, provenance))
        quantities.append(_number("share of the balanced step", {"K": k}, reached, provenance))
    return quantities


def _hidden(rounds: Rounds, latency_s: float, provenance: Provenance) -> list[Quantity]:
    quantities = []
    for k, several in rounds.items():
        least = hidden_from(joined(several), latency_s)
        quantities.append(
            Quantity(
                name="hidden from", key={"K": k}, value=None if least is None else least / 1e9, unit="GB/s",
                provenance=provenance, higher_is_better=False,
                note="least bandwidth per direction with a step at most 5 % longer than over a free link",
            )
        )  # fmt: skip
    return quantities


def _facts(several: Sequence[TimedActions]) -> dict[str, Any]:
    timed = joined(several)
    forward_s = [timed.medians_s()[stage, Kind.F] for stage in range(timed.num_stages)]
    return {
        "num_stages": timed.num_stages, "actions": timed.to_data(), "spread": timed.spread(),
        "mean_forward_ms": 1e3 * mean(forward_s),
    }  # fmt: skip


def _number(
    name: str, key: Mapping[str, Scalar], samples: Sequence[float], provenance: Provenance
) -> Quantity:
    return from_samples(name, samples, "ratio", key=key, provenance=provenance, higher_is_better=True)
