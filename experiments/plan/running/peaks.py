"""A case that counts: the bytes of every worker in real steps over processes, beside what a plan says.

Every way to train of the plan, with four micro-batches; the layers are cut evenly, because bytes need no
clock. In each process a dispatch mode follows every storage from the operation that makes it to its death,
the optimizer's too. The buffers that messages arrive in are counted with them: they lie in memory that both
processes map, are no storages that an operation makes, and stay from step to step. Both numbers are what the
worker's device would hold if it were an accelerator, where these buffers lie on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpipe_bench.experiments.plan.measures import Peaks
from gpipe_bench.experiments.plan.models import MODELS, Planned
from gpipe_bench.experiments.plan.running.choosing import NUM_WORKERS, WAYS, replicated, title
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Quantity, Record, Scalar
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.planner.candidate import Candidate

PART = "peaks"
MICROBATCHES = {"smoke": 2, "short": 4, "full": 4}
SMOKE = 3  # ways
OPTIMIZER = "sgd"
COUNTED, MODELLED = "counted peak", "predicted peak"


def run(key: dict[str, Scalar], options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.measuring.processes import run_processes

    planned = MODELS[options.profile][str(key["model"])]
    number = MICROBATCHES[options.profile]
    candidates = ways(planned, number)[: SMOKE if options.profile == "smoke" else None]
    counted = run_processes(count, NUM_WORKERS, planned, candidates, device="cpu")
    modelled = predicted(planned, candidates)
    quantities = []
    for place, candidate in enumerate(candidates):
        for worker in range(NUM_WORKERS):
            where: dict[str, Scalar] = {"configuration": title(candidate), "worker": worker}
            for name, value, provenance in (
                (COUNTED, counted[worker][place], "measured"),
                (MODELLED, modelled[place][worker], "modelled"),
            ):
                quantities.append(
                    Quantity(name=name, key=where, value=value, unit="bytes", provenance=provenance)  # type: ignore[arg-type]
                )
    return Outcome(tuple(quantities), {"title": planned.title, "scale": planned.scale})


def ways(planned: Planned, number: int) -> list[Candidate]:
    """All ways that the model has layers for, cut evenly."""
    layers = len(planned.subject.build()[0])
    found = []
    for name, per_worker, remat in WAYS:
        stages = per_worker * NUM_WORKERS
        if stages > layers:
            continue
        try:
            named(name, NUM_WORKERS, number, stages_per_worker=per_worker)
        except ValueError:  # not with so few micro-batches
            continue
        found.append(
            Candidate(
                cut=partition([1.0] * layers, stages), schedule=name, num_microbatches=number,
                remat=(remat,) * stages, num_workers=NUM_WORKERS, stages_per_worker=per_worker,
            )
        )  # fmt: skip
    return found + replicated(layers, planned.batch_size, (number,), (planned.batch_size // number,))


def predicted(planned: Planned, candidates: Sequence[Candidate]) -> list[tuple[int, ...]]:
    """What `predict` says of each, of every worker; its seconds are of no interest here."""
    from gpipe_bench.pipeline.plan.links import FREE
    from gpipe_bench.planner.costs import Costs, SizeCosts
    from gpipe_bench.planner.predict import predict
    from gpipe_bench.planner.profiles import profiles_of
    from gpipe_bench.planner.request import Request

    layers = planned.subject.build()[0]
    second = dict.fromkeys(("F", "G", "R", "B", "I", "W"), (1.0,) * len(layers))
    sizes = {candidate.microbatch_size(planned.batch_size) for candidate in candidates}
    costs = Costs(
        sizes=dict.fromkeys(sizes, SizeCosts(layers_s=second)),
        parameter_bytes=tuple(
            tuple(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in layers
        ),
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

    torch.manual_seed(1811)
    layers, loss = planned.subject.build()
    found = []
    for each in candidates:
        batch, target = planned.subject.batch(planned.batch_size // each.replicas)
        rank = dist.get_rank()
        found.append(_count(layers, loss, batch, target, each, rank, share_memory=share_memory))
    return found


def _count(
    layers: Any, loss: Any, batch: Any, target: Any, candidate: Candidate, rank: int, *, share_memory: bool
) -> int:
    import torch

    from gpipe_bench.experiments.engines.setup import clear
    from gpipe_bench.experiments.plan.running.replicas import processes_of
    from gpipe_bench.pipeline import Pipeline
    from gpipe_bench.pipeline.memory.tracker import LiveMemory
    from gpipe_bench.pipeline.stage.microbatch import tensors_of
    from gpipe_bench.planner.predict import schedule_of

    clear(layers)
    schedule, memory = schedule_of(candidate), LiveMemory()
    worker = rank % candidate.num_workers
    mine = [layers[layer] for stage in schedule.stages_of(worker) for layer in candidate.cut[stage]]
    with memory, memory.owned_by(rank):
        memory.watch(t for layer in mine for t in (*layer.parameters(), *layer.buffers()))
        pipeline = Pipeline(
            layers,
            num_stages=schedule.num_stages,
            num_microbatches=schedule.num_microbatches,
            schedule=schedule,
            cost=[1 / len(span) for span in candidate.cut for _ in span],
            **processes_of(candidate),
            share_memory=share_memory,
        )
        with pipeline:
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
    return memory.peak_bytes[rank] + shared_bytes + sum(users.values())


def peaks(record: Record) -> list[Peaks]:
    """The configurations of a record."""
    if record.status != "done":
        return []
    found: dict[str, dict[str, dict[int, int]]] = {}
    for quantity in record.quantities:
        if quantity.value is not None:
            of = found.setdefault(str(quantity.key["configuration"]), {COUNTED: {}, MODELLED: {}})
            of[quantity.name][int(str(quantity.key["worker"]))] = int(quantity.value)
    return [
        Peaks(
            str(record.details["title"]), name,
            *(tuple(of[kind][worker] for worker in sorted(of[kind])) for kind in (MODELLED, COUNTED)),
        )
        for name, of in found.items()
    ]  # fmt: skip
