"""Other engines beside ours, in one interleaved run: torch.distributed.pipelining, torchgpipe, the user's.

Expected: without re-materialization the engines take the same time to within a few percent, for the work is
the layers'; with it, ours is ahead, since it recomputes while it waits for the gradient and the others
recompute inside the backward. The machine should have nothing else to do:

    python -m experiments run peers
    python -m experiments run peers --engine my_engine:MyEngine,my_engine:Another

All engines get the same layers, batch, micro-batches and precision, and the same partition but for one that
is made for several stages in each process (`placement`); before and after the timing each is checked for what
it really did (`engines/checks.py`). They take turns (`side_by_side.py`), so only ratios of one round are
judged. torchgpipe runs in one process, where ours is set against it on one core.

The user's engines are tried first, each in processes of its own with a limit of time: one that raises, hangs
or leaves wrong gradients is a row with its error, and the others are measured without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.experiments.side_by_side import (
    Found,
    is_faster,
    measured,
    side_by_side,
    state_of,
    steps_of,
    trust_of,
    verdict,
)
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Quantity, Record, Scalar, from_samples
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.rounds import Times, ratios
from gpipe_bench.harness.units import convert, show

if TYPE_CHECKING:
    from gpipe_bench.experiments.engine_turns import Job
    from gpipe_bench.experiments.engines.isolated import Fault

MODELS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "amoebanet": (
        "amoebanet-d",
        {
            "num_layers": 3, "num_filters": 64, "image_size": 64, "num_classes": 10, "dropout": 0.0,
            "aux_head": False,
        },
        4,
        "AmoebaNet-D (3, 64), 64 x 64 pixels, 4 images per micro-batch",
    ),
    "transformer": (
        "transformer-lm",
        {
            "num_layers": 6, "vocab_size": 64, "d_model": 256, "ffn_dim": 1024, "num_heads": 4, "seq_len": 64,
        },
        2,
        "Transformer-6, width 256, 2 sequences of 64 tokens per micro-batch",
    ),
}  # fmt: skip
"""Scaled models: builder, options, micro-batch size, in words. Actions take more than 5 ms."""
NUM_STAGES = 2
KNOWN = "all"  # the engines that are always there; another one is added to them
ALWAYS = "ours, recomputing all"  # as the peers do, to tell apart what comes from recomputing less
PEERS = ("torch-gpipe", "torch-1f1b", "torchgpipe")
SAME_SCHEDULE = {"torch-1f1b": "ours-1f1b"}
"""Who of ours is set against an engine where both ran; otherwise it is ours with GPipe's schedule."""
TRIAL_S = 60.0  # after which a step of the user's engine counts as hung
PATIENCE = 10.0  # times the estimate, after which a case with the user's engines is given up
START_S = 8.0  # until all processes are up and the engines checked


class Plan(NamedTuple):
    """Rounds by profile, 0 for no such case, and how many times as fast as the peers ours shall be."""

    smoke: int
    short: int
    full: int
    target: float


PLANS = {
    ("processes", "never", 8): Plan(2, 12, 40, 1.0),
    ("processes", "except_last", 4): Plan(2, 12, 40, 1.12),
    ("processes", "except_last", 16): Plan(0, 5, 25, 1.04),
    ("one process", "never", 4): Plan(2, 8, 30, 1.0),
    ("one process", "except_last", 4): Plan(0, 8, 30, 1.0),
}
"""By where engines run, remat and M; a round takes longer the larger M."""
SMOKE = (("amoebanet", "processes", "never"), ("transformer", "processes", "except_last"),
         ("transformer", "one process", "never"))  # fmt: skip


def cases(options: RunOptions) -> list[Case]:
    found = []
    for model, (where, remat, count) in itertools.product(MODELS, PLANS):
        rounds = getattr(PLANS[where, remat, count], options.profile)
        if rounds and (options.profile != "smoke" or (model, where, remat) in SMOKE):
            key: dict[str, Scalar] = {
                "model": model, "where": where, "remat": remat, "num_microbatches": count,
            }  # fmt: skip
            round_s = 0.5 * len(engines_of(where, remat, options.engine)) * (count + 1) / 8
            found.append(Case(key, START_S + rounds * round_s))
    return found


def _plan(key: Mapping[str, Any]) -> Plan | None:
    return PLANS.get((key["where"], key["remat"], key["num_microbatches"]))


def engines_of(where: str, remat: str, extra: str | None) -> dict[str, tuple[str, str]]:
    """Variant -> engine and remat. The user's engines, comma-separated, are named without the digests of
    their files.
    """
    names = ["torchgpipe"] if where == "one process" else ["torch-gpipe", "torch-1f1b"]
    found = {"ours": ("ours", remat), **{name: (name, remat) for name in names}}
    if where == "processes" and remat == "never":
        found["ours-1f1b"] = ("ours-1f1b", remat)
    elif where == "processes":
        found[ALWAYS] = ("ours", "always")
    return found | {name.partition("@")[0]: (name, remat) for name in own_engines(extra)}


