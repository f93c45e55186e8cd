"""Training over processes is that of the plain model: one table of models, places, schedules and messages.

Each row takes steps that add up, with an evaluation before them, clips, and lets an optimizer take a step:
losses, outputs, norms, weights and the gradient of each parameter are the plain model's. Below, weights after
several steps of an optimizer are those of one process to the bit.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from case_runner import Outcomes, assert_passed, outcomes_of
from odd_layers import Add, tied_model
from odd_layers import words as few_words
from own_models import CASES as GRAPHS
from own_models import FAMILIES
from random_schedules import HELD_UP, LATE_WEIGHTS
from ranks import (
    UNEVEN,
    Part,
    Ranks,
    assert_gradients,
    assert_loss,
    grid,
    halves,
    joint_step,
    on,
    own_part,
    transformer,
    whole,
    words,
)
from tiny_models import AMOEBANET, everything, everything_batch, mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tree_models import tree_batch, tree_loss, tree_model

from gpipe_bench.models import MODELS, example_batch, loss_fn, set_drop_path
from gpipe_bench.models.llama import llama
from gpipe_bench.models.parallel import tensor_parallel
from gpipe_bench.models.tasks import class_loss, token_loss
from gpipe_bench.models.transformer.seq2seq import transformer_seq2seq
from gpipe_bench.pipeline import Pipeline, Pop, PortalSequential, Schedule, Stash, layers_of, split
from gpipe_bench.pipeline.ranks import ends

pytestmark = pytest.mark.processes  # four at a time
cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss


class Model(NamedTuple):
    """What is trained: `layers` in a pipeline, beside themselves, or a `plain` model that is no chain."""

    layers: Callable[[], Any]
    data: Callable[[int, int], Part]  # of so many examples, by a number
    loss: Callable[..., Tensor]
    plain: Callable[[], nn.Module] | None = None


def by_number(data: Callable[..., Part]) -> Callable[[int, int], Part]:
    return lambda size, number: data(size, seed=number)


def images(size: int, number: int, dtype: torch.dtype = torch.float64) -> Part:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.rand((size, c, 9, 9), generator=generator, dtype=dtype) for c in (3, 1))  # type: ignore[return-value]


def photos(size: int, number: int) -> Part:
    generator = torch.Generator().manual_seed(number)
    image = torch.randn(size, 3, 67, 67, generator=generator, dtype=torch.float64)
    return image, torch.randint(10, (size,), generator=generator)


def unet(dropout: float = 0.0) -> nn.Sequential:
    return MODELS["unet"](num_convs=1, num_filters=4, depth=2, dropout=dropout, image_size=8, portals=True)


def decoder() -> nn.Sequential:
    """A stash that layers of several stages pop, also of the next one."""
    popping = (layer for _ in range(3) for layer in (nn.Linear(6, 6), Pop("a", Add())))
    return PortalSequential(nn.Linear(6, 6), Stash("a", nn.Tanh()), *popping)


class Twins(nn.Module):
    """A weight that one layer uses twice, and a parameter that it does not use at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu_())


def odd() -> nn.Sequential:
    """Twins, layers without parameters or gradients, changes in place, and a portal."""
    return PortalSequential(
        Twins(), nn.ReLU(inplace=True), Stash("a", nn.Linear(6, 6)), nn.Linear(6, 6),
        nn.LeakyReLU(inplace=True), nn.Linear(6, 6).requires_grad_(False), Pop("a", Add()), Twins(),
    )  # fmt: skip


def in_place_first() -> nn.Sequential:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))


def seq2seq(tables: int) -> nn.Sequential:
    return transformer_seq2seq(
        num_layers=1, ffn_dim=8, num_heads=2, head_dim=2, d_model=6, vocab_size=11, num_tables=tables
    )


def sentences(size: int, number: int) -> Part:
    return (words(size, number)[0], words(size, number + 1, 4)[0]), words(size, number + 2, 4)[0]


