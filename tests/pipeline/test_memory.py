"""The modelled peak of every stage against real training steps, and its book-keeping against pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import real_steps
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from real_steps import Call, Counted, Loss, Step, compare
from torch import Tensor, nn
from tree_models import tree_batch, tree_loss, tree_model

from gpipe_bench.experiments.paper.table1.real_steps import verify
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import (
    Action,
    Boundary,
    Pop,
    Profiler,
    Schedule,
    StageMemory,
    Stash,
    gpipe,
    pipeline_memory,
)
from gpipe_bench.pipeline.memory.peaks import OPTIMIZERS
from gpipe_bench.pipeline.memory.stage_bytes import Bytes, StageBytes
from gpipe_bench.pipeline.memory.workers import shared_weights, stage_memory
from gpipe_bench.pipeline.stage.trees import Tree

C, SIDE = 8, 8


def conv(out_channels: int = C) -> nn.Conv2d:
    return nn.Conv2d(C, out_channels, 3, padding=1)


# Runs of layers that between them take an image to an image of the same shape.
RUNS: dict[str, Callable[[], list[nn.Module]]] = {
    "conv": lambda: [conv()],
    "frozen conv": lambda: [conv().requires_grad_(False)],
    "conv without bias": lambda: [nn.Conv2d(C, C, 1, bias=False)],
    "relu": lambda: [nn.ReLU()],
    "tanh": lambda: [nn.Tanh()],
    "norm": lambda: [nn.BatchNorm2d(C)],
    "block": lambda: [nn.Sequential(conv(), nn.BatchNorm2d(C), nn.ReLU(inplace=True))],
    "pool": lambda: [nn.MaxPool2d(3, 1, 1)],
    "dropout": lambda: [nn.Dropout(0.2)],
    "residual": lambda: [Call(lambda x, f: x + f(x), nn.Sequential(conv(), nn.Tanh()))],
    "skip": lambda: [Call(lambda x, f: (f(x), x), conv()), Call(lambda v: v[0].tanh() + v[1])],
    "long skip": lambda: [
        Call(lambda x, f: (f(x), x.tanh()), conv()),
        Call(lambda v, f: (f(v[0]), v[1]), conv()),
        Call(lambda v: v[0] * v[1]),
    ],
    "twice": lambda: [Call(lambda x: (x, x)), Call(lambda v, f: f(v[0]) + v[1], conv())],
    "slices": lambda: [
        Call(lambda x, f: f(x).chunk(2, 1), conv(2 * C)), Call(lambda v: v[0] * v[1].sigmoid()),
    ],
    "positions": lambda: [
        Call(lambda x: (x, torch.arange(len(x) * SIDE).view(len(x), SIDE))),
        Call(lambda v: v[0] * v[1][:, None, None].float()),
    ],
}  # fmt: skip


def square_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def compared(names: list[str], batch_size: int, step: Step) -> tuple[Counted, tuple[StageMemory, ...]]:
    torch.manual_seed(0)
    # At least one layer learns, and there are as many layers as stages.
    model = nn.Sequential(
        *(layer for name in names for layer in RUNS[name]()), conv(), nn.Tanh(), conv(), nn.ReLU()
    )
    x, target = torch.randn(2, batch_size, C, SIDE, SIDE)
    # Tensors of their own: the model counts the batch and the target, not what they are views of.
    return compare(model, x.clone(), target.clone(), square_error, step)


def check(counted: Counted, modelled: tuple[StageMemory, ...]) -> None:
    for peak, stage in zip(counted.peaks, modelled, strict=True):
        assert stage.peak == pytest.approx(peak, rel=0.01)
        parts = dataclasses.asdict(stage)
        del parts["when"]
        assert sum(parts.values()) == stage.peak
        assert min(parts.values()) >= 0


steps = st.builds(
    Step,
    num_stages=st.integers(1, 4),
    num_microbatches=st.sampled_from([1, 2, 4, 8]),
    remat=st.sampled_from(["never", "always", "except_last"]),
    schedule=st.sampled_from(["gpipe", "naive"]),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    autocast=st.sampled_from([None, None, torch.bfloat16]),
)


@settings(max_examples=60, derandomize=True)
@example(["frozen conv", "norm"], Step(num_stages=3, optimizer="sgd"))  # a gradient that nobody asks for
@example(["block", "skip"], Step(1, 8, "always", "1f1b"))
@given(st.lists(st.sampled_from(list(RUNS)), max_size=5), steps)
def test_the_modelled_peak_is_that_of_real_steps(names: list[str], step: Step) -> None:
    check(*compared(names, 16, step))


@pytest.mark.parametrize("remat", ["never", "always"])
def test_under_1f1b_the_peak_lies_between_no_and_one_waiting_message(remat: str) -> None:
    model, (batch, target) = in_place(), rows_of_numbers()
    step = Step(3, 8, remat, "1f1b")
    counted, pipeline = real_steps.count(model, batch, target, mse_loss, step)
    layers, loss = real_steps.profiles(model, batch, target, mse_loss, step)
    low, high = (
        pipeline_memory(
            layers, loss, pipeline.partition, pipeline.schedule, step.optimizer, receive_ahead=ahead
        )
        for ahead in (0, 1)
    )
    for least, peak, most in zip(low, counted.peaks, high, strict=True):
        assert least.peak * 0.99 <= peak <= most.peak * 1.01


def test_profiles_of_the_larger_micro_batches_bound_an_uneven_mini_batch() -> None:
    for remat in ("never", "always"):
        counted, modelled = compared(["block", "skip"], 14, Step(2, 4, remat))  # 4, 4, 3, 3
        for peak, stage in zip(counted.peaks, modelled, strict=True):
            assert peak <= stage.peak <= peak * 4 / 3 * 1.01


@pytest.mark.parametrize(
    ("name", "num_stages", "remat", "num_microbatches"),
    [
        ("amoebanet-d", 2, "never", 4),
        ("amoebanet-d", 4, "always", 8),
        ("transformer-lm", 4, "always", 4),
    ],
)
def test_scaled_down_models_of_the_paper(
    name: str, num_stages: int, remat: str, num_microbatches: int
) -> None:
    found = verify(name, num_stages, remat, num_microbatches)
    assert len(found.tracked) == len(found.modelled) == num_stages
    assert found.largest_error < 1e-4
    errors = [abs(m.peak - t) / t for m, t in zip(found.modelled, found.tracked, strict=True)]
    assert found.largest_error == max(errors)


# The book-keeping, with sizes that tell what was counted: each a power of ten.
STAGE = StageBytes(
    parameter_bytes=10**9,
    trained_sizes=(10**9,),
    buffer_bytes=0,
    gradient_bytes=0,
    input_bytes=10**2,
    kept_input_bytes=1,
    target_bytes=0,
    output_gradient_bytes=10**6,
    saved_bytes=10**4,
    free=Bytes(transients=0),
    forward=Bytes(transients=0),
    backward_first=Bytes(transients=0),
    backward=Bytes(transients=0),
)


def peak_of(
    schedule: Schedule, *, is_first: bool = False, receive_ahead: int = 0, **changes: Any
) -> StageMemory:
    stage = dataclasses.replace(STAGE, **changes)
    return stage_memory(stage, schedule.actions[0], "sgd", is_first=is_first, receive_ahead=receive_ahead)


def test_what_is_charged_at_the_fullest_moment() -> None:
    always = gpipe(2, 4, "always")
    found = peak_of(always)
    assert (found.when, found.boundary, found.transients) == ("0R3", 4 * 10**2, 10**6)
    found = peak_of(always, receive_ahead=1)
    assert (found.when, found.boundary, found.transients) == ("0R3", 4 * 10**2, 2 * 10**6)
    found = peak_of(always, backward_first=Bytes(transients=10**7))
    assert (found.when, found.boundary, found.transients) == ("0B3", 3 * 10**2 + 1, 10**7)
    found = peak_of(always, receive_ahead=3, free=Bytes(transients=10**8))
    assert (found.when, found.boundary, found.transients) == ("0F0", 10**2, 10**8 + 3 * 10**2)
    never = gpipe(2, 4, "never")
    found = peak_of(never)
    assert (found.when, found.activations, found.boundary) == ("0F3", 3 * 10**4, 10**2 + 3)
    found = peak_of(never, backward_first=Bytes(activations=10**4, transients=10**5))
    assert (found.when, found.activations, found.boundary) == ("0B3", 4 * 10**4, 4)


def test_gradients_exist_from_the_first_backward_on_and_none_before() -> None:
    always = gpipe(2, 3, "always")
    growing = Bytes(gradients=10**8)
    found = peak_of(always, gradient_bytes=10**8, forward=Bytes(transients=10**7), backward_first=growing)
    assert (found.when, found.gradients) == ("0R1", 10**8)
    found = peak_of(always, gradient_bytes=10**8, free=Bytes(transients=10**9))
    assert (found.when, found.gradients) == ("0F2", 0)
    found = peak_of(always, gradient_bytes=10**8, backward_first=Bytes(gradients=10**7, transients=10**9))
    assert (found.when, found.gradients) == ("0B2", 10**7)
    found = peak_of(gpipe(2, 1, "always"), gradient_bytes=10**8)
    assert (found.when, found.gradients) == ("optimizer", 10**8)


@pytest.mark.parametrize(
    ("optimizer", "state", "temporaries"),
    [("sgd", 0, 0), ("rmsprop", 2 * 1100 + 4 * 3, 900 + 50), ("adam", 2 * 1100 + 4 * 3, 2 * 900 + 50)],
)
def test_optimizers(optimizer: str, state: int, temporaries: int) -> None:
    """State of what is trained; while 900 are updated, a temporary of the 50 before is still there."""
    stage = dataclasses.replace(
        STAGE, parameter_bytes=5000, trained_sizes=(150, 50, 900), gradient_bytes=10**7, input_bytes=0,
        kept_input_bytes=0, output_gradient_bytes=0, saved_bytes=0,
    )  # fmt: skip
    found = stage_memory(stage, gpipe(1, 1).actions[0], optimizer, is_first=True)
    assert (found.when, found.parameters, found.optimizer_state) == ("optimizer", 5000, state)
    assert found.transients == temporaries
    assert found.working_set == temporaries


mse_loss = nn.functional.mse_loss
WIDTH, ROWS = 64, 128  # a boundary is 32 KiB
GPT2 = {"num_layers": 2, "d_model": 16, "num_heads": 2, "vocab_size": 97, "seq_len": 12, "dropout": 0.0}


# Layers that copy what re-materialization needs again: overwritten inputs, changing buffers


def in_place() -> nn.Sequential:
    """Each stage of two layers begins with one that overwrites its input, the second behind a view."""
    return nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH),
        nn.Flatten(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
        nn.ReLU(inplace=True), nn.Linear(WIDTH, 4),
    )  # fmt: skip


class Follow(nn.Module):
    """Follows its input in a buffer, in place or by another tensor, beside two that stay as they are."""

    def __init__(self, rows: int, *, replaced: bool) -> None:
        super().__init__()
        self.replaced = replaced
        self.register_buffer("average", torch.zeros(rows, WIDTH))
        self.register_buffer("scale", torch.ones(1000))
        self.register_buffer("table", torch.zeros(400, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.replaced:
                self.average = self.average * 0.9
            else:
                self.average.mul_(0.9)
            self.average[0] += x.mean(dim=0)
        return x + self.average[0].detach().clone()


class Still(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros(250, WIDTH))
        self.register_buffer("large", torch.zeros(400, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def follows(rows: int, *, replaced: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Follow(rows, replaced=replaced),
        Still(), nn.Linear(WIDTH, WIDTH), Follow(rows, replaced=replaced), nn.Linear(WIDTH, 4),
    )  # fmt: skip


def rows_of_numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(4 * ROWS, WIDTH), torch.randn(4 * ROWS, 4)


def of_one_worker() -> Schedule:
    """Both stages, which share a weight, on one worker."""
    row = [f"{stage}F{m}" for m in range(2) for stage in range(2)]
    row += [f"{stage}B{m}" for m in range(2) for stage in (1, 0)]
    return Schedule("own", 2, 2, "never", (tuple(map(Action.parse, row)),), (0, 0))


# Model, what it is given, its loss.
MODELLED: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], tuple[Tree, Tree]], Loss]] = {
    "overwriting": (in_place, rows_of_numbers, mse_loss),
    "buffers": (lambda: follows(500, replaced=False), rows_of_numbers, mse_loss),
    "buffers replaced": (lambda: follows(500, replaced=True), rows_of_numbers, mse_loss),
    "tied": (
        lambda: MODELS["gpt2"](**GPT2), lambda: example_batch("gpt2", 8, **GPT2), loss_fn("gpt2", **GPT2),
    ),
    "trees": (lambda: tree_model().double(), lambda: tree_batch(512), tree_loss),
}  # fmt: skip
WAYS = (("gpipe", "always"), ("1f1b", "always"), ("1f1b", "never"), ("gpipe", "never"))
CASES = [
    *(("overwriting", Step(k, 4, remat, name, "sgd")) for k in (1, 3) for name in ("gpipe", "1f1b")
      for remat in ("always", "except_last", "never")),
    *((f"buffers{how}", Step(3, 4, remat, "1f1b", "sgd"))
      for remat, how in (("always", ""), ("always", " replaced"), ("never", ""))),
    *(("tied", Step(1, 4, remat, name, optimizer)) for name, remat in (WAYS[0], WAYS[2])
      for optimizer in ("sgd", "adam")),
    *(("tied", Step(2, 2, "never", of_one_worker(), optimizer)) for optimizer in ("sgd", "adam")),
    *(("trees", Step(k, 4, remat, name, "sgd")) for k in (1, 3) for name, remat in WAYS),
]  # fmt: skip


def label(value: object) -> str:
    if not isinstance(value, Step):
        return str(value)
    name = value.schedule if isinstance(value.schedule, str) else value.schedule.name
    return f"{value.num_stages}-{name}-{value.remat}-{value.optimizer}"


@pytest.mark.parametrize(("name", "step"), CASES, ids=label)
def test_modelled_peaks_are_those_of_real_steps(name: str, step: Step) -> None:
    build, data, loss = MODELLED[name]
    torch.manual_seed(0)
    model, (batch, target) = build(), data()
    counted, modelled = compare(model, batch, target, loss, step)
    # Of a tied weight there is one gradient, and the model counts one for each use.
    more = sum((len(tie.layers) - 1) * tie.num_bytes for tie in shared_weights(list(model)))
    for peak, found in zip(counted.peaks, modelled, strict=True):
        assert 0.99 * peak <= found.peak <= 1.01 * peak + more


def test_every_kind_of_tree_reaches_the_layers_as_it_was() -> None:
    """The layers look at what they get; a tensor that stands twice is one, and constants are part of it."""
    batch, target = tree_batch(8)
    profiler = Profiler()
    layers, found = profiler.model(tree_model().double(), tree_loss, Boundary.of(batch), Boundary.of(target))
    assert [len(layer.inputs.tensors) for layer in layers] == [3, 5, 4, 3]
    assert found.inputs.num_bytes == sum(
        spec.num_bytes for spec in (*layers[-1].outputs.tensors, *Boundary.of(target).tensors)
    )
    other, _ = tree_batch(8, scale=0.25)
    assert Boundary.of(batch) != Boundary.of(other)
    assert Boundary.of(batch) == Boundary.of(tree_batch(8, seed=1)[0])


class ToDict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


class FromDict(nn.Module):
    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return given["x"]


def test_portals_beside_a_dict_are_refused() -> None:
    layers = [Stash("a"), nn.Linear(4, 4), ToDict(), FromDict(), Pop("a", Call(lambda v: v[0] + v[1]))]
    batch = Boundary.of(torch.randn(2, 4))
    with pytest.raises(ValueError, match="modelled between layers that pass tensors"):
        Profiler().model(layers, mse_loss, batch, batch)
