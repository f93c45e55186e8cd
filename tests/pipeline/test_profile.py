"""Bytes of small layers against counts made by hand, and of a stack of Transformer blocks against torch's own
tracker; which layers are profiled once; and our own tracker, which counts each storage once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from real_steps import Call
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from gpipe_bench.pipeline import Boundary, Profiler
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import LayerProfile, TensorSpec, Trace
from gpipe_bench.pipeline.memory.tracker import EventLog, LiveMemory
from gpipe_bench.pipeline.stage.compiled import signature

N, C, SIDE = 2, 4, 8  # examples, channels, height and width
X = N * C * SIDE * SIDE * 4  # bytes of one activation
PIXELS = N * C * SIDE * SIDE


def image(channels: int = C, *, grad: bool = True, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec((N, channels, SIDE, SIDE), dtype, grad)


def one(spec: TensorSpec) -> Boundary:
    return Boundary((spec,), (0,), False)


def profile(layer: nn.Module, inputs: Boundary | None = None, **options: Any) -> LayerProfile:
    return Profiler().layer(layer, inputs or one(image()), **options)


def kept_bytes(trace: Trace) -> int:
    return sum(trace.sizes[storage] for storage in trace.kept)


def conv(out_channels: int = C, in_channels: int = C) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, padding=1)


CONV = (C * C * 9 + C) * 4  # bytes of its parameters


@pytest.mark.parametrize(
    ("layer", "kept", "inside"),
    [
        # bytes that the graph holds, and of them those that are neither input nor output
        (nn.Identity(), 0, 0),
        (nn.ReLU(), X, 0),  # its result
        (nn.ReLU(inplace=True), X, 0),  # its result, which is its input
        (nn.Tanh(), X, 0),
        (nn.GELU(), X, 0),  # its input
        (conv(), X, 0),  # its input; the weight is no activation
        (conv().requires_grad_(False), X, 0),  # its input, needed or not
        (nn.Linear(SIDE, SIDE).requires_grad_(False), 0, 0),  # the weight is enough
        (nn.Sequential(conv(), nn.ReLU(inplace=True)), 2 * X, 0),  # input, result of both
        (nn.Sequential(conv(), nn.ReLU()), 2 * X, 0),
        (nn.Sequential(conv(), nn.Tanh(), conv()), 2 * X, X),  # input, tanh's result once
        (nn.Sequential(conv(), nn.Flatten(), nn.Unflatten(1, (C, SIDE, SIDE)), conv()), 2 * X, X),
        (nn.Sequential(nn.MaxPool2d(2)), X + PIXELS // 4 * 8, PIXELS // 4 * 8),  # input, int64 indices
        (nn.AvgPool2d(2), X, 0),
        (nn.BatchNorm2d(C), X + 2 * C * 4, 2 * C * 4),  # input, mean and inverse deviation
        (nn.BatchNorm2d(C).eval(), X + 2 * C * 4, 2 * C * 4),  # profiled as in training, whatever the mode
        (nn.LayerNorm(SIDE), X + 2 * (PIXELS // SIDE) * 4, 2 * (PIXELS // SIDE) * 4),
        (nn.Dropout(0.5), X, X),  # on the CPU the scaled mask, in the input's type
        (Call(lambda x: x + 1), 0, 0),
        (Call(lambda x: x * x), X, 0),
        (Call(lambda x: x.detach()), 0, 0),
        (Call(lambda x: x[:, :1]), 0, 0),
    ],
)  # fmt: skip
def test_what_a_graph_keeps(layer: nn.Module, kept: int, inside: int) -> None:
    found = profile(layer)
    for trace in (found.first, found.later):
        assert kept_bytes(trace) == kept
        assert trace.kept_inside == inside
    assert found.free.kept == frozenset()
    assert found.free.backward == ()


def test_only_parameters_with_a_gradient_have_one() -> None:
    part = nn.Sequential(conv().requires_grad_(False), conv())
    found = profile(part)
    assert (found.num_parameters, found.parameter_bytes) == (CONV // 4, 2 * CONV)
    assert (found.gradient_bytes, sum(found.trained_sizes)) == (CONV, CONV)
    idle = profile(Call(lambda x, used, idle: used(x), conv(), conv()))
    assert (idle.num_parameters, idle.parameter_bytes) == (2 * CONV // 4, 2 * CONV)
    assert (idle.gradient_bytes, sum(idle.trained_sizes)) == (CONV, CONV)
    assert profile(nn.ReLU()).trained_sizes == ()


def test_a_loss_may_leave_outputs_unused() -> None:
    two = Call(lambda x, a, b: (a(x), b(x)), conv(), conv())
    target = one(image(grad=False))
    layers, loss = Profiler().model(
        [nn.Tanh(), two], lambda output, wanted: (output[1] - wanted).square().mean(), one(image()), target
    )
    assert loss.inputs.is_tuple
    assert len(loss.inputs.tensors) == 3
    assert (loss.first.without_gradient, layers[1].unused) == ({0}, {0})
    assert layers[1].gradient_bytes == CONV


def test_under_autocast_activations_and_weights_are_cast_but_parameters_stay() -> None:
    found = Profiler(torch.bfloat16).layer(nn.Linear(SIDE, 3), one(image()))
    assert (found.parameter_bytes, found.gradient_bytes) == ((SIDE * 3 + 3) * 4, (SIDE * 3 + 3) * 4)
    assert found.outputs.tensors[0].dtype == torch.bfloat16
    # The input and the weight in half the bytes; nothing in float32.
    assert kept_bytes(found.first) == X // 2 + SIDE * 3 * 2


def test_equal_layers_are_profiled_once() -> None:
    profiler = Profiler()
    a, b, c = profiler.chain([conv(), conv(), conv(2)], one(image()))
    assert a is b
    assert a is not c
    assert profiler.layer(conv(), one(image())) is a
    assert profiler.layer(conv(), one(image(grad=False))) is not a


def test_profiling_leaves_the_model_and_the_random_state_alone() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(C), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    model.eval()
    Profiler().chain(model, one(image()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model[0].training


def test_parameters_shared_between_layers_are_refused() -> None:
    a, b = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
    b.weight = a.weight
    with pytest.raises(ValueError, match="share the parameter 'weight', which profiles"):
        Profiler().chain([a, nn.ReLU(), b], one(image()))
    relu = nn.ReLU()  # without parameters, the same module may stand twice
    assert len(Profiler().chain([a, relu, relu], one(image()))) == 3


class Block(nn.Module):
    """A Transformer block with explicit attention: d = 512, 8 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(512), nn.LayerNorm(512)
        self.qkv, self.out = nn.Linear(512, 3 * 512), nn.Linear(512, 512)
        self.f1, self.f2 = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, 8, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) / 8).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.f2(self.f1(self.ln2(x)).relu())


