"""Engines with one mistake each, such as users have met; `Staged` has none. All stages are in one process,
and each has a graph of its own, as over processes.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.append(os.fspath(Path(__file__).parents[2] / "examples"))
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


class OldWeights(Staged):
    """Computes with the weights of the step before, as PipeDream does where a stage is ahead."""

    before: list[Tensor] | None = None

    def step(self, *arguments: Any) -> Tensor:
        parameters = [p for stage in self.stages for p in stage.parameters()]
        now = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter, old in zip(parameters, self.before or now, strict=True):
                parameter.copy_(old)
        loss = super().step(*arguments)
        with torch.no_grad():
            for parameter, kept in zip(parameters, now, strict=True):
                parameter.copy_(kept)
        self.before = now
        return loss


class OldBatch(Staged):
    before: tuple[Any, ...] | None = None

    def step(self, *arguments: Any) -> Tensor:
        given, self.before = self.before or arguments, arguments
        return super().step(*given)


class DoublesLater(Staged):
    steps = 0

    def step(self, *arguments: Any) -> Tensor:
        self.steps += 1
        return super().step(*arguments)

    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return super().weight(wanted, target) * (2 if self.steps > 2 else 1)


class HangsLater(Staged):
    steps = 0

    def step(self, *arguments: Any) -> Tensor:
        self.steps += 1
        while self.steps > 3:
            time.sleep(0.05)
        return super().step(*arguments)


class ExitsLater(Staged):
    steps = 0

    def step(self, *arguments: Any) -> Tensor:
        self.steps += 1
        if self.steps > 2:
            os._exit(0)
        return super().step(*arguments)


class DropsFifth(Staged):
    """Runs its fifth micro-batch, and forgets what it gives."""

    def weight(self, wanted: Tensor, target: Tensor) -> float:
        self.seen = getattr(self, "seen", -1) + 1
        return super().weight(wanted, target) * (self.seen % self.count != 4)


class Autocasts(Staged):
    def step(self, *arguments: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().step(*arguments)


class HidesOverflow(Staged):
    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        for parameter in nn.Sequential(*self.stages).parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()
        return loss


class SameMasks(Staged):
    def step(self, *arguments: Any) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return super().step(*arguments)


class LeavesEvaluation(Staged):
    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        for stage in self.stages:
            stage.eval()
        return loss


class KeepsActivations(Staged):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.kept: list[Any] = []

    def forward(self, stage: nn.Module, value: Any, m: int) -> Any:
        value = super().forward(stage, value, m)
        self.kept.append(value)
        return value


class KeepsGraphs(Staged):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.losses: list[Tensor] = []

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        def kept(*values: Any) -> Tensor:
            self.losses.append(loss_fn(*values))
            return self.losses[-1]

        return super().step(batch, target, kept)


class ClipsAlways(Staged):
    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        self.clip(0.5)
        return loss


class FirstLossFunction(Staged):
    first: Any = None

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        self.first = self.first or loss_fn
        return super().step(batch, target, self.first)


class ChangesBatch(Staged):
    def step(self, batch: Tensor, *arguments: Any) -> Tensor:
        loss = super().step(batch, *arguments)
        batch.mul_(0.5)
        return loss


# Twelve that were written before the cases that are to find them


class TrainsItself(Staged):
    """Its step updates the weights, too."""

    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        with torch.no_grad():
            for parameter in nn.Sequential(*self.stages).parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
        return loss


class Clears(Staged):
    def step(self, *arguments: Any) -> Tensor:
        for stage in self.stages:
            stage.zero_grad()
        return super().step(*arguments)


class DetachesLater(Staged):
    """Cuts the model for good at its third step."""

    steps = 0

    def step(self, *arguments: Any) -> Tensor:
        self.steps += 1
        return super().step(*arguments)

    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if self.steps < 3 or number == len(self.stages) - 1:
            super().backward(number, made, gradients)
        else:
            super().backward(number, made, [None if g is None else torch.zeros_like(g) for g in gradients])


class Decays(Staged):
    """Adds weight decay to the gradients."""

    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        for parameter in nn.Sequential(*self.stages).parameters():
            if parameter.grad is not None:
                parameter.grad += 0.01 * parameter.detach()
        return loss


class SwapsTargets(Staged):
    """Swaps the targets of two micro-batches, where there are more than four."""

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        if self.count > 4:
            parts = list(target.tensor_split(self.count))
            parts[0], parts[1] = parts[1], parts[0]
            target = torch.cat(parts)
        return super().step(batch, target, loss_fn)


class RoundsDown(Staged):
    """Sends float32 over its boundary, whatever it is given."""

    def cut(self, value: Any, m: int) -> Any:
        made = tuple(t.detach().float().to(t.dtype).requires_grad_(t.requires_grad) for t in each(value))
        return made if isinstance(value, tuple) else made[0]


class HalvesAgain(Staged):
    """Averages over replicas, of which there is one."""

    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return super().weight(wanted, target) / len(self.stages)


class FreezesLater(Staged):
    steps = 0

    def step(self, *arguments: Any) -> Tensor:
        self.steps += 1
        loss = super().step(*arguments)
        if self.steps == 2:
            self.stages[0].requires_grad_(False)
        return loss


class Hooks(Staged):
    """Registers its hook in every step anew, and each takes a little of what comes."""

    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        self.stages[-1][-1].register_forward_hook(lambda layer, inputs, output: output * 0.99)
        return loss


class OldLoss(Staged):
    """Returns the loss of the step before, not to wait for this one's."""

    before: Tensor | None = None

    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        given, self.before = loss if self.before is None else self.before, loss
        return given


