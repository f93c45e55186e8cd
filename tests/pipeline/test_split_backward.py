"""I and W together are B, bit for bit, and I lets go of the graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_cases import CASES, Call
from test_models_registry import SMALL
from test_engine import Saved
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench import models
from gpipe_bench.pipeline import Action, Kind, Pipeline, Schedule, one_f_one_b
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.pipeline.stage.trees import Message, Tree, flatten

NUM_MICROBATCHES = 3
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Alone:
    """A stage in the middle of a pipeline that is not there: one layer, the same micro-batches every time."""

    def __init__(self, layer: nn.Module, inputs: Tree, dtype: torch.dtype = torch.float32) -> None:
        self.layer = layer.to(dtype)
        tensors, self.structure = flatten(inputs)
        self.inputs = tuple([t.to(dtype) if t.is_floating_point() else t for t in tensors])
        self.stage = Stage(1, [self.layer], 1, device=torch.device("cpu"), is_last=False)
        self.stage.begin(0, NUM_MICROBATCHES, training=True)

    def forward(self, m: int = 0) -> tuple[Tensor, ...]:
        """F; returns a gradient for each output."""
        needs_grad = tuple([t.is_floating_point() for t in self.inputs])
        inputs = tuple([t.clone(memory_format=torch.preserve_format) for t in self.inputs])
        message = self.stage.forward(m, Message(inputs, self.structure, needs_grad), graph=True)
        assert message is not None
        generator = torch.Generator().manual_seed(m)
        return tuple([torch.randn(t.shape, generator=generator).to(t) for t in message.tensors])

    def whole(self, m: int = 0) -> tuple[Tensor | None, ...]:
        return self.stage.backward(m, self.forward(m))

    def halves(self, m: int = 0) -> tuple[Tensor | None, ...]:
        gradients = self.stage.backward_inputs(m, self.forward(m))
        self.stage.backward_weights(m)
        return gradients

    def gradients(self, backward: Callable[[int], tuple[Tensor | None, ...]]) -> list[Tensor | None]:
        """Of the inputs of each micro-batch, and the sums of the parameters'."""
        self.layer.zero_grad()
        of_inputs = [gradient for m in range(NUM_MICROBATCHES) for gradient in backward(m)]
        return [*of_inputs, *(p.grad for p in self.layer.parameters())]