def test_torchs_own_tracker_agrees_on_transformer_blocks() -> None:
    layers = [Block() for _ in range(4)]
    spec = TensorSpec((4, 128, 512), torch.float32)
    profiles, loss = Profiler().model(
        layers, lambda output, _: output.mean(), one(spec), one(TensorSpec((4,), torch.float32))
    )
    found = stage_bytes(profiles, loss)

    model = nn.Sequential(*layers)
    x = torch.randn(spec.shape)
    optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.9, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tracker = MemTracker()
    tracker.track_external(model, optimizer, x)
    with tracker:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = {
        str(kind): size for kind, size in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()
    }

    mib = 2**20
    state = 2 * sum(found.trained_sizes) + 4 * len(found.trained_sizes)
    fullest = max(
        found.parameter_bytes + state + found.input_bytes + moment.total
        for moment in (found.forward, found.backward_first)
    )
    assert found.parameter_bytes / mib == pytest.approx(48.10, abs=0.01)
    # Per block: x, two normalizations' results, q, k, v, softmax twice as large, attention's result, the
    # second half's input, and four times x after the rectifier.
    per_block = (1 + 1 + 3 + 2 + 1 + 1 + 1 + 4) * mib
    assert found.saved_bytes / mib == pytest.approx((4 * per_block - mib) / mib, abs=0.1)
    assert fullest == pytest.approx(peak["Total"], abs=64)
    assert fullest / mib == pytest.approx(213.34, abs=1)


KIB = 1024


Empty = Callable[[int], torch.Tensor]


