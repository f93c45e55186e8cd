"""Engines with one known mistake each, beside the cases that must find it; and correct engines.

All stages are in one process, each with its own graph, as over processes; `OVER_PROCESSES` have the same
mistakes in one of two stages. Most mistakes replace one method of `Staged`.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

sys.path.append(os.fspath(Path(__file__).parents[2] / "examples"))
from own_engine import FillDrain, as_it_was

from gpipe_bench.experiments.engines.setup import Setup

RIGHT = (
    "planted_engines:Staged", "planted_engines:Threaded", "planted_engines:OneLoss",
    "planted_engines:Accumulates", "own_engine:FillDrain", "ours", "ours-1f1b",
    "gpipe_bench.experiments.engines.known:OursZBH1",
)  # fmt: skip
PLANTED: dict[str, tuple[set[str], str]] = {}
"""The cases that name each mistake, all others being right, and words of what is said."""


def found_by(*cases: str, said: str = "") -> Callable[[Any], Any]:
    """Registers an engine and the cases that must find its mistake."""

    def plant(engine: type) -> type:
        PLANTED[engine.__name__] = {*cases}, said
        return engine

    return plant


def mistake(method: str, *cases: str, said: str = "") -> Callable[[Any], Any]:
    """Registers `Staged` with the function in place of one of its methods."""

    def plant(function: Any) -> Any:
        return found_by(*cases, said=said)(type(function.__name__, (Staged,), {method: function}))

    return plant


def each(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def like(value: Any, leaves: Sequence[Tensor]) -> Any:
    return tuple(leaves) if isinstance(value, tuple) else leaves[0]


def zeros(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if gradient is None else torch.zeros_like(gradient) for gradient in gradients]


class Staged:
    """Correct: one micro-batch after another, forward and backward through all stages."""

    steps = 0

    def __init__(self, setup: Setup) -> None:
        if setup.group is not None:
            raise ValueError("all stages in one process")
        self.setup, self.count = setup, setup.num_microbatches
        self.stages = [nn.Sequential(*setup.stage_layers(stage)) for stage in setup.local_stages]
        self.kept: list[Any] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(nn.ModuleList(self.stages).parameters())

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters if parameter.grad is not None]

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        self.steps += 1
        self.before()
        total = torch.zeros((), dtype=torch.float64)
        parts = zip(batch.tensor_split(self.count), target.tensor_split(self.count), strict=True)
        for m, (value, wanted) in enumerate(parts):
            kept = []
            for number, stage in enumerate(self.stages):
                arrived = self.cut(value, m) if number else value
                value = self.forward(stage, arrived, m)
                kept.append((each(arrived), each(value)))
            loss = loss_fn(value, wanted)
            total += loss.detach() * (len(wanted) / len(target))
            kept[-1] = (kept[-1][0], (loss * self.weight(wanted, target),))
            gradients: Sequence[Tensor | None] = [None]
            for number in reversed(range(len(self.stages))):
                arrived, made = kept[number]
                self.backward(number, made, gradients)
                gradients = [leaf.grad for leaf in arrived if leaf.requires_grad]
        self.after()
        return total

    def before(self) -> None: ...

    def after(self) -> None: ...

    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return len(wanted) / len(target)

    def cut(self, value: Any, m: int) -> Any:
        return like(value, [t.detach().requires_grad_(t.requires_grad) for t in each(value)])

    def forward(self, stage: nn.Module, value: Any, m: int) -> Any:
        remat = self.setup.remat
        if remat == "never" or (remat == "except_last" and m == self.count - 1):
            return stage(value)
        return self.again(stage, value)

    def again(self, stage: nn.Module, value: Any) -> Any:
        contexts = nullcontext(), as_it_was(stage)
        return checkpoint(stage, value, use_reentrant=False, context_fn=lambda: contexts)

    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if outputs := [output for output in made if output.requires_grad]:
            torch.autograd.backward(outputs, gradients)

    def evaluate(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return loss_fn(nn.Sequential(*self.stages)(batch), target)

    def clip(self, max_norm: float) -> Any:
        return clip_grad_norm_(self.parameters, max_norm)


class Accumulates:
    """Correct: no stages and no recomputation."""

    def __init__(self, setup: Setup) -> None:
        if setup.group is not None or setup.remat != "never":
            raise ValueError("one process, and nothing is recomputed")
        self.model, self.count = nn.Sequential(*setup.layers), setup.num_microbatches

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> None:
        parts = zip(batch.tensor_split(self.count), target.tensor_split(self.count), strict=True)
        for inputs, wanted in parts:
            (loss_fn(self.model(inputs), wanted) * (len(wanted) / len(target))).backward()


class Threaded(Staged):
    """Correct: runs its steps in another thread."""

    def step(self, *arguments: Any) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().step, *arguments).result()


class OneLoss(Staged):
    """Correct: all micro-batches forward, then one loss of the whole mini-batch."""

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        outputs = []
        for m, value in enumerate(batch.tensor_split(self.count)):
            for stage in self.stages:
                value = self.forward(stage, value, m)
            outputs.append(value)
        loss = loss_fn(torch.cat(outputs), target)
        loss.backward()
        return loss.detach()


# What a micro-batch counts


@mistake("weight", "summed loss")
def sums(self, wanted, target):
    return self.count * len(wanted) / len(target)


@mistake("weight", "ragged mini-batch")
def equal_weights(self, wanted, target):
    return 1 / self.count


@mistake("weight", "later steps", said="in step 3 every gradient is 2 times")
def doubles_later(self, wanted, target):
    return len(wanted) / len(target) * (2 if self.steps > 2 else 1)


@mistake("weight", "gradients", said="with M = 6 in float64: micro-batch 4 counts 0 times")
def drops_fifth(self, wanted, target):
    self.seen = getattr(self, "seen", -1) + 1
    return len(wanted) / len(target) * (self.seen % self.count != 4)


@found_by("accumulation over steps")
class DividesAgain(Staged):
    """Divides gradients of earlier steps by M, too."""

    weight = sums.weight

    def after(self) -> None:
        for parameter in self.trained:
            parameter.grad /= self.count


# What crosses a boundary


@mistake("cut", "masks per micro-batch")
def first_mask(self, value, m):
    """Uses the first micro-batch's tensors that need no gradient for all."""
    value = Staged.cut(self, value, m)
    if isinstance(value, tuple):
        self.first = value if m == 0 else self.first
        value = tuple(new if new.requires_grad else old for new, old in zip(value, self.first, strict=True))
    return value


