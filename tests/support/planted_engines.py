"""Engines with one mistake each, such as users have met, beside the cases that name it; and right ones.

All stages are in one process, each with a graph of its own, as over processes; those of `OVER_PROCESSES` are
the same mistakes in one stage of two.
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
from torch.utils.checkpoint import checkpoint

sys.path.append(os.fspath(Path(__file__).parents[2] / "examples"))
from own_engine import FillDrain, as_it_was

from gpipe_bench.experiments.engines.setup import Setup

PLANTED: dict[str, tuple[set[str], str]] = {}
"""The cases that name each mistake, all others being right, and words of what is said."""


def found_by(*cases: str, said: str = "") -> Callable[[type], type]:
    """Plants an engine."""

    def plant(engine: type) -> type:
        PLANTED[engine.__name__] = {*cases}, said
        return engine

    return plant


def each(value: Any) -> Sequence[Tensor]:
    return value if isinstance(value, tuple) else (value,)


class Staged:
    def __init__(self, setup: Setup) -> None:
        if setup.group is not None:
            raise ValueError("all stages in one process")
        self.setup, self.count = setup, setup.num_microbatches
        self.stages = [nn.Sequential(*setup.stage_layers(stage)) for stage in setup.local_stages]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(nn.ModuleList(self.stages).parameters())

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
        return nn.utils.clip_grad_norm_(self.parameters, max_norm)


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


class Threaded(Staged):
    """Takes its steps in another thread."""

    def step(self, *arguments: Any) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().step, *arguments).result()


class OneLoss(Staged):
    """All micro-batches forward, then one loss of the whole mini-batch."""

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        outputs = []
        for m, value in enumerate(batch.tensor_split(self.count)):
            for stage in self.stages:
                value = self.forward(stage, value, m)
            outputs.append(value)
        loss = loss_fn(torch.cat(outputs), target)
        loss.backward()
        return loss.detach()


RIGHT = (
    "planted_engines:Staged", "planted_engines:Threaded", "planted_engines:OneLoss",
    "planted_engines:Accumulates", "own_engine:FillDrain", "ours", "ours-1f1b",
    "gpipe_bench.experiments.engines.known:OursZBH1",
)  # fmt: skip


class Later(Staged):
    """Counts its steps, and does something wrong before or after each."""

    steps = 0

    def step(self, *arguments: Any) -> Any:
        self.steps += 1
        self.before()
        loss = super().step(*arguments)
        self.after()
        return loss

    def before(self) -> None:
        pass

    def after(self) -> None:
        pass

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


@found_by("accumulation over steps")
class DividesAgain(Later):
    """Divides by M what earlier steps have left, too."""

    def after(self) -> None:
        for gradient in self.gradients:
            gradient /= self.count

    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return self.count * super().weight(wanted, target)


@found_by("summed loss")
class Sums(Staged):
    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return self.count * super().weight(wanted, target)


@found_by("clipping over stages")
class ClipsApart(Staged):
    def clip(self, max_norm: float) -> None:
        for stage in self.stages:
            nn.utils.clip_grad_norm_(stage.parameters(), max_norm)


@found_by("evaluation first")
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


@found_by("frozen stage")
class StopsAtFrozen(Staged):
    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if any(parameter.requires_grad for parameter in self.stages[number].parameters()):
            super().backward(number, made, gradients)


@found_by("frozen first layers")
class AsksFrozen(Staged):
    """Asks every number that crosses a boundary for a gradient."""

    def cut(self, value: Any, m: int) -> Any:
        leaves = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in each(value))
        return leaves if isinstance(value, tuple) else leaves[0]

    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        torch.autograd.backward([output for output in made if output.is_floating_point()], gradients)


@found_by("shared weights")
class OwnsShared(Staged):
    """Drops what later stages add to a weight of the first."""

    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        first = set(self.stages[0].parameters())
        shared = [p for p in self.stages[number].parameters() if number and p in first]
        before = [None if p.grad is None else p.grad.clone() for p in shared]
        super().backward(number, made, gradients)
        for parameter, gradient in zip(shared, before, strict=True):
            parameter.grad = gradient


@found_by("a skip")
class OneGradient(Staged):
    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        rest = [None if gradient is None else torch.zeros_like(gradient) for gradient in gradients[1:]]
        super().backward(number, made, [*gradients[:1], *rest])


@found_by("masks per micro-batch")
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


@found_by("loss scaling")
class SkipsAlone(Later):
    """Its first stage takes large gradients for an overflow, and says so to nobody."""

    def after(self) -> None:
        for parameter in self.stages[0].parameters():
            if parameter.grad is not None and parameter.grad.abs().max() > 1e3:
                parameter.grad.zero_()


@found_by("batch norm's averages", "batch norm, recomputed")
class TriesShapes(Staged):
    """Its first step begins with a pass for the shapes."""

    tried = False

    def step(self, batch: Tensor, *arguments: Any) -> Tensor:
        if not self.tried:
            self.tried = True
            with torch.no_grad():
                nn.Sequential(*self.stages)(batch[:2])
        return super().step(batch, *arguments)


@found_by("dropout under recomputation")
class OtherDraws(Staged):
    def again(self, stage: nn.Module, value: Any) -> Any:
        contexts = nullcontext(), as_it_was(stage)
        return checkpoint(
            stage, value, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts
        )


@found_by("batch norm, recomputed")
class CountsTwice(Staged):
    """Batch normalization moves its averages again when it is recomputed."""

    def again(self, stage: nn.Module, value: Any) -> Any:
        return checkpoint(stage, value, use_reentrant=False)


@found_by("M < K")
class FillsFirst(Staged):
    def step(self, batch: Tensor, *arguments: Any) -> Tensor:
        parts = batch.tensor_split(self.count)
        [parts[warm_up] for warm_up in range(len(self.stages))]
        return super().step(batch, *arguments)


@found_by("ragged mini-batch")
class EqualWeights(Staged):
    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return 1 / self.count


@found_by("later steps", "returned loss", said="those at the weights of the step before")
class OldWeights(Later):
    """Computes with the weights of the step before, as PipeDream does where a stage is ahead."""

    old: list[Tensor] | None = None

    @torch.no_grad()
    def before(self) -> None:
        self.all = list(nn.ModuleList(self.stages).parameters())
        self.now = [parameter.detach().clone() for parameter in self.all]
        for parameter, value in zip(self.all, self.old or self.now, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def after(self) -> None:
        for parameter, value in zip(self.all, self.now, strict=True):
            parameter.copy_(value)
        self.old = self.now


@found_by("later steps", "returned loss", said="those of the mini-batch of the step before")
class OldBatch(Staged):
    before: tuple[Any, ...] | None = None

    def step(self, *arguments: Any) -> Tensor:
        given, self.before = self.before or arguments, arguments
        return super().step(*given)


@found_by("later steps", said="in step 3 every gradient is 2 times")
class DoublesLater(Later):
    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return super().weight(wanted, target) * (2 if self.steps > 2 else 1)


class HangsLater(Later):
    def after(self) -> None:
        if self.steps > 3:
            threading.Event().wait()


class ExitsLater(Later):
    def after(self) -> None:
        if self.steps > 2:
            os._exit(0)


@found_by("gradients", said="with M = 6 in float64: micro-batch 4 counts 0 times")
class DropsFifth(Staged):
    """Runs its fifth micro-batch, and forgets what it gives."""

    def weight(self, wanted: Tensor, target: Tensor) -> float:
        self.seen = getattr(self, "seen", -1) + 1
        return super().weight(wanted, target) * (self.seen % self.count != 4)


@found_by("gradients", "returned loss", said="in float32: the gradients are those of bfloat16")
class Autocasts(Staged):
    def step(self, *arguments: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().step(*arguments)


@found_by("loss scaling", said="an infinite loss leaves finite gradients")
class HidesOverflow(Later):
    def after(self) -> None:
        for gradient in self.gradients:
            gradient.nan_to_num_()


@found_by("dropout under recomputation", said="drew the masks of the step before")
class SameMasks(Staged):
    def step(self, *arguments: Any) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return super().step(*arguments)


@found_by("left alone", said="a step changes layers, to evaluation mode")
class LeavesEvaluation(Later):
    def after(self) -> None:
        nn.ModuleList(self.stages).eval()


@found_by("memory over steps", said="activations or graphs of two steps are kept")
class KeepsActivations(Staged):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.kept: list[Any] = []

    def forward(self, stage: nn.Module, value: Any, m: int) -> Any:
        value = super().forward(stage, value, m)
        self.kept.append(value)
        return value


@found_by("memory over steps")
class KeepsGraphs(Staged):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.losses: list[Tensor] = []

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        def kept(*values: Any) -> Tensor:
            self.losses.append(loss_fn(*values))
            return self.losses[-1]

        return super().step(batch, target, kept)


@found_by("gradients", "later steps", said="scaled down to a norm of 0.5: the engine clips by itself")
class ClipsAlways(Later):
    def after(self) -> None:
        nn.utils.clip_grad_norm_(nn.ModuleList(self.stages).parameters(), 0.5)


@found_by("loss scaling", said="those of the loss function of an earlier step")
class FirstLossFunction(Staged):
    first: Any = None

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        self.first = self.first or loss_fn
        return super().step(batch, target, self.first)


@found_by("left alone", said="a step changes the mini-batch")
class ChangesBatch(Staged):
    def step(self, batch: Tensor, *arguments: Any) -> Tensor:
        loss = super().step(batch, *arguments)
        batch.mul_(0.5)
        return loss


# Twelve that were written before the cases that are to find them


@found_by("left alone", said="a step changes weights, which an optimizer does")
class TrainsItself(Later):
    """Its step updates the weights, too."""

    @torch.no_grad()
    def after(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad


@found_by("accumulation over steps")
class Clears(Staged):
    def step(self, *arguments: Any) -> Tensor:
        for stage in self.stages:
            stage.zero_grad()
        return super().step(*arguments)


@found_by("later steps")
class DetachesLater(Later):
    """Cuts the model for good at its third step."""

    def backward(self, number: int, made: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if self.steps < 3 or number == len(self.stages) - 1:
            super().backward(number, made, gradients)
        else:
            super().backward(number, made, [None if g is None else torch.zeros_like(g) for g in gradients])


@found_by("gradients", said="hold 0.01 times the weights")
class Decays(Later):
    """Adds weight decay to the gradients."""

    def after(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad += 0.01 * parameter.detach()


@found_by("gradients", "returned loss")
class SwapsTargets(Staged):
    """Swaps the targets of two micro-batches, where there are more than four."""

    def step(self, batch: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        if self.count > 4:
            parts = list(target.tensor_split(self.count))
            parts[0], parts[1] = parts[1], parts[0]
            target = torch.cat(parts)
        return super().step(batch, target, loss_fn)


@found_by("gradients", said="as if rounded to float32")
class RoundsDown(Staged):
    """Sends float32 over its boundary, whatever it is given."""

    def cut(self, value: Any, m: int) -> Any:
        made = tuple(t.detach().float().to(t.dtype).requires_grad_(t.requires_grad) for t in each(value))
        return made if isinstance(value, tuple) else made[0]


@found_by("summed loss")
class HalvesAgain(Staged):
    """Averages over replicas, of which there is one."""

    def weight(self, wanted: Tensor, target: Tensor) -> float:
        return super().weight(wanted, target) / len(self.stages)


@found_by("left alone")
class FreezesLater(Later):
    def after(self) -> None:
        if self.steps == 2:
            self.stages[0].requires_grad_(False)


@found_by("later steps", "returned loss")
class Hooks(Later):
    """Registers its hook in every step anew, and each takes a little of what comes."""

    def after(self) -> None:
        self.stages[-1][-1].register_forward_hook(lambda layer, inputs, output: output * 0.99)


@found_by("returned loss", said="which is the loss of the step before")
class OldLoss(Staged):
    """Returns the loss of the step before, not to wait for this one's."""

    before: Tensor | None = None

    def step(self, *arguments: Any) -> Tensor:
        loss = super().step(*arguments)
        given, self.before = loss if self.before is None else self.before, loss
        return given