def of_library(name: str) -> Model:
    """A family of transformers, with tied weights where it ties them."""
    family = FAMILIES[name]

    def data(size: int, number: int) -> Part:
        inputs = tuple(each[:size] for each in family.batch())
        shape = (size,) if name == "vit" else inputs[0].shape
        target = torch.randint(5, shape, generator=torch.Generator().manual_seed(number))
        return inputs if len(inputs) > 1 else inputs[0], target

    class Plain(nn.Module):
        """Its forward with names."""

        def __init__(self) -> None:
            super().__init__()
            self.model = family.model(tied=family.tied)
            self.named_parameters = self.model.named_parameters  # type: ignore[method-assign]

        def forward(self, inputs: Any) -> Tensor:
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            return self.model(**dict(zip(family.inputs, inputs, strict=True))).logits

    return Model(
        lambda: layers_of(family.model(tied=family.tied), family.inputs),
        data,
        lambda logits, target: cross_entropy(logits.flatten(0, -2), target.flatten()),
        Plain,
    )


TRAINED = {
    "everything": Model(everything, by_number(everything_batch), cross_entropy),
    "mlp": Model(mlp, by_number(mlp_batch), mse_loss),
    "linear": Model(lambda: mlp(dropout=0.0), by_number(mlp_batch), mse_loss, lambda: mlp(dropout=0.0)),
    "in place first": Model(in_place_first, by_number(mlp_batch), mse_loss),
    "trees": Model(tree_model, lambda size, number: tree_batch(size, number, 1 / (1 + number)), tree_loss),
    "tied": Model(lambda: tied_model(3), few_words, cross_entropy),
    "amoebanet": Model(lambda: MODELS["amoebanet-d"](**AMOEBANET), photos, class_loss),
    "transformer": Model(lambda: transformer(dropout=0.2), words, token_loss),
    "two layers": Model(lambda: transformer(num_layers=2), words, token_loss),
    "sublayers": Model(
        lambda: transformer(num_layers=2, attention="explicit", cut="sublayer"), words, token_loss
    ),
    "llama in parts": Model(
        lambda: llama(num_layers=2, d_model=8, ffn_dim=12, num_heads=4, num_kv_heads=2, vocab_size=11),
        words,
        token_loss,
    ),
    "seq2seq, 2 tables": Model(partial(seq2seq, 2), sentences, token_loss),
    "seq2seq, 3 tables": Model(partial(seq2seq, 3), sentences, token_loss),
    "u-net": Model(unet, images, mse_loss, unet),
    "decoder": Model(decoder, by_number(mlp_batch), mse_loss, decoder),
    "odd": Model(odd, by_number(mlp_batch), mse_loss, odd),
    **{name: of_library(name) for name in FAMILIES},
}


class Row(NamedTuple):
    """One way to train a model. `sizes` are the examples of each replica, step by step; `messages` go through
    memory or the network, in few buffers where they are tight.
    """

    model: str
    where: str
    schedule: str | Schedule
    remat: str = "never"
    sizes: tuple[int, ...] = UNEVEN
    num_microbatches: int = 3
    messages: str = "memory"
    options: dict[str, Any] = {}  # noqa: RUF012
    rtol: float = 1e-12

    def __str__(self) -> str:
        schedule = getattr(self.schedule, "name", self.schedule)
        of = [f"{name}={value}" for name, value in self.options.items() if name in ("zero", "sequence")]
        number = "" if self.rtol < 1e-6 else "float32"
        messages = self.messages.replace("memory", "")
        said = (self.model, self.where, schedule, self.remat, messages, *of, number)
        return ", ".join(each.strip() for each in said if each.strip())

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.rtol < 1e-6 else torch.float32

    def pipeline(self, layers: Any) -> Pipeline:
        options = {"schedule": self.schedule, "remat": self.remat, **self.options}
        sequence = options.pop("sequence", None)
        if "rank" in self.where:
            ranks = Ranks() if self.where == "4 ranks" else halves()
            share = "memory" in self.messages
            return ranks.pipeline(layers, self.num_microbatches, share_memory=share, **options)
        mesh = grid(**{name: int(size) for name, size in (each.split("=") for each in self.where.split())})
        if sequence is not None:
            tensor_parallel(layers, mesh["tp"], sequence=sequence)
        return on(mesh, layers, self.num_microbatches, **options)


