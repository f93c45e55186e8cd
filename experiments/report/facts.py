"""Facts of the first screen that no comparison holds: same seeds, the schedule's formula, the hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.unknowns import load_unknowns

RECOMPUTED = 3, 4
"""Slots of F, R and B, of which the recomputation of the last stages starts while they would wait: a bubble
has F and B alone, and a micro-batch all of them (`table2-bound` of results/paper.csv)."""


def speed(num_stages: int, num_microbatches: int) -> float:
    """Of even stages over one device, F : R : B = 1 : 1 : 2, a free link, recomputation that starts early."""
    idle, work = RECOMPUTED
    return num_microbatches * num_stages * work / (work * num_microbatches + idle * (num_stages - 1))


def idle_share(num_stages: int, num_microbatches: int) -> float:
    """The share of their time that such stages wait."""
    return 1 - speed(num_stages, num_microbatches) / num_stages


def facts_of(records: Mapping[str, Sequence[Record]]) -> dict[str, str]:
    """By name, in words; those whose records are missing are left out.

    Args:
        records: by experiment, finished or not
    """
    found = {
        "even_speed_up": f"{speed(8, 32) / speed(2, 32):.2f}",
        "even_idle": f"{100 * idle_share(2, 8):.1f} to {100 * idle_share(8, 32):.1f} %",
    }
    low, high = load_unknowns().find("claims", "near_linear_share").range or (0.0, 0.0)
    found["near_linear"] = f"{100 * low:g} or at {100 * high:g} %"
    trained = records.get("consistency", ())
    same = of_case(trained, "done", part="same seed")
    if same:
        compared, differing = (
            sum(int(each.value or 0) for record in same for each in record.quantities if each.name == name)
            for name in ("numbers compared", "numbers that differ")
        )
        found |= {
            "same_runs": f"{len(same)}", "weights": f"{compared:,}",
            "different_weights": f"{differing:,}" if differing else "none",
            "own_runs": f"{len(of_case(trained, 'done', part='own seeds'))}",
        }  # fmt: skip
    environments = [
        record.environment
        for several in records.values()
        for record in several
        if any(quantity.provenance != "modelled" for quantity in record.quantities)
    ]
    if environments:
        found["hardware"] = hardware(environments)
    return found


def hardware(environments: Sequence[Mapping[str, object]]) -> str:
    """One sentence about what timed or trained anything."""
    processors = sorted({str(each.get("cpu_model", "an unknown processor")) for each in environments})
    cores = sorted({int(str(each.get("cores_logical") or 0)) for each in environments})
    gpus = any(each.get("gpus") for each in environments)
    names = " and ".join(name.replace("(R)", "") for name in processors)
    counts = " or ".join(map(str, cores))
    where = f"Everything that ran here ran on {counts} processor cores ({names}), "
    if gpus:
        return f"{where}some of it on GPUs."
    return (
        f"{where}none of it on a GPU or TPU: no training step was timed on more than {max(cores)} of them, "
        "and what is said of four and eight devices is computed from these steps."
    )
