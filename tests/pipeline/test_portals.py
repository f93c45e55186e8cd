"""Portals: tensors that go straight from the layer that stashes them to the layers that pop them."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from covering import pairwise
from own_models import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_bench.models import MODELS
from gpipe_bench.pipeline import (
    NAMED,
    Boundary,
    InProcess,
    Pipeline,
    Pop,
    PortalSequential,
    Profiler,
    Stash,
    layers_of,
    named,
)
from gpipe_bench.pipeline.memory.profile import layer_costs
from gpipe_bench.pipeline.plan.edges import Declared, Edge, edges_of, messages_of, rings_of
from gpipe_bench.pipeline.plan.remat import REMAT_MODES

SPLIT = "zb-h1"
UNET = {"num_convs": 1, "num_filters": 4, "depth": 2, "dropout": 0.0, "image_size": 8}


class Add(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def _linear() -> nn.Linear:
    return nn.Linear(3, 3)


def _encoder() -> PortalSequential:
    """One stash that three layers pop, as decoder layers pop the output of an encoder."""
    torch.manual_seed(0)
    layers = [_linear(), Stash("encoded", _linear()), nn.Tanh()]
    for _ in range(3):
        layers += [_linear(), nn.Tanh(), Pop("encoded", Add())]
    return PortalSequential(*layers, _linear()).double()


def _around_a_cut() -> PortalSequential:
    """Cut right behind the stash and right before the pop the tensor goes two ways at once, and what comes
    back on both is added.
    """
    torch.manual_seed(0)
    layers = [_linear(), Stash("a"), _linear(), nn.Tanh(), Pop("a", Add()), _linear()]
    return PortalSequential(*layers).double()


def _unet(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return MODELS["unet"](portals=True, **{**UNET, "dropout": dropout}).double()


def _images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.rand(5, n, 9, 9, generator=generator).double() for n in (3, 1))  # type: ignore[return-value]


def _rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(9, 3, generator=generator).double() for _ in range(2))  # type: ignore[return-value]


BUILT = {"unet": (_unet, _images), "encoder": (_encoder, _rows), "around a cut": (_around_a_cut, _rows)}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _plain(model: nn.Module, inputs: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), target)
    loss.backward()
    found = _gradients(model)
    model.zero_grad()
    return loss.detach(), found


def _assert_as_plain(name: str, **options: Any) -> None:
    model, (inputs, target) = (make() for make in BUILT[name])
    loss, expected = _plain(model, inputs, target)
    layers = len(list(model))
    pipeline = Pipeline(copy.deepcopy(model), cost=[1.0] * layers, **{"num_microbatches": 3, **options})
    found = pipeline.step(inputs, target, nn.functional.mse_loss)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-14)
    gradients = _gradients(pipeline)
    assert list(gradients) == list(expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-14, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(pipeline.eval()(inputs), model.eval()(inputs), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "num_stages", "schedule", "remat", "options"),
    [
        *((*row, {}) for row in pairwise(tuple(BUILT), (1, 2, 4), ("gpipe", "1f1b", SPLIT), REMAT_MODES)),
        ("around a cut", 3, "1f1b", "always", {}),
        ("around a cut", 6, "1f1b", "always", {}),
        ("encoder", 12, "1f1b", "always", {}),
        ("encoder", 4, "gpipe", "always", {"transport": InProcess(copy=True)}),
        ("encoder", 3, "gpipe", "always", {"compile": "eager"}),
    ],
)
def test_gradients_and_outputs_are_the_plain_models(
    name: str, num_stages: int, schedule: str, remat: str, options: dict[str, Any]
) -> None:
    _assert_as_plain(name, num_stages=num_stages, schedule=schedule, remat=remat, **options)


@pytest.mark.parametrize("name", NAMED)
def test_every_named_schedule_with_devices_of_their_own(name: str) -> None:
    """Several stages per worker, V-shaped placements and split backwards among them."""
    for remat in ("never", "always"):
        schedule = named(name, 2, 4, remat=remat)
        transport = InProcess(devices=[torch.device("cpu")] * schedule.num_stages)
        _assert_as_plain(
            "encoder",
            num_stages=schedule.num_stages,
            num_microbatches=4,
            schedule=schedule,
            transport=transport,
        )


def test_the_unet_is_the_same_with_its_skips_as_portals_or_in_the_tuple() -> None:
    model, (inputs, target) = _unet(dropout=0.3), _images()
    in_tuple = MODELS["unet"](**{**UNET, "dropout": 0.3}).double()
    in_tuple.load_state_dict(model.state_dict())
    found = []
    for each in (model, in_tuple):
        pipeline = Pipeline(each, num_stages=3, num_microbatches=2)
        pipeline.step(inputs, target, nn.functional.mse_loss)
        found.append(_gradients(pipeline))
    assert list(found[0]) == list(found[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_weights_are_bit_equal_over_the_number_of_stages(schedule: str) -> None:
    weights = []
    for num_stages in (1, 2, 4):
        model, (inputs, target) = _unet(dropout=0.2), _images()
        pipeline = Pipeline(
            model.float(), num_stages=num_stages, num_microbatches=4, schedule=schedule, remat="always"
        )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            pipeline.step(inputs.float(), target.float(), nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(pipeline.state_dict())
    for other in weights[1:]:
        assert all(torch.equal(other[name], value) for name, value in weights[0].items())


class _Counting(InProcess):
    """Counts the bytes that a stage is sent: all but gradients of the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.received: Counter[int] = Counter()

    def send(self, edge: Edge, microbatch: int, message: Any) -> None:
        self.received[edge.target] += sum(tensor.nbytes for tensor in message.tensors)
        super().send(edge, microbatch, message)

    def send_back(self, edge: Edge, microbatch: int, gradients: Any) -> None:
        if edge.names:
            self.received[edge.source] += sum(tensor.nbytes for tensor in gradients if tensor is not None)
        super().send_back(edge, microbatch, gradients)