class FirstWeights(Staged):
    """Copies the layers when it is built, and never looks at the user's again."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.own, self.stages = self.stages, [copy.deepcopy(stage) for stage in self.stages]

    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        for stage, mine in zip(self.own, self.stages, strict=True):
            for theirs, parameter in zip(stage.parameters(), mine.parameters(), strict=True):
                if parameter.grad is not None:
                    theirs.grad = parameter.grad if theirs.grad is None else theirs.grad + parameter.grad
                    parameter.grad = None
        return loss


class GradientsOff(Staged):
    """Leaves the process without gradients."""

    def step(self, *arguments: Any) -> Tensor:
        with torch.enable_grad():
            loss = super().step(*arguments)
        torch.set_grad_enabled(False)
        return loss


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
    "OldWeights": {"later steps", "returned loss"},
    "OldBatch": {"later steps", "returned loss"},
    "DoublesLater": {"later steps"},
    "DropsFifth": {"gradients"},
    "Autocasts": {"gradients", "returned loss"},
    "HidesOverflow": {"loss scaling"},
    "SameMasks": {"dropout under recomputation"},
    "LeavesEvaluation": {"left alone"},
    "KeepsActivations": {"memory over steps"},
    "KeepsGraphs": {"memory over steps"},
    "ClipsAlways": {"gradients", "later steps"},
    "FirstLossFunction": {"loss scaling"},
    "ChangesBatch": {"left alone"},
    "TrainsItself": {"left alone"},
    "Clears": {"accumulation over steps"},
    "DetachesLater": {"later steps"},
    "Decays": {"gradients"},
    "SwapsTargets": {"gradients", "returned loss"},
    "RoundsDown": {"gradients"},
    "HalvesAgain": {"summed loss"},
    "FreezesLater": {"left alone"},
    "Hooks": {"later steps", "returned loss"},
    "OldLoss": {"returned loss"},
    "FirstWeights": {
        "micro-batches",
        "later steps",
        "returned loss",
        "clipping over stages",
        "batch norm's averages",
        "remat except_last",
        "remat always",
        "batch norm, recomputed",
    },
    "GradientsOff": {"left alone"},
}
"""The cases that name each mistake; all others must be right. What computes with layers of its own does
nothing right for those that it was given.
"""
NAMED = {
    "OldWeights": "those at the weights of the step before",
    "OldBatch": "those of the mini-batch of the step before",
    "DoublesLater": "in step 3 every gradient is 2 times",
    "DropsFifth": "with M = 6 in float64: micro-batch 4 counts 0 times",
    "Autocasts": "in float32: the gradients are those of bfloat16",
    "HidesOverflow": "an infinite loss leaves finite gradients",
    "SameMasks": "drew the masks of the step before",
    "LeavesEvaluation": "a step changes layers, to evaluation mode",
    "KeepsActivations": "activations or graphs of two steps are kept",
    "ClipsAlways": "scaled down to a norm of 0.5: the engine clips by itself",
    "FirstLossFunction": "those of the loss function of an earlier step",
    "ChangesBatch": "a step changes the mini-batch",
    "TrainsItself": "a step changes weights, which an optimizer does",
    "Decays": "hold 0.01 times the weights",
    "RoundsDown": "as if rounded to float32",
    "OldLoss": "which is the loss of the step before",
}
"""What is said of some of them."""
BREAK_LATER = {"HangsLater": "no answer within", "ExitsLater": "its process ended with status 0"}
