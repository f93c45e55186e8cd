"""Checks what an engine does in a step: counts forwards and backwards, and compares gradients.

A benchmark of an engine that skips micro-batches or re-materialization measures something else, and its
numbers do not show it. So every engine is checked before it is timed (`verify`), and the counts are recorded.

`check-engine` checks more (`cases`): the uncut model is trained beside the engine (`Given`). Gradients that
are stale, clipped or of another mini-batch all look alike: wrong. So each known mistake is made with the
uncut model, and the one that gives the engine's gradients is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.plan.schedule import recomputes
from gpipe_bench.pipeline.stage.trees import num_examples, split, tensors_of

from .setup import Engine, LossFn, Setup, clear

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.1,
}
"""Largest difference of gradients, relative to the parameter's largest gradient."""
SMALL = 1e-3  # smaller gradients, relative to the model's largest, are compared with that


class Count(NamedTuple):
    """Numbers of forwards and backwards of one stage in a step."""

    rows: tuple[int, ...]  # examples of each forward
    backwards: int


@contextmanager
def counting(first_layers: Mapping[int, nn.Module]) -> Iterator[Callable[[], dict[int, Count]]]:
    """Counts forwards of each stage's first layer, and gradients that come back to its outputs."""
    rows: dict[int, list[int]] = {stage: [] for stage in first_layers}
    backwards: Counter[int] = Counter()

    # Counted at the beginning: a recomputation may stop inside the layer.
    def begins(stage: int, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        rows[stage].append(num_examples(inputs[0]))

    def ends(stage: int, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        # A tensor that passes unchanged may require a gradient even without a graph.
        given = {id(tensor) for tensor in tensors_of(inputs[0])}
        own = [t for t in tensors_of(output) if t.is_floating_point() and id(t) not in given]
        if own and own[0].requires_grad:
            own[0].register_hook(lambda gradient: backwards.update([stage]))  # type: ignore[no-untyped-call]

    hooks = [layer.register_forward_pre_hook(partial(begins, stage)) for stage, layer in first_layers.items()]
    hooks += [layer.register_forward_hook(partial(ends, stage)) for stage, layer in first_layers.items()]
    try:
        yield lambda: {stage: Count(tuple(rows[stage]), backwards[stage]) for stage in first_layers}
    finally:
        for hook in hooks:
            hook.remove()


def check_counts(
    name: str, counted: Mapping[int, Count], setup: Setup, batch: Any
) -> tuple[Count, list[int]]:
    """A stage's counts and the sizes of the micro-batches. RuntimeError unless every stage of `counted` ran
    each micro-batch backward, and forward in any order, with the setup's recomputations.

    Under "except_last" an engine may recompute the last micro-batch, too; and split backwards may bring each
    gradient twice: 2 M are counted as M.
    """
    sizes = [num_examples(part) for part in split(batch, setup.num_microbatches)]
    number = len(sizes)
    modes = ("except_last", "always") if setup.remat == "except_last" else (setup.remat,)
    expected = [
        [*sizes, *(size for index, size in enumerate(sizes) if recomputes(mode, index, number))]
        for mode in modes
    ]
    due = " or ".join(str(len(rows)) for rows in expected)
    for stage, count in counted.items():
        if count.backwards == 2 * number:
            count = count._replace(backwards=number)
        right = count.backwards == number
        if right and Counter(count.rows) in map(Counter, expected):
            continue
        if right and sorted(count.rows) == sorted(sizes):
            raise RuntimeError(
                f"{name}: stage {stage} recomputed nothing: {number} forwards, and {due} are due with "
                f"setup.remat = {setup.remat!r}; recompute, or refuse it by a ValueError in the factory"
            )
        forwards, backwards = _number(len(count.rows), "forward"), _number(count.backwards, "backward")
        raise RuntimeError(
            f"{name}: stage {stage} ran {forwards} of {_all_of(count.rows)} examples and {backwards}; "
            f"{number} micro-batches of {_all_of(sizes)} with setup.remat = {setup.remat!r} take {due} "
            f"forwards and {_number(number, 'backward')}"
        )
    return count, sizes


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _all_of(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(set(sizes))))


def named_parameters(setup: Setup) -> dict[str, nn.Parameter]:
    """The parameters of this process's stages, named by layer index: "3.weight"."""
    return {
        f"{index}.{name}": parameter
        for stage in setup.local_stages
        for index in setup.partition[stage]
        for name, parameter in setup.layers[index].named_parameters()
        if parameter.requires_grad
    }


def reference(setup: Setup, batch: Any, target: Any, loss_fn: LossFn) -> dict[str, Tensor]:
    """The gradients that a step must leave in this process: the plain model's, micro-batch by micro-batch.
    All layers must be on the setup's device. Clears `.grad`.
    """
    clear(setup.layers)
    total, count = num_examples(batch), setup.num_microbatches
    for inputs, wanted in zip(split(batch, count), split(target, count), strict=True):
        value: Any = inputs
        for layer in setup.layers:
            value = layer(value)
        (loss_fn(value, wanted) * (num_examples(inputs) / total)).backward()  # type: ignore[no-untyped-call]
    gradients = gradients_of(named_parameters(setup), "the plain model")
    clear(setup.layers)
    return gradients


def gradients_of(parameters: Mapping[str, nn.Parameter], name: str) -> dict[str, Tensor]:
    """Copies of the gradients. RuntimeError if a parameter has none."""
    without = [each for each, parameter in parameters.items() if parameter.grad is None]
    if without:
        raise RuntimeError(
            f"{name} left {len(without)} of {len(parameters)} parameters without a gradient, "
            f"such as {without[0]}"
        )
    return {each: p.grad.clone() for each, p in parameters.items() if p.grad is not None}


def gradient_error(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], name: str, tolerance: float | None = None
) -> float:
    """The largest relative difference. RuntimeError, with the parameter's name, if it exceeds rounding, or
    `tolerance`.
    """
    floor = SMALL * max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    largest = 0.0
    for each, wanted in expected.items():
        scale = max(float(wanted.abs().max()), floor) or 1.0
        error = float((found[each] - wanted).abs().max()) / scale
        if not error < (tolerance or TOLERANCE.get(wanted.dtype, 1e-3)):
            raise RuntimeError(
                f"the gradients of {name} are wrong: {each} differs by {error:.1e} of its largest value; "
                "a step must leave the gradients of the mean loss over the mini-batch"
            )
        largest = max(largest, error)
    return largest


