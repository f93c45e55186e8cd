"""The engine's own cost, measured side by side with the bare layers and with other engines.

Expected: stages overlap to within a few percent of the schedule's ideal step; two processes train a
Transformer at almost twice the speed of one; small micro-batches cost a fraction of a millisecond. The
machine should have nothing else to do:

    python -m experiments run engine

The arms of a case take turns in the same processes, one thread each, every process on a core of its own;
numbers come from rounds, not from runs (`harness/rounds.py`). Before and after, the real layers are
counted: that all micro-batches ran, that stages were recomputed, that gradients agree.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.side_by_side.control import conditions_of, held_still, void_of
from gpipe_bench.experiments.side_by_side.engine_text import tables
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Quantity, Record, Scalar
from gpipe_bench.harness.rounds import Times, differences, ratios, slowest
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.harness.verdict import Entry

if TYPE_CHECKING:
    from gpipe_bench.experiments.side_by_side.engine_work import EngineJob, EngineResult

SEED = 1811
# Rounds by part (and M) and profile.
ROUNDS: dict[str, dict[str, int]] = {
    "smoke": {"overlap": 1, "transformer": 1, "small": 2, "in process": 2},
    "short": {"overlap": 4, "transformer": 8, "small": 16, "in process": 16},
    "full": {"overlap": 10, "transformer": 40, "small": 60, "in process": 60},
}
REMATS = ("never", "except_last")
START_S = 5.0  # until all processes are up


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"

    def case(
        part: str, num_stages: int, num_microbatches: int, remat: str, estimate_s: float, **more: str
    ) -> Case:
        key: dict[str, Scalar] = {
            "part": part,
            "num_stages": num_stages,
            "num_microbatches": num_microbatches,
            "remat": remat,
            **more,
        }
        return Case(key, START_S + estimate_s * ROUNDS[options.profile][part])

    if smoke:
        return [
            case("overlap", 4, 8, "never", 2.5),
            case("transformer", 2, 4, "never", 2.5),
            case("transformer", 2, 4, "except_last", 1.0),
            case("small", 2, 64, "never", 0.5, transport="gloo"),
            case("in process", 4, 8, "never", 0.3, against="bare layers"),
        ]
    found = [
        case("overlap", k, m, remat, 0.15 * (m + k))
        for k, m, remat in ((8, 32, "never"), (4, 8, "never"), (4, 8, "except_last"))
    ]
    found.append(case("transformer", 2, 16, "never", 8.0))
    found += [case("transformer", 2, m, "except_last", 0.2 + 0.2 * m) for m in (1, 4, 16)]
    found += [case("small", 2, 64, "never", 0.5, transport=name) for name in ("gloo", "memory")]
    found += [
        case("in process", 4, 8, remat, 0.4, against=peer)
        for peer in ("bare layers", "torchgpipe")
        for remat in REMATS
    ]
    return found


def run(case: Case, options: RunOptions) -> Outcome:
    if case.key.get("against") == "torchgpipe" and importlib.util.find_spec("torchgpipe") is None:
        return Outcome(status="skipped", reason="torchgpipe is not installed: pip install -e .[peers]")
    from gpipe_bench.experiments.side_by_side.engine_work import EngineJob, work
    from gpipe_bench.pipeline.ranks.launch import launch

    key: dict[str, Any] = case.key
    rounds = ROUNDS[options.profile][key["part"]]
    job = EngineJob(
        key["part"],
        key["num_stages"],
        key["num_microbatches"],
        key["remat"],
        rounds,
        SEED,
        key.get("against", ""),
        key.get("transport", "memory"),
    )
    # The processes measure the host's side, and there may be more of them than GPUs.
    num_processes = 1 if job.part == "in process" else job.num_stages

    def take(rounds: int) -> Outcome:
        again = job._replace(rounds=rounds)
        found: list[EngineResult] = launch(work, num_processes, again, device="cpu")
        return outcome(again, found)

    return take(rounds) if options.profile == "smoke" else held_still(take, rounds)


def outcome(job: EngineJob, found: Sequence[EngineResult]) -> Outcome:
    """What the processes of a case found, as numbers."""
    times = slowest([result.times for result in found])
    first = found[0]
    quantities = [
        from_samples(f"step of {arm}", [1e3 * sample for sample in samples], "ms", higher_is_better=False)
        for arm, samples in times.items()
    ]
    quantities += NUMBERS[job.part](job, times)
    quantities += conditions_of([result.usage for result in found], times)
    details = {
        "rounds": job.rounds,
        "arms": first.counts,
        "actions_ms": {name: 1e3 * s for result in found for name, s in result.actions_s.items()},
        "pinned_cores": [result.conditions["pinned_cores"] for result in found],
        "threads": [result.conditions["threads"] for result in found],
        "cpu_s": [result.usage.cpu_s for result in found],
        **void_of(quantities),
    }
    return Outcome(tuple(quantities), details)


def _overlap(job: EngineJob, times: Times) -> list[Quantity]:
    """Against the schedule with the nominal wait in every action, each step on its own; and, round by round,
    with the time that the bare stages take for an action, which includes what waking up costs here.
    """
    from gpipe_bench.experiments.side_by_side.engine_work import WAIT_S
    from gpipe_bench.pipeline.plan.replay import replay
    from gpipe_bench.pipeline.plan.schedule import Kind, gpipe

    schedule = gpipe(job.num_stages, job.num_microbatches, job.remat)
    num_slots = replay(schedule, dict.fromkeys((Kind.F, Kind.R, Kind.B), 1)).makespan_s
    bare_actions = 2 * job.num_microbatches  # F and B
    samples = [num_slots * WAIT_S / step_s for step_s in times["ours"]]
    of_bare = ratios(times, "bare layers", "ours", num_slots / bare_actions)
    return [
        from_samples("share of the ideal", samples, "ratio", higher_is_better=True),
        from_samples("share of the bare ideal", of_bare, "ratio", higher_is_better=True),
        Quantity(name="ideal step", value=1e3 * num_slots * WAIT_S, unit="ms", provenance="replayed"),
        from_samples(
            "bare action",
            [1e3 * s / bare_actions for s in times["bare layers"]],
            "ms",
            higher_is_better=False,
        ),
    ]


def _transformer(job: EngineJob, times: Times) -> list[Quantity]:
    numbers = [_rate("ScheduleGPipe", times)]
    if "sequential" in times:
        num_stages, count = job.num_stages, job.num_microbatches
        ideal = (count + num_stages - 1) / (count * num_stages)  # of the sequential step
        for arm, name in (("ours", "efficiency"), ("ScheduleGPipe", "efficiency of ScheduleGPipe")):
            numbers.append(
                from_samples(name, ratios(times, "sequential", arm, ideal), "ratio", higher_is_better=True)
            )
        numbers.append(
            from_samples(
                "core beside a busy one", ratios(times, "sequential", "sequential on every core"), "ratio",
                higher_is_better=True, note="speed of one core while all compute, against alone",
            )
        )  # fmt: skip
    return numbers


def _small(job: EngineJob, times: Times) -> list[Quantity]:
    per_microbatch_us = 1e6 / job.num_microbatches
    note = "engine and transport per micro-batch, forward and backward"
    return [
        from_samples(
            name,
            differences(times, arm, "bare layers", per_microbatch_us),
            "us",
            higher_is_better=False,
            note=note,
        )
        for arm, name in (("ours", "per micro-batch"), ("ScheduleGPipe", "per micro-batch of ScheduleGPipe"))
    ] + [_rate("ScheduleGPipe", times)]


def _in_process(job: EngineJob, times: Times) -> list[Quantity]:
    from gpipe_bench.pipeline.plan.schedule import gpipe

    num_actions = sum(1 for _ in gpipe(job.num_stages, job.num_microbatches, job.remat))
    numbers = [_rate(job.against, times)] if job.against in times and job.against != "bare layers" else []
    for arm, name in (("ours", "per action"), ("torchgpipe", "per action of torchgpipe")):
        if arm in times:
            cost_us = differences(times, arm, "bare layers", 1e6 / num_actions)
            numbers.append(
                from_samples(
                    name, cost_us, "us", higher_is_better=False, note="over the bare layers' own time"
                )
            )
    return numbers


NUMBERS = {"overlap": _overlap, "transformer": _transformer, "small": _small, "in process": _in_process}


def _rate(other: str, times: Times) -> Quantity:
    """Our steps per second over another engine's."""
    return from_samples(f"rate against {other}", ratios(times, other, "ours"), "ratio", higher_is_better=True)


def cells(records: Sequence[Record]) -> list[Entry]:
    """None: the paper measured no engine but its own."""
    return []


EXPERIMENT = Experiment(
    name="engine",
    title="The engine's own cost, measured side by side",
    source="beyond the paper",
    describe=(
        "Overlap of waiting stages, speed-up of a Transformer on two processes, cost of small micro-batches "
        "and of actions in one process, in turns with torch.distributed.pipelining, torchgpipe and the bare "
        "layers."
    ),
    profiles={
        "smoke": "a round or two of five cases",
        "short": "enough rounds for intervals of a few percent",
        "full": "three to four times as many rounds",
    },
    cases=cases,
    run=run,
    cells=cells,
    tables=tables,
    options=(),
)
