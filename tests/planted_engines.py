"""Engines with one mistake each, such as users have met; `Staged` has none. All stages are in one process,
and each has a graph of its own, as over processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.append(os.fspath(Path(__file__).parents[1] / "examples"))
from own_engine import as_it_was

from gpipe_bench.experiments.engines.setup import Setup


def each(value: Any) -> Sequence[Tensor]:
    return value if isinstance(value, tuple) else (value,)


class Staged:
    def __init__(self, setup: Setup) -> None:
        if setup.group is not None:
            raise ValueError("all stages in one process")
        self.setup, self.count = setup, setup.num_microbatches
        self.stages = [nn.Sequential(*setup.stage_layers(stage)) for stage in setup.local_stages]

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for m, (value, wanted) in enumerate(
            zip(batch.tensor_split(self.count), target.tensor_split(self.count), strict=True)
        ):
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
        return total

    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return len(wanted) / len(target)

    def cut(self, value: Any, m: int) -> Any:
        leaves = tuple(t.detach().requires_grad_(t.requires_grad) for t in each(value))
        return leaves if isinstance(value, tuple) else leaves[0]

    def forward(self, stage: nn.Module, value: Any, m: int) -> Any:
        remat = self.setup.remat
        if remat == "never" or (remat == "except_last" and m == self.count - 1):
            return stage(value)
        return self.again(stage, value)

    def again(self, stage: nn.Module, value: Any) -> Any:
        return checkpoint(
            stage, value, use_reentrant=False, context_fn=lambda: (nullcontext(), as_it_was(stage))
        )

    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if outputs := [output for output in made if output.requires_grad]:
            torch.autograd.backward(outputs, gradients)

    def evaluate(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return loss_fn(nn.Sequential(*self.stages)(batch), target)

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(nn.Sequential(*self.stages).parameters(), max_norm)


class Accumulates:
    """No stages at all, and nothing recomputed."""

    def __init__(self, setup: Setup) -> None:
        if setup.group is not None or setup.remat != "never":
            raise ValueError("one process, and nothing is recomputed")
        self.model, self.count = nn.Sequential(*setup.layers), setup.num_microbatches

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> None:
        for inputs, wanted in zip(
            batch.tensor_split(self.count), target.tensor_split(self.count), strict=True
        ):
            (loss_fn(self.model(inputs), wanted) * (len(wanted) / len(target))).backward()


class DividesAgain(Staged):
    """Divides by M what earlier steps have left, too."""

    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        for parameter in nn.Sequential(*self.stages).parameters():
            if parameter.grad is not None:
                parameter.grad /= self.count
        return loss

    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return self.count * super().weight(wanted, target)


class Sums(Staged):
    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return self.count * super().weight(wanted, target)


class ClipsApart(Staged):
    def clip(self, max_norm: float) -> None:
        for stage in self.stages:
            nn.utils.clip_grad_norm_(stage.parameters(), max_norm)


class LearnsWhenEvaluating(Staged):
    """What it learns of boundaries in its first pass it believes for ever."""

    learned = False

    def evaluate(self, *arguments: Any) -> Tensor:
        self.learned = True
        return super().evaluate(*arguments)

    def cut(self, value: Any, m: int) -> Any:
        return (
            tuple(t.detach() for t in value)
            if self.learned and isinstance(value, tuple)
            else (value.detach() if self.learned else super().cut(value, m))
        )


class StopsAtFrozen(Staged):
    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if any(parameter.requires_grad for parameter in self.stages[number].parameters()):
            super().backward(number, made, gradients)


class AsksFrozen(Staged):
    """Asks every number that crosses a boundary for a gradient."""

    def cut(self, value: Any, m: int) -> Any:
        leaves = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in each(value))
        return leaves if isinstance(value, tuple) else leaves[0]

    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        torch.autograd.backward([output for output in made if output.is_floating_point()], gradients)


class OwnsShared(Staged):
    """Drops what later stages add to a weight of the first."""

    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        first = set(self.stages[0].parameters())
        shared = [p for p in self.stages[number].parameters() if number and p in first]
        before = [None if p.grad is None else p.grad.clone() for p in shared]
        super().backward(number, made, gradients)
        for parameter, gradient in zip(shared, before, strict=True):
            parameter.grad = gradient


class OneGradient(Staged):
    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        rest = [None if gradient is None else torch.zeros_like(gradient) for gradient in gradients[1:]]
        super().backward(number, made, [*gradients[:1], *rest])


class FirstMask(Staged):
    """Takes what needs no gradient from the first micro-batch."""

    def cut(self, value: Any, m: int) -> Any:
        value = super().cut(value, m)
        if isinstance(value, tuple):
            self.first = value if m == 0 else self.first
            value = tuple(
                new if new.requires_grad else old for new, old in zip(value, self.first, strict=True)
            )
        return value


class SkipsAlone(Staged):
    """Its first stage takes large gradients for an overflow, and says so to nobody."""

    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        for parameter in self.stages[0].parameters():
            if parameter.grad is not None and parameter.grad.abs().max() > 1e3:
                parameter.grad.zero_()
        return loss


class TriesShapes(Staged):
    """Its first step begins with a pass for the shapes."""

    tried = False

    def step(self, batch: Tensor, *arguments: Any) -> Tensor:
        if not self.tried:
            self.tried = True
            with torch.no_grad():
                nn.Sequential(*self.stages)(batch[:2])
        return super().step(batch, *arguments)


class OtherDraws(Staged):
    def again(self, stage: nn.Module, value: Any) -> Any:
        contexts = nullcontext(), as_it_was(stage)
        return checkpoint(
            stage, value, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts
        )


class CountsTwice(Staged):
    """Batch normalization moves its averages again when it is recomputed."""

    def again(self, stage: nn.Module, value: Any) -> Any:
        return checkpoint(stage, value, use_reentrant=False)


class FillsFirst(Staged):
    def step(self, batch: Tensor, *arguments: Any) -> Tensor:
        parts = batch.tensor_split(self.count)
        [parts[warm_up] for warm_up in range(len(self.stages))]
        return super().step(batch, *arguments)


class EqualWeights(Staged):
    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return 1 / self.count


RIGHT = ("planted_engines:Staged", "planted_engines:Accumulates", "own_engine:FillDrain", "ours", "ours-1f1b")
PLANTED = {
    "DividesAgain": {"accumulation over steps"},
    "Sums": {"summed loss"},
    "ClipsApart": {"clipping over stages"},
    "LearnsWhenEvaluating": {"evaluation first"},
    "StopsAtFrozen": {"frozen stage"},
    "AsksFrozen": {"frozen first layers"},
    "OwnsShared": {"shared weights"},
    "OneGradient": {"a skip"},
    "FirstMask": {"masks per micro-batch"},
    "SkipsAlone": {"loss scaling"},
    "TriesShapes": {"batch norm's averages", "batch norm, recomputed"},
    "OtherDraws": {"dropout under recomputation"},
    "CountsTwice": {"batch norm, recomputed"},
    "FillsFirst": {"M < K"},
    "EqualWeights": {"ragged mini-batch"},
}
"""The cases that name each mistake; all others must be right."""
