"""What must not be overwritten although a message came into its memory: cases of four processes.

A stage may pass on what it received, as it is or as a view, and autograd may make a gradient that arrives the
`.grad` of a parameter. The processes tell each other through the store how far they are, so that what an
engine might overwrite too early really is still needed when it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import torch
from ranks import Ranks
from tiny_models import EXACT, assert_own_gradients, mlp_batch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline.ranks import ends

mse_loss = nn.functional.mse_loss
WIDTH = 6


def over_both_transports(case: Callable[[Ranks], list[str]]) -> Callable[[], None]:
    """Through memory and through the network, with as few buffers as messages that take memory have. What is
    wrong is collected, since the other ranks go on and wait for this one.
    """

    @functools.wraps(case)
    def run() -> None:
        problems: list[str] = []
        torch.manual_seed(0)  # of the models, on all ranks
        with mock.patch.object(ends, "SMALL_BYTES", 0):
            for share_memory in (True, False):
                found = case(Ranks(share_memory=share_memory))
                problems += [f"share_memory={share_memory}: {problem}" for problem in found]
        assert not problems, "\n".join(problems)

    return run


class Signal:
    """What one process waits for until another has got so far; nobody waits before it is `armed`."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        number = self._store.add(f"signals of rank {dist.get_rank()}", 1)  # all ranks make all
        self._key, self.armed = f"signal {number}", False

    def give(self) -> None:
        if self.armed:
            self._store.set(self._key, "given")

    def wait(self) -> None:
        if self.armed:
            self._store.wait([self._key])


class Through(nn.Module):
    """Passes everything on as it is; calls something in its n-th forward, or in its n-th backward."""

    def __init__(self, number: int = -1, call: Callable[[], None] = lambda: None, back: bool = False) -> None:
        super().__init__()
        self.number, self.call, self.back, self.count = number, call, back, [0, 0]

    def passed(self, back: bool) -> None:
        if self.back == back and self.count[back] == self.number:
            self.call()
        self.count[back] += 1

    def forward(self, x: Tensor) -> Tensor:
        self.passed(back=False)
        return _Through.apply(x, self)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layer: Through) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.passed(back=True)
        return gradient, None


class Position(nn.Module):
    """Adds a parameter, seen through a view, so that its gradient may be taken for its `.grad` uncopied."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.position[None]).view(1, WIDTH)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH).double()


def exact_gradients(layers: list[nn.Module], num_microbatches: int) -> dict[str, Tensor | None]:
    """Summed outside of autograd, whose own sum goes wrong where two gradients share memory."""
    batch, target = mlp_batch(num_microbatches)
    model = nn.Sequential(*layers)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
    for x, y in zip(batch.split(1), target.split(1), strict=True):
        loss = mse_loss(model(x), y) / num_microbatches
        for name, gradient in zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True):
            sums[name] = gradient if sums[name] is None else sums[name] + gradient
    return sums


def wrong(
    ranks: Ranks, layers: list[nn.Module], num_microbatches: int, signal: Signal | None = None, **options: str
) -> list[str]:
    """A step, one in which the signal counts, and one that is added to it: all have the right gradients."""
    wanted = exact_gradients(layers, num_microbatches)
    pipeline, found = ranks.pipeline(layers, num_microbatches, **options), []
    for step in range(3):
        for module in nn.ModuleList(layers).modules():
            if isinstance(module, Through):
                module.count = [0, 0]
        if signal is not None:
            signal.armed = step == 1
        if step < 2:
            pipeline.zero_grad()
        pipeline.step(*ranks.own(*mlp_batch(num_microbatches)), mse_loss)
        times = 2 if step == 2 else 1
        try:
            both = {name: None if each is None else times * each for name, each in wanted.items()}
            assert_own_gradients(pipeline, both, **EXACT)
        except AssertionError as error:
            found.append(f"{options}, step {step}: {error}")
    return found


@over_both_transports
def gradients_that_are_passed_on(ranks: Ranks) -> list[str]:
    """Stage 0 takes no second gradient before a later one has come into the memory it was passed on from."""
    found = []
    for remat, later in (("always", 2), ("never", 3)):
        signal = Signal()
        first = nn.Sequential(linear(), Through(0, signal.wait, back=True))
        layers = [first, Through(later, signal.give, back=True), linear(), linear()]
        found += wrong(ranks, layers, 4, signal, schedule="gpipe", remat=remat)
    return found


@over_both_transports
def gradients_that_a_parameter_keeps_or_shares(ranks: Ranks) -> list[str]:
    """The first that comes in is also the first of a parameter, to which the others are added; and on its way
    to stage 0 it must not become the sum of all of the parameter's.
    """
    signal = Signal()
    first = nn.Sequential(linear(), Through(0, signal.wait, back=True))
    sharing = nn.Sequential(Through(2, signal.give, back=True), Position(), nn.Tanh())
    return [
        *wrong(ranks, [linear(), linear(), Position(), linear()], 4, schedule="1f1b"),
        *wrong(ranks, [first, sharing, linear(), linear()], 4, signal, schedule="gpipe", remat="never"),
    ]


@over_both_transports
def activations_that_are_passed_on(ranks: Ranks) -> list[str]:
    """No gradient comes back from stage 3, so stage 2 is done with a micro-batch that is still on its way."""
    signal = Signal()
    last = nn.Sequential(Through(0, signal.wait), linear())
    layers = [linear().requires_grad_(False), Through(8, signal.give), Through(), last]
    return wrong(ranks, layers, 9, signal, schedule="1f1b", remat="never")


@over_both_transports
def what_a_user_keeps(ranks: Ranks) -> list[str]:
    """Inputs, gradients and outputs that were kept stay as they are while other mini-batches follow."""
    layers = [linear(), nn.Identity(), nn.Identity(), nn.Flatten()]
    pipeline = ranks.pipeline(layers, 4, schedule="1f1b")
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(tensor: Tensor) -> None:
        kept.append((tensor, tensor.clone()))

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        keep(inputs[0].detach())
        if inputs[0].requires_grad:
            inputs[0].register_hook(keep)

    layers[ranks.rank].register_forward_pre_hook(hook)
    for step in range(2):
        batch, target = mlp_batch(8, seed=step)
        pipeline.step(*ranks.own(batch, target), mse_loss)
        output = pipeline.eval()(batch if ranks.is_first else None)
        pipeline.train()
        if output is not None:
            keep(output)
    return [] if all(map(torch.equal, *zip(*kept, strict=True))) else ["what was kept has changed"]


CASES = (
    gradients_that_are_passed_on,
    gradients_that_a_parameter_keeps_or_shares,
    activations_that_are_passed_on,
    what_a_user_keeps,
)
