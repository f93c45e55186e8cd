"""An engine under test beside the uncut model: both take the same steps, and are trained alike.

What a step has left is held against the uncut model, and what would explain a difference is named. Wrong
gradients alone help nobody: stale ones, those of another mini-batch, clipped or rounded ones look alike. So
each known mistake is tried on the uncut model, and the one whose gradients the engine has is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_bench.experiments.engines.checks import (
    counting,
    gradient_error,
    gradients_of,
    named_parameters,
    reference,
)
from gpipe_bench.experiments.engines.setup import Engine, Setup, clear

WIDTH, SEED, STEPS, LEARNING_RATE = 6, 1811, 4, 0.1


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The loss: the mean over what it is given."""
    return ((output - target) ** 2).mean()


class Step(NamedTuple):
    """A step that an engine has taken: its number from 1, the loss that it returned and what it counted."""

    number: int
    loss: Any
    counts: Any


@dataclass
class Given:
    """An engine, what it was built from, and the uncut model beside it, whose weights are trained alike.

    Where layers draw at random (not `compares`), gradients are not compared; its layers train by its own.
    `before` are mini-batch and weights of the steps until now; `disturbed` is what a step has changed of what
    it was given, in words; `everything` are the gradients of the latest step, of all layers.
    """

    engine: Engine
    setup: Setup
    plain: Sequence[nn.Module]
    batch: Tensor
    target: Tensor
    everything: dict[str, Tensor] = field(default_factory=dict)
    before: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = field(default_factory=list)
    disturbed: str = ""
    compares: bool = True

    @property
    def whole(self) -> Setup:
        """The uncut model's, all in this process."""
        return replace(self.setup, layers=self.plain, group=None, placement=())

    @property
    def expected(self) -> dict[str, Tensor]:
        """The gradients that a step must leave in this process."""
        return {name: self.everything[name] for name in named_parameters(self.setup)}

    def draw(self, number: int) -> None:
        """The mini-batch of a step, and the gradients of the uncut model."""
        self.batch, self.target = drawn(len(self.batch), number, self.batch.dtype)
        if self.compares:
            self.everything = reference(self.whole, self.batch, self.target, mean_square)

    def step(self, loss_fn: Callable[..., Tensor] = mean_square, *, clean: bool = True) -> Any:
        """One step, by default without earlier gradients; what it may not change is put back."""
        if clean:
            clear(self.setup.layers)
        batch, target = self.batch.clone(), self.target.clone()
        local = self.setup.local_layers
        parameters = [(p, p.detach().clone(), p.requires_grad) for p in _parameters(local)]
        loss = self.engine.step(batch, target, loss_fn)
        found = {
            "the mini-batch": not (torch.equal(batch, self.batch) and torch.equal(target, self.target)),
            "weights, which an optimizer does": any(not torch.equal(p, value) for p, value, _ in parameters),
            "parameters, in whose place are others": any(
                now is not before[0] for now, before in zip(_parameters(local), parameters, strict=True)
            ),
            "layers, to evaluation mode": not all(layer.training for layer in local),
            "parameters, which train no longer or again": any(p.requires_grad != n for p, _, n in parameters),
            "the process, in which gradients are off": not torch.is_grad_enabled(),
        }
        torch.set_grad_enabled(True)
        for layer in local:
            layer.train()
        with torch.no_grad():
            for parameter, value, needs in parameters:
                parameter.copy_(value)
                parameter.requires_grad_(needs)
        self.disturbed = self.disturbed or " and ".join(what for what, changed in found.items() if changed)
        return loss

    def train(self, steps: int = STEPS, loss_fn: Callable[..., Tensor] = mean_square) -> Iterator[Step]:
        """Steps with another mini-batch each; once one has been looked at, weights are updated."""
        for number in range(1, steps + 1):
            self.draw(number)
            weights = {name: p.detach().clone() for name, p in named_parameters(self.whole).items()}
            first = {stage: self.setup.stage_layers(stage)[0] for stage in self.setup.local_stages}
            with counting(first) as counts:
                loss = self.step(loss_fn)
            yield Step(number, loss, counts())
            self.before.append((self.batch, self.target, weights))
            with torch.no_grad():
                for setup in (self.setup, self.whole) if self.compares else (self.setup,):
                    for parameter, name in {p: name for name, p in named_parameters(setup).items()}.items():
                        gradient = self.everything[name] if self.compares else parameter.grad
                        parameter.sub_(LEARNING_RATE * (0 if gradient is None else gradient))