@found_by(
    "batch norm's averages",
    "batch norm, recomputed",
    "clipping over stages",
    "later steps",
    "micro-batches",
    "remat always",
    "remat except_last",
    "returned loss",
)
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


@found_by("left alone")
class GradientsOff(Staged):
    """Leaves the process without gradients."""

    def step(self, *arguments: Any) -> Tensor:
        with torch.enable_grad():
            loss = super().step(*arguments)
        torch.set_grad_enabled(False)
        return loss


# Written when all others were found, and not found then


@found_by("memory over steps", said="inputs, activations or graphs of two steps are kept")
class KeepsBatches(Staged):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.kept: list[Any] = []

    def step(self, *arguments: Any) -> Tensor:
        self.kept.append(arguments[:2])
        return super().step(*arguments)


@found_by("left alone", said="a step changes parameters, in whose place are others")
class ReplacesParameters(Later):
    """An optimizer that was made before goes on with the old ones."""

    def after(self) -> None:
        layer = self.stages[0][0]
        weight = nn.Parameter(layer.weight.detach().clone(), layer.weight.requires_grad)
        weight.grad, layer.weight = layer.weight.grad, weight


BREAK_LATER = {"HangsLater": "no answer within", "ExitsLater": "its process ended with status 0"}
"""What is said of those that do not come back."""


class Over(FillDrain):
    steps = 0

    def step(self, *arguments: Any) -> Any:
        self.steps += 1
        self.before()
        loss = super().step(*arguments)
        self.after()
        return loss

    before, after = Later.before, Later.after


class OldWeightsOver(Over):
    old, before, after = None, OldWeights.before, OldWeights.after


class ClipsOver(Over):
    after = ClipsAlways.after


class HangsOver(Over):
    after = HangsLater.after


class ExitsOver(Over):
    after = ExitsLater.after


OVER_PROCESSES = {
    "OldWeightsOver": ("later steps", "failed", "those at the weights of the step before"),
    "ClipsOver": ("gradients", "failed", "scaled down to a norm of 0.5: the engine clips by itself"),
    "HangsOver": ("step", "broken", "no answer within"),
    "ExitsOver": ("step", "broken", "ended with status 0"),
}
"""The case that names each over two processes, its verdict, and words of what is said."""
