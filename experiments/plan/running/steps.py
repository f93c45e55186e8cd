"""A case that plans and runs: what its processes found, as numbers, and read back from a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.plan.measures import Compared
from gpipe_bench.experiments.plan.models import MODELS
from gpipe_bench.experiments.plan.rules import MOST_DRIFT
from gpipe_bench.experiments.side_by_side.control import void_of
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Quantity, Record, Scalar
from gpipe_bench.harness.rounds import against_itself, used_by_others
from gpipe_bench.harness.stats import from_samples

if TYPE_CHECKING:
    from gpipe_bench.experiments.plan.running.work import PlanResult
    from gpipe_bench.pipeline.plan.links import Link

PART = "steps"
NUM_PROCESSES = 2
SEED = 1811
STEP, BY_THE_CLOCK, PREDICTED = "step", "step by the clock", "predicted step"


def run(key: dict[str, Scalar], options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.measuring.processes import run_processes
    from gpipe_bench.experiments.plan.running.work import PlanJob, work

    planned = MODELS[options.profile][str(key["model"])]
    job = PlanJob(planned, SEED + options.seed, device=options.device)
    found = run_processes(work, NUM_PROCESSES, job, device=options.device)
    return outcome(str(key["model"]), options.profile, found)


def outcome(model: str, profile: str, found: Sequence[PlanResult]) -> Outcome:
    """What the processes of a case found, as numbers."""
    from gpipe_bench.experiments.plan.running.choosing import title
    from gpipe_bench.experiments.plan.running.work import at_reference_s, describe, request_of

    planned, first = MODELS[profile][model], found[0]
    request = request_of(first.costs, planned, len(found))
    quantities: list[Quantity] = []
    names: list[str] = []
    steps: dict[str, list[float]] = {}
    for place, number in enumerate(first.places):
        prediction = first.ranking[number]
        ran = [each.ran[place] for each in found]
        name = title(prediction.candidate)
        key: dict[str, Scalar] = {"configuration": name}
        names.append(name)
        steps[name] = at_reference_s(prediction, first.costs, request, ran)
        clock = [max(samples) for samples in zip(*(each.step_s for each in ran), strict=True)]
        quantities += [
            Quantity(
                name=PREDICTED, key=key, value=1e3 * prediction.step_s, low=1e3 * prediction.low_s,
                high=1e3 * prediction.high_s, unit="ms", provenance="replayed", higher_is_better=False,
                note="made before any step of it; 95 % of single steps",
            ),
            from_samples(
                STEP, [1e3 * each for each in steps[name]], "ms", key=key, higher_is_better=False,
                note="at the speed that the machine had when the layers were timed",
            ),
            from_samples(BY_THE_CLOCK, [1e3 * each for each in clock], "ms", key=key, higher_is_better=False),
        ]  # fmt: skip
    quantities += [
        from_samples(
            "control", [ratio for name in names for ratio in against_itself(steps, name)], "ratio",
            note="first sample of a round / second, of all configurations",
        ),
        Quantity(
            name="used by others", value=used_by_others([each.usage for each in found]), unit="ratio",
            provenance="measured", higher_is_better=False,
            note="share of the machine's cores that other programs used meanwhile",
        ),
        *(
            Quantity(
                name="drift", key={"process": number}, value=each.drift, unit="ratio", provenance="measured",
                note="the reference step while the plan ran, over the same while the layers were timed",
            )
            for number, each in enumerate(found)
        ),
    ]  # fmt: skip
    details: dict[str, Any] = {
        "title": planned.title,
        "scale": planned.scale,
        "batch_size": planned.batch_size,
        "chosen": min(planned.chosen, len(names)),
        "plan": describe(first),
        "costs": summary(first),
        "pinned_cores": [each.conditions["pinned_cores"] for each in found],
        "threads": [each.conditions["threads"] for each in found],
        **void_of(quantities),
    }
    off = [each.drift for each in found if not 1 / MOST_DRIFT <= each.drift <= MOST_DRIFT]
    if off:
        details["void"] = (
            f"a core's speed drifted by a factor of {off[0]:.2f} between the probes and the steps"
        )
    return Outcome(tuple(quantities), details)


def summary(result: PlanResult) -> dict[str, Any]:
    """What a record keeps of the costs: without the jitter, in milliseconds."""
    costs = result.costs
    return {
        "provenance": dict(costs.provenance),
        "probes_s": result.probes_s,
        "plan_s": result.plan_s,
        "gap_ms": 1e3 * costs.gap_s,
        "step_ms": 1e3 * costs.step_s,
        "link": _link(costs.link),
        "sum_link": _link(costs.sum_link),
        "update_ms": [1e3 * each for each in costs.update_s],
        "layers_ms": {
            str(size): {kind: [round(1e3 * s, 4) for s in seconds] for kind, seconds in each.layers_s.items()}
            for size, each in costs.sizes.items()
        },
        "action_ms": {
            str(size): {kind: round(1e3 * s, 4) for kind, s in each.action_s.items()}
            for size, each in costs.sizes.items()
        },
        "shard_update_ms": [1e3 * each for each in costs.shard_update_s],
        "shards_ms": {
            str(size): {
                str(level): {kind: round(1e3 * s, 4) for kind, s in kinds.items()}
                for level, kinds in each.shards_s.items()
            }
            for size, each in costs.sizes.items()
        },
        "whole_ms": {
            str(size): {kind: round(1e3 * s, 4) for kind, s in each.whole_s.items()}
            for size, each in costs.sizes.items()
        },
    }


def _link(link: Link | None) -> dict[str, float | None] | None:
    if link is None:
        return None
    return {"latency_ms": 1e3 * link.latency_s, "bytes_per_s": _finite(link.bandwidth_bytes_per_s)}


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def compared(record: Record) -> list[Compared]:
    """The configurations of a record, in the order of the plan; none of a void one."""
    if record.status != "done" or record.details.get("void"):
        return []
    found = []
    predicted = [quantity for quantity in record.quantities if quantity.name == PREDICTED]
    for place, quantity in enumerate(predicted):
        step = record.quantity(STEP, **quantity.key)
        if step is None or not step.value or quantity.value is None:
            continue
        found.append(
            Compared(
                str(record.details["title"]), str(quantity.key["configuration"]), quantity.value / 1e3,
                step.value / 1e3, place < record.details["chosen"],
            )
        )  # fmt: skip
    return found
