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
from real_steps import Call, Counted, Step, compare
from torch import Tensor, nn

from gpipe_bench.experiments.paper.table1.real_steps import verify
from gpipe_bench.pipeline import (
    Kind,
    Schedule,
    StageMemory,
    gpipe,
    naive,
    one_f_one_b,
    pipeline_memory,
)
from gpipe_bench.pipeline.memory.counts import steps as steps_of
from gpipe_bench.pipeline.memory.peaks import OPTIMIZERS
from gpipe_bench.pipeline.memory.stage_bytes import Bytes, StageBytes
from gpipe_bench.pipeline.memory.workers import stage_memory
from gpipe_bench.pipeline.plan.named import SCHEDULES

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
)


@settings(max_examples=60, derandomize=True)
@example(["frozen conv", "norm"], Step(num_stages=3, optimizer="sgd"))  # a gradient that nobody asks for
@given(st.lists(st.sampled_from(list(RUNS)), max_size=5), steps)
def test_the_modelled_peak_is_that_of_real_steps(names: list[str], step: Step) -> None:
    check(*compared(names, 16, step))


@settings(max_examples=12, derandomize=True)
@given(st.lists(st.sampled_from(list(RUNS)), max_size=4), steps)
def test_one_stage_under_1f1b(names: list[str], step: Step) -> None:
    check(*compared(names, 16, dataclasses.replace(step, num_stages=1, schedule="1f1b")))


@settings(max_examples=12, derandomize=True)
@given(st.lists(st.sampled_from(["conv", "block", "tanh", "residual", "skip"]), max_size=4), steps)
def test_under_mixed_precision_too(names: list[str], step: Step) -> None:
    check(*compared(names, 16, dataclasses.replace(step, autocast=torch.bfloat16)))


@settings(max_examples=12, derandomize=True)
@given(st.lists(st.sampled_from(["conv", "block", "tanh", "skip"]), max_size=4), steps)
def test_under_1f1b_the_peak_lies_between_no_and_one_waiting_message(names: list[str], step: Step) -> None:
    step = dataclasses.replace(step, schedule="1f1b")
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for name in names for layer in RUNS[name]()), conv(), nn.Tanh(), conv(), conv()
    )
    x, target = torch.randn(16, C, SIDE, SIDE), torch.randn(16, C, SIDE, SIDE)
    counted, pipeline = real_steps.count(model, x, target, square_error, step)
    layers, loss = real_steps.profiles(model, x, target, square_error, step)
    for index, peak in enumerate(counted.peaks):
        low, high = (
            pipeline_memory(
                layers, loss, pipeline.partition, pipeline.schedule, step.optimizer, receive_ahead=ahead
            )[index].peak
            for ahead in (0, 1)
        )
        assert low * 0.99 <= peak <= high * 1.01


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
        ("transformer-lm", 1, "never", 1),
        ("transformer-lm", 4, "always", 4),
        ("transformer-lm", 2, "never", 8),
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


def counts(schedule: Schedule) -> dict[str, tuple[int, ...]]:
    """Of the first stage's telling actions: inputs held whole, graphs of others, receives posted for inputs
    and for gradients.
    """
    found = {str(step.action)[1:]: step.counts for step in steps_of(schedule.actions[0])}
    return {when: (c.whole, c.graphs, c.inputs_ahead, c.gradients) for when, c in found.items()}


def test_gpipe_with_remat_as_in_the_picture() -> None:
    """F0 F1 F2 R2 B2 R1 B1 R0 B0: three inputs at F2, R2 and B2, then fewer; one graph at a time."""
    # F0, F1, R0 and B0 hold less of the same.
    assert counts(gpipe(1, 3, "always")) == {
        "F2": (3, 0, 0, 0), "R2": (3, 0, 0, 1), "B2": (2, 0, 0, 0), "R1": (2, 0, 0, 1), "B1": (1, 0, 0, 0)
    }  # fmt: skip
    found = {str(step.action)[1:]: step for step in steps_of(gpipe(1, 3, "always").actions[0])}
    assert [found[name].counts.after_backward for name in ("R2", "B2", "R1", "B1")] == [0, 0, 1, 1]
    assert all(step.recomputed for step in found.values())


def test_gpipe_without_remat_holds_a_graph_per_micro_batch() -> None:
    found = counts(gpipe(1, 3, "never"))
    assert found == {"F2": (1, 2, 0, 0), "B2": (0, 2, 0, 0), "B1": (0, 1, 0, 0)}


def test_except_last_keeps_the_graph_of_the_last_micro_batch() -> None:
    found = counts(gpipe(1, 3, "except_last"))
    assert found["F1"] == (2, 0, 0, 0)  # without a graph
    assert found["F2"] == (3, 0, 0, 0)  # with one, beside two inputs
    assert found["B2"] == (2, 0, 0, 0)
    assert found["R1"] == (2, 0, 0, 1)


def test_1f1b_holds_fewer_the_later_the_stage() -> None:
    schedule = one_f_one_b(3, 8, "never")
    graphs = [max(step.counts.graphs for step in steps_of(row)) for row in schedule.actions]
    assert graphs == [2, 1, 0]  # of other micro-batches


def test_naive_holds_one_micro_batch() -> None:
    one, none = (1, 0, 0, 0), (0, 0, 0, 0)
    assert counts(naive(2, 4, "never")) == {"F0": one, "B0": none, "F1": one, "B1": none}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("remat", ["never", "always", "except_last"])
@pytest.mark.parametrize("receive_ahead", [0, 1, 2])
def test_receives_posted_ahead_are_never_more_than_what_is_still_to_come(
    name: str, remat: str, receive_ahead: int
) -> None:
    schedule = SCHEDULES[name](2, 4, remat)
    for row in schedule.actions:
        for step in steps_of(row, receive_ahead):
            position = [str(action) for action in row].index(str(step.action))
            inputs_left = sum(action.kind is Kind.F for action in row[position + 1 :])
            backwards_left = sum(action.kind is Kind.B for action in row[position + 1 :])
            assert step.counts.inputs_ahead == min(receive_ahead, inputs_left)
            own = step.action.kind is Kind.R  # its own gradient is received while it recomputes
            expected = 0 if step.action.kind is Kind.F else own + min(receive_ahead, backwards_left - own)
            assert step.counts.gradients == expected


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


def test_the_first_stage_owns_the_mini_batch_and_receives_nothing() -> None:
    found = peak_of(gpipe(2, 4, "always"), is_first=True, receive_ahead=1, target_bytes=7)
    assert found.boundary == 4 * (10**2 + 7)
    assert peak_of(gpipe(2, 4, "always"), target_bytes=7).boundary == 4 * (10**2 + 7)


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


def test_a_stage_without_parameters_needs_no_optimizer() -> None:
    stage = dataclasses.replace(STAGE, parameter_bytes=0, trained_sizes=())
    found = stage_memory(stage, gpipe(1, 2, "always").actions[0], "adam", is_first=False)
    assert (found.parameters, found.optimizer_state) == (0, 0)
