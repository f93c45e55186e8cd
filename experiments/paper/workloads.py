"""The models of the performance tables: as the paper has them, and scaled to what two laptop cores can time.

A scaled model keeps the number of layers and their kinds, so it cuts into stages as the paper's does; widths,
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
    """A model of the zoo at one size, with its mini-batch and its loss; plain data until it builds itself.

    Args:
        title: the paper's name of the model
        model: the zoo's
        options: of its builder
        batch_size: examples of a mini-batch, N
        scale: what is smaller than the paper's, in words; empty at the paper's own size
        cap_bytes: of a stage, where the mini-batch is fitted to memory
    """

    title: str
    model: str
    options: Mapping[str, Any]
    batch_size: int
    scale: str = ""
    cap_bytes: int = 0

    def build(self, device: torch.device | str = "cpu", *, seed: int = SEED) -> nn.Sequential:
        """The layers, with the same weights in every process. On "meta" they take no memory.

        An accelerator draws weights itself: one thread of the host takes half a minute for two billion.
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
        """Inputs and target of a mini-batch of this many examples, the same in every process."""
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
    """Moves a layer from the meta device to real memory on `device`, with harmless values in it."""
    import torch

    layer.to_empty(device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        for name, buffer in layer.named_buffers():
            buffer.fill_(1) if name.endswith("running_var") else buffer.zero_()
    return layer.train()


class Configuration(NamedTuple):
    """K, M and N. `runs_for_real` also takes its steps with one stage per process; the step is laid out with
    each of `counts` micro-batches, the wanted number first, by default with M.
    """

    num_stages: int
    num_microbatches: int
    batch_size: int
    remat: str = "always"
    runs_for_real: bool = False
    counts: tuple[int, ...] = ()
    label: str = ""  # what results call it, instead of K and M

    @property
    def microbatch_size(self) -> int:
        return -(-self.batch_size // self.num_microbatches)


class Job(NamedTuple):
    """One case as its processes see it."""

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
    """A case per model, whose steps say how far the replay errs; `estimates_s` are of two cores."""
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
    """Workload of each profile, from its options, its mini-batch and, where they matter, scale and cap."""
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
        # Half of it in float32 with RMSProp needs 19.5 GiB for a single example.
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
"""The paper gives neither mini-batch nor sequence length; 128 images and 32 sequences of 1024 tokens (Table
1's) are taken."""

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
        "AmoebaNet-D (4, 512)",  # v1 counts the cells of one stack of three: L = 12 in v5's words
        "amoebanet-d",
        smoke=_SMALL_AMOEBANET,
        short=(_amoebanet(12, 128, 80, 100), 32, "filters / 4, 80 x 80 pixels, 100 classes"),
        full=(_amoebanet(12, 512, 224, 1001), 128),
    ),
}
"""The models of v1's figures 3 and 4."""


# The mini-batch fitted to memory, as the paper chose its own (section 3: "adjusted to fit memory")

FITTED_MICROBATCHES, LARGEST_MICROBATCH = 2, 32  # micro-batches that are run, examples of one


def fitted(
    workload: Workload, cells: Iterable[tuple[int, int]]
) -> tuple[tuple[Configuration, ...], dict[str, Any]]:
    """Configurations for cells of K and M, and facts for the record. Cells with equal stages and examples are
    laid out from one configuration.
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
    """Examples of the largest micro-batch, a power of two, whose stages stay under a memory cap, and the peak
    bytes of the fullest stage. ValueError if none fits.
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
    """Peak bytes of the fullest stage under gpipe with re-materialization and RMSProp (modelled). The cut is
    by the estimated cost of the layers, since nothing has been timed yet.
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
