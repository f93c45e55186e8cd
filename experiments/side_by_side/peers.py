"""Other engines beside ours, in one interleaved run: torch.distributed.pipelining, torchgpipe, the user's.

Expected: without re-materialization the engines take the same time to within a few percent, for the work is
the layers'; with it, ours is ahead, since it recomputes while it waits for the gradient and the others
recompute inside the backward. The machine should have nothing else to do:

    python -m experiments run peers
    python -m experiments run peers --engine my_engine:MyEngine,my_engine:Another

All engines get the same layers, partition, batch, micro-batches and precision; before and after the timing
each is checked for what it really did (`engines/checks.py`). Numbers come from rounds in which all engines
run there and back (`harness/rounds.py`), so only ratios of one round are judged. torchgpipe runs in
one process, where ours is set against it on one core.

The user's engines are tried first, each in processes of its own with a limit of time: one that raises, hangs
or leaves wrong gradients is a row with its error, and the others are measured without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.side_by_side.control import conditions_of, held_still, void_of
from gpipe_bench.experiments.side_by_side.peers_models import MODELS
from gpipe_bench.experiments.side_by_side.peers_text import SAME_SCHEDULE, tables
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Quantity, Record, Scalar
from gpipe_bench.harness.rounds import Times, ratios, slowest
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.harness.verdict import Entry

if TYPE_CHECKING:
    from gpipe_bench.experiments.engines.isolated import Fault
    from gpipe_bench.experiments.side_by_side.peers_work import PeersJob, PeersResult

SEED = 1811
NUM_STAGES = 2
KNOWN = "all"  # the engines that are always there; another one is added to them
ALWAYS = "ours, recomputing all"  # as the peers do, to tell apart what comes from recomputing less
TRIAL_S = 60.0  # after which a step of the user's engine counts as hung
PATIENCE = 10.0  # times the estimate, after which a case with the user's engines is given up
MEMORY = "of what a step's operations make: activations, gradients, messages; counted, not timed"
START_S = 8.0  # until all processes are up and the engines checked

# (where, remat, M) -> rounds by profile; 0 leaves the case out. A round takes longer the larger M.
ROUNDS: dict[tuple[str, str, int], dict[str, int]] = {
    ("processes", "never", 8): {"smoke": 2, "short": 12, "full": 40},
    ("processes", "except_last", 4): {"smoke": 2, "short": 12, "full": 40},
    ("processes", "except_last", 16): {"smoke": 0, "short": 5, "full": 25},
    ("one process", "never", 4): {"smoke": 2, "short": 8, "full": 30},
    ("one process", "except_last", 4): {"smoke": 0, "short": 8, "full": 30},
}
SMOKE = {("amoebanet", "never"), ("transformer", "except_last")}


def cases(options: RunOptions) -> list[Case]:
    found = []
    for model in MODELS:
        for (where, remat, count), by_profile in ROUNDS.items():
            rounds = by_profile[options.profile]
            if options.profile == "smoke" and where == "processes" and (model, remat) not in SMOKE:
                continue
            if options.profile == "smoke" and where == "one process" and model != "transformer":
                continue
            if rounds:
                key: dict[str, Scalar] = {
                    "model": model,
                    "where": where,
                    "remat": remat,
                    "num_microbatches": count,
                }
                round_s = 0.5 * len(engines_of(where, remat, options.engine)) * (count + 1) / 8
                found.append(Case(key, START_S + rounds * round_s))
    return found


def engines_of(where: str, remat: str, extra: str | None) -> dict[str, tuple[str, str]]:
    """Arm -> engine and remat. The user's engines, comma-separated, are named without the digests of their
    files.
    """
    names = ["torchgpipe"] if where == "one process" else ["torch-gpipe", "torch-1f1b"]
    arms = {"ours": ("ours", remat), **{name: (name, remat) for name in names}}
    if where == "processes" and remat == "never":
        arms["ours-1f1b"] = ("ours-1f1b", remat)
    elif where == "processes":
        arms[ALWAYS] = ("ours", "always")
    arms |= {name.partition("@")[0]: (name, remat) for name in own_engines(extra)}
    return arms


def own_engines(extra: str | None) -> list[str]:
    """The user's engines as named by `--engine`."""
    return [] if extra in (None, KNOWN) else str(extra).split(",")


