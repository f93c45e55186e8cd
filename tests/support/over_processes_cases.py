"""Tiny models with large messages, and the bytes that their processes hold, to test the memory model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.experiments.beyond.plan_steps import NUM_WORKERS, REPLICATED, WAYS, processes_of
from gpipe_bench.experiments.beyond.trainings import Planned
from gpipe_bench.pipeline.plan.links import FREE
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.planner import Candidate
from gpipe_bench.planner.candidate import Grid
from gpipe_bench.planner.costs import Costs, SizeCosts
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.request import Request

Built = tuple[Sequence[nn.Module], Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]
MICROBATCHES, BATCH_SIZE = 4, 8
OPTIMIZER = "sgd"
KINDS = ("F", "G", "R", "B", "I", "W")


class Apart(nn.Module):
    """Adds a function of its input to it: no graph keeps its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = value + torch.tanh(value * self.scale)
        return made


class Kept(nn.Module):
    """Its graph keeps its own output, as a ReLU's does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, value: Tensor) -> Tensor:
        return torch.relu(value + self.shift)


def _built(make: Callable[[int], nn.Module], width: int) -> Built:
    layers = [make(width) for _ in range(8)]
    example = torch.zeros(BATCH_SIZE, width)
    return layers, example, torch.zeros(BATCH_SIZE, width), nn.functional.mse_loss


def small() -> Built:
    """Messages of 16 KiB."""
    return _built(Apart, 2048)


def small_kept() -> Built:
    """The same of outputs that a graph holds."""
    return _built(Kept, 2048)


def large() -> Built:
    """Messages of 320 KiB."""
    return _built(Apart, 2**15 + 2**13)


def large_kept() -> Built:
    """The same of outputs that a graph holds."""
    return _built(Kept, 2**15 + 2**13)


MODELS = ("small", "small_kept", "large", "large_kept")


def planned(name: str) -> Planned:
    """One of the models, for two processes."""
    return Planned(name, f"over_processes_cases:{name}", {}, "tiny", batch_size=BATCH_SIZE)


def _candidate(layers: int, name: str, per_worker: int, remat: str, number: int) -> Candidate:
    """A candidate whose layers are cut evenly."""
    stages = per_worker * NUM_WORKERS
    return Candidate(
        grid=Grid(NUM_WORKERS), schedule=name, stages_per_worker=per_worker, num_microbatches=number,
        microbatch_size=BATCH_SIZE // number, cut=partition([1.0] * layers, stages), remat=(remat,) * stages,
    )  # fmt: skip


def ways_of(planned: Planned, number: int) -> list[Candidate]:
    """All ways for which the model has layers and the schedules micro-batches."""
    layers = len(planned.source.build()[0])
    found = []
    for name, per_worker, remat in WAYS:
        try:
            named(name, NUM_WORKERS, number, stages_per_worker=per_worker)
        except ValueError:
            continue
        if per_worker * NUM_WORKERS <= layers:
            found.append(_candidate(layers, name, per_worker, remat, number))
    return found + _replicated(layers, number)


def peaks_of(planned: Planned, candidates: Sequence[Candidate]) -> list[tuple[int, ...]]:
    """Predicted peak bytes of every worker for each candidate; seconds are made up."""
    layers = planned.source.build()[0]
    second = SizeCosts(layers_s=dict.fromkeys(KINDS, (1.0,) * len(layers)))
    trained = [[p.nbytes for p in layer.parameters() if p.requires_grad] for layer in layers]
    costs = Costs(
        sizes=dict.fromkeys((each.microbatch_size for each in candidates), second),
        parameter_bytes=trained,
        profiles=planned.profiles,
    )
    request = Request(
        accelerators=NUM_WORKERS, memory_bytes=2**60, batch_size=planned.batch_size, link=FREE,
        optimizer=OPTIMIZER,
    )  # fmt: skip
    found = [predict(each, costs, request, parts=False).peak_bytes for each in candidates]
    return [each * (NUM_WORKERS // len(each)) for each in found]  # replicas are equal


def count(planned: Planned, candidates: Sequence[Candidate], *, share_memory: bool = True) -> list[int]:
    """Runs in each process; returns its peak bytes in the second step of each candidate, with messages
    through shared memory or gloo.
    """
    import torch
    from torch import distributed as dist

    from gpipe_bench.experiments.engines.setup import clear
    from gpipe_bench.pipeline.memory.tracker import LiveMemory
    from gpipe_bench.pipeline.stage.trees import tensors_of

    torch.manual_seed(1811)
    layers, loss = planned.source.build()
    found = []
    for each in candidates:
        batch, target = planned.source.batch(planned.batch_size // each.grid.replicas)
        clear(layers)
        schedule, memory, rank = each.rows(), LiveMemory(), dist.get_rank()
        worker = rank % each.grid.pp
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
        # The mini-batch and its targets are the user's and existed before.
        users = {}
        for here, tree in ((schedule.worker(0), batch), (schedule.worker(schedule.num_stages - 1), target)):
            for tensor in tensors_of(tree, "the mini-batch") if here == worker else ():
                storage = tensor.untyped_storage()
                users[storage.data_ptr()] = tensor.nbytes  # parts may share its storage
        found.append(memory.peak_bytes[rank] + shared_bytes + sum(users.values()))
    return found


def _pipeline(candidate: Candidate, layers: Sequence[Any], **more: Any) -> Any:
    from gpipe_bench.pipeline import Pipeline

    return Pipeline(
        layers, partition=candidate.cut, num_microbatches=candidate.num_microbatches,
        schedule=candidate.rows(), **processes_of(candidate), **more,
    )  # fmt: skip


def _replicated(num_layers: int, number: int) -> list[Candidate]:
    """Two replicas of the whole model, with micro-batches as large as those of a single pipeline."""
    return [
        Candidate(
            grid=Grid(1, NUM_WORKERS), schedule=name, stages_per_worker=1, cut=(range(num_layers),),
            num_microbatches=number // NUM_WORKERS, microbatch_size=BATCH_SIZE // number, remat=(remat,),
        )
        for name, remat in REPLICATED
    ]  # fmt: skip


def ways() -> list[Candidate]:
    """All ways to train one of the models."""
    return ways_of(planned("small"), MICROBATCHES)


def count_all() -> dict[str, list[int]]:
    """Runs in each process; returns the bytes of each way by model, and by model over gloo."""
    found = {name: count(planned(name), ways()) for name in MODELS}
    for name in ("small", "large"):
        found[f"{name} over gloo"] = count(planned(name), ways()[:4], share_memory=False)
    return found
