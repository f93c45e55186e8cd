"""Steps laid out over links: over PCIe as it is, slowed down with the computation, and of any bandwidth.

What a scaled model on this machine and the paper's model on a P100 share is the schedule and the balance of
the stages, not how long a message takes beside an action. So the scaled model's link is slowed down by as
much as its actions are, per byte; that factor needs the P100's speed, which is modelled, and the share of its
peak that real programs reach, which is assumed: what the ends of that range do to a number is on record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from gpipe_bench.experiments.paper.timed.replay import (
    TimedActions,
    balanced,
    hidden_from,
    lay_out,
    same_share,
)
from gpipe_bench.experiments.paper.timed.results import (
    Found,
    Rates,
    by_turn,
    conditions_of,
    joined,
    normalised,
)
from gpipe_bench.experiments.paper.timed.workloads import Configuration, Workload
from gpipe_bench.harness.record import Metric, Provenance, Scalar, from_samples
from gpipe_bench.harness.unknowns import load_unknowns, points
from gpipe_bench.pipeline.plan.links import FREE, LINKS, Link
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedule import Kind

STAGES = (2, 4, 8)
NUM_MICROBATCHES = 32
SAME_SHARE = "PCIe, same share"
PCIE = LINKS["pcie3-host"]

Rounds = Mapping[int, Sequence[TimedActions]]
"""The turns of the steps of each K."""


@dataclass(frozen=True)
class Estimate:
    """One micro-batch in float32 on an accelerator, by layer. Table 3's second question is how fast a link
    must be for messages to stay hidden, and that ratio belongs to the paper's hardware and size.

    Args:
        seconds: share of the peak -> forward and backward of each layer
        output_bytes: over a cut behind each layer
        gradient_bytes: the same for the way back
        num_parameters: of all layers
    """

    seconds: Callable[[float], Sequence[tuple[float, float]]]
    output_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    num_parameters: int

    def actions(self, num_stages: int, num_microbatches: int, share_of_peak: float) -> TimedActions:
        """The actions of the best cut into stages. A recomputation takes as long as a forward; set-up and
        update are left out.
        """
        layers = self.seconds(share_of_peak)
        stages = partition([forward_s for forward_s, _ in layers], num_stages)
        samples: dict[tuple[int, Kind], tuple[float, ...]] = {}
        for number, stage in enumerate(stages):
            forward_s, backward_s = (sum(layers[layer][way] for layer in stage) for way in (0, 1))
            samples[number, Kind.F] = samples[number, Kind.R] = (forward_s,)
            samples[number, Kind.B] = (backward_s,)
        sent, returned = (
            tuple(sizes[stage.stop - 1] for stage in stages[:-1])
            for sizes in (self.output_bytes, self.gradient_bytes)
        )
        return TimedActions(stages, num_microbatches, "always", samples, (), 0.0, sent, returned)


def estimate_of(paper: Workload) -> Estimate:
    """One micro-batch of the paper's model at a P100's peaks."""
    from gpipe_bench.experiments.paper.predicted.sizes import FullSize
    from gpipe_bench.planner.accelerators import P100_16

    full, size = FullSize(paper.model, dict(paper.options)), paper.batch_size // NUM_MICROBATCHES

    def seconds(share_of_peak: float) -> list[tuple[float, float]]:
        found = full.seconds(P100_16, "float32", size, (share_of_peak,))
        return [(float(layer.forward[0]), float(layer.backward[0])) for layer in found]

    layers = range(len(full.layers))
    return Estimate(
        seconds,
        tuple(full.sent_bytes(layer, size, "float32") for layer in layers),
        tuple(full.returned_bytes(layer, size, "float32") for layer in layers),
        sum(full.parameters),
    )


def shares_of_peak() -> tuple[float, float, float]:
    """Share of a device's peak that real programs reach, from the file of unknowns: middle, low and high."""
    low, middle, high = points(load_unknowns().find("table3-amoebanet", "share_of_peak"))
    return float(middle), float(low), float(high)


def modelled(paper: Estimate, batch_size: int) -> tuple[list[Metric], dict[str, Any]]:
    """The paper's size on its own hardware over PCIe."""
    middle, *ends = shares_of_peak()
    at = {
        share: {k: [paper.actions(k, NUM_MICROBATCHES, share)] for k in STAGES} for share in (middle, *ends)
    }
    links = {"PCIe": PCIE, "free link": FREE}
    metrics, details = _numbers(at[middle], links, "PCIe", PCIE.latency_s, batch_size, "modelled")
    for share in ends:
        for k, speed_up in _speed_ups(at[share], PCIE).items():
            key: dict[str, Scalar] = {"link": "PCIe", "share_of_peak": share, "K": k}
            metrics.append(_ratio("normalised throughput", speed_up, key, "modelled"))
    return metrics, {**details, "num_parameters": paper.num_parameters}


