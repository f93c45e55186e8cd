"""Compares the speed of engines: ours, torch.distributed.pipelining, torchgpipe, the user's, and the bare
layers, a baseline for an engine's own cost.

Expected: without re-materialization engines take the same time to within a few per cent; with it, ours is
faster, since it recomputes while it waits for the gradient. The machine should be otherwise idle:

    python -m experiments run engines
    python -m experiments run engines --engine my_engine:MyEngine,my_engine:Another
    python -m experiments run engines --device cuda    the same on GPUs, a process for each

All engines of a case get the same layers, batch, micro-batches, precision and partition, and take turns; each
is checked before and after (`engines/checks.py`). The user's are first tried beside ours, with a time limit:
one that raises an error, hangs or leaves wrong gradients becomes a row with its error, and the others are
measured without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.paper import convert, show
from gpipe_bench.harness.record import Metric, Record, Scalar, from_samples
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.rounds import Times, differences, is_faster, measured, ratios, state_of, trust_of

from ..registry import PROFILES
from .trainings import (
    ALL,
    ALL_CORES,
    ALONE,
    BARE,
    CONFIGURATIONS,
    ON_GPUS,
    WORKLOADS,
    Job,
    configuration_of,
    job_of,
)

if TYPE_CHECKING:
    from ..engines.trials import Fault
    from .engine_turns import Found

SAME_SCHEDULE = (("ours-1f1b", "torch-1f1b"), ("interleaved", "torch-interleaved"), ("zb-v", "torch-zb-v"))
SPEED, SHARE, COST = "speed", "share of the ideal step", "over the bare layers"
START_S = 8.0  # seconds until processes have started and engines are checked
MIN_ACTION_MS = 5.0
LEAST_ROUNDS = 5
"""Fewest rounds for a 95 % interval. An interval of two rounds holds the true value in half of all cases, of
three in three quarters; so in smoke runs one engine under two names often looked like two."""


def cases(options: RunOptions) -> list[Case]:
    found = []
    for chosen in ON_GPUS if options.device == "cuda" else CONFIGURATIONS:
        if rounds := chosen.rounds[PROFILES.index(options.profile)]:
            more = 1 + len(job_of(chosen, options.engine).own) / len(chosen.engines)
            found.append(Case(chosen.key, START_S + rounds * chosen.round_s * more))
    return found


def run(case: Case, options: RunOptions) -> Outcome:
    from gpipe_bench.pipeline import devices

    from ..engines.known import why_no_torchgpipe
    from .engine_turns import fault_in, side_by_side, taken, without

    chosen = configuration_of(case.key)
    assert chosen is not None, "cases are made of configurations"
    job = job_of(chosen, options.engine)
    reason = why_no_torchgpipe() if "torchgpipe" in chosen.engines else ""
    if chosen.device != "cpu" and (count := devices.count(chosen.device)) < job.num_processes:
        reason = reason or f"needs {job.num_processes} GPUs; torch sees {count}"
    if reason:
        return Outcome(status="skipped", reason=reason)
    rounds = chosen.rounds[PROFILES.index(options.profile)]
    faults = {name: fault for name in job.own if (fault := fault_in(job, name)) is not None}

    def take(number: int) -> list[Found]:
        found, late = taken(without(job, faults), number, case.estimate_s * number / rounds)
        faults.update(late)
        return found

    return side_by_side(
        take,
        partial(numbers, job, faults),
        rounds,
        control=chosen.engines[0],
        again=options.profile != "smoke",
    )


def numbers(job: Job, faults: Mapping[str, Fault], times: Times, found: Sequence[Found]) -> Outcome:
    """The outcome of a case from its processes' findings and the faults of the user's engines, which get no
    numbers. The case fails unless these engines only refuse it.
    """
    metrics = [
        from_samples("step", [1e3 * s for s in samples], "ms", key={"engine": name})
        for name, samples in times.items()
    ]
    metrics += [
        from_samples(
            SPEED, ratios(times, b, a), "ratio", key={"engine": a, "against": b}, note="round by round"
        )
        for a, b in itertools.combinations(times, 2)
    ]
    metrics += _against_layers(job, times)
    memory = "of what a step's operations make: activations, gradients, messages; counted, not timed"
    threads = "its operations run in threads, which are hardly seen"
    for rank, each in enumerate(found):
        for name, seen in each.details["peak_bytes"].items():
            is_seen = seen is not None and name != "torchgpipe"
            key: dict[str, Scalar] = {"engine": name, "process": rank}
            peak, note = (seen, memory) if is_seen else (None, threads)
            metrics.append(Metric("peak memory", peak, "bytes", "measured", key=key, note=note))
    actions_ms = {name: 1e3 * s for each in found for name, s in each.details["actions_s"].items()}
    note = "mean over the micro-batches of our latest step"
    metrics.append(Metric("shortest action", min(actions_ms.values()), "ms", "measured", note=note))
    first = found[0].details
    faulty = {name: fault for name, fault in faults.items() if not fault.refused}
    refused = {name: fault.reason for name, fault in faults.items() if fault.refused} | first["refused"]
    details: dict[str, Any] = {
        "engines": {
            name: {"engine": engine, "remat": remat} for name, (engine, remat) in job.engines.items()
        },
        "checks": [each.details["checks"] for each in found],  # by process
        "refused": {name: reason.removeprefix("ValueError: ") for name, reason in refused.items()},
        "partition": [[span.start, span.stop] for span in first["partition"]],
        "actions_ms": actions_ms,
        "faulty": {name: fault.reason for name, fault in faulty.items()},
        "microbatch_size": job.work.microbatch_size,
        "precision": "float32",
    }
    if not faulty:
        return Outcome(tuple(metrics), details)
    details["traceback"] = "\n".join(fault.traceback for fault in faulty.values())
    reason = "; ".join(f"{name}: {fault.reason}" for name, fault in faulty.items())
    return Outcome(tuple(metrics), details, "failed", reason)


def _against_layers(job: Job, times: Times) -> list[Metric]:
    """The cost of an action beyond the bare layers' time, and a step's share of the time that its schedule
    would take with the actions of the bare layers or of the sequential model.
    """
    from gpipe_bench.pipeline.plan.named import gpipe
    from gpipe_bench.pipeline.plan.schedule import Kind
    from gpipe_bench.pipeline.plan.simulate import replay

    chosen = job.chosen
    num_stages, count = chosen.num_stages, chosen.num_microbatches
    schedule = gpipe(num_stages, count, next(iter(job.engines.values()))[1])
    own = [action for action in schedule if chosen.in_process or action.stage == 0]
    ideal = {BARE: 2 * count, ALONE: 2 * count * num_stages}
    slots = replay(schedule, dict.fromkeys((Kind.F, Kind.R, Kind.B), 1)).makespan_s
    base = BARE if chosen.workload == "waiting" else ALONE
    found = []
    for name in (name for name in times if name not in ideal and name != ALL_CORES):
        if BARE in times and base not in times:
            cost_us = differences(times, name, BARE, 1e6 / len(own))
            note = "per action, over the bare layers' own time"
            found.append(from_samples(COST, cost_us, "us", key={"engine": name}, note=note))
        if base in times:
            reached = ratios(times, base, name, slots / ideal[base])
            found.append(from_samples(SHARE, reached, "ratio", key={"engine": name}))
    if ALL_CORES in times:
        note = "speed of one core while all compute, against alone"
        reached = ratios(times, ALONE, ALL_CORES)
        found.append(from_samples("core beside a busy one", reached, "ratio", note=note))
    return found


# Tables


def tables(records: Sequence[Record]) -> str:
    """A table for each case, then notes on all of them."""
    if not records:
        return "Engines side by side: nothing on record"
    heading = "Engines side by side, float32, one thread per process (measured)"
    return "\n\n".join([heading, *map(_block, records), NOTES])


def _block(record: Record) -> str:
    case, details = record.case, record.details
    faulty, refused = details.get("faulty", {}), details.get("refused", {})
    remat = "not re-materialized" if case["remat"] == "never" else f"re-materialized ({case['remat']})"
    where = "one process per stage" if case["where"] == "processes" else "all stages in one process"
    title = (
        f"{WORKLOADS[str(case['workload'])].words}\n  {where}{', GPUs' * ('device' in case)}, "
        f"K = {case['num_stages']}, M = {case['num_microbatches']}, {remat}"
    )
    if record.status != "done" and not faulty:
        return f"{title}: {record.status}: {record.reason}"
    first, (word, why) = next(iter(details["engines"])), _state(record)
    columns = ["engine", "ms per step [95 %]", f"{first} / its speed", f"{first} is"]
    columns += ["per action", "of ideal", "peak MiB"]

    def line(name: str) -> list[str]:
        step = record.metric("step", engine=name)
        if step is None:
            state = "failed" if name in faulty else "skipped" if name in refused else "-"
            return [name, state, *[""] * 5]
        ratio = None if name == first else speed_of(record, first, name)
        compared = ["", ""] if ratio is None else [measured(ratio), word or _compared(record, ratio)]
        of_layers = record.metric(COST, engine=name), record.metric(SHARE, engine=name)
        costs = ["" if each is None else measured(each) for each in of_layers]
        return [name, measured(step), *compared, *costs, _peak(record, name)]

    lines = [line(name) for name in details["engines"]]
    shown = [place for place in range(len(columns)) if place < 2 or any(line[place] for line in lines)]
    notes = [f"{name} failed: {why}" for name, why in faulty.items()]
    notes += [f"{name} skipped: {why}" for name, why in refused.items()]
    columns, *lines = [[line[place] for place in shown] for line in (columns, *lines)]
    grid = Grid(title=title, columns=columns, lines=lines, notes=notes).text()
    return "\n\n".join([grid, *_pairs(record, word), "\n".join(filter(None, [_trust(record), why]))])


def _compared(record: Record, ratio: Metric) -> str:
    words = {True: "faster", False: "slower", None: "within the noise"}
    return words[is_faster(ratio, record.metric("control"))]


def _pairs(record: Record, word: str) -> list[str]:
    """Compares each of the user's engines with every other engine, and ours with torch's."""
    chosen = configuration_of(record.case)
    known = chosen.engines if chosen is not None else ()
    pairs = [pair for pair in itertools.combinations(record.details["engines"], 2) if pair[1] not in known]
    lines = [
        [a, b, measured(ratio), word or _compared(record, ratio)]
        for a, b in (*SAME_SCHEDULE, *pairs)
        if (ratio := speed_of(record, a, b)) is not None
    ]
    columns = ["engine", "against", "its speed [95 %]", "it is"]
    return [Grid(columns=columns, lines=lines).text()] if lines else []


def speed_of(record: Record, engine: str, against: str) -> Metric | None:
    """How many times as fast an engine is as another, from either order on record."""
    found = record.metric(SPEED, engine=engine, against=against)
    inverse = record.metric(SPEED, engine=against, against=engine)
    if found is not None or inverse is None or not inverse.value:
        return found
    low, high = (None if end is None else 1 / end for end in (inverse.high, inverse.low))
    return replace(inverse, value=1 / inverse.value, low=low, high=high, samples=())


def _state(record: Record) -> tuple[str, str]:
    """A case's state in a word and a sentence (`state_of`); in smoke runs also "too few rounds"."""
    control = record.metric("control")
    if record.profile == "smoke" and control is not None and len(control.samples) < LEAST_ROUNDS:
        return "too few rounds", (
            f"too few rounds: {len(control.samples)}, whose interval is none; from {LEAST_ROUNDS} on, as in "
            "the profile short, engines are judged"
        )
    return state_of(record)


