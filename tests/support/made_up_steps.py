"""Made-up action times, and made-up findings of the processes of a timed table."""

from __future__ import annotations

from typing import Any

from gpipe_bench.experiments.paper.results import Found, Steps, TimedActions
from gpipe_bench.experiments.paper.workloads import Configuration, Job, Workload
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.pipeline import Kind

OPTIONS = {
    "num_layers": 3, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "seq_len": 8, "vocab_size": 40,
    "cut": "sublayer",
}  # fmt: skip
TINY = Workload("A model", "transformer-lm", OPTIONS, 32, "half")


def timed(
    num_stages: int = 2, num_microbatches: int = 4, slow: float = 1.0, unit_s: float = 0.01, **more: Any
) -> TimedActions:
    """F and R take a unit, B two, on the last stage `slow` times that. Messages have 1000 bytes."""
    seconds = {Kind.F: unit_s, Kind.R: unit_s, Kind.B: 2 * unit_s}
    last, per_stage = num_stages - 1, 8 // num_stages
    given = {
        "partition": tuple(range(k * per_stage, (k + 1) * per_stage) for k in range(num_stages)),
        "num_microbatches": num_microbatches,
        "remat": "always",
        "samples_s": {
            (stage, kind): (each * (slow if stage == last else 1.0),) * 3
            for stage in range(num_stages)
            for kind, each in seconds.items()
        },
        "update_s": (0.0,) * num_stages,
        "setup_s": 0.0,
        "activation_bytes": (1000,) * last,
        "gradient_bytes": (1000,) * last,
    }
    return TimedActions(**{**given, **more})


def steps(turns: int = 2, real_s: tuple[float, ...] = (), why: str = "", **more: Any) -> Steps:
    """The steps of one process, which took so many turns."""
    action = timed(**more)
    return Steps(action.partition, [action] * turns, list(real_s), {"F": 8}, why)


def found(*each: Steps) -> Found:
    """The findings of one process with a very fast link."""
    return Found(each, 1e12, {"threads": "1"}, Usage(1.0, 2.0, 1.0, 2))


def job_of(*configurations: Configuration, **more: Any) -> Job:
    return Job(TINY, configurations, 2, **more)


def value(metrics: Any, name: str, **key: Any) -> float:
    """The value of the metric with this name and key."""
    (metric,) = [each for each in metrics if (each.name, each.key) == (name, key)]
    return float(metric.value)
