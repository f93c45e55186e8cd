"""Runs a case of `plan`: times layers on two processes, predicts all ways to train, and runs ten of them.

Ranked are the ways that the planner's search finds for two processes, for each kind of re-materialization
separately, because without a memory limit it would recompute nothing. The best five run, and five others
spread evenly over the rest. The plan is made before any of them runs. They take turns, and the probes'
reference step runs before and after each step: a prediction holds for a machine as fast as during the probes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Metric, Scalar, from_samples
from gpipe_bench.harness.rounds import Usage, against_itself, slowest, turns
from gpipe_bench.pipeline.clock import conditions
from gpipe_bench.pipeline.plan.links import FREE
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.planner.candidate import Candidate, Prediction
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.measured import measured
from gpipe_bench.planner.predict import Layout, predict
from gpipe_bench.planner.probes import (
    Bench,
    ProbeJob,
    Trained,
    probe,
    settle,
    sharded_over,
    time_step,
)
from gpipe_bench.planner.request import Request, Space
from gpipe_bench.planner.search import Search

from ..paper.steps import run_processes
from .engine_turns import Found, conditions_of
from .trainings import BY_THE_CLOCK, PREDICTED, STEP, Planned

NUM_WORKERS = 2
SEED = 1811
MEMORY_BYTES = 2**40  # no cap: only time matters here
MOST_DRIFT = 2.0
"""A core whose speed is less than half or more than double that of the probes voids the case."""
WAYS = (
    ("gpipe", 1, "never"), ("gpipe", 1, "always"), ("gpipe", 1, "except_last"), ("1f1b", 1, "never"),
    ("1f1b", 1, "always"), ("zb-h1", 1, "never"), ("zb-h2", 1, "never"), ("interleaved", 2, "never"),
    ("interleaved", 2, "always"), ("breadth-first", 2, "never"), ("zb-v", 2, "never"), ("v-half", 2, "never"),
)  # fmt: skip
"""Schedule, stages per worker, re-materialization."""
REPLICATED = (("1f1b", "never"), ("1f1b", "always"))
"""Schedule and re-materialization of two replicas with one stage each; 1F1B keeps the least memory."""


def run(planned: Planned, seed: int, device: str) -> Outcome:
    found = run_processes(work, NUM_WORKERS, planned, SEED + seed, device, device=device)
    metrics, details = numbers(planned, found)
    drifts = [each.details["drift"] for each in found]
    note = "the reference step while the plan ran, over the same while the layers were timed"
    metrics += [
        Metric("drift", drift, "ratio", "measured", key={"process": number}, note=note)
        for number, drift in enumerate(drifts)
    ]
    if off := [drift for drift in drifts if not 1 / MOST_DRIFT <= drift <= MOST_DRIFT]:
        details["void"] = (
            f"a core's speed drifted by a factor of {off[0]:.2f} between the probes and the steps"
        )
    return Outcome(tuple(metrics), details)


def work(planned: Planned, seed: int, device: str) -> Found:
    """Runs in each process: times the layers, plans, and then runs what the plan has ranked."""
    torch.manual_seed(seed)
    sizes = tuple(sorted(planned.batch_size // number for number in planned.numbers))
    bench = Bench(ProbeJob(planned.source, sizes, planned.rounds, planned.optimizer, seed, device))
    start_s = perf_counter()
    everyone = bench.everyone(probe(bench))
    probes_s = perf_counter() - start_s
    costs = measured(everyone, "", planned.profiles)
    start_s = perf_counter()
    asked = request_of(costs, planned)
    ranking = bench.everyone(ranked(costs, asked, planned.numbers) if bench.rank == 0 else None)[0]
    plan_s = perf_counter() - start_s
    places = to_run(ranking, planned.chosen, planned.others)
    runs = {title(ranking[place].candidate): _Run(bench, ranking[place]) for place in places}
    for each in runs.values():
        for _ in range(2):
            each.step()
    settle()
    first = bench.reference()
    start = Usage.now()
    for name in turns(list(runs), planned.turns, seed):
        runs[name].take()
        bench.reference()
    used = Usage.now().since(start)
    for each in runs.values():
        each.pipeline.close()
    details = {
        "costs": replace(costs, profiles=None), "ranking": ranking,  # the same in all processes
        "places": places,  # ranks of those that ran
        "speeds": {name: each.speeds() for name, each in runs.items()},
        "probes_s": probes_s, "plan_s": plan_s,
        "drift": median(bench.references[first:]) / bench.reference_s,  # rounds over probes
    }  # fmt: skip
    times = {name: [seconds for _, seconds in each.taken] for name, each in runs.items()}
    return Found(times, used, conditions(), details)


class _Run:
    """A candidate, run by all processes."""

    def __init__(self, bench: Bench, prediction: Prediction) -> None:
        candidate = prediction.candidate
        schedule = candidate.rows()
        # torch shards parameters in place, for good.
        layers = bench.fresh_layers() if candidate.grid.fsdp > 1 else bench.layers
        self.pipeline, self._step = bench.pipeline(
            schedule, candidate.microbatch_size, candidate.cut,
            over=processes_of(candidate, bench.device.type), layers=layers,
        )  # fmt: skip
        self.bench = bench
        self.trained = bench.trained if layers is bench.layers else Trained(layers, bench.job.optimizer)
        worker = bench.rank % candidate.grid.pp
        self._mine = [layer for stage in schedule.stages_of(worker) for layer in candidate.cut[stage]]
        self.taken: list[tuple[int, float]] = []

    def step(self) -> float:
        """Seconds of one step with the optimizer's, in this process."""
        seconds = time_step(self._step, self.trained.layers, device=self.bench.device)
        start_s = perf_counter()
        self.trained.update(self._mine, self.bench.device)
        return seconds + perf_counter() - start_s

    def take(self) -> None:
        """Runs a step that counts, between two references."""
        self.taken.append((len(self.bench.references) - 1, self.step()))

    def speeds(self) -> list[float]:
        """The reference's duration around each step, relative to the probes."""
        return [self.bench.speed(before, self.bench.reference_s) for before, _ in self.taken]