def run(case: Case, options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.side_by_side.peers_work import PeersJob

    key: dict[str, Any] = case.key
    model, model_options, microbatch_size, _ = MODELS[key["model"]]
    engines = engines_of(key["where"], key["remat"], options.engine)
    in_process = key["where"] == "one process"
    if in_process and list(engines) == ["ours", "torchgpipe"]:
        from gpipe_bench.experiments.engines.known import why_no_torchgpipe

        if reason := why_no_torchgpipe():
            return Outcome(status="skipped", reason=reason)
    rounds = ROUNDS[key["where"], key["remat"], key["num_microbatches"]][options.profile]
    job = PeersJob(
        model, model_options, microbatch_size, NUM_STAGES, key["num_microbatches"], engines, in_process,
        rounds, SEED,
    )  # fmt: skip
    own = [name.partition("@")[0] for name in own_engines(options.engine)]
    faulty = {name: fault for name in own if (fault := fault_in(job, name)) is not None}
    right = [name for name in own if name not in faulty]

    def take(rounds: int) -> Outcome:
        again = job._replace(rounds=rounds)
        found, late = measured(again, right, faulty, case.estimate_s * rounds / job.rounds)
        return outcome(again, found, {**faulty, **late})

    return take(rounds) if options.profile == "smoke" else held_still(take, rounds)


def fault_in(job: PeersJob, name: str) -> Fault | None:
    """What is wrong with an engine, found out in processes of its own."""
    from gpipe_bench.experiments.engines.isolated import IsolatedError, run_isolated
    from gpipe_bench.experiments.side_by_side.peers_work import tried

    try:
        run_isolated(tried, _processes(job), job, name, timeout_s=TRIAL_S)
    except IsolatedError as error:
        return error.fault
    return None


def measured(
    job: PeersJob, own: Sequence[str], without: Iterable[str], estimate_s: float
) -> tuple[list[PeersResult], dict[str, Fault]]:
    """What the processes of a case found with all engines but those `without`, and what went wrong beside the
    others with the user's `own`: then the others are measured once more, without them.
    """
    from gpipe_bench.experiments.engines.isolated import IsolatedError, run_isolated
    from gpipe_bench.experiments.measuring.processes import run_processes
    from gpipe_bench.experiments.side_by_side.peers_work import work, work_told

    def only(left_out: Iterable[str]) -> PeersJob:
        gone = set(left_out)
        return job._replace(engines={name: arm for name, arm in job.engines.items() if name not in gone})

    if not own:
        return run_processes(work, _processes(job), only(without)), {}
    patience_s = TRIAL_S + PATIENCE * estimate_s
    try:
        return run_isolated(work_told, _processes(job), only(without), timeout_s=patience_s), {}
    except IsolatedError as error:
        beside = error.fault._replace(reason=f"beside the others: {error.fault.reason}")
    return run_processes(work, _processes(job), only([*without, *own])), dict.fromkeys(own, beside)


def _processes(job: PeersJob) -> int:
    return 1 if job.in_process else job.num_stages


def outcome(
    job: PeersJob, found: Sequence[PeersResult], faulty: Mapping[str, Fault] | None = None
) -> Outcome:
    """What the processes of a case found, as numbers. With `faulty` engines the case has failed, and has the
    numbers of the others.
    """
    faulty = faulty or {}
    times = slowest([result.times for result in found])
    first = found[0]
    quantities = [
        from_samples(f"step of {arm}", [1e3 * sample for sample in samples], "ms", higher_is_better=False)
        for arm, samples in times.items()
    ]
    quantities += [
        from_samples(
            f"ours against {arm}", ratios(times, arm, "ours"), "ratio", higher_is_better=True,
            note="our steps per second over its, round by round",
        )
        for arm in times
        if arm != "ours"
    ]  # fmt: skip
    quantities += _among_others(times)
    quantities += [
        Quantity(
            name=f"peak memory of {arm}", key={"process": rank}, value=num_bytes, unit="bytes",
            provenance="measured", higher_is_better=False,
            note=MEMORY if num_bytes is not None else "its operations run in threads, where none is seen",
        )
        for rank, result in enumerate(found)
        for arm, num_bytes in result.peak_bytes.items()
    ]  # fmt: skip
    actions_ms = {name: 1e3 * s for result in found for name, s in result.actions_s.items()}
    quantities.append(
        Quantity(
            name="shortest action", value=min(actions_ms.values()), unit="ms", provenance="measured",
            note="mean over the micro-batches of our latest step",
        )
    )  # fmt: skip
    quantities += conditions_of([result.usage for result in found], times)
    details = {
        "rounds": job.rounds,
        "engines": {
            name: {"engine": engine, "remat": remat} for name, (engine, remat) in job.engines.items()
        },
        "checks": [result.checks for result in found],  # by process
        "refused": first.refused,
        "faulty": {name: fault.reason for name, fault in faulty.items()},
        **({"traceback": "\n".join(fault.traceback for fault in faulty.values())} if faulty else {}),
        "partition": [[span.start, span.stop] for span in first.partition],
        "microbatch_size": job.microbatch_size,
        "precision": "float32",
        "actions_ms": actions_ms,
        "pinned_cores": [result.conditions["pinned_cores"] for result in found],
        "threads": [result.conditions["threads"] for result in found],
        "cpu_s": [result.usage.cpu_s for result in found],
        **void_of(quantities),
    }
    if faulty:
        reason = "; ".join(f"{name}: {fault.reason}" for name, fault in faulty.items())
        return Outcome(tuple(quantities), details, "failed", reason)
    return Outcome(tuple(quantities), details)


def _among_others(times: Times) -> list[Quantity]:
    """The speed of each other engine over that of every one, once for each two of them."""
    others = [arm for arm in times if arm != "ours"]
    pairs = [(a, b) for i, a in enumerate(others) for b in others[i + 1 :]]
    # A schedule of ours stands first beside the same schedule of another engine.
    pairs = [(b, a) if SAME_SCHEDULE.get(a) == b else (a, b) for a, b in pairs]
    return [
        from_samples(
            f"{a} against {b}", ratios(times, b, a), "ratio", higher_is_better=True,
            note="both with the same schedule" if SAME_SCHEDULE.get(b) == a else "",
        )
        for a, b in pairs
    ]  # fmt: skip


def cells(records: Sequence[Record]) -> list[Entry]:
    """None: the paper set no engines side by side."""
    return []


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
    cells=cells,
    tables=tables,
    docs="docs/own-engine.md",
    options=("engine",),
    engines=(KNOWN,),
    several_engines=True,
)