@found_by("evaluation first")
class LearnsWhenEvaluating(Staged):
    """Keeps for ever what its first pass shows about boundaries."""

    learned = False

    def evaluate(self, *arguments: Any) -> Tensor:
        self.learned = True
        return super().evaluate(*arguments)

    def cut(self, value: Any, m: int) -> Any:
        return like(value, [t.detach() for t in each(value)]) if self.learned else super().cut(value, m)


@found_by("frozen first layers")
class AsksFrozen(Staged):
    """Requires a gradient of every number that crosses a boundary."""

    def cut(self, value: Any, m: int) -> Any:
        return like(value, [t.detach().requires_grad_(t.is_floating_point()) for t in each(value)])

    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        torch.autograd.backward([output for output in made if output.is_floating_point()], gradients)


@mistake("backward", "a skip")
def one_gradient(self, number, made, gradients):
    Staged.backward(self, number, made, [*gradients[:1], *zeros(gradients[1:])])


@mistake("backward", "later steps")
def detaches_later(self, number, made, gradients):
    is_whole = self.steps < 3 or number == len(self.stages) - 1
    Staged.backward(self, number, made, gradients if is_whole else zeros(gradients))


@mistake("backward", "frozen stage")
def stops_at_frozen(self, number, made, gradients):
    if any(parameter.requires_grad for parameter in self.stages[number].parameters()):
        Staged.backward(self, number, made, gradients)


