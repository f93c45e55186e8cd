"""The models of the performance tables, at the paper's size and scaled to two laptop cores.

A scaled model has the paper's number and kinds of layers, so it is partitioned like the paper's; widths,
images and sequences shrink until an action takes milliseconds. Importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import partition

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SEED = 1811
NUM_MICROBATCHES = 32  # of Table 3
Layers = TypeVar("Layers", bound="nn.Module")
PROFILES = {
    "smoke": "tiny models",
    "short": "models scaled to two cores, with the paper's numbers of layers",
    "full": "the paper's models, for GPUs",
}
"""Descriptions of a timed table's profiles."""


@dataclass(frozen=True, eq=False)
class Workload:
    """A model of the zoo at one size, with mini-batch and loss, as plain data.

    Args:
        title: the paper's name of the model
        model: its name in the zoo
        options: options of its builder
        batch_size: examples of a mini-batch, N
        scale: what is smaller than in the paper, in words; empty at the paper's size
        cap_bytes: memory of a stage to which the mini-batch is fitted, if any
    """

    title: str
    model: str
    options: Mapping[str, Any]
    batch_size: int
    scale: str = ""
    cap_bytes: int = 0

    def build(self, device: torch.device | str = "cpu", *, seed: int = SEED) -> nn.Sequential:
        """Builds the layers, with the same weights in every process. On "meta" they take no memory.

        Weights are drawn on an accelerator: one thread of the host takes half a minute for two billion.
        """
        import torch

        from gpipe_bench.models import MODELS

        where = torch.device(device)
        torch.manual_seed(seed)
        if where.type == "cpu":
            return MODELS[self.model](**self.options)
        with torch.device("meta"):
            layers = MODELS[self.model](**self.options)
        return layers if where.type == "meta" else materialized(layers, where)

    def example(
        self, batch_size: int, device: torch.device | str = "cpu", *, seed: int = SEED
    ) -> tuple[Any, Any]:
        """Inputs and target of a mini-batch of so many examples, equal in every process."""
        import torch

        from gpipe_bench.models import example_batch

        if str(device) == "meta":
            return example_batch(self.model, batch_size, device="meta", **self.options)
        generator = torch.Generator().manual_seed(seed)
        inputs, target = example_batch(self.model, batch_size, generator=generator, **self.options)
        several = isinstance(inputs, tuple)
        return tuple(each.to(device) for each in inputs) if several else inputs.to(device), target.to(device)

    def loss(self) -> Callable[[Any, Tensor], Tensor]:
        """The loss of outputs and target, the mean over examples."""
        from gpipe_bench.models import loss_fn

        return loss_fn(self.model, **self.options)

    def facts(self) -> dict[str, Any]:
        """Facts of the workload for a record."""
        return {"title": self.title, "scale": self.scale, "options": dict(self.options)}


