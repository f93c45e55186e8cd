"""What `split` and `layers_of` send past stages, counted, and that nothing else changes by it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_graphs import CASES
from own_models import FAMILIES
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline, Pop, Stash, layers_of, split
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import Profiler, layer_costs
from gpipe_bench.pipeline.transport import InProcess


class Counting(InProcess):
    """Bytes that each stage is sent, but for gradients of the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.received: Counter[int] = Counter()

    def send(self, edge: Any, microbatch: int, message: Any) -> None:
        self.received[edge.target] += sum(tensor.nbytes for tensor in message.tensors)
        super().send(edge, microbatch, message)

    def send_back(self, edge: Any, microbatch: int, gradients: Any) -> None:
        if edge.names:
            self.received[edge.source] += sum(each.nbytes for each in gradients if each is not None)
        super().send_back(edge, microbatch, gradients)


class Skipping(nn.Module):
    """A wide tensor of the first layer is used by the fourth and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(2, 100)
        self.a, self.b, self.c, self.d = (nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        x = self.b(self.a(x).tanh()).tanh()
        x = self.c(x) + wide.sum(1, keepdim=True)
        return self.d(x.tanh()) * wide.mean(1, keepdim=True)


def test_a_skip_over_stages_is_sent_once_for_each_hop() -> None:
    torch.manual_seed(0)
    model = Skipping().double()
    layers = split(model, ["a", "b", "c", "d"])
    counting = Counting()
    pipeline = Pipeline(layers, num_stages=5, num_microbatches=2, cost=[1] * 5, transport=counting)
    x, y = torch.randn(6, 2).double(), torch.randn(6, 2).double()
    F.mse_loss(model(x), y).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    pipeline.step(x, y, F.mse_loss)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-12, atol=1e-14)
    assert [(line.source, line.target) for line in pipeline.portals] == [(0, 3)]
    wide, thin = 6 * 100 * 8, 6 * 2 * 8
    # Stage 3 uses it and passes it to the next one; stages 1 and 2 never see it.
    assert counting.received == {1: thin, 2: thin, 3: thin + wide, 4: thin + wide, 0: wide}


@pytest.mark.parametrize("name", CASES)
def test_split_models_give_their_own_outputs(name: str) -> None:
    case = CASES[name]
    model = case.model(dropout=0.0)
    batch, _ = case.data()
    layers = split(model, case.at)
    wanted = model(*batch) if isinstance(batch, tuple) else model(batch)
    assert torch.equal(layers(batch), wanted)
    if name == "u-net":
        assert any(part.stashes for part in layers)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 2


class Product(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


class Passing(nn.Module):
    """A module's tuple is given to another one two layers later: it is no tensor, and travels along."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.a, self.b, self.join = Pair(), nn.Linear(2, 2), nn.Linear(2, 2), Product()

    def forward(self, x: Tensor) -> Tensor:
        pair = self.pair(x)
        y = self.b(self.a(x))
        return y + self.join(pair)


def test_what_may_be_no_tensor_is_passed_on() -> None:
    torch.manual_seed(0)
    model, x = Passing(), torch.randn(4, 2)
    layers = split(model, ["a", "b"])
    assert not any(part.stashes for part in layers)
    assert torch.equal(layers(x), model(x))


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
    counting = Counting()
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
    torch.manual_seed(0)
    layers = split(Skipping(), ["a", "b", "c", "d"])
    x = torch.randn(6, 2)
    profiles, _ = Profiler().model(layers, F.mse_loss, Boundary.of(x), Boundary.of(x))
    assert [len(profile.outputs.tensors) for profile in profiles] == [2, 2, 2, 2, 1]
