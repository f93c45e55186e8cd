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

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.ranks import ends

mse_loss = nn.functional.mse_loss
WIDTH = 6


class Judge(Ranks):
    """Collects what is wrong instead of raising, since the other ranks go on and wait for this one."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.problems: list[str] = []

    def compare(self, what: str, pipeline: Pipeline, wanted: dict[str, Tensor | None]) -> None:
        try:
            assert_own_gradients(pipeline, wanted, **EXACT)
        except AssertionError as error:
            self.problems.append(f"{what}: {error}")


def over_both_transports(case: Callable[[Judge], None]) -> Callable[[], None]:
    """Through memory and through the network, with as few buffers as messages that take memory have."""

    @functools.wraps(case)
    def run() -> None:
        problems: list[str] = []
        torch.manual_seed(0)  # of the models, on all ranks
        with mock.patch.object(ends, "SMALL_BYTES", 0):
            for share_memory in (True, False):
                judge = Judge(share_memory=share_memory)
                case(judge)
                problems += [f"share_memory={share_memory}: {problem}" for problem in judge.problems]
        assert not problems, "\n".join(problems)

    return run


class Signal:
    """What one process waits for until another has got so far; nobody waits before it is `armed`."""

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = store
        self._key = f"signal {store.add(f'signals of rank {dist.get_rank()}', 1)}"  # all ranks make all
        self.armed = False

    def give(self) -> None:
        if self.armed:
            self._store.set(self._key, "given")

    def wait(self) -> None:
        if self.armed:
            self._store.wait([self._key])


class Through(nn.Module):
    """Passes everything on as it is; calls `on_forward` and `on_backward` in their calls of a number."""

    def __init__(
        self,
        on_forward: tuple[int, Callable[[], None]] | None = None,
        on_backward: tuple[int, Callable[[], None]] | None = None,
    ) -> None:
        super().__init__()
        self.on_forward, self.on_backward = on_forward, on_backward
        self.begin()

    def begin(self) -> None:
        self.forwards = self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.on_forward is not None and self.forwards == self.on_forward[0]:
            self.on_forward[1]()
        self.forwards += 1
        return _Through.apply(x, self)

    def backward_begins(self) -> None:
        if self.on_backward is not None and self.backwards == self.on_backward[0]:
            self.on_backward[1]()
        self.backwards += 1


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layer: Through) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.backward_begins()
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


def stages(*layers: nn.Module) -> list[nn.Sequential]:
    return [nn.Sequential(layer) if not isinstance(layer, nn.Sequential) else layer for layer in layers]


def exact_gradients(layers: list[nn.Sequential], num_microbatches: int) -> dict[str, Tensor | None]:
    """Summed outside of autograd, whose own sum goes wrong where two gradients share memory."""
    batch, target = mlp_batch(num_microbatches)
    model = nn.Sequential(*layers)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums: dict[str, Tensor | None] = {name: torch.zeros_like(p) for name, p in trained.items()}
    for x, y in zip(batch.split(1), target.split(1), strict=True):
        loss = mse_loss(model(x), y) / num_microbatches
        for name, gradient in zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True):
            sums[name] = sums[name] + gradient
    return {name: sums.get(name) for name, _ in model.named_parameters()}


def check(
    ranks: Judge,
    layers: list[nn.Sequential],
    num_microbatches: int,
    signal: Signal | None = None,
    **options: object,
) -> Pipeline:
    """A step, and one in which the signal counts: both have the right gradients."""
    wanted = exact_gradients(layers, num_microbatches)
    pipeline = ranks.pipeline(layers, num_microbatches, **options)
    for step in range(2):
        for module in nn.ModuleList(layers).modules():
            if isinstance(module, Through):
                module.begin()
        if signal is not None:
            signal.armed = step == 1
        pipeline.zero_grad()
        pipeline.step(*ranks.own(*mlp_batch(num_microbatches)), mse_loss)
        ranks.compare(f"{options}, step {step}", pipeline, wanted)
    return pipeline


@over_both_transports
def gradients_that_are_passed_on(ranks: Judge) -> None:
    """Stage 0 takes no second gradient before a later one has come into the memory it was passed on from."""
    for remat, later in (("always", 2), ("never", 3)):
        signal = Signal()
        layers = stages(
            nn.Sequential(linear(), Through(on_backward=(0, signal.wait))),
            Through(on_backward=(later, signal.give)),
            linear(),
            linear(),
        )
        check(ranks, layers, 4, signal, schedule="gpipe", remat=remat)


@over_both_transports
def gradients_that_are_kept_by_a_parameter(ranks: Judge) -> None:
    """The first gradient that comes in is also the first of a parameter, to which the others are added."""
    for schedule in ("gpipe", "1f1b"):
        layers = stages(linear(), linear(), Position(), linear())
        pipeline = check(ranks, layers, 4, schedule=schedule)
        pipeline.step(*ranks.own(*mlp_batch(4)), mse_loss)  # a second time, added to the first
        wanted = {name: 2 * gradient for name, gradient in exact_gradients(layers, 4).items()}
        ranks.compare(f"{schedule}, added to those of the step before", pipeline, wanted)


@over_both_transports
def gradients_that_a_parameter_shares(ranks: Judge) -> None:
    """The gradient on its way to stage 0 must not become the sum of all of the parameter's."""
    signal = Signal()
    layers = stages(
        nn.Sequential(linear(), Through(on_backward=(0, signal.wait))),
        nn.Sequential(Through(on_backward=(2, signal.give)), Position(), nn.Tanh()),
        linear(),
        linear(),
    )
    check(ranks, layers, 4, signal, schedule="gpipe", remat="never")


@over_both_transports
def activations_that_are_passed_on(ranks: Judge) -> None:
    """No gradient comes back from stage 3, so stage 2 is done with a micro-batch that is still on its way."""
    signal = Signal()
    layers = stages(
        linear().requires_grad_(False),
        Through(on_forward=(8, signal.give)),
        Through(),
        nn.Sequential(Through(on_forward=(0, signal.wait)), linear()),
    )
    check(ranks, layers, 9, signal, schedule="1f1b", remat="never")


@over_both_transports
def what_a_user_keeps(ranks: Judge) -> None:
    """Inputs, gradients and outputs that were kept stay as they are while other mini-batches follow."""
    layers = stages(linear(), nn.Identity(), nn.Identity(), nn.Flatten())
    pipeline = ranks.pipeline(layers, 4, schedule="1f1b")
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(tensor: Tensor) -> None:
        kept.append((tensor, tensor.clone()))

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        keep(inputs[0].detach())
        if inputs[0].requires_grad:
            inputs[0].register_hook(keep)

    layers[ranks.rank].register_forward_pre_hook(hook)
    for step in range(4):
        batch, target = mlp_batch(8, seed=step)
        if step % 2:
            pipeline.eval()
            output = pipeline(batch if ranks.is_first else None)
            if output is not None:
                keep(output)
            pipeline.train()
        else:
            pipeline.step(*ranks.own(batch, target), mse_loss)
    if not all(torch.equal(tensor, as_it_was) for tensor, as_it_was in kept):
        ranks.problems.append("what was kept has changed")


CASES = (
    gradients_that_are_passed_on,
    gradients_that_are_kept_by_a_parameter,
    gradients_that_a_parameter_shares,
    activations_that_are_passed_on,
    what_a_user_keeps,
)