def _peak(record: Record, name: str) -> str:
    """Peak MiB of each process: `1.20, 0.81`."""
    peaks = [each for each in record.metrics if each.name == "peak memory" and each.key["engine"] == name]
    return ", ".join(
        "not seen" if each.value is None else f"{convert(each.value, each.unit, 'MiB'):.2f}" for each in peaks
    )


def _trust(record: Record) -> str:
    """Evidence of a case's validity, in one line."""
    action, parts = record.metric("shortest action"), trust_of(record)
    if action is not None and action.value is not None:
        short = "" if action.value >= MIN_ACTION_MS else f", below {MIN_ACTION_MS:g} ms: overheads show"
        parts.insert(0, f"shortest action {show(action.value, 'ms', 2)}{short}")
    return "; ".join(parts)


NOTES = """\
Every engine was checked before and after: M micro-batches ran forward and backward in each stage,
stages were recomputed as asked, gradients are the plain model's. Counts are in the records.
control: the first engine's first sample of a round over its second. Where its interval excludes 1,
the machine did not hold still, and nothing is judged (void; contaminated where so it was twice);
nothing is faster or slower that is no further from 1 than the control's interval.
per action: over the bare layers' own time. of ideal: of the step that the schedule would take with
the actions of the bare layers or of the sequential model. peak: bytes alive of what a step makes.
except_last: ours and torchgpipe recompute M - 1 micro-batches; torch's stages are wrapped in
torch.utils.checkpoint and recompute all M, inside the backward. `ours, recomputing all` does
the same work as they."""


EXPERIMENT = Experiment(
    name="engines",
    title="Engines side by side: ours, torch's, torchgpipe's, your own, and the bare layers",
    source="beyond the paper",
    describe=(
        "torch.distributed.pipelining, torchgpipe and one's own engine (--engine module:attribute) beside "
        "ours, with several schedules; overlap of waiting stages, and what an action costs over the layers."
    ),
    profiles={
        "smoke": "a round or two of some of the cases",
        "short": "enough rounds for intervals of a few percent",
        "full": "three to five times as many rounds",
    },
    cases=cases,
    run=run,
    cells=lambda records: [],  # the paper set no engines side by side
    tables=tables,
    docs="docs/own-engine.md",
    options=("engine",),
    engines=(ALL,),
    takes=("engines",),
)