def verify(
    name: str,
    engine: Engine,
    setup: Setup,
    batch: Any,
    target: Any,
    loss_fn: LossFn,
    expected: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Runs two steps of an engine; returns, for a record's details, its stages' forwards and backwards, their
    examples, and the difference of gradients from `expected`, by default the plain model's (`reference`,
    which needs a device for the whole model); other parameters are not compared. All processes must call.
    RuntimeError for a missing micro-batch or recomputation, one of another size, and wrong gradients.
    """
    if expected is None:
        expected = reference(setup, batch, target, loss_fn)
    clear(setup.layers)
    engine.step(batch, target, loss_fn)  # engines may exchange shapes in it
    clear(setup.layers)
    with counting({stage: setup.stage_layers(stage)[0] for stage in setup.local_stages}) as counted:
        engine.step(batch, target, loss_fn)
    count, _ = check_counts(name, counted(), setup, batch)
    found: dict[str, Any] = {
        "forwards": len(count.rows), "backwards": count.backwards, "examples": max(count.rows),
    }  # fmt: skip
    gradients = gradients_of(named_parameters(setup), name)
    if expected:
        found["gradient error"] = gradient_error(gradients, expected, name)
    clear(setup.layers)
    return found


# Training beside the uncut model

WIDTH, SEED, STEPS, LEARNING_RATE = 6, 1811, 4, 0.1


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


class Step(NamedTuple):
    """A step of an engine: its number from 1, the loss it returned and its counts."""

    number: int
    loss: Any
    counts: Any


@dataclass
class Given:
    """An engine, its setup, and the uncut model, which is trained in the same way.

    Args:
        batch, target: the current mini-batch
        everything: gradients of all layers in the latest step
        before: mini-batch and weights of earlier steps
        disturbed: what a step changed beside gradients, in words
        compares: whether gradients are compared; if not, since layers draw random numbers, the engine's own
            update the weights
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
        """The uncut model's setup, in this process."""
        return replace(self.setup, layers=self.plain, group=None, placement=())

    @property
    def expected(self) -> dict[str, Tensor]:
        """The gradients that a step must leave in this process."""
        return {name: self.everything[name] for name in named_parameters(self.setup)}

    def draw(self, number: int) -> None:
        self.batch, self.target = drawn(len(self.batch), number, self.batch.dtype)
        if self.compares:
            self.everything = reference(self.whole, self.batch, self.target, mean_square)

    def step(self, loss_fn: Callable[..., Tensor] = mean_square, *, clean: bool = True) -> Any:
        """Runs one step, by default without earlier gradients; then restores what a step must not change."""
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
        """Runs steps with a new mini-batch each; weights are updated after the caller has seen a step."""
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
    """The mini-batch of a step, equal in every process."""
    generator = torch.Generator().manual_seed(SEED + number)
    batch, target = (torch.randn(size, WIDTH, dtype=dtype, generator=generator) for _ in range(2))
    return batch, target


