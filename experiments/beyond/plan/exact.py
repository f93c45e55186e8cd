"""What a plan should say exactly, on two processes: bytes that are counted, and steps of stages that wait.

Peaks: every way to train of the plan, with four micro-batches; the layers are cut evenly, because bytes need
no clock. In each process a dispatch mode follows every storage from the operation that makes it to its death,
the optimizer's too. The buffers that messages arrive in are counted with them: they lie in memory that both
processes map, are no storages that an operation makes, and stay from step to step. Both numbers are what the
worker's device would hold if it were an accelerator, where these buffers lie on it.

Waiting stages: what is wrong with a prediction of measured layers may be the layers or the laying out. Here
every action takes the slots it is told to, so what a step takes beyond its prediction is the laying out, and
the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.beyond.plan.rules import Peaks
from gpipe_bench.experiments.beyond.plan.steps import (
    MODELS,
    NUM_WORKERS,
    WAYS,
    Planned,
    processes_of,
    replicated,
    title,
)
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Metric, Record, Scalar, from_samples
from gpipe_bench.pipeline.plan.links import FREE
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.simulate import SLOTS
from gpipe_bench.planner.candidate import Candidate, Prediction
from gpipe_bench.planner.costs import Costs, SizeCosts
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.request import Request

if TYPE_CHECKING:
    from gpipe_bench.pipeline import Pipeline

PEAKS, WAITING = "peaks", "waiting stages"
COUNTED, MODELLED = "counted peak", "predicted peak"
MICROBATCHES = {"smoke": 2, "short": 4, "full": 4}
SMOKE = 3  # ways
OPTIMIZER = "sgd"
KINDS = ("F", "G", "R", "B", "I", "W")

STEP, PREDICTED = "waiting step", "predicted waiting step"
LAYERS, BATCH_SIZE = 8, 8
SLOT_S = {"smoke": 10e-3, "short": 20e-3, "full": 20e-3}
STEPS = {"smoke": 3, "short": 7, "full": 15}
NUMBERS = (2, 4)
WAITING_WAYS = (
    ("gpipe", 1, "never"), ("gpipe", 1, "always"), ("1f1b", 1, "never"), ("zb-h1", 1, "never"),
    ("interleaved", 2, "never"), ("zb-v", 2, "never"),
)  # fmt: skip


def run_peaks(key: dict[str, Scalar], options: RunOptions) -> Outcome:
    """The case of one model."""
    from gpipe_bench.experiments.paper.timed.steps import run_processes

    planned = MODELS[options.profile][str(key["model"])]
    candidates = ways(planned, MICROBATCHES[options.profile])[: SMOKE if options.profile == "smoke" else None]
    counted = run_processes(count, NUM_WORKERS, planned, candidates, device="cpu")
    metrics: list[Metric] = []
    for place, (candidate, modelled) in enumerate(
        zip(candidates, peaks_of(planned, candidates), strict=True)
    ):
        for worker in range(NUM_WORKERS):
            make = partial(Metric, key={"configuration": title(candidate), "worker": worker}, unit="bytes")
            metrics += [
                make(name=COUNTED, value=counted[worker][place], provenance="measured"),
                make(name=MODELLED, value=modelled[worker], provenance="modelled"),
            ]
    return Outcome(tuple(metrics), {"title": planned.title, "scale": planned.scale})


def _candidate(layers: int, name: str, per_worker: int, remat: str, number: int) -> Candidate:
    """Cut evenly."""
    stages = per_worker * NUM_WORKERS
    return Candidate(
        cut=partition([1.0] * layers, stages), schedule=name, num_microbatches=number,
        remat=(remat,) * stages, num_workers=NUM_WORKERS, stages_per_worker=per_worker,
    )  # fmt: skip


def ways(planned: Planned, number: int) -> list[Candidate]:
    """All ways that the model has layers for, and the schedules so few micro-batches."""
    layers = len(planned.subject.build()[0])
    found = []
    for name, per_worker, remat in WAYS:
        try:
            named(name, NUM_WORKERS, number, stages_per_worker=per_worker)
        except ValueError:
            continue
        if per_worker * NUM_WORKERS <= layers:
            found.append(_candidate(layers, name, per_worker, remat, number))
    return found + replicated(layers, planned.batch_size, (number,), (planned.batch_size // number,))


def peaks_of(planned: Planned, candidates: Sequence[Candidate]) -> list[tuple[int, ...]]:
    """What `predict` says of each, of every worker; its seconds are of no interest here."""
    from gpipe_bench.planner.measured import profiles_of

    layers = planned.subject.build()[0]
    second = SizeCosts(layers_s=dict.fromkeys(KINDS, (1.0,) * len(layers)))
    trained = [[p.nbytes for p in layer.parameters() if p.requires_grad] for layer in layers]
    costs = Costs(
        sizes=dict.fromkeys((each.microbatch_size(planned.batch_size) for each in candidates), second),
        parameter_bytes=trained,
        profiles=profiles_of(planned.subject),
    )
    request = Request(
        accelerators=NUM_WORKERS, memory_bytes=2**60, batch_size=planned.batch_size, link=FREE,
        optimizer=OPTIMIZER,
    )  # fmt: skip
    found = [predict(each, costs, request, parts=False).peak_bytes for each in candidates]
    return [each * (NUM_WORKERS // len(each)) for each in found]  # replicas hold the same


def count(planned: Planned, candidates: Sequence[Candidate], *, share_memory: bool = True) -> list[int]:
    """What one process does: the most bytes that lived in it in the second step of each candidate, whose
    messages go through memory that processes share, or through gloo.
    """
    import torch
    from torch import distributed as dist

    from gpipe_bench.experiments.engines.setup import clear
    from gpipe_bench.pipeline.memory.tracker import LiveMemory
    from gpipe_bench.pipeline.stage.trees import tensors_of

    torch.manual_seed(1811)
    layers, loss = planned.subject.build()
    found = []
    for each in candidates:
        batch, target = planned.subject.batch(planned.batch_size // each.replicas)
        clear(layers)
        schedule, memory, rank = each.rows(), LiveMemory(), dist.get_rank()
        worker = rank % each.num_workers
        mine = [layers[layer] for stage in schedule.stages_of(worker) for layer in each.cut[stage]]
        with memory, memory.owned_by(rank):
            memory.watch(t for layer in mine for t in (*layer.parameters(), *layer.buffers()))
            with _pipeline(each, layers, share_memory=share_memory) as pipeline:
                parameters = [p for layer in mine for p in layer.parameters()]
                optimizer = torch.optim.SGD(parameters, lr=1e-6, foreach=False)
                for step in range(2):
                    if step:
                        memory.reset_peaks()
                    pipeline.step(batch, target, loss)
                    optimizer.step()
                    optimizer.zero_grad()
                shared_bytes = pipeline.shared_message_bytes
        # The mini-batch and its targets are the user's, and lived before.
        users = {}
        for here, tree in ((schedule.worker(0), batch), (schedule.worker(schedule.num_stages - 1), target)):
            for tensor in tensors_of(tree, "the mini-batch") if here == worker else ():
                storage = tensor.untyped_storage()
                users[storage.data_ptr()] = tensor.nbytes  # a part of an example may lie in the whole one
        found.append(memory.peak_bytes[rank] + shared_bytes + sum(users.values()))
    return found


def _pipeline(candidate: Candidate, layers: Sequence[Any], **more: Any) -> Pipeline:
    from gpipe_bench.pipeline import Pipeline

    return Pipeline(
        layers, partition=candidate.cut, num_microbatches=candidate.num_microbatches,
        schedule=candidate.rows(), **processes_of(candidate), **more,
    )  # fmt: skip


def peaks(record: Record) -> list[Peaks]:
    """The configurations of a record, each with the bytes of its workers in their order."""
    found: dict[str, dict[str, list[int]]] = {}
    for metric in sorted(record.metrics, key=lambda each: int(str(each.key["worker"]))):
        if metric.value is not None:
            of = found.setdefault(str(metric.key["configuration"]), {COUNTED: [], MODELLED: []})
            of[metric.name].append(int(metric.value))
    title = str(record.details.get("title"))
    return [Peaks(title, name, tuple(of[MODELLED]), tuple(of[COUNTED])) for name, of in found.items()]


def run_waiting(options: RunOptions) -> Outcome:
    """The case of all schedules of stages that wait."""
    from gpipe_bench.experiments.paper.timed.steps import run_processes

    slot_s, steps, candidates = SLOT_S[options.profile], STEPS[options.profile], waiting_ways()
    found = run_processes(wait, NUM_WORKERS, candidates, slot_s, steps, device="cpu")
    metrics: list[Metric] = []
    for place, candidate in enumerate(candidates):
        where: dict[str, Scalar] = {
            "schedule": candidate.schedule, "M": candidate.num_microbatches, "remat": candidate.remat[0],
        }  # fmt: skip
        samples = [1e3 * max(each) for each in zip(*(one[place] for one in found), strict=True)]
        predicted_ms = 1e3 * waiting_step(candidate, slot_s).step_s
        metrics += [
            Metric(PREDICTED, predicted_ms, "ms", "replayed", key=where),
            from_samples(STEP, samples, "ms", key=where),
        ]
    return Outcome(tuple(metrics), {"slot_ms": 1e3 * slot_s})


def waiting_ways() -> list[Candidate]:
    """Schedules on two workers, of equal stages."""
    return [_candidate(LAYERS, *way, number) for number in NUMBERS for way in WAITING_WAYS]


def waiting_step(candidate: Candidate, slot_s: float) -> Prediction:
    """Of stages that wait, over a free link: an action takes its slots, whatever its stage holds."""
    nothing = dict.fromkeys(KINDS, (0.0,) * LAYERS)
    slots = {str(kind): count * slot_s for kind, count in SLOTS.items()}
    size = SizeCosts(layers_s=nothing, action_s={**slots, "G": slots["F"]})
    costs = Costs(
        sizes={BATCH_SIZE // number: size for number in NUMBERS},
        provenance={"layers": "by definition: stages that wait"},
    )
    request = Request(accelerators=NUM_WORKERS, memory_bytes=2**60, batch_size=BATCH_SIZE, link=FREE)
    return predict(candidate, costs, request)


def wait(candidates: Sequence[Candidate], slot_s: float, steps: int) -> list[list[float]]:
    """What one process does: seconds of some steps of each."""
    import torch
    from torch import nn

    from gpipe_bench.experiments.paper.timed.engine_turns import waiting_stages
    from gpipe_bench.planner.timing import time_step

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(LAYERS)]
    batch = torch.randn(BATCH_SIZE, 8)
    found = []
    with waiting_stages(slot_s):
        for each in candidates:
            with _pipeline(each, layers) as pipeline:
                step = partial(pipeline.step, batch, batch, nn.functional.mse_loss)
                time_step(step, layers)  # agrees on shapes
                found.append([time_step(step, layers) for _ in range(steps)])
    return found
