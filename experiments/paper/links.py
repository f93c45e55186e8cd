"""Steps laid out over links: over PCIe as it is, and slowed down with the computation.

What a scaled model on this machine and the paper's model on a P100 share is the schedule and the balance of
the stages, not how long a message takes beside an action. So the scaled model's link is slowed down by as
much as its actions are, per byte; that factor needs the P100's speed, which is modelled, and the share of its
peak that real programs reach, which is declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

from gpipe_bench.experiments.paper.full_size import FullSize
from gpipe_bench.experiments.paper.timed.replay import (
    SAME_SHARE,
    TimedActions,
    balanced,
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
from gpipe_bench.experiments.paper.timed.workloads import NUM_MICROBATCHES, Configuration
from gpipe_bench.harness.record import Metric, from_samples
from gpipe_bench.harness.reproduction import load_reproduction
from gpipe_bench.pipeline.plan.links import FREE, LINKS, Link
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.planner.accelerators import P100_16

PCIE = LINKS["pcie3-host"]

Rounds = Mapping[int, Sequence[TimedActions]]
"""The turns of the steps of each K."""


def replayed(
    plan: Sequence[Configuration], found: Sequence[Found], paper: FullSize, batch_size: int
) -> tuple[list[Metric], dict[str, Any]]:
    """Actions of this machine over PCIe as it is, over PCIe slowed down as much as they are, and over a free
    link: throughput, relative to the first K where there are such steps, and how much of what even stages
    would give a step over the slowed link reaches. `batch_size` is the mini-batch of the paper's model.
    """
    examples = batch_size // NUM_MICROBATCHES
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
    share = float(str(load_reproduction().of("table3-amoebanet")["share_of_peak"].value))
    slowed, base = _slowed(rounds, paper, examples, share), plan[0].num_stages
    metrics, ours = list[Metric](), NUM_MICROBATCHES * plan[0].microbatch_size
    for name, link in {"PCIe": PCIE, SAME_SHARE: slowed, "free link": FREE}.items():
        steps_s = _steps_s(rounds, link)
        rates = {k: [ours / step_s for step_s in several] for k, several in steps_s.items()}
        keyed: Rates = [({"link": name, "K": k}, each) for k, each in rates.items()]
        metrics += normalised("throughput", keyed, rates.get(base), "replayed")
    stages = {}
    steps_s = _steps_s(rounds, slowed)
    for k, several in rounds.items():
        of = partial(from_samples, unit="ratio", key={"K": k}, provenance="replayed")
        even_s = [balanced(timed).makespan_s for timed in several]
        if base in steps_s:
            one = zip(steps_s[base], even_s, strict=True)
            metrics.append(of("normalised bound", [step_s / bound_s for step_s, bound_s in one]))
        reached = [bound_s / step_s for bound_s, step_s in zip(even_s, steps_s[k], strict=True)]
        metrics.append(of("share of the balanced step", reached))
        whole = joined(several)
        forward_s = mean([whole.medians_s()[stage, Kind.F] for stage in range(k)])
        stages[f"K={k}"] = {
            "num_stages": k, "actions": whole.to_data(), "mean_forward_ms": 1e3 * forward_s,
        }  # fmt: skip
    return metrics, {
        "batch_size": ours,
        "assumption": (
            f"a P100's programs are taken to run at {share:.0%} of its arithmetic, and no faster than its "
            "memory allows"
        ),
        "judged": SAME_SHARE,
        "stages": stages,
        "slowed_link": {"latency_s": slowed.latency_s, "bandwidth_bytes_per_s": slowed.bandwidth_bytes_per_s},
        "counts": {f"K={c.num_stages}": found[0].steps[i].counts for i, c in enumerate(plan)},
        "out_of_memory": out_of_memory,
        **conditions_of(found),
    }


def _steps_s(rounds: Rounds, link: Link) -> dict[int, list[float]]:
    return {k: [lay_out(timed, link).makespan_s for timed in several] for k, several in rounds.items()}


def _slowed(rounds: Rounds, paper: FullSize, examples: int, share_of_peak: float) -> Link:
    """PCIe for this machine's model: see `same_share`. Times are those of all stages, bytes of all cuts, the
    paper's those of a micro-batch in float32 on a P100, whose stages have even forwards.
    """
    layers = paper.seconds(P100_16, "float32", examples, (share_of_peak,))
    forward_s = [float(layer.forward[0]) for layer in layers]
    theirs_s = 2 * sum(forward_s) + sum(float(layer.backward[0]) for layer in layers)
    slower, larger = [], []
    for num_stages, several in rounds.items():
        timed = joined(several)
        ends = [stage.stop - 1 for stage in partition(forward_s, num_stages)[:-1]]
        slower.append(sum(timed.medians_s().values()) / theirs_s)
        sent = sum(paper.sent_bytes(end, examples, "float32") for end in ends)
        larger.append(sum(timed.activation_bytes) / sent)
    return same_share(PCIE, mean(slower), mean(larger))