@mistake("backward", "shared weights")
def owns_shared(self, number, made, gradients):
    """Drops gradients that later stages add to a weight of the first."""
    first = set(self.stages[0].parameters())
    shared = [p for p in self.stages[number].parameters() if number and p in first]
    before = [None if p.grad is None else p.grad.clone() for p in shared]
    Staged.backward(self, number, made, gradients)
    for parameter, gradient in zip(shared, before, strict=True):
        parameter.grad = gradient


# Recomputation and buffers


@mistake("again", "dropout under recomputation")
def other_draws(self, stage, value):
    return checkpoint(
        stage, value, use_reentrant=False, preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), as_it_was(stage)),
    )  # fmt: skip


@mistake("again", "batch norm, recomputed")
def counts_twice(self, stage, value):
    return checkpoint(stage, value, use_reentrant=False)


@mistake("step", "batch norm's averages", "batch norm, recomputed")
def tries_shapes(self, batch, *arguments):
    """Begins its first step with a pass to find shapes."""
    if not self.steps:
        with torch.no_grad():
            nn.Sequential(*self.stages)(batch[:2])
    return Staged.step(self, batch, *arguments)


# What a step is given and returns


@mistake("step", "M < K")
def fills_first(self, batch, *arguments):
    parts = batch.tensor_split(self.count)
    [parts[warm_up] for warm_up in range(len(self.stages))]
    return Staged.step(self, batch, *arguments)


@mistake("step", "later steps", "returned loss", said="those of the mini-batch of the step before")
def old_batch(self, *arguments):
    given, self.kept = self.kept or arguments, arguments
    return Staged.step(self, *given)


@mistake("step", "loss scaling", said="those of the loss function of an earlier step")
def first_loss_function(self, batch, target, loss_fn):
    self.kept = self.kept or [loss_fn]
    return Staged.step(self, batch, target, self.kept[0])


@mistake("step", "returned loss", said="which is the loss of the step before")
def old_loss(self, *arguments):
    self.kept.append(Staged.step(self, *arguments))
    return self.kept[-2:][0]


@mistake("step", "gradients", "returned loss")
def swaps_targets(self, batch, target, loss_fn):
    """Swaps the targets of two micro-batches, where there are more than four."""
    one, two, *others = target.tensor_split(self.count)
    return Staged.step(self, batch, torch.cat([two, one, *others]) if self.count > 4 else target, loss_fn)


@mistake("step", "gradients", "returned loss", said="in float32: the gradients are those of bfloat16")
def autocasts(self, *arguments):
    with torch.autocast("cpu", torch.bfloat16):
        return Staged.step(self, *arguments)


@mistake("step", "dropout under recomputation", said="drew the masks of the step before")
def same_masks(self, *arguments):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Staged.step(self, *arguments)


@mistake("step", "memory over steps", said="inputs, activations or graphs of two steps are kept")
def keeps_batches(self, *arguments):
    self.kept.append(arguments[:2])
    return Staged.step(self, *arguments)


@mistake("forward", "memory over steps", said="activations or graphs of two steps are kept")
def keeps_activations(self, stage, value, m):
    self.kept.append(Staged.forward(self, stage, value, m))
    return self.kept[-1]


# Gradients afterwards


@mistake("step", "accumulation over steps")
def clears(self, *arguments):
    for parameter in self.parameters:
        parameter.grad = None
    return Staged.step(self, *arguments)


@mistake("clip", "clipping over stages")
def clips_apart(self, max_norm):
    for stage in self.stages:
        clip_grad_norm_(stage.parameters(), max_norm)


@mistake("after", "gradients", "later steps", said="scaled down to a norm of 0.5: the engine clips by itself")
def clips_always(self):
    clip_grad_norm_(nn.ModuleList(self.stages).parameters(), 0.5)