def assert_same(ours: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    assert len(ours) == len(wanted)
    for a, b in zip(ours, wanted, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert (a.dtype, a.layout, a.shape) == (b.dtype, b.layout, b.shape)
        if a.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_halves_give_the_bits_of_the_whole(case: str, dtype: torch.dtype) -> None:
    build, inputs = CASES[case]
    torch.manual_seed(0)
    alone = Alone(build(), inputs(), dtype)
    try:
        wanted = alone.gradients(alone.whole)
    except RuntimeError as error:  # not every operation knows every type
        if "not implemented for" in str(error):
            pytest.skip(str(error))
        raise
    assert any(gradient is not None for gradient in wanted)
    assert_same(alone.gradients(alone.halves), wanted)


@pytest.mark.parametrize(
    "case",
    ["linear", "convolution", "used twice", "layer normalization", "encoder layer", "left out of autocast"],
)
def test_autocast_gives_the_same_bits_too(case: str) -> None:
    """In the types that it chose, and with its cache of casts, which several micro-batches share."""
    build, inputs = CASES[case]
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = Alone(build(), inputs())
        wanted = alone.gradients(alone.whole)
        assert_same(alone.gradients(alone.halves), wanted)
    assert {p.grad.dtype for p in alone.layer.parameters() if p.grad is not None} == {torch.float32}


def halved(schedule: Schedule) -> Schedule:
    """The same with I and W for B, each W as late as the next I."""
    rows = []
    for row in schedule.actions:
        actions: list[Action] = []
        waiting: list[Action] = []
        for action in row:
            if action.kind is Kind.B:
                actions += [*waiting, Action(action.stage, Kind.I, action.microbatch)]
                waiting = [Action(action.stage, Kind.W, action.microbatch)]
            else:
                actions.append(action)
        rows.append((*actions, *waiting))
    return Schedule("halved", schedule.num_stages, schedule.num_microbatches, schedule.remat, tuple(rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_the_zoo_trains_on_the_same_gradients(name: str, dtype: torch.dtype) -> None:
    whole = one_f_one_b(2, NUM_MICROBATCHES, remat="except_last")
    found = []
    # With kernels larger than the image, torch's bfloat16 convolutions read memory that nobody has written.
    options = SMALL[name] | ({"image_size": 64} if "image_size" in SMALL[name] else {})
    for schedule in (whole, halved(whole)):
        torch.manual_seed(0)
        model = models.MODELS[name](**options).to(dtype)
        pipeline = Pipeline(
            model, num_stages=2, num_microbatches=NUM_MICROBATCHES, schedule=schedule, cost=[1] * len(model)
        )
        inputs, target = models.example_batch(name, 6, generator=torch.Generator().manual_seed(1), **options)
        if isinstance(inputs, Tensor) and inputs.is_floating_point():
            inputs = inputs.to(dtype)
        pipeline.step(inputs, target, models.loss_fn(name, **options))
        found.append([p.grad for p in pipeline.parameters()])
    assert_same(found[1], found[0])


# The work, and when it is done

# Without a product that is counted, or with one that cannot wait.
IN_THE_FIRST_HALF = {
    "linear, frozen weight",
    "weight on the left",
    "weight by itself",
    "addmm with factors",
    "embedding",
    "embedding, sparse",
    "bag of embeddings",
    "convolution, frozen weight",
    "layer normalization",
    "scale",
    "recurrent",
    "bilinear",
    "weight norm",
    "functional call",
    "in place on a view",
    "used many times",
    "used and scaled",
    "tied to two heads",
    "a view of a parameter in the sum",
    "checkpointed, reentrant",
}


def flops(do: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        do()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("case", CASES)
def test_the_halves_do_the_work_of_the_whole(case: str) -> None:
    """Products counted: none twice, and those of known weights in W."""
    build, inputs = CASES[case]
    torch.manual_seed(0)
    alone = Alone(build(), inputs())
    gradients = alone.forward()
    whole = flops(lambda: alone.stage.backward(0, gradients))
    gradients = alone.forward()
    first = flops(lambda: alone.stage.backward_inputs(0, gradients))
    second = flops(lambda: alone.stage.backward_weights(0))
    assert first + second == whole
    assert (second == 0) == (case in IN_THE_FIRST_HALF), (first, second)


class Chain(nn.Module):
    """Linear, tanh, something with a memory of its own, Linear, LayerNorm; it watches what lives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 5), nn.Linear(5, 4), nn.LayerNorm(4)
        self.graph: list[weakref.ref[Tensor]] = []
        self.memory: dict[str, weakref.ref[torch.UntypedStorage]] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = Saved.apply(torch.tanh(self.first(x)), self.graph)
        product = self.second(hidden)
        output: Tensor = self.norm(product)
        for name, tensor in (("input", x), ("hidden", hidden), ("product", product)):
            self.memory[name] = weakref.ref(tensor.untyped_storage())
        return output

    def alive(self) -> set[str]:
        return {name for name, memory in self.memory.items() if memory() is not None}


def test_the_graph_is_gone_after_the_first_half_and_the_rest_after_the_second() -> None:
    """Until W only the inputs of the operations with weights are held, of what the forward left."""
    layer = Chain()
    alone = Alone(layer, torch.randn(4, 6))
    gc.collect()
    gc.disable()  # nothing may wait for a collection
    try:
        gradients = alone.forward()
        assert layer.alive() == {"input", "hidden", "product"}
        assert layer.graph[-1]() is not None
        alone.stage.backward_inputs(0, gradients)
        assert layer.graph[-1]() is None
        assert layer.alive() == {"input", "hidden"}
        del gradients
        alone.stage.backward_weights(0)
        assert layer.alive() == set()
    finally:
        gc.enable()
    assert all(p.grad is not None for p in layer.parameters())


def test_parameters_change_in_the_second_half_alone() -> None:
    alone = Alone(Chain(), torch.randn(4, 6))
    for m in (0, 1):
        alone.stage.backward_inputs(m, alone.forward(m))
    assert all(p.grad is None for p in alone.layer.parameters())
    alone.stage.backward_weights(1)
    after_one = [p.grad.clone() for p in alone.layer.parameters()]
    alone.stage.backward_weights(0)
    assert not any(torch.equal(p.grad, a) for p, a in zip(alone.layer.parameters(), after_one, strict=True))


class Copies(TorchDispatchMode):
    """Counts copies of tensors with two and more dimensions."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.count += args[0].dim() > 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["linear", "convolution", "embedding", "matrix product"])
def test_the_first_gradient_is_not_copied(case: str) -> None:
    build, inputs = CASES[case]
    alone = Alone(build(), inputs())
    alone.stage.backward_inputs(0, alone.forward())
    with Copies() as copies:
        alone.stage.backward_weights(0)
    assert copies.count == 0


# Hooks

Hook = Callable[[nn.Parameter, list[int]], Any]


def changing(parameter: nn.Parameter, calls: list[int]) -> Any:
    def hook(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * 0.5 + 1

    return parameter.register_hook(hook)


def accumulated(parameter: nn.Parameter, calls: list[int]) -> Any:
    return parameter.register_post_accumulate_grad_hook(lambda p: calls.append(1))


def behind_the_sum(parameter: nn.Parameter, calls: list[int]) -> Any:
    """As DistributedDataParallel has it."""
    node = get_gradient_edge(parameter).node
    return node, node.register_hook(lambda *_: calls.append(1))


@pytest.mark.parametrize("hook", [changing, accumulated, behind_the_sum])
def test_hooks_of_parameters_run_once_with_the_sum(hook: Hook) -> None:
    """Of weights that wait, and of those whose gradients come with the first half."""
    alone = Alone(Chain(), torch.randn(4, 6))
    calls: list[int] = []
    hooks = [hook(parameter, calls) for parameter in alone.layer.parameters()]
    wanted = alone.gradients(alone.whole)
    assert len(calls) == len(hooks) * NUM_MICROBATCHES
    calls.clear()
    alone.layer.zero_grad()
    inputs = [
        gradient
        for m in range(NUM_MICROBATCHES)
        for gradient in alone.stage.backward_inputs(m, alone.forward(m))
    ]
    assert not calls
    for m in range(NUM_MICROBATCHES):
        alone.stage.backward_weights(m)
    assert len(calls) == len(hooks) * NUM_MICROBATCHES
    assert_same([*inputs, *(p.grad for p in alone.layer.parameters())], wanted)


def test_a_hook_that_raises_leaves_the_others_in_place() -> None:
    alone = Alone(Chain(), torch.randn(4, 6))
    calls: list[int] = []
    changing(alone.layer.norm.weight, calls)
    gradients = alone.forward()
    alone.stage._microbatches[0].edges[0].node.register_prehook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        alone.stage.backward_inputs(0, gradients)
    alone.stage.finish(complete=False)
    alone.whole()
    assert calls == [1]


# What cannot be split


def test_a_checkpoint_computes_its_part_once_and_in_the_first_half() -> None:
    runs = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(1)
            return super().forward(x)

    def do(layer: Call, x: Tensor) -> Tensor:
        return layer.parts[1](checkpoint(layer.parts[0], x, use_reentrant=False))

    alone = Alone(Call(do, nn.Sequential(nn.Linear(6, 6), Counted(6, 6)), nn.Linear(6, 6)), torch.randn(4, 6))
    gradients = alone.forward()
    assert len(runs) == 1
    alone.stage.backward_inputs(0, gradients)
    alone.stage.backward_weights(0)
    assert len(runs) == 2


def test_a_reentrant_checkpoint_falls_back_to_the_whole() -> None:
    build, inputs = CASES["checkpointed, reentrant"]
    alone = Alone(build(), inputs())
    alone.stage.backward_inputs(0, alone.forward())
    found = [p.grad.clone() for p in alone.layer.parameters()]
    alone.stage.backward_weights(0)
    assert all(torch.equal(p.grad, a) for p, a in zip(alone.layer.parameters(), found, strict=True))


def test_tensors_on_the_host_come_back_through_their_hooks() -> None:
    def do(layer: Call, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return layer.parts[0](x)

    alone = Alone(Call(do, nn.Linear(6, 6)), torch.randn(4, 6))
    wanted = alone.gradients(alone.whole)
    assert_same(alone.gradients(alone.halves), wanted)


class Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(x)
        output: Tensor = self.linear(self.hidden)
        return output

    def overwrite(self) -> None:
        with torch.no_grad():
            self.hidden.add_(1)


def test_what_the_second_half_needs_may_not_be_overwritten() -> None:
    layer = Overwritten()
    alone = Alone(layer, torch.randn(4, 6))
    gradients = alone.forward()
    alone.stage.backward_inputs(0, gradients)
    layer.overwrite()
    with pytest.raises(RuntimeError, match="the gradients of weights are computed"):
        alone.stage.backward_weights(0)
    alone.stage.finish(complete=False)
    gradients = alone.forward()
    layer.overwrite()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        alone.stage.backward_inputs(0, gradients)


def test_gradients_that_go_out_are_not_a_parameters() -> None:
    """Where a layer adds a parameter to its input, both gradients are one tensor."""
    build, inputs = CASES["a view of a parameter in the sum"]
    alone = Alone(build(), inputs())
    outgoing = [alone.halves(m)[0] for m in range(2)]
    wanted = [alone.whole(m)[0] for m in range(2)]
    assert_same(outgoing, wanted)
    storages = [
        t.untyped_storage().data_ptr() for t in (*outgoing, *(p.grad for p in alone.layer.parameters()))
    ]
    assert len(set(storages)) == len(storages)


def test_nothing_of_the_gradients_has_a_graph() -> None:
    """No backward can be taken of a backward: neither half leaves anything to differentiate."""
    alone = Alone(Chain(), torch.randn(4, 6))
    assert not any(gradient.requires_grad for gradient in alone.gradients(alone.halves))