MANY = (9, 4, 3, 9, 6, 1, 2, 12, 9)  # some of fewer examples than micro-batches
OF_TWO = {"num_stages": 4}
PIPELINES = (
    Row("everything", "4 ranks", "gpipe", "always", MANY, 4),
    Row("everything", "4 ranks", "1f1b", "never", MANY, 4, "network"),
    Row("everything", "4 ranks", "zb-h1", "except_last", (11, 2), 8, "tight memory"),
    Row("everything", "4 ranks", "gpipe", "except_last", (11, 2), 8, "tight network"),
    Row("everything", "4 ranks", "naive", "always", (4, 3), 1),
    Row("everything", "2 ranks", "1f1b", "always", (9, 3), 1),
    Row("everything", "2 ranks", "interleaved", "never", (11, 2), 7, "tight memory", OF_TWO),
    Row("everything", "2 ranks", "zb-v", "always", (11, 2), 7, "tight network", OF_TWO),
    Row("everything", "2 ranks", "v-min", "except_last", (11, 2), 7, "memory", OF_TWO),
    Row("mlp", "4 ranks", "interleaved", "never", (5, 3, 1, 4), 4, "memory", {"num_stages": 8}),
    Row("mlp", "4 ranks", "zb-v", "except_last", (5, 3, 1, 4), 4, "network", {"num_stages": 8}),
    *(
        Row("mlp", "2 ranks", schedule, "never", (11, 12), schedule.num_microbatches, messages)
        for schedule in (LATE_WEIGHTS, HELD_UP)  # in which a stage keeps longer what it receives
        for messages in ("tight memory", "tight network")
    ),
    Row("in place first", "2 ranks", "gpipe", "always"),
    Row("trees", "4 ranks", "gpipe", "always", (9, 9, 5)),
    Row("trees", "2 ranks", "zb-h1", "never", (9, 9, 5), messages="network"),
    Row("u-net", "4 ranks", "1f1b", "always", (7, 2), 4),
    Row("u-net", "4 ranks", "zb-h1", "never", (7, 7), 4, "network"),
    Row("u-net", "2 ranks", "1f1b", "never", (7, 2), 4, "tight memory"),
    Row("decoder", "4 ranks", "gpipe", "except_last", (6, 7), 4),
    Row("decoder", "2 ranks", "interleaved", "never", (6, 7), 2, "memory", OF_TWO),
    Row("tied", "4 ranks", "gpipe", "always"),
    Row("tied", "4 ranks", "zb-h1", "except_last"),
    Row("tied", "2 ranks", "interleaved", "never", options=OF_TWO),
    *(
        Row(name, "2 ranks", schedule, remat, (8, 3), 4, options={"cost": None})
        for name in FAMILIES
        for schedule, remat in (("1f1b", "always"), ("zb-h1", "never"))
    ),
)  # fmt: skip
GRIDS = (
    Row("everything", "dp=2 pp=2", "gpipe", "always"),
    Row("everything", "dp=2 pp=2", "1f1b", "never"),
    Row("everything", "dp=2 pp=2", "zb-h1", "except_last"),
    Row("everything", "dp=2 pp=2", "zb-v", "always"),
    Row("everything", "dp=2 pp=2", "interleaved", "never"),
    Row("everything", "dp=4 pp=1", "1f1b", "always"),
    Row("everything", "dp=1 pp=2", "gpipe", "never"),
    Row("mlp", "dp=2 pp=2", "dualpipe-v", "always", (5, 4, 2, 5, 1, 2, 4, 3)),
    Row("tied", "dp=4 pp=1", "interleaved", "never"),
    Row("tied", "dp=2 pp=2", "zb-v", "never"),
    Row("amoebanet", "dp=2 pp=2", "1f1b", "always", (5, 3), 2, options={"bucket_bytes": 1 << 14}),
    Row("transformer", "dp=2 pp=2", "zb-h1", "never", (5, 3), 2, rtol=1e-5),
)
SHARDS = (
    Row("everything", "fsdp=2 pp=2", "gpipe", "always", options={"zero": 2}),
    Row("everything", "fsdp=2 pp=2", "gpipe", "never", options={"zero": 3}),
    Row("everything", "fsdp=2 pp=2", "1f1b", "always", options={"zero": 3}),
    Row("everything", "fsdp=2 pp=2", "zb-h1", "except_last", options={"zero": 2}),
    Row("everything", "fsdp=2 pp=2", "interleaved", "always", options={"zero": 3}),
    Row("everything", "fsdp=2 pp=2", "zb-v", "always", options={"zero": 2}),
    Row("mlp", "fsdp=2 pp=2", "1f1b", "always", (2, 5, 4, 7, 3, 1), 4, options={"zero": 2}),
    # All replicas call a divided layer equally often, so a short share makes the others' micro-batches fewer.
    Row("linear", "fsdp=2 pp=2", "1f1b", "never", (2, 5, 4, 7, 3, 1), 4, options={"zero": 3}),
    Row("odd", "fsdp=2 pp=2", "zb-h1", "never", options={"zero": 2}),
    Row("odd", "fsdp=2 pp=2", "1f1b", "always", options={"zero": 3}),
    # gloo knows no mean and no product before the sum, which float64 never asks of it.
    Row("transformer", "fsdp=2 pp=2", "zb-h1", "never", options={"zero": 2}, rtol=1e-5),
    Row("transformer", "fsdp=2 pp=2", "gpipe", "always", options={"zero": 3}, rtol=1e-5),
    Row("amoebanet", "fsdp=2 pp=2", "1f1b", "always", (4, 5), 2, options={"zero": 2}),
    Row("transformer", "dp=2 fsdp=2 pp=1", "zb-h1", "never", options={"zero": 2}),
    Row("transformer", "dp=2 fsdp=2 pp=1", "gpipe", "always", options={"zero": 3}),
)
PARTS_OF_LAYERS = (
    Row("two layers", "pp=2 tp=2", "gpipe", "always", options={"sequence": False}),
    Row("two layers", "pp=2 tp=2", "1f1b", "never", options={"sequence": False}),
    Row("sublayers", "pp=2 tp=2", "interleaved", "never", options={"sequence": True}),
    Row("sublayers", "pp=2 tp=2", "zb-h1", "never", options={"sequence": True}),
    Row("llama in parts", "pp=2 tp=2", "zb-h1", "always", options={"sequence": False}),
    Row("llama in parts", "pp=2 tp=2", "1f1b", "never", options={"sequence": True}),
    Row("seq2seq, 2 tables", "pp=2 tp=2", "zb-h1", "never", options={"sequence": False}),
    Row("seq2seq, 3 tables", "pp=2 tp=2", "1f1b", "never", options={"sequence": True}),
    Row("two layers", "fsdp=2 pp=1 tp=2", "zb-h1", "never", options={"zero": 2, "sequence": True}),
    Row("two layers", "fsdp=2 pp=1 tp=2", "gpipe", "never", options={"zero": 3, "sequence": True}),
)
OF_EIGHT = (
    Row("two layers", "dp=2 pp=2 tp=2", "zb-h1", "never", options={"sequence": False}),
    Row("two layers", "dp=2 pp=2 tp=2", "1f1b", "always", options={"sequence": True}),
)
ROWS = {str(row): row for row in (*PIPELINES, *GRIDS, *SHARDS, *PARTS_OF_LAYERS, *OF_EIGHT)}