def processes_of(candidate: Candidate, device_type: str = "cpu") -> dict[str, Any]:
    """The arguments of `Pipeline` for processes: a pipeline over all, or a replica or shards in each; all
    must call.
    """
    if candidate.grid.fsdp > 1:
        return sharded_over(candidate.grid.fsdp, candidate.grid.fsdp_level, device_type)
    if candidate.grid.dp == 1:
        return {"group": dist.group.WORLD}
    sizes = (candidate.grid.dp, candidate.grid.pp)
    return {"mesh": init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "pp"))}


def request_of(costs: Costs, planned: Planned) -> Request:
    return Request(
        accelerators=NUM_WORKERS, memory_bytes=MEMORY_BYTES, batch_size=planned.batch_size,
        link=costs.link or FREE, optimizer=planned.optimizer,
    )  # fmt: skip


def ranked(costs: Costs, request: Request, numbers: Sequence[int]) -> list[Prediction]:
    """Predictions of all candidates that the search finds, fastest first. Costs have profiles, because the
    search checks memory.
    """
    alone = replace(costs, profiles=None)  # without profiles only seconds are predicted
    found = [predict(each, alone, request, parts=False) for each in searched(costs, request, numbers)]
    return sorted(found, key=lambda each: each.step_s)


def searched(costs: Costs, request: Request, numbers: Sequence[int]) -> list[Candidate]:
    """The planner's candidates among `WAYS` and `REPLICATED`, each with its best partition and with every
    number of micro-batches in `numbers`, of which each replica has its share. Equal ones count once.
    """
    shares = tuple(sorted({number // NUM_WORKERS for number in numbers if number % NUM_WORKERS == 0}))
    found: dict[Any, Candidate] = {}  # by rows and partition: some schedules are equal for few micro-batches
    for remat in REMAT_MODES:
        for pp, ways, counts in ((NUM_WORKERS, WAYS, tuple(numbers)), (1, REPLICATED, shares)):
            schedules = tuple(name for name, *_, what in ways if what == remat)
            if not schedules or not counts or (pp == 1 and not costs.parameter_bytes):
                continue  # the size of replicas' sums is not known
            space = Space(schedules=schedules, microbatches=counts, pp=(pp,), remats=(remat,), fewer=False)
            for each in Search(costs, request, space).run(kept=None, of_each=lambda way: way):
                one = each.candidate
                rows = one.rows()
                found.setdefault(
                    (rows.actions, rows.placement, one.cut, one.grid.dp, one.grid.fsdp_level), one
                )
    return list(found.values())


def to_run(ranking: Sequence[Prediction], chosen: int, others: int) -> list[int]:
    """The ranks, from 0, of the candidates to run: the first ones, others spread evenly to the last, and the
    best replicas and the best of each ZeRO level if missing.
    """
    rest = range(min(chosen, len(ranking)), len(ranking))
    found = {*range(rest.start), *(rest if len(rest) <= others else ())}
    if len(rest) > others:
        found |= {rest[round((step + 1) * (len(rest) - 1) / others)] for step in range(others)}
    grids = [each.candidate.grid for each in ranking]
    kinds = {grids[place].fsdp_level for place in found if grids[place].replicas > 1}
    for place, grid in enumerate(grids):
        if grid.replicas > 1 and grid.fsdp_level not in kinds:
            kinds.add(grid.fsdp_level)
            found.add(place)
    return sorted(found)


def title(candidate: Candidate) -> str:
    """`zb-v, M = 4, always`."""
    remat = sorted(set(candidate.remat))
    again = "" if remat == ["never"] else ", remat " + " / ".join(remat)
    grid = "" if candidate.grid.dp == 1 else f"dp = {candidate.grid.dp}, "
    if candidate.grid.fsdp > 1:
        grid += f"fsdp = {candidate.grid.fsdp} (ZeRO-{candidate.grid.fsdp_level}), "
    return f"{grid}{candidate.schedule}, M = {candidate.num_microbatches}{again}"


def numbers(planned: Planned, found: Sequence[Found]) -> tuple[list[Metric], dict[str, Any]]:
    """Metrics: each configuration's predicted and measured steps, and the control; details of the plan."""
    first = found[0].details
    costs, ranking = first["costs"], first["ranking"]
    request, clock = request_of(costs, planned), slowest([each.times for each in found])
    metrics: list[Metric] = []
    steps: dict[str, list[float]] = {}
    for number in first["places"]:
        prediction = ranking[number]
        name = title(prediction.candidate)
        key: dict[str, Scalar] = {"configuration": name}
        layout = Layout(prediction.candidate, costs, request)
        plain_s = float(layout.timeline().makespan_s)
        # Slower workers around a step lengthen the replayed step as they do the real one.
        around = zip(*(each.details["speeds"][name] for each in found), strict=True)
        steps[name] = [
            step_s * plain_s / float(layout.timeline(speeds).makespan_s)
            for step_s, speeds in zip(clock[name], around, strict=True)
        ]
        note = "at the speed that the machine had when the layers were timed"
        metrics += [
            Metric(
                PREDICTED, 1e3 * prediction.step_s, "ms", "replayed", key=key, low=1e3 * prediction.low_s,
                high=1e3 * prediction.high_s,
                note="made before any step of it; 95 % of single steps",
            ),
            from_samples(STEP, [1e3 * each for each in steps[name]], "ms", key=key, note=note),
            from_samples(BY_THE_CLOCK, [1e3 * each for each in clock[name]], "ms", key=key),
        ]  # fmt: skip
    ratios = [ratio for name in steps for ratio in against_itself(steps, name)]
    note = "first sample of a round / second, of all configurations"
    trust, facts = conditions_of(found, ratios, note)
    rows = [
        {"name": title(each.candidate), "cut": [len(stage) for stage in each.candidate.cut],
         "step_ms": 1e3 * each.step_s, "low_ms": 1e3 * each.low_s, "high_ms": 1e3 * each.high_s}
        for each in ranking
    ]  # fmt: skip
    of_costs = {name: each for name, each in costs.to_data().items() if name != "jitter"}
    return metrics + trust, {
        **facts,
        "title": planned.title,
        "scale": planned.scale,
        "batch_size": planned.batch_size,
        "chosen": min(planned.chosen, len(steps)),
        "plan": {"ranking": rows, "places": first["places"]},
        "costs": of_costs | {name: first[name] for name in ("probes_s", "plan_s")},
    }


# Models as users write them

Built = tuple[Sequence[nn.Module], Tensor, Tensor, Callable[[Any, Tensor], Tensor]]
"""Layers, inputs, target and loss."""
IMAGE_SIZE, PATCH, CLASSES = 32, 4, 10
WIDTHS = (48, 48, 64, 64, 96, 96, 128, 128, 96, 64)


class Mixing(nn.Module):
    """An MLP-Mixer block: mixes places, then channels, and changes the width."""

    def __init__(self, width: int, next_width: int) -> None:
        super().__init__()
        places = (IMAGE_SIZE // PATCH) ** 2
        self.norm = nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.channels = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, next_width)
        )

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.places(self.norm(value).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = self.channels(value)
        return mixed


def mixer() -> Built:
    """A model with unequal blocks, whose best partition has unequal numbers of blocks."""
    first = nn.Sequential(nn.Conv2d(3, WIDTHS[0], PATCH, PATCH), nn.Flatten(2), _Transposed())
    blocks = [Mixing(*widths) for widths in zip(WIDTHS, (*WIDTHS[1:], WIDTHS[0]), strict=True)]
    head = nn.Sequential(nn.LayerNorm(WIDTHS[0]), _Mean(), nn.Linear(WIDTHS[0], CLASSES))
    inputs = torch.zeros(8, 3, IMAGE_SIZE, IMAGE_SIZE)
    target = torch.zeros(8, dtype=torch.long)
    if inputs.device.type != "meta":
        inputs.normal_()
    return [first, *blocks, head], inputs, target, nn.functional.cross_entropy


def attending() -> Built:
    width, words = 192, 1000
    blocks = [
        nn.TransformerEncoderLayer(
            width, 6, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        for _ in range(9)
    ]
    tokens = torch.zeros(8, 32, dtype=torch.long)
    return [nn.Embedding(words, width), *blocks, nn.Linear(width, words)], tokens, tokens, _next_word


def _next_word(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class _Transposed(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        """(N, channels, places) to (N, places, channels)."""
        return value.transpose(1, 2)


class _Mean(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.mean(1)
