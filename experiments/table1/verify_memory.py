"""Real training steps, counted storage by storage, against the memory model.

The models are scaled down so that a laptop trains them in a blink; everything else is what Table 1 models:
the engine, RMSProp with momentum, every stage owning its boundary tensors as on a device of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.stages.peaks import StageMemory
from gpipe_bench.pipeline.memory.stages.workers import pipeline_memory
from gpipe_bench.pipeline.memory.tracker import LiveMemory, tensors_behind
from gpipe_bench.pipeline.transport import InProcess

BATCH_SIZE = 8  # divisible by every number of micro-batches below
SCALED_DOWN: dict[str, dict[str, Any]] = {
    "amoebanet-d": {
        "num_layers": 3, "num_filters": 16, "image_size": 96, "num_classes": 10, "aux_head": True,
    },
    "transformer-lm": {
        "num_layers": 6, "vocab_size": 512, "d_model": 64, "ffn_dim": 256, "num_heads": 4, "seq_len": 64,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Verification:
    """Peak bytes of each stage: counted in a real step, and modelled."""

    tracked: tuple[int, ...]
    modelled: tuple[StageMemory, ...]

    @property
    def largest_error(self) -> float:
        """Largest relative difference over the stages."""
        return max(
            abs(model.peak - peak) / peak for model, peak in zip(self.modelled, self.tracked, strict=True)
        )


def verify(name: str, num_stages: int, remat: str, num_microbatches: int, seed: int = 0) -> Verification:
    """Train a scaled-down model for two steps and compare the second one's peaks with the model's."""
    options = SCALED_DOWN[name]
    torch.manual_seed(seed)
    model, compute_loss = MODELS[name](**options), loss_fn(name, **options)
    memory = LiveMemory()
    pipeline = Pipeline(
        model,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule="gpipe",
        remat=remat,
        transport=InProcess(copy=True, observe_transfer=memory.owned_by),
    )
    tracked = _train(pipeline, name, options, compute_loss, memory)
    microbatch = example_batch(name, BATCH_SIZE // num_microbatches, device="meta", **options)
    profiler = _profiler()
    layers, loss = profiler.model(model, compute_loss, *map(Boundary.of, microbatch))
    modelled = pipeline_memory(layers, loss, pipeline.partition, pipeline.schedule, "rmsprop")
    return Verification(tracked, modelled)


@cache
def _profiler() -> Profiler:
    """Shared by all cases: they differ in the cut and in the micro-batches, not in the layers."""
    return Profiler()


def _train(
    pipeline: Pipeline, name: str, options: dict[str, Any], compute_loss: Any, memory: LiveMemory
) -> tuple[int, ...]:
    """Peak bytes owned by each stage in its second step: the optimizer's state exists from then on.

    The first one is not followed operation by operation, which takes longer than the step itself. What it
    left behind is counted all the same: whatever tensor a stage still refers to, for what reason ever.
    """
    stages = pipeline.stages
    optimizers = [
        torch.optim.RMSprop(_parameters(stage.layers), lr=1e-3, momentum=0.9, foreach=False)
        for stage in stages
    ]
    inputs, target = example_batch(name, BATCH_SIZE, **options)

    def step() -> None:
        pipeline.step(inputs, target, compute_loss, observe=lambda action: memory.owned_by(action.stage))
        for stage, optimizer in zip(stages, optimizers, strict=True):
            with memory.owned_by(stage.index):
                optimizer.step()
                optimizer.zero_grad()

    step()
    with memory:
        for stage, optimizer in zip(stages, optimizers, strict=True):
            with memory.owned_by(stage.index):
                memory.watch(tensors_behind(stage, optimizer))
        memory.reset_peaks()
        step()
    # The mini-batch is the first stage's, its targets the last one's; both are the user's.
    data = {0: inputs, len(stages) - 1: target} if len(stages) > 1 else {0: (inputs, target)}
    return tuple(memory.peak_bytes[stage.index] + _num_bytes(data.get(stage.index, ())) for stage in stages)


def _parameters(layers: tuple[nn.Module, ...]) -> list[nn.Parameter]:
    return [parameter for layer in layers for parameter in layer.parameters()]


def _num_bytes(value: Any) -> int:
    tensors = (value,) if isinstance(value, torch.Tensor) else value
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
