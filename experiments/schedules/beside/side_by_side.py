"""Our schedules beside 1F1B and beside torch's of the same names, on two processes, in one interleaved run.

Two cases: without re-materialization, M = 2, 4 and 8, against our 1F1B and against torch's schedules; and
GPipe with every micro-batch recomputed against the same with W put off into the bubble, M = 2 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.side_by_side.control import conditions_of, held_still, void_of
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Quantity, Scalar
from gpipe_bench.harness.rounds import ratios, slowest
from gpipe_bench.harness.stats import from_samples

if TYPE_CHECKING:
    from gpipe_bench.experiments.schedules.beside.side_by_side_work import SideResult

PART = "side by side"
NUM_WORKERS = 2
SEED = 1811
MODEL = "transformer-lm"
OPTIONS: dict[str, dict[str, Any]] = {
    "smoke": {
        "num_layers": 6, "vocab_size": 32, "d_model": 32, "ffn_dim": 64, "num_heads": 2, "seq_len": 16,
    },
    "short": {
        "num_layers": 8, "vocab_size": 64, "d_model": 384, "ffn_dim": 1536, "num_heads": 6, "seq_len": 64,
    },
}  # fmt: skip
OPTIONS["full"] = OPTIONS["short"]
SIZE = {"smoke": 1, "short": 2, "full": 2}
WORDS = "Transformer-8, width 384, 2 sequences of 64 tokens per micro-batch"

# (remat, M) -> rounds by profile.
ROUNDS: dict[tuple[str, int], dict[str, int]] = {
    ("never", 2): {"smoke": 1, "short": 10, "full": 40},
    ("never", 4): {"smoke": 0, "short": 6, "full": 30},
    ("never", 8): {"smoke": 0, "short": 5, "full": 20},
    ("always", 2): {"smoke": 0, "short": 20, "full": 60},
    ("always", 4): {"smoke": 0, "short": 14, "full": 40},
}

OURS = ("1f1b", "zb-h1", "interleaved", "interleaved zero bubble", "zb-v", "zb-v, generated")
THEIRS = ("1f1b", "interleaved", "interleaved zero bubble", "zb-v")
RECOMPUTED = ("gpipe", "gpipe, W put off", "generated")
TARGETS: dict[tuple[str, str], dict[int, float]] = {
    ("zb-h1", "1f1b"): {2: 0.90, 4: 0.95, 8: 1.00},
    ("interleaved", "1f1b"): {2: 0.90, 4: 0.95, 8: 0.98},
    ("zb-v, generated", "1f1b"): {2: 0.88, 4: 0.95, 8: 1.00},
    ("gpipe, W put off", "gpipe"): {2: 0.90, 4: 0.93},
    **{(name, f"torch's {name}"): {2: 1.0, 4: 1.0, 8: 1.0} for name in THEIRS},
}
"""(arm, against) -> by M, the most that its step may take of the other's."""


def keys(profile: str) -> list[tuple[dict[str, Scalar], float]]:
    """The cases and how long each takes."""
    seconds = {"smoke": 10.0, "short": 90.0, "full": 500.0}[profile]
    return [
        ({"part": PART, "remat": remat, "num_microbatches": number}, seconds)
        for (remat, number), rounds in ROUNDS.items()
        if rounds[profile]
    ]


def arms(remat: str) -> tuple[str, ...]:
    """Who takes turns."""
    return (*OURS, *(f"torch's {name}" for name in THEIRS)) if remat == "never" else RECOMPUTED


def run(key: dict[str, Scalar], options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.measuring.processes import run_processes
    from gpipe_bench.experiments.schedules.beside.side_by_side_work import SideJob, work

    remat, number = str(key["remat"]), int(str(key["num_microbatches"]))
    rounds = ROUNDS[remat, number][options.profile]

    def take(rounds: int) -> Outcome:
        job = SideJob(
            MODEL, OPTIONS[options.profile], SIZE[options.profile], number, remat, arms(remat), rounds, SEED
        )
        return outcome(number, remat, run_processes(work, NUM_WORKERS, job))

    return take(rounds) if options.profile == "smoke" else held_still(take, rounds)


def outcome(number: int, remat: str, found: Sequence[SideResult]) -> Outcome:
    """What the processes of a case found, as numbers."""
    times = slowest([result.times for result in found])
    base = arms(remat)[0]
    quantities: list[Quantity] = [
        from_samples(
            "step", [1e3 * sample for sample in samples], "ms", key={"arm": arm}, higher_is_better=False
        )
        for arm, samples in times.items()
    ]
    quantities += [
        from_samples(
            "step over", ratios(times, arm, against), "ratio", key={"arm": arm, "against": against},
            higher_is_better=False, note="round by round",
        )
        for arm, against in [
            *((arm, base) for arm in times if arm != base and not arm.startswith("torch's")),
            *((name, f"torch's {name}") for name in THEIRS if f"torch's {name}" in times),
        ]
    ]  # fmt: skip
    quantities += conditions_of([result.usage for result in found], {"ours": times[base]})
    details = {
        "errors": [result.errors for result in found],
        "refused": found[0].refused,
        "actions_ms": found[0].actions_ms,
        "generated": found[0].generated,
        "pinned_cores": [result.conditions["pinned_cores"] for result in found],
        "threads": [result.conditions["threads"] for result in found],
        **void_of(quantities),
    }
    return Outcome(tuple(quantities), details)