def trains_as_plain(name: str) -> None:
    """On each rank."""
    row, model = ROWS[name], TRAINED[ROWS[name].model]
    tight = mock.patch.object(ends, "SMALL_BYTES", 0) if "tight" in row.messages else nullcontext()
    num_microbatches = None if model.plain is not None else row.num_microbatches
    plain = seeded(model.plain or model.layers, row.dtype)
    with (
        tight,
        row.pipeline(
            seeded(model.layers, row.dtype) if row.model not in FAMILIES else model.layers()
        ) as made,
    ):
        replicas = made.grid.replicas if made.grid is not None else 1
        groups = max(len(row.sizes) // replicas, 2)
        numbers = itertools.cycle(row.sizes)
        steps = [
            [model.data(next(numbers), replicas * step + each) for each in range(replicas)]
            for step in range(groups)
        ]
        evaluates_alike(made, plain, steps[-1], row.rtol)
        for step, parts in enumerate(steps):
            wanted = joint_step(plain, parts, model.loss, num_microbatches, step=step)
            assert_loss(made.step(*own_part(made, parts), model.loss), wanted, max(row.rtol, 1e-11))
            assert_gradients(made, wanted, row.rtol)
        norm = nn.utils.clip_grad_norm_(list(dict.fromkeys(plain.parameters())), 0.01)
        torch.testing.assert_close(
            made.clip_grad_norm_(0.01).double(), norm.double(), rtol=100 * row.rtol, atol=0
        )
        for each in (plain, made):
            torch.optim.SGD(each.parameters(), lr=1.0, foreach=True).step()
        values = dict(plain.named_parameters(remove_duplicate=False))
        for name, parameter in made.named_parameters():
            torch.testing.assert_close(
                whole(parameter.detach()), values[name].detach(), rtol=100 * row.rtol, atol=row.rtol, msg=name
            )


def evaluates_alike(pipeline: Pipeline, plain: nn.Module, parts: list[Part], rtol: float) -> None:
    """Before the training, in which normalization follows whole mini-batches."""
    batch, _ = own_part(pipeline, parts)
    inputs = parts[pipeline.grid.replica if pipeline.grid is not None else 0][0]
    with torch.inference_mode(pipeline.grid is None):
        output, wanted = pipeline.eval()(batch), plain.eval()(inputs)
    if output is not None:
        for found, expected in zip(tree_leaves(output), tree_leaves(wanted), strict=True):
            if isinstance(found, Tensor):
                torch.testing.assert_close(whole(found), expected, rtol=100 * rtol, atol=10 * rtol)
    assert all(parameter.grad is None for parameter in pipeline.parameters())
    pipeline.train()
    plain.train()


# To the bit


class Bits(NamedTuple):
    """A model in float32 that is trained for three steps."""

    layers: Callable[[], Any]
    data: Callable[[int], Part]
    loss: Callable[..., Tensor]
    schedule: str
    remat: str
    num_stages: int | None = None  # of two workers; else as many as there are


def of_zoo(name: str, schedule: str, remat: str, num_stages: int | None = None, **options: Any) -> Bits:
    def layers() -> nn.Sequential:
        model = MODELS[name](**options)
        set_drop_path(model, 0.7)
        return model

    def data(step: int) -> Part:
        return example_batch(name, 7, generator=torch.Generator().manual_seed(step), **options)

    return Bits(layers, data, loss_fn(name, **options), schedule, remat, num_stages)


LM = {
    "num_layers": 6, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "vocab_size": 50, "seq_len": 6,
    "dropout": 0.2,
}  # fmt: skip
BITS = {
    "amoebanet": of_zoo("amoebanet-d", "gpipe", "except_last", **AMOEBANET),
    "transformer": of_zoo("transformer-lm", "1f1b", "except_last", **LM),
    "transformer, interleaved": of_zoo("transformer-lm", "interleaved", "never", 4, **LM),
    "transformer, in a V": of_zoo("transformer-lm", "zb-v", "always", 4, **LM),
    "portals": Bits(
        lambda: unet(0.2), lambda step: images(7, step, torch.float32), mse_loss, "1f1b", "always"
    ),
    **{
        f"{name} cut by its graph": Bits(
            lambda case=case: split(case.model(dtype=torch.float32), case.at),
            lambda step, case=case: case.data(torch.float32),
            case.loss,
            "1f1b",
            "never",
        )
        for name, case in GRAPHS.items()
    },
}


def weights_to_the_bit(name: str) -> None:
    """With dropout, drop path and normalization, on one process, two and four; by the model's names."""
    case = BITS[name]

    def train(make: Callable[[Any], Pipeline]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        pipeline = make(case.layers())
        optimizer = torch.optim.RMSprop(pipeline.parameters(), lr=1e-3, momentum=0.9)
        for step in range(3):
            pipeline.step(*own_part(pipeline, [case.data(step)]), case.loss)
            pipeline.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return pipeline.state_dict()

    options = {"schedule": case.schedule, "remat": case.remat}
    wanted = train(
        lambda layers: Pipeline(layers, num_stages=case.num_stages or 1, num_microbatches=3, **options)
    )
    for ranks in (halves(),) if case.num_stages else (halves(), Ranks()):
        stages = {"num_stages": case.num_stages or ranks.size}
        found = train(lambda layers, ranks=ranks, of=stages: ranks.pipeline(layers, 3, **of, **options))
        assert 0 < len(found) < len(wanted)
        for key, value in found.items():
            assert torch.equal(value, wanted[key]), f"{ranks.size} processes: {key}"


HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
CASES = {
    **{name: partial(trains_as_plain, name) for name, row in ROWS.items() if row not in OF_EIGHT},
    **{f"bits of {name}": partial(weights_to_the_bit, name) for name in BITS},
}


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    if case in ROWS and ROWS[case].model in FAMILIES and not HAS_TRANSFORMERS:
        pytest.skip("needs transformers: pip install -e .[transformers]")
    assert_passed(outcomes, case)


@pytest.mark.parametrize("case", [str(row) for row in OF_EIGHT])
def test_case_of_eight(case: str) -> None:
    assert_passed(outcomes_of({case: partial(trains_as_plain, case)}, num_ranks=8), case)