@mistake("after", "loss scaling")
def skips_alone(self):
    """Its first stage treats large gradients as an overflow, without telling the others."""
    for parameter in self.stages[0].parameters():
        if parameter.grad is not None and parameter.grad.abs().max() > 1e3:
            parameter.grad.zero_()


@mistake("after", "loss scaling", said="an infinite loss leaves finite gradients")
def hides_overflow(self):
    for parameter in self.trained:
        parameter.grad.nan_to_num_()


# Weights


@found_by("later steps", "returned loss", said="those at the weights of the step before")
class OldWeights(Staged):
    """Computes with the weights of the step before, as PipeDream's leading stages do."""

    old: list[Tensor] | None = None

    def put(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(nn.ModuleList(self.stages).parameters(), values, strict=True):
                parameter.copy_(value)

    def before(self) -> None:
        self.now = [parameter.detach().clone() for parameter in nn.ModuleList(self.stages).parameters()]
        OldWeights.put(self, self.old or self.now)

    def after(self) -> None:
        OldWeights.put(self, self.now)
        self.old = self.now


@found_by("later steps", "micro-batches", "returned loss")
class FirstWeights(Staged):
    """Copies the layers when it is built, and ignores later changes."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.own, self.stages = self.stages, [copy.deepcopy(stage) for stage in self.stages]

    def after(self) -> None:
        for own, stage in zip(self.own, self.stages, strict=True):
            for theirs, mine in zip(own.parameters(), stage.parameters(), strict=True):
                if mine.grad is not None:
                    theirs.grad = mine.grad if theirs.grad is None else theirs.grad + mine.grad
                    mine.grad = None


@mistake("after", "left alone", said="a step changes weights, which an optimizer does")
def trains_itself(self):
    for parameter in self.trained:
        parameter.data -= 0.01 * parameter.grad


@mistake("after", "left alone", said="a step changes parameters, in whose place are others")
def replaces_parameters(self):
    """An optimizer made before keeps the old ones."""
    layer = self.stages[0][0]
    weight = nn.Parameter(layer.weight.detach().clone(), layer.weight.requires_grad)
    weight.grad, layer.weight = layer.weight.grad, weight


# What else a step changes


@mistake("after", "left alone", said="a step changes layers, to evaluation mode")
def leaves_evaluation(self):
    nn.ModuleList(self.stages).eval()


@mistake("after", "left alone")
def freezes_later(self):
    if self.steps == 2:
        self.stages[0].requires_grad_(False)


@mistake("after", "left alone")
def gradients_off(self):
    torch.set_grad_enabled(False)


@mistake("step", "left alone", said="a step changes the mini-batch")
def changes_batch(self, batch, *arguments):
    loss = Staged.step(self, batch, *arguments)
    batch.mul_(0.5)
    return loss


# Over two processes


class Over(FillDrain):
    steps = 0

    def step(self, *arguments: Any) -> Any:
        self.steps += 1
        self.before()
        loss = super().step(*arguments)
        self.after()
        return loss

    before, after = Staged.before, Staged.after


class OldWeightsOver(Over):
    old, before, after = None, OldWeights.before, OldWeights.after


class ClipsOver(Over):
    after = clips_always.after


class HangsOver(Over):
    def after(self) -> None:
        if self.steps > 3:
            threading.Event().wait()


class ExitsOver(Over):
    def after(self) -> None:
        if self.steps > 2:
            os._exit(0)


OVER_PROCESSES = {
    "OldWeightsOver": ("later steps", "failed", "those at the weights of the step before"),
    "ClipsOver": ("gradients", "failed", "scaled down to a norm of 0.5: the engine clips by itself"),
    "HangsOver": ("step", "broken", "no answer within"),
    "ExitsOver": ("step", "broken", "ended with status 0"),
}
"""The case that names each over two processes, its verdict, and words of what is said."""