def drawn(size: int, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The mini-batch of a step, alike in every process."""
    generator = torch.Generator().manual_seed(SEED + number)
    batch, target = (torch.randn(size, WIDTH, dtype=dtype, generator=generator) for _ in range(2))
    return batch, target


def _parameters(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for layer in layers for parameter in layer.parameters()]


# What explains a difference

OK, FAILED, BROKEN, CANNOT, UNTRIED = "ok", "failed", "broken", "cannot be asked", "not tried"
"""Verdicts. `broken`: it raised, hung or ended its process; `cannot be asked`: it says so itself, by a
ValueError, or has no method for it.
"""
SKIPPED = (CANNOT, UNTRIED)
AS_BEFORE = "as before"
"""Verdict of a case whose step is wrong in the same way as in the first cases."""
Said = tuple[str, str]
"""A verdict, and what is said."""

Gradients = Mapping[str, Tensor]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference from the uncut model's gradients, as a share of a parameter's largest."""
_SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference from what a known mistake would give."""
_LOSS = {torch.float64: 1e-6, torch.float32: 1e-4}
_ROUNDED = 1e-5  # differences in float64 that can come from float32
_EXACT = 1e-12  # what float64 itself leaves


def compared(given: Given) -> tuple[str, str]:
    """`right`; `times` where all gradients are as many times the uncut model's; else `wrong`; and why."""
    found: Gradients = {}
    wanted, dtype = given.expected, given.batch.dtype
    try:
        found = gradients_of(named_parameters(given.setup), "the engine")
        share = gradient_error(found, wanted, "the engine", TOLERANCE[dtype])
    except RuntimeError as error:
        return (_explained(given, found, wanted) if found else None) or ("wrong", str(error))
    return "right", f"all {len(found)} are the plain model's, to {share:.0e}"


def _explained(given: Given, found: Gradients, wanted: Gradients) -> tuple[str, str] | None:
    factor = factor_of(found, wanted)
    if factor is not None and factor < 1 and (norm := round_norm(found)):
        return "wrong", f"all gradients are scaled down to a norm of {norm}: the engine clips by itself"
    for what, gradients in _mistakes(given):
        if same(found, gradients):
            return "wrong", what
    if factors := _factors(given, found):
        return factors
    mine, theirs = flat(found, found), flat(wanted, found)
    rest, largest = mine - theirs, float(theirs.abs().max())
    off = float(rest.abs().max()) / largest
    differs = rest.abs() > _EXACT * largest
    if mine.dtype is torch.float64 and 1e-9 < off < _ROUNDED and int(differs.sum()) > len(rest) // 2:
        return "wrong", f"most gradients differ, by {off:.0e} of the largest, as if rounded to float32"
    weights = flat({name: p.detach() for name, p in named_parameters(given.setup).items()}, found)
    decay = float(rest @ weights / (weights @ weights))
    if off > _ROUNDED and _close(rest, decay * weights, theirs):
        return "wrong", f"the gradients hold {decay:.4g} times the weights, as weight decay would add"
    return None


def _mistakes(given: Given) -> Iterator[tuple[str, Gradients]]:
    """Mistakes that an engine may have made, in words, with the gradients that each would have left."""
    if given.before:
        batch, target, weights = given.before[-1]
        yield (
            "the gradients are those at the weights of the step before: the engine's are stale",
            _at(given, given.batch, given.target, weights),
        )
        yield (
            "the gradients are those of the mini-batch of the step before",
            _at(given, batch, target, None),
        )
        yield (
            "the gradients are those of the step before, mini-batch and weights",
            _at(given, batch, target, weights),
        )
        yield (
            "the gradients are those at the first weights: the engine computes with a copy of its own",
            _at(given, given.batch, given.target, given.before[0][2]),
        )
    if given.batch.dtype is torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            rounded = _at(given, given.batch, given.target, None)
        yield "the gradients are those of bfloat16: the engine runs under autocast", rounded


def _at(given: Given, batch: Tensor, target: Tensor, weights: Mapping[str, Tensor] | None) -> Gradients:
    """The uncut model's gradients, at other weights if they are given."""
    parameters = named_parameters(given.whole)
    now = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        with torch.no_grad():
            for name, value in (weights or {}).items():
                parameters[name].copy_(value)
        return reference(given.whole, batch, target, mean_square)
    finally:
        with torch.no_grad():
            for name, value in now.items():
                parameters[name].copy_(value)


def _factors(given: Given, found: Gradients) -> tuple[str, str] | None:
    """Which micro-batches count how often, where the gradients are sums of theirs with other factors."""
    count, batch, target = given.setup.num_microbatches, given.batch, given.target
    alone = replace(given.setup, layers=given.plain, num_microbatches=1)
    parts = [
        reference(alone, *part, mean_square)
        for part in zip(batch.tensor_split(count), target.tensor_split(count), strict=True)
    ]
    mine = flat(found, found)
    theirs = torch.stack([flat(each, found) for each in parts], dim=1)
    theirs *= torch.tensor([len(part) / len(batch) for part in batch.tensor_split(count)], dtype=theirs.dtype)
    factors = torch.linalg.lstsq(theirs, mine[:, None]).solution.flatten()
    if not _close(theirs @ factors, mine, theirs):
        return None
    digits = 6 if mine.dtype is torch.float64 else 3
    times = [round(float(factor), digits) + 0.0 for factor in factors]
    if set(times) == {1}:  # wrong by something else, and little
        return None
    if len(set(times)) == 1:
        is_sum = times[0] == count
        reason = ": the losses of the micro-batches are added up, not averaged" if is_sum else ""
        text = f"every gradient is {times[0]:.6g} times that of the mean loss over the mini-batch{reason}"
        return "times", text
    wrong = [f"micro-batch {m} counts {each:.6g} times" for m, each in enumerate(times) if each != 1]
    each_once = "in the gradients, where each should count once, by its share of the examples"
    return "wrong", f"{' and '.join(wrong)} {each_once}"


def left(setup: Setup) -> dict[str, Tensor]:
    """Copies of the gradients that a step has left; zeros where there is none."""
    parameters = named_parameters(setup)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}


