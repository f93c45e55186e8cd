"""Our schedules beside 1F1B and beside torch's of the same names, on two processes, in one interleaved run.

Two cases: without re-materialization, M = 2, 4 and 8, against our 1F1B and against torch's schedules; and
GPipe with every micro-batch recomputed against the same with W put off into the bubble, M = 2 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.side_by_side import Found, measured, side_by_side, state_of, trust_of, verdict
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Quantity, Record, Scalar, from_samples, of_case
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.rounds import Times, ratios

if TYPE_CHECKING:
    from gpipe_bench.experiments.engine_turns import Job

PART = "side by side"
NUM_WORKERS = 2
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

# (remat, M) -> rounds by profile.
ROUNDS: dict[tuple[str, int], dict[str, int]] = {
    ("never", 2): {"smoke": 1, "short": 10, "full": 40},
    ("never", 4): {"smoke": 0, "short": 6, "full": 30},
    ("never", 8): {"smoke": 0, "short": 5, "full": 20},
    ("always", 2): {"smoke": 0, "short": 20, "full": 60},
    ("always", 4): {"smoke": 0, "short": 14, "full": 40},
}
SECONDS = {"smoke": 10.0, "short": 90.0, "full": 500.0}

_OURS, _KNOWN = "gpipe_bench.experiments.schedules.engines", "gpipe_bench.experiments.engines.known"
OURS = {
    "1f1b": "ours-1f1b", "zb-h1": f"{_OURS}:ZBH1", "interleaved": f"{_OURS}:Interleaved",
    "interleaved zero bubble": f"{_OURS}:Borrowed", "zb-v": f"{_OURS}:ZBV",
    "zb-v, generated": f"{_OURS}:GeneratedV",
}  # fmt: skip
TORCHS = {
    "torch's 1f1b": "torch-1f1b", "torch's interleaved": f"{_KNOWN}:TorchInterleaved",
    "torch's interleaved zero bubble": f"{_KNOWN}:TorchZeroBubble", "torch's zb-v": f"{_KNOWN}:TorchZBV",
}  # fmt: skip
RECOMPUTED = {
    "gpipe": "ours", "gpipe, W put off": f"{_OURS}:PutOff", "generated": f"{_OURS}:Generated",
}  # fmt: skip
"""Engines by what results call them."""
THEIRS = {name: name.removeprefix("torch's ") for name in TORCHS}
TARGETS: dict[tuple[str, str], dict[int, float]] = {
    ("zb-h1", "1f1b"): {2: 0.90, 4: 0.95, 8: 1.00},
    ("interleaved", "1f1b"): {2: 0.90, 4: 0.95, 8: 0.98},
    ("zb-v, generated", "1f1b"): {2: 0.88, 4: 0.95, 8: 1.00},
    ("gpipe, W put off", "gpipe"): {2: 0.90, 4: 0.93},
    **{(name, theirs): {2: 1.0, 4: 1.0, 8: 1.0} for theirs, name in THEIRS.items()},
}
"""(variant, against) -> by M, the most that its step may take of the other's."""


def keys(profile: str) -> list[tuple[dict[str, Scalar], float]]:
    """The cases and how long each takes."""
    return [
        ({"part": PART, "remat": remat, "num_microbatches": number}, SECONDS[profile])
        for (remat, number), rounds in ROUNDS.items()
        if rounds[profile]
    ]


def variants(remat: str) -> dict[str, str]:
    """Who takes turns; the first is the base and the control."""
    return OURS | TORCHS if remat == "never" else RECOMPUTED


