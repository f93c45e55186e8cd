"""What a plan should say exactly: the peak bytes of two processes, beside those that are counted.

Every way to train of the plan, with four micro-batches; the layers are cut evenly, because bytes need no
clock. In each process a dispatch mode follows every storage from the operation that makes it to its death,
the optimizer's too. The buffers that messages arrive in are counted with them: they lie in memory that both
processes map, are no storages that an operation makes, and stay from step to step. Both numbers are what the
worker's device would hold if it were an accelerator, where these buffers lie on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

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
from gpipe_bench.harness.record import Metric, Scalar
from gpipe_bench.pipeline.plan.links import FREE
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.planner.candidate import Candidate
from gpipe_bench.planner.costs import Costs, SizeCosts
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.request import Request

if TYPE_CHECKING:
    from gpipe_bench.pipeline import Pipeline

PART = "peaks"
COUNTED, MODELLED = "counted peak", "predicted peak"
MICROBATCHES = {"smoke": 2, "short": 4, "full": 4}
SMOKE = 3  # ways
OPTIMIZER = "sgd"
KINDS = ("F", "G", "R", "B", "I", "W")


def run(key: dict[str, Scalar], options: RunOptions) -> Outcome:
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
    """A candidate whose layers are cut evenly."""
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
    """Peak bytes of every worker as `predict` gives them for each candidate; its seconds are not used."""
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
    """Runs in each process: the most bytes that lived in it in the second step of each candidate, whose
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