def materialized(layer: Layers, device: torch.device) -> Layers:
    """Moves a layer from the meta device to `device`, with harmless values."""
    import torch

    layer.to_empty(device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        for name, buffer in layer.named_buffers():
            buffer.fill_(1) if name.endswith("running_var") else buffer.zero_()
    return layer.train()


class Configuration(NamedTuple):
    """K, M and N. With `runs_for_real` its steps also run with one stage per process. The step is replayed
    with each of `counts` micro-batches, default M; the first is the wanted number.
    """

    num_stages: int
    num_microbatches: int
    batch_size: int
    remat: str = "always"
    runs_for_real: bool = False
    counts: tuple[int, ...] = ()
    label: str = ""  # name in results, instead of K and M

    @property
    def microbatch_size(self) -> int:
        return -(-self.batch_size // self.num_microbatches)


class Job(NamedTuple):
    """A case as its processes get it."""

    workload: Workload
    configurations: tuple[Configuration, ...]
    rounds: int  # of two turns each
    engine: str = "ours"
    device: str = "cpu"
    seed: int = SEED

    def facts(self) -> dict[str, Any]:
        """Facts of the job for a record."""
        return {**self.workload.facts(), "engine": self.engine, "rounds": self.rounds}


def real_cases(models: Iterable[str], estimates_s: Iterable[float], options: RunOptions) -> list[Case]:
    """A case per model, whose real steps measure the replay's error; `estimates_s` are for two cores."""
    return [
        Case({"part": "replay error", "model": model}, 5.0 if options.profile == "smoke" else estimate_s)
        for model, estimate_s in zip(models, estimates_s, strict=True)
    ]


Sizes = Mapping[str, Workload]
"""A model by profile: "smoke", "short" and "full"."""

_MIB, _GIB = 2**20, 2**30


def _amoebanet(
    num_layers: int, num_filters: int, image_size: int, num_classes: int, *, aux_head: bool = True
) -> dict[str, Any]:
    return {
        "num_layers": num_layers, "num_filters": num_filters, "image_size": image_size,
        "num_classes": num_classes, "aux_head": aux_head,
    }  # fmt: skip


def _transformer(
    num_layers: int, d_model: int, num_heads: int, seq_len: int, vocab_size: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_layers": num_layers, "d_model": d_model, "ffn_dim": 4 * d_model, "num_heads": num_heads,
        "seq_len": seq_len, "vocab_size": vocab_size, "cut": "sublayer", **more,
    }  # fmt: skip


def _sizes(title: str, model: str, **of_profile: tuple[Any, ...]) -> Sizes:
    """The workload of each profile, from options, mini-batch and, if needed, scale and cap."""
    return {profile: Workload(title, model, *given) for profile, given in of_profile.items()}


_SMALL_AMOEBANET = _amoebanet(6, 16, 32, 10, aux_head=False), 8, "6 cells, 16 filters, 32 x 32 pixels"
_SMALL_TRANSFORMER = "8 layers, width 32, 16 tokens, 500 words"

TABLE2: Mapping[str, Sizes] = {
    "amoebanet": _sizes(
        "AmoebaNet-D (18, 256)",
        "amoebanet-d",
        smoke=(*_SMALL_AMOEBANET, 7 * _MIB // 2),
        short=(
            _amoebanet(18, 64, 112, 100), 32, "filters / 4, 112 x 112 pixels, 100 classes", 180 * _MIB,
        ),
        full=(_amoebanet(18, 256, 224, 1001), 128, "", 8 * _GIB),
    ),
    "transformer": _sizes(
        "Transformer-48",
        "transformer-lm",
        smoke=(_transformer(8, 32, 2, 16, 500), 8, _SMALL_TRANSFORMER, 9 * _MIB // 4),
        short=(_transformer(48, 128, 8, 64, 2000), 32, "width / 16, 64 tokens, 2,000 words", 140 * _MIB),
        # Half of the model in float32 with RMSProp needs 19.5 GiB for one example.
        full=(
            _transformer(48, 2048, 32, 512, 32_000), 32, "512 instead of 1024 tokens, 24 instead of 16 GiB",
            24 * _GIB,
        ),
    ),
}  # fmt: skip
"""Models are named as in results/paper.csv, in every table."""

TABLE3: Mapping[str, Sizes] = {
    "amoebanet": _sizes(
        "AmoebaNet-D (18, 128)",
        "amoebanet-d",
        smoke=_SMALL_AMOEBANET,
        short=(_amoebanet(18, 32, 144, 100), 32, "filters / 4, 144 x 144 pixels, 100 classes"),
        full=(_amoebanet(18, 128, 224, 1001), 128),
    ),
    "transformer": _sizes(
        "Transformer-24",
        "transformer-lm",
        smoke=(_transformer(8, 32, 2, 16, 500, attention="explicit"), 8, _SMALL_TRANSFORMER),
        short=(
            _transformer(24, 192, 8, 96, 2000, attention="explicit"), 32,
            "width 192 of 2048, 96 tokens, 2,000 words",
        ),
        full=(_transformer(24, 2048, 32, 1024, 32_000, attention="explicit"), 32),
    ),
}  # fmt: skip
"""The paper states neither mini-batch nor sequence length; we use 128 images and 32 sequences of 1024 tokens,
as in Table 1."""

VERSION1: Mapping[str, Sizes] = {
    "resnet101": _sizes(
        "ResNet-101",
        "resnet101",
        smoke=(
            {"image_size": 64, "num_classes": 10, "num_blocks": (2, 2, 4, 2), "num_filters": 16},
            4,
            "10 blocks of 33, filters / 4, 64 x 64 pixels, 10 classes",
        ),
        short=({"image_size": 64, "num_classes": 100}, 32, "64 x 64 pixels, 100 classes"),
        full=({"image_size": 224, "num_classes": 1000}, 128),
    ),
    "amoebanet": _sizes(
        "AmoebaNet-D (4, 512)",  # v1 counts the cells of one of three stacks: L = 12 in v5
        "amoebanet-d",
        smoke=_SMALL_AMOEBANET,
        short=(_amoebanet(12, 128, 80, 100), 32, "filters / 4, 80 x 80 pixels, 100 classes"),
        full=(_amoebanet(12, 512, 224, 1001), 128),
    ),
}
"""The models of v1's figures 3 and 4."""


# The mini-batch fitted to memory, as in the paper (section 3: "adjusted to fit memory")

FITTED_MICROBATCHES, LARGEST_MICROBATCH = 2, 32  # number of micro-batches, most examples in one


def fitted(
    workload: Workload, cells: Iterable[tuple[int, int]]
) -> tuple[tuple[Configuration, ...], dict[str, Any]]:
    """Configurations for cells of K and M, and facts for the record. Cells with equal stages and examples are
    replayed from one configuration.
    """
    counts: dict[tuple[int, int], tuple[int, ...]] = {}
    peaks: dict[str, int] = {}
    for k, m in cells:
        examples, peaks[f"K={k} M={m}"] = fitted_microbatch(workload, k, m, workload.cap_bytes)
        counts[k, examples] = (*counts.get((k, examples), ()), m)
    ran, facts = FITTED_MICROBATCHES, {"cap_bytes": workload.cap_bytes, "modelled_peak_bytes": peaks}
    return tuple(
        Configuration(k, ran, ran * examples, counts=several) for (k, examples), several in counts.items()
    ), facts


def fitted_microbatch(
    workload: Workload, num_stages: int, num_microbatches: int, cap_bytes: int
) -> tuple[int, int]:
    """The examples of the largest micro-batch, a power of two, whose stages keep to a memory cap, and the
    largest peak of a stage in bytes. ValueError if none fits.
    """
    peak, size = peak_bytes(workload, num_stages, num_microbatches, 1), 1
    if peak > cap_bytes:
        raise ValueError(
            f"{workload.model} on {num_stages} stages with {num_microbatches} micro-batches of one example "
            f"needs {peak:,} bytes on one stage; the cap is {cap_bytes:,}: raise it or take more stages"
        )
    while 2 * size <= LARGEST_MICROBATCH:
        larger = peak_bytes(workload, num_stages, num_microbatches, 2 * size)
        if larger > cap_bytes:
            break
        size, peak = 2 * size, larger
    return size, peak


def peak_bytes(workload: Workload, num_stages: int, num_microbatches: int, microbatch_size: int) -> int:
    """The largest peak of a stage under gpipe with re-materialization and RMSProp (modelled). The partition
    is by estimated costs, since nothing has been timed yet.
    """
    from gpipe_bench.pipeline.memory.workers import pipeline_memory

    from .profiles import Reading, profiled_model

    stages = partition(_layer_costs(workload), num_stages)
    schedule = gpipe(num_stages, num_microbatches, "always")
    profile = profiled_model(Reading(), workload.model, microbatch_size, **workload.options)
    return max(stage.peak for stage in pipeline_memory(*profile, stages, schedule, receive_ahead=1))


@cache
def _layer_costs(workload: Workload) -> tuple[float, ...]:
    from gpipe_bench.pipeline.memory.profile import layer_costs

    return layer_costs(list(workload.build("meta")), workload.example(1, "meta")[0])