def test_a_skip_over_stages_is_sent_once_and_so_is_its_gradient() -> None:
    class Widen(nn.Linear):
        stashes = ("wide",)

        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            wide = super().forward(value)
            return value, wide

    class Narrow(nn.Module):
        pops = ("wide",)

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + pair[1].sum(dim=1, keepdim=True)

    layers = [Widen(2, 100), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), Narrow()]
    counting = _Counting()
    pipeline = Pipeline(
        layers, num_stages=5, num_microbatches=2, cost=[1.0] * 5, remat="always", transport=counting
    )
    pipeline.step(torch.randn(6, 2), torch.randn(6, 2), nn.functional.mse_loss)
    wide, thin = 6 * 100 * 4, 6 * 2 * 4
    # Once forward to the last stage, once back to the first; recomputing sends nothing.
    assert counting.received == {1: thin, 2: thin, 3: thin, 4: thin + wide, 0: wide}


def test_the_messages_follow_from_the_declarations_the_cuts_and_the_schedule() -> None:
    declared = [Declared(("a",)), Declared(("b",)), Declared((), ("b",)), Declared((), ("a",))]
    edges = edges_of(declared, [range(1), range(1, 3), range(3, 4)])
    assert edges == (Edge(2, 0, 2, ("a",)),)
    schedule = named("1f1b", 3, 2, remat="never")
    messages = [each for back in (False, True) for each in messages_of(schedule, edges[0], back=back)]
    assert [f"{message.source} {message.target}" for message in messages] == [
        "0F0 2F0", "0F1 2F1", "2B0 0B0", "2B1 0B1",
    ]  # fmt: skip
    split = messages_of(named(SPLIT, 3, 2, remat="never"), edges[0], back=True)
    assert [f"{message.source} {message.target}" for message in split] == ["2I0 0I0", "2I1 0I1"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", SPLIT])
def test_a_receive_has_a_buffer_before_its_stage_needs_the_portal(name: str) -> None:
    """Nobody waits for a portal to leave, so this is all that could stop a schedule."""
    schedule = named(name, 4, 6, remat="never" if name == SPLIT else "always")
    edges = [Edge(3 + i, *ends, ("a",)) for i, ends in enumerate([(0, 2), (0, 3), (1, 3)])]
    rings = rings_of(schedule, edges)
    assert len(rings) == 6 + 6
    for edge, gradients in itertools.product(edges, (False, True)):
        ring = rings[edge.number, gradients].tight
        stage = edge.source if gradients else edge.target
        posted, done = set(ring.initial), set()
        ends = {"W"} if name == SPLIT else {"B"}
        for action in schedule.row(stage):
            kind = action.kind.value
            if kind in (("B", "I") if gradients else ("F",)):
                assert action.microbatch in posted
            if kind in ends and (following := ring.following[action.microbatch]) is not None:
                posted.add(following)
                done.add(action.microbatch)


def test_names_that_are_one_string_are_refused() -> None:
    layer = _linear()
    layer.stashes = "skip"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="stashes of a Linear is 'skip';"):
        Pipeline([layer], num_stages=1, num_microbatches=1)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_stash_gives_a_tensor_for_each_name(num_stages: int) -> None:
    layer = _linear()
    layer.stashes = ("skip",)  # type: ignore[assignment]
    pipeline = Pipeline([layer, Pop("skip", Add())], num_stages=num_stages, num_microbatches=1)
    with pytest.raises(Exception, match="action 0F0 failed: TypeError: a layer"):
        pipeline.step(torch.randn(2, 3), torch.randn(2, 3), nn.functional.mse_loss)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_tensor_that_is_overwritten_on_the_way_is_refused(num_stages: int) -> None:
    layers = [_linear(), Stash("a"), nn.ReLU(inplace=True), Pop("a", Add())]
    pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=1, remat="never", cost=[1.0] * 4)
    with pytest.raises(Exception, match=r"out-of-place form of the operation \(inplace=False\)"):
        pipeline.step(torch.randn(2, 3), torch.randn(2, 3), nn.functional.mse_loss)
    with pytest.raises(RuntimeError, match=r"out-of-place form of the operation \(inplace=False\)"):
        PortalSequential(*layers)(torch.randn(2, 3))