def run(key: dict[str, Scalar], options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.engine_turns import Job, work
    from gpipe_bench.experiments.timed.steps import run_processes

    remat, number = str(key["remat"]), int(str(key["num_microbatches"]))
    engines = {name: (engine, remat) for name, engine in variants(remat).items()}
    job = Job(
        "transformer-lm", OPTIONS[options.profile], SIZE[options.profile], NUM_WORKERS, number, engines,
        cut_by_time=True,
    )  # fmt: skip
    return side_by_side(
        partial(run_processes, work, NUM_WORKERS, job), partial(numbers, job),
        ROUNDS[remat, number][options.profile], control=next(iter(engines)), again=options.profile != "smoke",
    )  # fmt: skip


def numbers(job: Job, times: Times, found: Sequence[Found]) -> Outcome:
    """What the processes of a case found."""
    from gpipe_bench.experiments.engine_turns import details_of

    base = next(iter(times))
    steps = [
        from_samples("step", [1e3 * s for s in samples], "ms", key={"arm": name})
        for name, samples in times.items()
    ]
    pairs = [(name, base) for name in times if name != base and name not in THEIRS]
    pairs += [(name, theirs) for theirs, name in THEIRS.items() if theirs in times]
    over = [
        from_samples(
            "step over", ratios(times, name, against), "ratio", key={"arm": name, "against": against},
            note="round by round",
        )
        for name, against in pairs
    ]  # fmt: skip
    details = details_of(job, found) | {"made": found[0].details["made"]}
    return Outcome((*steps, *over), details)


# Steps, ratios, what was asked of them, what voids them


def tables(records: Sequence[Record]) -> list[str]:
    """A block for each case, then what holds for all."""
    found = of_case(records, "done", part=PART)
    return [*(_block(record) for record in found), *([_notes(found)] if found else [])]


def _block(record: Record) -> str:
    number, remat = int(str(record.case["num_microbatches"])), str(record.case["remat"])
    word, why = state_of(record)
    control = record.quantity("control")
    lines = []
    for name in variants(remat):
        if name in record.details["refused"]:
            lines.append([name, "-", f"torch refuses it: {record.details['refused'][name]}", "", "", ""])
            continue
        step = record.quantity("step", arm=name)
        assert step is not None, "every variant that was not refused has been timed"
        over = [each for each in record.quantities if each.name == "step over" and each.key["arm"] == name]
        first, *others = [_against(ratio, number, word, control) for ratio in over] or [["", "", "", ""]]
        lines += [[name, measured(step), *first], *(["", "", *each] for each in others)]
    what = "not re-materialized" if remat == "never" else "every micro-batch recomputed"
    return Grid(
        title=f"Side by side on two processes, M = {number}, {what} (measured)",
        columns=["schedule", "ms per step [95 %]", "over", "ratio [95 %]", "target", "holds?"],
        lines=lines,
        notes=["; ".join(trust_of(record)), *([why] if why else [])],
    ).text()


def _against(ratio: Quantity, number: int, word: str, control: Quantity | None) -> list[str]:
    name, against = str(ratio.key["arm"]), str(ratio.key["against"])
    bound = TARGETS.get((name, against), {}).get(number)
    if bound is None:
        return [against, measured(ratio), "", ""]
    return [against, measured(ratio), f"<= {bound:.2f}", word or verdict(ratio, "<=", bound, control)]


def _notes(records: Sequence[Record]) -> str:
    model = f"A tiny Transformer, {SIZE['smoke']} sequence per micro-batch"
    if any(record.profile != "smoke" for record in records):
        model = "Transformer-8, width 384, 2 sequences of 64 tokens per micro-batch"
    return "\n".join(
        [
            f"{model}, float32, one thread per process.",
            "All schedules train the same layers; those of one name have the same stages. Before and after",
            "the timing all gradients were the plain model's. Ratios are formed round by round; control:",
            "1F1B's (or GPipe's) first sample of a round over its second; where its interval excludes 1",
            "nothing is judged, and nothing is certain that is no further from its target than that",
            "interval from 1. `interleaved zero bubble` runs torch's own rows here; `generated` are rows",
            "for the stages' times as measured in the same run; `gpipe, W put off` keeps two graphs alive.",
        ]
    )
