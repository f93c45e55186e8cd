"""Layers that do more than map their input to their output: right, refused with the remedy, or found by
`verify`, which says nothing of what is right and changes nothing. Over processes see `test_distributed`.
"""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    assert_own_gradients,
    assert_trains_as_plain,
    everything,
    everything_batch,
    mlp_batch,
    seeded,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from gpipe_bench.pipeline import ActionError, Pipeline, VerifyError

mse_loss, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy
Layers = Callable[[], list[nn.Module]]
WIDTH = 6


class Dense(nn.Module):
    """A linear layer whose subclasses do something beside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Does(Dense):
    """Calls `what(layer, x, y)`, which gives what comes out, or nothing where that is y. It begins with
    the attributes and buffers that are given.
    """

    def __init__(self, what: Callable[[Any, Tensor, Tensor], Any], **attributes: object) -> None:
        super().__init__()
        self.what = what
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        found = self.what(self, x, y)
        return found if isinstance(found, Tensor) else y


def counts(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    layer.n += 1
    return y * (1 + 0.1 * layer.n)


def counts_unread(layer: Any, x: Tensor, y: Tensor) -> None:
    layer.n += 1


def reads_its_log(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    layer.log.append(y.detach().mean())
    return y + layer.log[-min(2, len(layer.log))]


def remembers(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    before = layer.state["mean"]
    layer.state["mean"] = 0.5 * before + 0.5 * x.detach().mean(0)
    return y * (1 + before)


def remembers_in_place(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    before = layer.state["mean"].clone()
    layer.state["mean"].lerp_(x.detach().mean(0), 0.5)
    return y * (1 + before)


def goes_by_the_first(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """By the first input that it ever saw."""
    if layer.scale is None:
        layer.scale = 1 + x.detach().mean(0)
    return y * layer.scale


def counts_in_an_object(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    layer.holder.n += 1
    return y * (1 + 0.1 * layer.holder.n)


class Recurrent(nn.Module):
    """Backpropagation through time, cut off at the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.h = nn.RNN(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        output, h = self.rnn(x[None], self.h)
        self.h = h.detach()
        return output[0]


def moves_its_buffer(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    layer.mean = 0.7 * layer.mean + 0.3 * x.detach().mean(0)
    return y * (1 + layer.mean)


def moves_it_by_data(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    layer.mean.data.lerp_(x.detach().mean(0), 0.3)
    return y * (1 + layer.mean)


def counts_in_integers(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    layer.calls += 1
    return y * layer.calls


class ChangesItsWeight(Dense):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


def trains_inside(layer: Any, x: Tensor, y: Tensor) -> None:
    with torch.enable_grad():
        layer.linear(torch.ones(1, WIDTH, dtype=x.dtype)).sum().backward()


def adds_a_slope(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """A gradient penalty's way: asks autograd for something, and changes nothing."""
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(layer.linear(z).square().sum(), z)
    return y + 0.1 * slope.detach()


def hooks_its_output(layer: Any, x: Tensor, y: Tensor) -> None:
    y.register_hook(lambda gradient: 2 * gradient)


def hooked() -> nn.Module:
    """A hook counts in a closure, and scales by that; another one changes a gradient."""
    layer, calls = Dense(), [0]

    def scale(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * (1 + 0.1 * calls[0])

    layer.register_forward_hook(scale)
    return layer


def hook_in_backward() -> nn.Module:
    layer = Dense()
    layer.linear.weight.register_hook(lambda gradient: 0.5 * gradient)
    return layer


class Checkpointed(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def leaves_a_loss(layer: Any, x: Tensor, y: Tensor) -> None:
    layer.aux = y.square().mean()


class ReadsAux(Dense):
    """What another layer left; in a list, so that it is no module of this one."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other[0].aux


class Special(Tensor):
    pass


def asks_for_special(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    y = y.as_subclass(Tensor)
    return 2 * y if isinstance(x, Special) else y


def sets_scale(layer: Any, x: Tensor, y: Tensor) -> None:
    y.scale = 2.0


class Experts(nn.Module):
    """Data decide which one is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Dense(), Dense()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if float(x.detach()[0, 0]) > 0 else self.b(x)


class OtherKeys(Dense):
    """A dict whose keys data decide."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        return {"y": y} if float(x.detach()[0, 0]) > 0 else {"y": y, "z": 2 * y}


def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(WIDTH, dtype=dtype)


def means() -> dict[str, Tensor]:
    return {"mean": zeros(torch.float64)}


def reading() -> list[nn.Module]:
    """A layer, and one two places on that has to do with it."""
    source = Does(leaves_a_loss, aux=None)
    return [source, Dense(), ReadsAux(source)]


def alone(kind: Callable[[], nn.Module]) -> Layers:
    return lambda: [Dense(), kind(), Dense()]


OTHER = "gives another output in the recomputation of micro-batch 2 than in its forward: "
UNKNOWN = f"{OTHER}a layer goes by something that has changed since"
WEIGHT = "changes a parameter in its forward, which the micro-batches before it have used"


def attribute(name: str) -> str:
    return f"{OTHER}attribute '{name}' of layer 1 (Does) changes in each forward; keep it in a buffer"


# Kind: the layers, cut into two stages; what an error says without and with re-materialization, and None
# where it trains as the plain model.
KINDS: dict[str, tuple[Layers, str | None, str | None]] = {
    "counts": (alone(lambda: Does(counts, n=0)), None, attribute("n")),
    "counts unread": (alone(lambda: Does(counts_unread, n=0)), None, None),
    "reads its log": (alone(lambda: Does(reads_its_log, log=[])), None, attribute("log")),
    "remembers": (alone(lambda: Does(remembers, state=means())), None, attribute("state")),
    "remembers in place": (alone(lambda: Does(remembers_in_place, state=means())), None, attribute("state")),
    "goes by the first input": (alone(lambda: Does(goes_by_the_first, scale=None)), None, None),
    "an object": (
        alone(lambda: Does(counts_in_an_object, holder=SimpleNamespace(n=0))), None, attribute("holder"),
    ),
    "a buffer": (alone(lambda: Does(moves_its_buffer, mean=zeros())), None, None),
    "a buffer by data": (alone(lambda: Does(moves_it_by_data, mean=zeros())), None, UNKNOWN),
    "an integer in place": (
        alone(lambda: Does(counts_in_integers, calls=torch.tensor(0))),
        "let it make a new one (self.n = self.n + 1)", None,
    ),
    "changes its weight": (alone(ChangesItsWeight), WEIGHT, WEIGHT),
    "trains inside": (alone(lambda: Does(trains_inside)), None, "use torch.autograd.grad there"),
    "asks for a gradient": (alone(lambda: Does(adds_a_slope)), None, None),
    "hooks its output": (alone(lambda: Does(hooks_its_output)), None, "forwards run without a graph"),
    "hooks where it can": (
        alone(lambda: Does(lambda self, x, y: y.requires_grad and hooks_its_output(self, x, y))), None, None,
    ),
    "asks whether there is a graph": (
        alone(lambda: Does(lambda self, x, y: y * (1.1 if torch.is_grad_enabled() else 1.0))), None, UNKNOWN,
    ),
    "a counting hook": (alone(hooked), None, UNKNOWN),
    "a hook in the backward": (alone(hook_in_backward), None, None),
    "checkpointed": (alone(Checkpointed), None, None),
    "noise of its own": (
        alone(lambda: Does(
            lambda self, x, y: y * torch.rand((), generator=self.own, dtype=x.dtype),
            own=torch.Generator().manual_seed(1),
        )), None, attribute("own"),
    ),
    "leaves a loss": (
        alone(lambda: Does(leaves_a_loss, aux=None)), None, "attribute 'aux' of layer 1 (Does) holds",
    ),
    "reads what is left": (
        reading, "Trying to backward through the graph a second time", "another output in the recomputation",
    ),
    "a type": (
        lambda: [Does(lambda self, x, y: y.as_subclass(Special)), Does(asks_for_special)],
        "is of type Special", "is of type Special",
    ),
    "an attribute of a tensor": (
        lambda: [Does(sets_scale), Dense()], "has the attribute 'scale'", "has the attribute 'scale'",
    ),
    "experts": (alone(Experts), None, None),
    "a gradient for some": (
        alone(lambda: Does(lambda self, x, y: y if float(x.detach()[0, 0]) > 0 else y.detach())),
        "y + 0 * parameter.sum()", "y + 0 * parameter.sum()",
    ),
    "spectral norm": (alone(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))), None, None),
    "weight norm": (alone(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))), None, None),
}  # fmt: skip


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_the_plain_model_or_says_why_not(kind: str, remat: str) -> None:
    build, *words = KINDS[kind]
    options = {"num_steps": 3, "num_stages": 2, "remat": remat}
    wanted = words[remat == "always"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of counts that nobody reads
        if wanted is not None:
            with pytest.raises(ActionError) as caught:
                assert_trains_as_plain(
                    lambda: nn.Sequential(*build()), lambda step: mlp_batch(7, seed=step), mse_loss, 3,
                    **options,
                )  # fmt: skip
            assert wanted in str(caught.value)
            return
        pipeline, _ = assert_trains_as_plain(
            lambda: nn.Sequential(*build()), lambda step: mlp_batch(7, seed=step), mse_loss, 3, **options
        )
        assert pipeline.verify(*mlp_batch(7, seed=3), mse_loss) < 1e-12


class Last(Dense):
    def forward(self, given: Tensor | dict[str, Tensor]) -> Tensor:
        return super().forward(given["y"] if isinstance(given, dict) else given)


@pytest.mark.parametrize(
    ("kind", "remat", "words"),
    [
        (
            lambda: Does(lambda self, x, y: y * (1 + 0.5 * np.random.rand())),
            "always",
            "draws random numbers that are not",
        ),
        (
            lambda: Does(lambda self, x, y: y * (1 + 0.5 * random.random())),
            "always",
            "draws random numbers that are not",
        ),
        (Recurrent, "always", "attribute 'h' of layer 0 (Recurrent) changes"),
        (OtherKeys, "never", "as in a dict with all keys"),
    ],
)
def test_what_the_plain_model_cannot_show_is_refused(
    kind: Callable[[], nn.Module], remat: str, words: str
) -> None:
    torch.manual_seed(0)
    layers = [kind().double(), Last().double()]
    with pytest.raises(ActionError) as caught:
        Pipeline(layers, num_stages=2, num_microbatches=3, remat=remat).step(*mlp_batch(6), mse_loss)
    assert words in str(caught.value)


def test_a_log_is_warned_of_and_trains_right() -> None:
    pipeline = Pipeline(
        [Does(lambda self, x, y: self.log.append(1.0), log=[]).double()], num_stages=1, num_microbatches=2
    )
    with pytest.warns(UserWarning, match=r"attribute 'log' of layer 0 \(Does\) changes in each forward"):
        pipeline.step(*mlp_batch(4), mse_loss)


class Later(Dense):
    """From the second step on a buffer changes behind torch's back, and the output goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.has_begun = False

    def forward(self, x: Tensor) -> Tensor:
        if self.has_begun:
            self.scale.data.mul_(1.5)
        return super().forward(x) * self.scale


def test_what_begins_after_the_first_step_is_found_by_verify() -> None:
    layers = [layer.double() for layer in (Later(), Dense())]
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=3)
    pipeline.verify(*mlp_batch(6), mse_loss)
    pipeline.step(*mlp_batch(6), mse_loss)
    layers[0].has_begun = True
    with pytest.raises((VerifyError, ActionError), match="gradient of 'linear|such as .* changes by .data"):
        pipeline.verify(*mlp_batch(6), mse_loss)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_cache_of_parametrized_weights_is_not_used(num_microbatches: int) -> None:
    layers = [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)).double()]
    pipeline = Pipeline(layers, num_stages=1, num_microbatches=num_microbatches)
    with parametrize.cached():
        assert pipeline.verify(*mlp_batch(4), mse_loss) < 1e-12
        pipeline.step(*mlp_batch(4), mse_loss)
    assert all(p.grad is not None for p in layers[0].parameters())


class Through(nn.Module):
    """Remembers in a buffer how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, value: Any) -> Any:
        self.calls += 1
        return value


@pytest.mark.parametrize(("remat", "num_stages"), [("always", 3), ("never", 1)])
def test_a_step_goes_on_as_if_nobody_had_asked_verify(remat: str, num_stages: int) -> None:
    """Parameters, averages, buffers, gradients that add up, random numbers, the optimizer's own hooks."""
    runs = []
    for asks in (False, True):
        model = seeded(everything)
        model.insert(1, Through())
        pipeline = Pipeline(model, num_stages=num_stages, num_microbatches=3, remat=remat)
        counted: list[Tensor] = []
        next(model.parameters()).register_post_accumulate_grad_hook(counted.append)
        torch.manual_seed(7)
        for step in range(3):
            batch, target = everything_batch(7, seed=step)
            if asks:
                state = copy.deepcopy(model.state_dict())
                assert pipeline.verify(batch, target, cross_entropy) < 1e-12
                assert all(map(torch.equal, state.values(), model.state_dict().values()))
            pipeline.step(batch, target, cross_entropy)
            if step:
                for parameter in model.parameters():
                    parameter.data.add_(parameter.grad, alpha=-0.1)
        runs.append((pipeline, len(counted), torch.rand(3)))
    (plain, before, drawn), (asked, after, redrawn) = runs
    assert_own_gradients(asked, {name: p.grad for name, p in plain.named_parameters()})
    for name, value in plain.state_dict().items():
        assert torch.equal(value, asked.state_dict()[name]), name
    assert (before, asked.num_steps) == (after, plain.num_steps)
    assert torch.equal(drawn, redrawn)


def test_two_threads_in_one_pipeline() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(20)
        return mse_loss(output, target)

    pipeline = Pipeline([nn.Linear(WIDTH, WIDTH).double()], num_stages=1, num_microbatches=1, remat="never")
    other = threading.Thread(target=pipeline.step, args=(*mlp_batch(4), loss_fn))
    other.start()
    assert inside.wait(20)
    with pytest.raises(RuntimeError, match="the pipeline is in a step"):
        pipeline.step(*mlp_batch(4), mse_loss)
    go_on.set()
    other.join()
    assert pipeline.step(*mlp_batch(4), mse_loss).isfinite()