def test_a_failed_step_leaves_nothing_behind() -> None:
    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise FloatingPointError("no loss today")

    model, (inputs, target) = _encoder(), _rows()
    pipeline = Pipeline(model, num_stages=4, num_microbatches=2)
    with pytest.raises(Exception, match="no loss today"):
        pipeline.step(inputs, target, broken)
    pipeline.zero_grad()
    expected = _plain(copy.deepcopy(model), inputs, target)[1]
    pipeline.step(inputs, target, nn.functional.mse_loss)
    for name, gradient in _gradients(pipeline).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-14)


# What `layers_of` sends past stages, and what is profiled


def test_costs_of_layers_with_portals() -> None:
    class Add(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + pair[1]

    plain = layer_costs([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)], torch.randn(2, 4))
    found = layer_costs([Stash("a", nn.Linear(4, 4)), nn.Linear(4, 4), Pop("a", Add())], torch.randn(2, 4))
    assert found[:2] == plain[:2]
    assert found[2] > 0


def test_the_target_of_a_t5_goes_past_its_encoder_and_the_memory_along_its_decoder() -> None:
    """The memory as a portal would be the same bytes: one message to each stage of the decoder."""
    family = FAMILIES["t5"]
    counting = _Counting()
    layers = layers_of(family.model().float(), ("input_ids", "decoder_input_ids"))
    count = len(layers)  # embedding, two encoder blocks, turn, two decoder blocks, head
    pipeline = Pipeline(
        layers, num_stages=count, num_microbatches=2, cost=[1] * count, transport=counting, remat="never"
    )
    assert [(line.source, line.target, line.names) for line in pipeline.portals] == [
        (0, 3, ("decoder_inputs",))
    ]
    tokens = family.batch()[0]
    with torch.no_grad():
        pipeline((tokens, tokens))
    x = tokens.numel() * 8 * 4  # 8 floats for each token; source and target are of one length
    bias = 2 * 2 * 6 * 6 * 4  # per micro-batch: 2 heads, 6 tokens by 6
    assert counting.received == {
        1: x, 2: x + bias, 3: x + bias + x,  # activations, and the target that went past them
        4: 2 * x, 5: 2 * x + bias, 6: 2 * x + bias,  # target and memory
    }  # fmt: skip


def test_profiles_of_layers_with_portals_count_them_as_passed_on() -> None:
    layers = [Stash("a", nn.Linear(2, 9)), nn.Linear(9, 2), nn.Linear(2, 9), Pop("a", Add())]
    batch, target = Boundary.of(torch.randn(6, 2)), Boundary.of(torch.randn(6, 9))
    profiles, _ = Profiler().model(layers, F.mse_loss, batch, target)
    assert [len(profile.outputs.tensors) for profile in profiles] == [2, 2, 2, 1]
    # What the first layer gives and what it stashes are one tensor, which travels once.
    assert [profile.outputs.num_bytes for profile in profiles] == [216, 264, 432, 216]
