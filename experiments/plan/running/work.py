"""What the processes of a case do: time the layers, plan, and only then run what the plan has ranked.

The plan is made from the probes before any of its candidates has taken a step, and is not touched again.
Then the candidates take turns, there and back in every round, and before and after each step stands the
reference step of the probes: a prediction is for a machine as fast as it was when the layers were timed, and
that can be told only by something else that was timed both times.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from gpipe_bench.experiments.plan.models import Planned
from gpipe_bench.experiments.plan.running.choosing import planned, title, to_run, with_replicas
from gpipe_bench.experiments.plan.running.replicas import processes_of
from gpipe_bench.harness.rounds import Usage, turns
from gpipe_bench.pipeline.plan.links import FREE
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.times.clock import conditions
from gpipe_bench.planner.bench import Bench, ProbeJob, Trained
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.measured import measured
from gpipe_bench.planner.predict import Layout, schedule_of
from gpipe_bench.planner.prediction import Prediction
from gpipe_bench.planner.probes import probe
from gpipe_bench.planner.profiles import profiles_of
from gpipe_bench.planner.request import Request
from gpipe_bench.planner.timing import settle, time_step

MEMORY_BYTES = 2**40  # no cap: what is asked is time


class PlanJob(NamedTuple):
    """One case as its processes see it."""

    planned: Planned
    seed: int
    where: str = ""
    device: str = "cpu"


class Ran(NamedTuple):
    """One candidate in one process. Samples are two per round."""

    step_s: list[float]  # with the optimizer's step of this process's layers
    speeds: list[float]  # of this process around each step, times the reference's
    events: Timeline  # of the last step, of this process


class PlanResult(NamedTuple):
    """What one process found; plan and costs are the same in all."""

    costs: Costs
    ranking: list[Prediction]
    places: list[int]  # of those that ran, in the ranking
    ran: list[Ran]
    probes_s: float  # seconds that the probes took
    plan_s: float  # and the plan
    reference_s: float
    drift: float  # the reference in the rounds over that in the probes
    usage: Usage
    conditions: dict[str, str]


def work(job: PlanJob) -> PlanResult:
    """What one process does for a case."""
    torch.manual_seed(job.seed)
    subject = job.planned
    sizes = tuple(sorted(subject.batch_size // number for number in subject.numbers))
    bench = Bench(ProbeJob(subject.subject, sizes, subject.rounds, subject.optimizer, job.seed, job.device))
    start_s = perf_counter()
    everyone = bench.everyone(probe(bench))
    probes_s = perf_counter() - start_s
    costs = measured(everyone, job.where, profiles_of(subject.subject))
    request = request_of(costs, subject, len(everyone))
    start_s = perf_counter()
    ranking = bench.everyone(planned(costs, request, subject.numbers) if bench.rank == 0 else None)[0]
    plan_s = perf_counter() - start_s
    chosen = with_replicas(to_run(ranking, subject.chosen, subject.others), ranking)
    runs = {title(each.candidate): _Run(bench, each) for _, each in chosen}
    for each in runs.values():
        for _ in range(2):
            each.step()
    settle()
    first = bench.reference()
    start = Usage.now()
    for name in turns(list(runs), subject.turns, job.seed):
        runs[name].take()
        bench.reference()
    used = Usage.now().since(start)
    for each in runs.values():
        each.pipeline.close()
    return PlanResult(
        replace(costs, profiles=None),
        ranking,
        [place for place, _ in chosen],
        [each.found() for each in runs.values()],
        probes_s,
        plan_s,
        bench.reference_s,
        median(bench.references[first:]) / bench.reference_s,
        used,
        conditions(),
    )


class _Run:
    """A candidate over all processes."""

    def __init__(self, bench: Bench, prediction: Prediction) -> None:
        candidate = prediction.candidate
        schedule = schedule_of(candidate)
        # torch divides parameters in place, and for good.
        layers = bench.fresh_layers() if candidate.fsdp > 1 else bench.layers
        self.pipeline, self._step = bench.pipeline(
            schedule, candidate.microbatch_size(prediction.batch_size), candidate.cut,
            over=processes_of(candidate, bench.device.type), layers=layers,
        )  # fmt: skip
        self.bench = bench
        self.trained = bench.trained if layers is bench.layers else Trained(layers, bench.job.optimizer)
        worker = bench.rank % candidate.num_workers
        self._mine = [layer for stage in schedule.stages_of(worker) for layer in candidate.cut[stage]]
        self._taken: list[tuple[int, float]] = []

    def step(self) -> float:
        """One step and the optimizer's, in seconds of this process."""
        seconds = time_step(self._step, self.trained.layers, device=self.bench.device)
        start_s = perf_counter()
        self.trained.update(self._mine, self.bench.device)
        return seconds + perf_counter() - start_s

    def take(self) -> None:
        """A step that counts, between two references."""
        before = len(self.bench.references) - 1
        self._taken.append((before, self.step()))

    def found(self) -> Ran:
        speeds = [self.bench.speed(before, self.bench.reference_s) for before, _ in self._taken]
        return Ran([seconds for _, seconds in self._taken], speeds, self.pipeline.timeline)


def at_reference_s(prediction: Prediction, costs: Costs, request: Request, ran: list[Ran]) -> list[float]:
    """The steps of all processes at the speed that the machine had when the layers were timed.

    A worker that was slower around a step makes the replayed step longer by so much, and the step that ran is
    made shorter by as much.
    """
    layout = Layout(prediction.candidate, costs, request)
    plain_s = float(layout.timeline().makespan_s)
    found = []
    for number, steps in enumerate(zip(*(each.step_s for each in ran), strict=True)):
        speeds = [each.speeds[number] for each in ran]
        found.append(max(steps) * plain_s / float(layout.timeline(speeds).makespan_s))
    return found


def request_of(costs: Costs, planned_model: Planned, processes: int) -> Request:
    """What was asked of the plan."""
    return Request(
        accelerators=processes, memory_bytes=MEMORY_BYTES, batch_size=planned_model.batch_size,
        link=costs.link or FREE, optimizer=planned_model.optimizer,
    )  # fmt: skip


def describe(result: PlanResult) -> dict[str, Any]:
    """What a record keeps of the plan: the whole ranking, in milliseconds."""
    return {
        "ranking": [
            {
                "name": title(each.candidate),
                "cut": [len(stage) for stage in each.candidate.cut],
                "step_ms": 1e3 * each.step_s,
                "low_ms": 1e3 * each.low_s,
                "high_ms": 1e3 * each.high_s,
            }
            for each in result.ranking
        ],
        "places": result.places,
    }