def replayed(
    plan: Sequence[Configuration], found: Sequence[Found], paper: Estimate
) -> tuple[list[Metric], dict[str, Any]]:
    """Actions of this machine over PCIe as it is, and over PCIe slowed down as much as they are."""
    rounds = {
        configuration.num_stages: [replace(each, num_microbatches=NUM_MICROBATCHES) for each in timed]
        for index, configuration in enumerate(plan)
        if (timed := by_turn([each.steps[index] for each in found]))
    }
    out_of_memory = {
        f"K={configuration.num_stages}": steps.out_of_memory
        for configuration, steps in zip(plan, found[0].steps, strict=True)
        if steps.out_of_memory
    }
    if not rounds:
        raise MemoryError(next(iter(out_of_memory.values())))
    shares = shares_of_peak()
    slowed = _slowed(rounds, paper, shares[0])
    links = {"PCIe": PCIE, SAME_SHARE: slowed, "free link": FREE}
    batch_size = NUM_MICROBATCHES * plan[0].microbatch_size
    metrics, details = _numbers(rounds, links, SAME_SHARE, 0.0, batch_size, "replayed")
    whole = {k: [joined(each)] for k, each in rounds.items()}
    middle, *ends = (_speed_ups(whole, _slowed(rounds, paper, share)) for share in shares)
    factors = {k: [1.0, *(end[k][0] / middle[k][0] for end in ends)] for k in middle}
    return metrics, {
        **details,
        "share_of_peak": {f"K={k}": [min(each), max(each)] for k, each in factors.items()},
        "slowed_link": {"latency_s": slowed.latency_s, "bandwidth_bytes_per_s": slowed.bandwidth_bytes_per_s},
        "counts": {f"K={c.num_stages}": found[0].steps[i].counts for i, c in enumerate(plan)},
        "out_of_memory": out_of_memory,
        **conditions_of(found),
    }


def _numbers(
    rounds: Rounds,
    links: Mapping[str, Link],
    judged: str,
    latency_s: float,
    batch_size: int,
    provenance: Provenance,
) -> tuple[list[Metric], dict[str, Any]]:
    """Throughput over each link, relative to that of K = 2 where there are such steps; what even stages and a
    free link would give, and how much of that a step over the `judged` link reaches; how fast a link must be.
    """
    steps_s = {name: _steps_s(rounds, link) for name, link in links.items()}
    metrics: list[Metric] = []
    for name, of_link in steps_s.items():
        rates = {k: [batch_size / step_s for step_s in several] for k, several in of_link.items()}
        keyed: Rates = [({"link": name, "K": k}, each) for k, each in rates.items()]
        metrics += normalised("throughput", keyed, rates.get(STAGES[0]), provenance)
    base_s = steps_s[judged].get(STAGES[0], [])
    for k, several in rounds.items():
        bound_s = [balanced(timed).makespan_s for timed in several]
        reached = [even / step for even, step in zip(bound_s, steps_s[judged][k], strict=True)]
        if base_s:
            bound = [one / even for one, even in zip(base_s, bound_s, strict=True)]
            metrics.append(_ratio("normalised bound", bound, {"K": k}, provenance))
        metrics.append(_ratio("share of the balanced step", reached, {"K": k}, provenance))
    stages = {}
    for k, several in rounds.items():
        timed = joined(several)
        least = hidden_from(timed, latency_s)
        metrics.append(
            Metric(
                name="hidden from", key={"K": k}, value=None if least is None else least / 1e9, unit="GB/s",
                provenance=provenance,
                note="least bandwidth per direction with a step at most 5 % longer than over a free link",
            )
        )  # fmt: skip
        forward_s = mean([timed.medians_s()[stage, Kind.F] for stage in range(k)])
        stages[f"K={k}"] = {
            "num_stages": k, "actions": timed.to_data(), "spread": timed.spread(),
            "mean_forward_ms": 1e3 * forward_s,
        }  # fmt: skip
    middle, low, high = shares_of_peak()
    assumption = (
        f"a P100's programs are taken to run at {middle:.0%} of its arithmetic, {low:.0%} to {high:.0%} as "
        "the range, and no faster than its memory allows"
    )
    return metrics, {
        "batch_size": batch_size, "assumption": assumption, "judged": judged, "stages": stages,
    }  # fmt: skip


def _ratio(name: str, samples: Sequence[float], key: Mapping[str, Scalar], provenance: Provenance) -> Metric:
    return from_samples(name, samples, "ratio", key=key, provenance=provenance)


def _steps_s(rounds: Rounds, link: Link) -> dict[int, list[float]]:
    return {k: [lay_out(timed, link).makespan_s for timed in several] for k, several in rounds.items()}


def _speed_ups(rounds: Rounds, link: Link) -> dict[int, list[float]]:
    """Throughput relative to that of K = 2; nothing without such steps."""
    steps_s = _steps_s(rounds, link)
    base_s = steps_s.get(STAGES[0])
    if base_s is None:
        return {}
    return {k: [one / step for one, step in zip(base_s, each, strict=True)] for k, each in steps_s.items()}


def _slowed(rounds: Rounds, paper: Estimate, share_of_peak: float) -> Link:
    """PCIe for this machine's model: see `same_share`. Times are those of all stages, bytes of all cuts."""
    slower, larger = [], []
    for num_stages, several in rounds.items():
        timed = joined(several)
        theirs = paper.actions(num_stages, timed.num_microbatches, share_of_peak)
        slower.append(sum(timed.medians_s().values()) / sum(theirs.medians_s().values()))
        larger.append(sum(timed.activation_bytes) / sum(theirs.activation_bytes))
    return same_share(PCIE, mean(slower), mean(larger))