def own_engines(extra: str | None) -> list[str]:
    """The user's engines as named by `--engine`."""
    return [] if extra in (None, KNOWN) else str(extra).split(",")


def run(case: Case, options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.engines.known import why_no_torchgpipe

    job = job_of(case.key, options.engine)
    if list(job.engines) == ["ours", "torchgpipe"] and (reason := why_no_torchgpipe()):
        return Outcome(status="skipped", reason=reason)
    rounds = getattr(_plan(case.key), options.profile)
    own = [name.partition("@")[0] for name in own_engines(options.engine)]
    faults = {name: fault for name in own if (fault := fault_in(job, name)) is not None}
    refused = {
        name: fault.reason.removeprefix("ValueError: ") for name, fault in faults.items() if fault.refused
    }
    faulty = {name: fault for name, fault in faults.items() if not fault.refused}
    others = job._replace(engines={name: each for name, each in job.engines.items() if name not in refused})

    def take(number: int) -> list[Found]:
        mine = [name for name in own if name not in refused]
        found, late = taken(others, number, mine, faulty, case.estimate_s * number / rounds)
        faulty.update(late)
        for each in found:
            each.details["refused"] |= refused
        return found

    return side_by_side(take, partial(numbers, job, faulty), rounds, again=options.profile != "smoke")


def job_of(key: Mapping[str, Any], extra: str | None) -> Job:
    """What the processes of a case do."""
    from gpipe_bench.experiments.engine_turns import Job

    model, options, microbatch_size, _ = MODELS[key["model"]]
    return Job(
        model, options, microbatch_size, NUM_STAGES, key["num_microbatches"],
        engines_of(key["where"], key["remat"], extra), key["where"] == "one process", cut_by_time=True,
        with_peaks=True,
    )  # fmt: skip


def fault_in(job: Job, name: str) -> Fault | None:
    """What is wrong with an engine, found out in processes of its own."""
    from gpipe_bench.experiments.engine_turns import tried
    from gpipe_bench.experiments.engines.isolated import IsolatedError, run_isolated

    try:
        run_isolated(tried, job.num_processes, job, name, timeout_s=TRIAL_S)
    except IsolatedError as error:
        return error.fault
    return None


def taken(
    job: Job, rounds: int, own: Sequence[str], faulty: Iterable[str], estimate_s: float
) -> tuple[list[Found], dict[str, Fault]]:
    """What the processes of a case found with all engines but the `faulty`, and what went wrong beside the
    others with the user's `own`: then the others are measured once more, without them.
    """
    from gpipe_bench.experiments.engine_turns import work, work_told
    from gpipe_bench.experiments.engines.isolated import IsolatedError, run_isolated
    from gpipe_bench.experiments.timed.steps import run_processes

    def without(*gone: str) -> Job:
        return job._replace(engines={name: each for name, each in job.engines.items() if name not in gone})

    right = [name for name in own if name not in faulty]
    if not right:
        return run_processes(work, job.num_processes, without(*faulty), rounds), {}
    patience_s = TRIAL_S + PATIENCE * estimate_s
    try:
        told = without(*faulty), rounds
        return run_isolated(work_told, job.num_processes, *told, timeout_s=patience_s), {}
    except IsolatedError as error:
        beside = error.fault._replace(reason=f"beside the others: {error.fault.reason}")
    return run_processes(work, job.num_processes, without(*own), rounds), dict.fromkeys(right, beside)


def numbers(job: Job, faulty: Mapping[str, Fault], times: Times, found: Sequence[Found]) -> Outcome:
    """What the processes of a case found. With `faulty` engines the case has failed, and has the numbers of
    the others.
    """
    from gpipe_bench.experiments.engine_turns import details_of

    others = [name for name in times if name != "ours"]
    # A schedule of ours stands first beside the same schedule of another engine.
    pairs = [(b, a) if SAME_SCHEDULE.get(a) == b else (a, b) for a, b in itertools.combinations(others, 2)]
    memory = "of what a step's operations make: activations, gradients, messages; counted, not timed"
    details = details_of(job, found)
    quantities = [
        *steps_of(times),
        *(
            from_samples(f"{a} against {b}", ratios(times, b, a), "ratio", note=note)
            for a, b, note in (
                *(("ours", name, "our steps per second over its, round by round") for name in others),
                *((a, b, "both with the same schedule" * (SAME_SCHEDULE.get(b) == a)) for a, b in pairs),
            )
        ),
        *(
            Quantity(
                f"peak memory of {name}", num_bytes, "bytes", "measured", key={"process": rank},
                note=memory if num_bytes is not None else "its operations run in threads, where none is seen",
            )
            for rank, each in enumerate(found)
            for name, num_bytes in each.details["peak_bytes"].items()
        ),
        Quantity(
            "shortest action", min(details["actions_ms"].values()), "ms", "measured",
            note="mean over the micro-batches of our latest step",
        ),
    ]  # fmt: skip
    reasons = {name: fault.reason for name, fault in faulty.items()}
    details |= {"faulty": reasons, "microbatch_size": job.microbatch_size, "precision": "float32"}
    if not faulty:
        return Outcome(tuple(quantities), details)
    details["traceback"] = "\n".join(fault.traceback for fault in faulty.values())
    reason = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    return Outcome(tuple(quantities), details, "failed", reason)


# Every engine's step, ours against it, and what was asked of that

MIN_ACTION_MS = 5.0
LEAST_ROUNDS = 5
"""With which an interval of 95 % is one. That of two rounds holds the truth every second time, that of three
three times in four; so one engine under two names often looked like two in a smoke run.
"""


def tables(records: Sequence[Record]) -> str:
    """One block per case, then what holds for all."""
    if not records:
        return "Engines side by side: nothing on record"
    shown = {str(record.case["model"]) for record in records}
    models = "; ".join(words for name, (_, _, _, words) in MODELS.items() if name in shown)
    heading = f"Engines side by side, K = 2, float32, one thread per process (measured)\n{models}"
    return "\n\n".join([heading, *(_block(record) for record in records), _notes(records)])


def _block(record: Record) -> str:
    case, faulty = record.case, record.details.get("faulty", {})
    remat = "not re-materialized" if case["remat"] == "never" else f"re-materialized ({case['remat']})"
    where = "one process per stage" if case["where"] == "processes" else "both stages in one process"
    title = f"{case['model']}, {where}, {remat}, M = {case['num_microbatches']}"
    if record.status != "done" and not faulty:
        return f"{title}: {record.status}: {record.reason}"
    word, why = _state(record)
    control = record.quantity("control")
    target = plan.target if (plan := _plan(case)) is not None else None
    lines = []
    for name in record.details["engines"]:
        if name in faulty:
            lines.append([name, "-", "-", "", f"failed: {faulty[name]}"])
            continue
        if name in record.details["refused"]:
            lines.append([name, "-", "-", "", f"skipped: {record.details['refused'][name]}"])
            continue
        step = record.quantity(f"step of {name}")
        ratio = record.quantity(f"{SAME_SCHEDULE.get(name, 'ours')} against {name}")
        ratio = ratio or record.quantity(f"ours against {name}")
        assert step is not None, "every engine that was not refused has been timed"
        line = [name, measured(step), "" if ratio is None else measured(ratio), "", ""]
        if ratio is not None and name in PEERS and target is not None:
            line[3:] = [f">= {target:.2f}", word or verdict(ratio, ">=", target, control)]
        lines.append(line)
    headings = ["engine", "ms per step [95 %]", "our speed / its [95 %]", "target", "holds?"]
    parts = [title, Grid(columns=headings, lines=lines).text(), *_among(record, word), _trust(record)]
    return "\n".join([*parts, *([why] if why else [])])


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


def _among(record: Record, word: str) -> list[str]:
    """Each engine against every other one, and what each needs in every process."""
    engines = [name for name in record.details["engines"] if record.quantity(f"step of {name}") is not None]
    said = {True: "faster", False: "slower", None: "within the noise"}
    pairs = [
        [first, second, measured(ratio), word or said[is_faster(ratio, record.quantity("control"))]]
        for first, second in itertools.combinations(engines, 2)
        if (ratio := speed_of(record, first, second)) is not None
    ]
    peaks = [[name, peak] for name in engines if (peak := _peak(record, name))]
    tables = [
        (["engine", "against", "its speed [95 %]", "it is"], pairs),
        (["engine", "peak memory of a step, by process"], peaks),
    ]
    found = [
        part for columns, lines in tables if lines for part in ("", Grid(columns=columns, lines=lines).text())
    ]
    return [*found, ""] if found else []


def _peak(record: Record, name: str) -> str:
    """`1.20 MiB, 0.81 MiB`: of every process."""
    return ", ".join(
        "not seen" if each.value is None else show(convert(each.value, each.unit, "MiB"), "MiB", 3)
        for each in record.quantities
        if each.name == f"peak memory of {name}"
    )


def _trust(record: Record) -> str:
    """What this case's numbers can be trusted for, in one line."""
    parts = []
    action = record.quantity("shortest action")
    if action is not None and action.value is not None:
        short = "" if action.value >= MIN_ACTION_MS else f", below {MIN_ACTION_MS:g} ms: overheads show"
        parts.append(f"shortest action {show(action.value, 'ms', 2)}{short}")
    return "; ".join([*parts, *trust_of(record)])


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


EXPERIMENT = Experiment(
    name="peers",
    title="Other engines beside ours, in one interleaved run",
    source="beyond the paper",
    describe=(
        "torch.distributed.pipelining (ScheduleGPipe, Schedule1F1B), torchgpipe and one's own engine "
        "(--engine module:attribute) beside ours on a scaled AmoebaNet-D and Transformer, two stages, with "
        "and without re-materialization."
    ),
    profiles={
        "smoke": "two rounds of three cases",
        "short": "enough rounds for intervals of a few percent",
        "full": "three to five times as many rounds",
    },
    cases=cases,
    run=run,
    cells=lambda records: [],  # the paper set no engines side by side
    tables=tables,
    docs="docs/own-engine.md",
    options=("engine",),
    engines=(KNOWN,),
    several_engines=True,
)