def factor_of(found: Gradients, once: Gradients) -> float | None:
    """The factor by which all gradients have been multiplied; None if it is not a single number."""
    mine, theirs = flat(found, once), flat(once, once)
    times = float(mine @ theirs / (theirs @ theirs))
    return times if _close(mine, times * theirs, mine) else None


def round_norm(gradients: Gradients) -> str:
    """The norm of the gradients, where it is as round as somebody would choose it; else nothing."""
    norm = float(flat(gradients, gradients).norm())
    text = f"{norm:.2g}"
    return text if abs(norm - float(text)) < 1e-4 * norm else ""


def same(found: Gradients, others: Gradients) -> bool:
    """Whether two sets of gradients are equal, as closely as one mistake is told from another."""
    mine, theirs = flat(found, found), flat(others, found)
    return _close(mine, theirs, theirs)


def flat(gradients: Gradients, names: Gradients) -> Tensor:
    """The gradients of these parameters, one behind the other."""
    return torch.cat([gradients[name].flatten() for name in names])


def _close(mine: Tensor, theirs: Tensor, scale: Tensor) -> bool:
    near = _SAME[mine.dtype]
    return torch.allclose(mine, theirs, rtol=near, atol=near * float(scale.abs().max()))


def loss_said(found: Any, wanted: float, before: float | None, dtype: torch.dtype) -> Said:
    """Whether a returned loss is the mini-batch's; `before` is that of the step before."""
    if found is None:
        return OK, "not returned by this process, which is allowed"
    value = float(found.detach() if isinstance(found, Tensor) else found)
    if abs(value - wanted) > _LOSS[dtype] * abs(wanted):
        if before is not None and abs(value - before) <= _LOSS[dtype] * abs(before):
            return FAILED, f"returned {value:.6g}, which is the loss of the step before"
        return FAILED, f"returned {value:.6g}; the mean over the mini-batch is {wanted:.6g}"
    return OK, "what it returns is the mean over the mini-batch"