def _parameters(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for layer in layers for parameter in layer.parameters()]


# Explanations of wrong gradients

OK, FAILED, BROKEN, CANNOT, UNTRIED = "ok", "failed", "broken", "cannot be asked", "not tried"
"""Verdicts. `broken`: the engine raised an error, hung or ended its process; `cannot be asked`: it raised
ValueError, or lacks the method.
"""
SKIPPED = (CANNOT, UNTRIED)
Said = tuple[str, str]  # a verdict and its text

Gradients = Mapping[str, Tensor]
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference from the uncut model's gradients, relative to a parameter's largest."""
_SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference from the gradients of a known mistake."""
_LOSS = {torch.float64: 1e-6, torch.float32: 1e-4}


def compared(given: Given) -> tuple[str, str]:
    """`right`, `times` (all gradients are the uncut model's times one factor) or `wrong`; and why."""
    found: Gradients = {}
    wanted, dtype = given.expected, given.batch.dtype
    try:
        found = gradients_of(named_parameters(given.setup), "the engine")
        share = gradient_error(found, wanted, "the engine", _CLOSE[dtype])
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
    return _factors(given, found)


def _mistakes(given: Given) -> Iterator[tuple[str, Gradients]]:
    """Known mistakes, in words, with the gradients that each leaves."""
    now = given.batch, given.target
    if given.before:
        batch, target, weights = given.before[-1]
        those = "the gradients are those"
        yield f"{those} at the weights of the step before: the engine's are stale", _at(given, *now, weights)
        yield f"{those} of the mini-batch of the step before", _at(given, batch, target)
        yield f"{those} of the step before, mini-batch and weights", _at(given, batch, target, weights)
        first = _at(given, *now, given.before[0][2])
        yield f"{those} at the first weights: the engine computes with a copy of its own", first
    if given.batch.dtype is torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            rounded = _at(given, *now)
        yield "the gradients are those of bfloat16: the engine runs under autocast", rounded


def _at(
    given: Given, batch: Tensor, target: Tensor, weights: Mapping[str, Tensor] | None = None
) -> Gradients:
    """The uncut model's gradients, at other weights if given."""
    parameters = named_parameters(given.whole)
    now = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, value in (weights or {}).items():
            parameters[name].copy_(value)
    try:
        return reference(given.whole, batch, target, mean_square)
    finally:
        with torch.no_grad():
            for name, value in now.items():
                parameters[name].copy_(value)


def _factors(given: Given, found: Gradients) -> tuple[str, str] | None:
    """If the gradients are the micro-batches' with other factors: which micro-batches count how often."""
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
    if set(times) == {1}:  # slightly wrong for another reason
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
    """Copies of the gradients after a step; zeros for missing ones."""
    parameters = named_parameters(setup)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}


def factor_of(found: Gradients, once: Gradients) -> float | None:
    """The single factor between all gradients; None if there is none."""
    mine, theirs = flat(found, once), flat(once, once)
    times = float(mine @ theirs / (theirs @ theirs))
    return times if _close(mine, times * theirs, mine) else None


def round_norm(gradients: Gradients) -> str:
    """The norm of the gradients if it is a round number, as users choose for clipping; else ""."""
    norm = float(flat(gradients, gradients).norm())
    text = f"{norm:.2g}"
    return text if abs(norm - float(text)) < 1e-4 * norm else ""


def same(found: Gradients, others: Gradients) -> bool:
    """Whether two sets of gradients are equal, as precisely as mistakes differ."""
    mine, theirs = flat(found, found), flat(others, found)
    return _close(mine, theirs, theirs)


def flat(gradients: Gradients, names: Gradients) -> Tensor:
    """The gradients of these parameters, concatenated."""
    return torch.cat([gradients[name].flatten() for name in names])


def _close(mine: Tensor, theirs: Tensor, scale: Tensor) -> bool:
    near = _SAME[mine.dtype]
    return torch.allclose(mine, theirs, rtol=near, atol=near * float(scale.abs().max()))


def loss_said(found: Any, wanted: float, before: float | None, dtype: torch.dtype) -> Said:
    """Whether a returned loss is the mini-batch's; `before` is the loss of the step before."""
    if found is None:
        return OK, "not returned by this process, which is allowed"
    value = float(found.detach() if isinstance(found, Tensor) else found)
    if abs(value - wanted) > _LOSS[dtype] * abs(wanted):
        if before is not None and abs(value - before) <= _LOSS[dtype] * abs(before):
            return FAILED, f"returned {value:.6g}, which is the loss of the step before"
        return FAILED, f"returned {value:.6g}; the mean over the mini-batch is {wanted:.6g}"
    return OK, "what it returns is the mean over the mini-batch"