@pytest.fixture(params=["real", "fake", "meta"])
def empty(request: pytest.FixtureRequest) -> Iterator[Empty]:
    """Makes a tensor of so many KiB, of each kind."""
    if request.param == "fake":
        with FakeTensorMode():
            yield lambda kib: torch.empty(kib * KIB // 4)
    else:
        device = "meta" if request.param == "meta" else "cpu"
        yield lambda kib: torch.empty(kib * KIB // 4, device=device)


def test_a_tensor_counts_from_its_operation_to_its_last_reference(empty: Empty) -> None:
    with LiveMemory() as memory:
        a = empty(4)
        b = a + 1
        assert memory.live_bytes[""] == 8 * KIB
        del a
        assert memory.live_bytes[""] == 4 * KIB
        del b
    assert memory.live_bytes[""] == 0
    assert memory.peak_bytes[""] == 8 * KIB


def test_views_and_in_place_results_share_the_storage(empty: Empty) -> None:
    with LiveMemory() as memory:
        a = empty(4)
        views = [a[:10], a.view(2, -1), a.t(), a.detach(), a.expand(3, -1), *a.chunk(2), a.relu_(), a.add_(1)]
        assert memory.live_bytes[""] == 4 * KIB
        del a
        assert memory.live_bytes[""] == 4 * KIB, "a view keeps the whole storage"
        views.clear()
        assert memory.live_bytes[""] == 0


def test_storages_from_before_do_not_count_unless_watched(empty: Empty) -> None:
    old, parameter = empty(4), empty(8)
    with LiveMemory() as memory:
        with memory.owned_by("stage"):
            memory.watch([parameter, parameter[:5]])
        kept = old[:3].add_(1), old.view(-1), parameter.view(-1)
        assert dict(memory.live_bytes) == {"stage": 8 * KIB}
        del kept, parameter
        assert memory.live_bytes["stage"] == 0


def test_the_owner_is_who_was_running_at_birth_and_owners_nest() -> None:
    with LiveMemory() as memory, memory.owned_by(0):
        a = torch.empty(256)
        with memory.owned_by(1):
            b = a.clone()
            del a  # dies while another runs: leaves its owner's account
        assert (memory.live_bytes[0], memory.live_bytes[1]) == (0, KIB)
        memory.reset_peaks()
        assert (memory.peak_bytes[0], memory.peak_bytes[1]) == (0, KIB)
        del b


def test_an_address_used_again_is_a_new_storage() -> None:
    with EventLog() as log:
        for _ in range(20):
            torch.empty(1000)
    assert log.events == [sign * number for number in range(1, 21) for sign in (1, -1)]


class Scaled(nn.Module):
    """A layer with an attribute that its `repr` does not show."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, inputs, output: output.clone())
    return layer


SCALES = (1, True, 2, (1, 2), [1, 2], {"a": 1}, {"a": 2}, torch.ones(2), torch.ones(2), {1, 2}, {1, 2})


@pytest.mark.parametrize(
    "kinds",
    [
        [
            lambda: nn.Linear(3, 4), lambda: nn.Linear(4, 3), lambda: nn.Linear(3, 4, bias=False),
            lambda: nn.Linear(3, 4, dtype=torch.float64), lambda: nn.Linear(3, 4).requires_grad_(False),
        ],
        [nn.ReLU, lambda: nn.ReLU(inplace=True), nn.Tanh, lambda: nn.Sequential(nn.ReLU()), nn.Identity],
        [lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)],
        [lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3, track_running_stats=False)],
        [lambda value=value: Scaled(value) for value in SCALES],
        [lambda factor=factor: Scaled(functools.partial(torch.add, factor)) for factor in (1, 2)],
    ],
)  # fmt: skip
def test_layers_are_one_where_all_that_they_may_cost_is_equal(kinds: list[Callable[[], nn.Module]]) -> None:
    """On any device. What cannot be compared by value is equal to itself alone."""
    for i, build in enumerate(kinds):
        with torch.device("meta"):
            meta = build()
        assert signature(build()) == signature(build()) == signature(meta)
        assert hash(signature(build())) == hash(signature(meta))
        assert all(signature(build()) != signature(other()) for j, other in enumerate(kinds) if i != j)
    assert signature(nn.Identity()) != signature(hooked(nn.Identity()))
    died = [signature(Scaled(torch.ones(2))) for _ in range(50)]  # and lends its identity to no other
    assert len(set(died)) == 50
