"""Cases that check an engine for known failures of pipelines.

Each case is a failure that users of some engine have met; `source` is the public thread. It runs with a model
whose step takes milliseconds, in one process and over two, in float64 and float32, with four and six
micro-batches, over three or four steps with a new mini-batch and an update each: only so do stale or later
errors show. Each step's gradients are compared with the uncut model's, and wrong ones are explained
(`checks.py`). A ValueError, or a missing method, is no failure. The first cases, `BASE`, share their steps;
if they fail, no other case runs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from .checks import (
    CANNOT,
    FAILED,
    OK,
    SEED,
    STEPS,
    UNTRIED,
    WIDTH,
    Given,
    Said,
    Step,
    check_counts,
    compared,
    factor_of,
    left,
    loss_said,
    mean_square,
    round_norm,
    same,
)
from .setup import Setup

_SCALE = 2.0**16  # initial factor of gradient scalers


# Checks


def first_steps(given: Given) -> list[Said]:
    """Runs a few counted steps; returns a result for each case of `BASE`."""
    counts: Said = (OK, "")
    first = summed = later = loss = counts
    alive: list[list[Callable[[], bool]]] = [[]]
    wanted: float | None = None

    def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        made = [output] if output.grad_fn is not None else []
        for tensor in made + [inputs[0]] * (layer is given.setup.layers[0]):  # the mini-batch
            alive[-1].append(_lives(StorageWeakRef(tensor.untyped_storage())))  # type: ignore[no-untyped-call]

    def watched(*values: Any) -> Any:
        found = _Watched.apply(mean_square(*values))  # type: ignore[no-untyped-call]
        node = weakref.ref(found.grad_fn)
        alive[-1].append(lambda: node() is not None)
        return found

    hooks = [layer.register_forward_hook(note) for layer in given.setup.local_layers]
    for step in given.train(STEPS, watched):
        before, wanted = wanted, _plain_loss(given)
        counts = _counted(step, given) if counts[0] == OK else counts
        loss = loss_said(step.loss, wanted, before, given.batch.dtype) if loss[0] == OK else loss
        how, said = compared(given)
        if step.number == 1:
            first = (FAILED, said) if how == "wrong" else (OK, said if how == "right" else "but for a factor")
            summed = {
                "right": (OK, "the gradients are those of the mean loss"),
                "times": (FAILED, said),
                "wrong": (UNTRIED, "its gradients are wrong in another way"),
            }[how]
            later = (OK, "") if how == "right" else (UNTRIED, "its first step is wrong")
        elif how != "right" and later[0] == OK:
            later = FAILED, f"in step {step.number} {said}"
        del step
        alive.append([])
    for hook in hooks:
        hook.remove()
    gc.collect()
    kept = sum(is_alive() for each in alive[:2] for is_alive in each)
    return [
        (OK, f"{type(given.engine).__name__} has step(batch, target, loss_fn)"),
        counts,
        first,
        summed,
        (later[0], later[1] or f"the gradients of {STEPS} steps are right, with an update after each"),
        loss,
        (FAILED, f"a step changes {given.disturbed}") if given.disturbed else (OK, "nothing else changes"),
        (FAILED, f"{kept} inputs, activations or graphs of two steps are kept over {STEPS}")
        if kept
        else (OK, "what a step has made is gone two steps later"),
    ]


def _lives(storage: StorageWeakRef) -> Callable[[], bool]:
    return lambda: not storage.expired()  # type: ignore[no-untyped-call]


class _Watched(torch.autograd.Function):
    """Returns the loss; its node lives as long as the graph that contains it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def trains(given: Given) -> Said:
    for step in given.train(3):
        said = _counted(step, given)
        if said[0] == OK:
            said = _right(given, said[1])
        if said[0] != OK:
            break
    return said


def frozen(given: Given) -> Said:
    local = [p for layer in given.setup.local_layers for p in layer.parameters()]
    for _ in given.train(3):
        if any(p.grad is not None and not p.requires_grad for p in local):
            return FAILED, "a frozen parameter has a gradient"
        if (said := _right(given))[0] != OK:
            break
    return said


def adds_up(given: Given) -> Said:
    """Checks that a step without clearing adds to the gradients of the step before."""
    once = _begin(given)
    given.step(clean=False)
    twice = left(given.setup)
    if same(twice, {name: 2 * gradient for name, gradient in once.items()}):
        return OK, "two steps leave the sum of their gradients"
    times = factor_of(twice, once)
    of = f"{times:.6g} times the gradients of one" if times is not None else "neither once nor twice these"
    return FAILED, f"two steps do not leave the sum of their gradients but {of}; a step must add to .grad"


def _begin(given: Given) -> dict[str, Tensor]:
    """Runs two training steps and a third; returns the gradients of the third."""
    for _ in given.train(2):
        pass
    given.draw(3)
    given.step()
    return left(given.setup)


def scaled(given: Given) -> Said:
    """Checks that a scaled loss scales the gradients."""
    once = _begin(given)
    given.step(lambda *values: _SCALE * mean_square(*values))
    found = left(given.setup)
    if not same(found, {name: _SCALE * gradient for name, gradient in once.items()}):
        if norm := round_norm(found):
            return FAILED, f"all gradients are scaled down to a norm of {norm}: the engine clips by itself"
        if same(found, once):
            return FAILED, "its gradients are those of the loss function of an earlier step"
        times = factor_of(found, once)
        of = f"{times:.6g} times" if times is not None else "not by one factor"
        return FAILED, f"with the loss times {_SCALE:g} the gradients are {of} those without"
    given.step(lambda *values: float("inf") * mean_square(*values))
    if all(bool(gradient.isfinite().all()) for gradient in left(given.setup).values()):
        return FAILED, "an infinite loss leaves finite gradients: a scaler would not see the overflow"
    return OK, f"the loss times {_SCALE:g} gives gradients times {_SCALE:g}, and an overflow is seen"


def clips(given: Given) -> Said:
    clip = getattr(given.engine, "clip", None)
    if clip is None:
        return CANNOT, "it has no method clip(max_norm)"
    for _ in given.train(3):
        if (verdict := _right(given))[0] != OK:
            return verdict
        norm = float(torch.cat([gradient.flatten() for gradient in given.everything.values()]).norm())
        returned = clip(norm / 4)
        found = left(given.setup)
        for name, wanted in given.expected.items():
            if not torch.allclose(found[name], wanted / 4, rtol=1e-3, atol=1e-6):
                times = float(found[name].norm() / (wanted / 4).norm())
                return FAILED, f"{name} is {times:.4g} times what clipping by the norm of all stages leaves"
        if returned is not None and abs(float(returned) - norm) > 1e-4 * norm:
            return FAILED, f"clip returned {float(returned):.6g}; the norm of all gradients was {norm:.6g}"
    return OK, "all gradients are scaled by the norm over all stages"


def evaluates_first(given: Given) -> Said:
    evaluate = getattr(given.engine, "evaluate", None)
    if evaluate is None:
        return CANNOT, "it has no method evaluate(batch, target, loss_fn)"
    given.draw(1)
    loss = evaluate(given.batch, given.target, mean_square)
    verdict, said = loss_said(loss, _plain_loss(given), None, given.batch.dtype)
    if verdict != OK:
        return verdict, f"evaluate {said}"
    local = given.setup.local_layers
    if any(p.grad is not None for layer in local for p in layer.parameters()):
        return FAILED, "evaluate leaves gradients"
    if not all(layer.training for layer in local):
        return FAILED, "the layers stay in evaluation mode"
    for _ in given.train(3):
        if (right := _right(given, "the steps after it are right"))[0] != OK:
            break
    return right


def averages(given: Given) -> Said:
    """Checks that after each step batch normalization's averages are those of its micro-batches in turn, or
    of the whole mini-batch.
    """
    count = given.setup.num_microbatches
    for step in given.train(3):
        for index in [index for stage in given.setup.local_stages for index in given.setup.partition[stage]]:
            layer, plain = given.setup.layers[index], given.plain[index]
            if not isinstance(layer, nn.BatchNorm1d) or not isinstance(plain, nn.BatchNorm1d):
                continue
            number = int(layer.num_batches_tracked or 0)
            if number not in (step.number, count * step.number):
                return FAILED, (
                    f"layer {index} has counted {number} batches in {step.number} steps of {count} "
                    "micro-batches"
                )
            if number == int(plain.num_batches_tracked or 0):  # else of the mini-batch
                for mine, theirs in zip(layer.buffers(), plain.buffers(), strict=True):
                    if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5):
                        return FAILED, f"layer {index} has averages of other examples, or of some twice"
    return OK, "the averages are those of the examples, once each"


def masks_again(given: Given) -> Said:
    """Checks that dropout draws the same mask in every forward of an input, and another in the next step."""
    layers = given.setup.layers
    drawn: dict[int, list[tuple[Tensor, Tensor]]] = {
        index: [] for index, layer in enumerate(layers) if isinstance(layer, nn.Dropout)
    }
    earlier: dict[int, list[Tensor]] = {}

    def note(index: int, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        drawn[index].append((inputs[0].detach().clone(), output.detach() != 0))

    for index in drawn:
        layers[index].register_forward_hook(partial(note, index))
    for step in given.train(3):
        for index, found in drawn.items():
            for place, (inputs, mask) in enumerate(found):
                for before, other in found[:place]:
                    if step.number > 1 and torch.equal(inputs, before) and not torch.equal(mask, other):
                        return FAILED, f"layer {index} drew another mask when a micro-batch was recomputed"
            masks, known = [mask for _, mask in found], earlier.get(index, [])
            if masks and len(masks) == len(known) and all(map(torch.equal, masks, known)):
                return FAILED, f"layer {index} drew the masks of the step before: they are no longer random"
            earlier[index] = masks
            found.clear()
    return OK, "every recomputation draws the mask of the forward, and every step its own"


def _counted(step: Step, given: Given) -> Said:
    """Checks what ran in a step, but not in the first, in which engines may exchange shapes."""
    if step.number == 1:
        return OK, ""
    try:
        count, sizes = check_counts("the engine", step.counts, given.setup, given.batch)
    except RuntimeError as error:
        return FAILED, str(error).partition(": ")[2]
    text = f"each stage ran {len(count.rows)} forwards and {count.backwards} backwards"
    return OK, f"{text} of {', '.join(map(str, sorted(set(sizes))))} examples"


def _right(given: Given, said: str = "") -> Said:
    """Whether the gradients are the uncut model's; `said` replaces the text if they are."""
    how, why = compared(given)
    return (OK, said or why) if how == "right" else (FAILED, why)


def _plain_loss(given: Given) -> float:
    with torch.no_grad():
        return float(mean_square(nn.Sequential(*given.plain)(given.batch), given.target))


# The models


class Skip(nn.Module):
    """A layer that returns its input beside its output, as AmoebaNet's cells do, or that joins the two."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.linear, self.joins = nn.Linear(WIDTH, WIDTH), joins

    def forward(self, value: Any) -> Any:
        if self.joins:
            return self.linear(value[0]) + value[1]
        return torch.tanh(self.linear(value)), value


class Masks(Skip):
    """A layer that makes a mask for each example, without a gradient, or that applies it."""

    def forward(self, value: Any) -> Any:
        if self.joins:
            return self.linear(value[0] * value[1])
        return torch.tanh(self.linear(value)), value > 0


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


MIDDLES: dict[str, Callable[[], list[nn.Module]]] = {
    "chain": lambda: [linear(), linear(), nn.Tanh()],
    "skip": lambda: [Skip(False), Skip(True), nn.Tanh()],
    "masks": lambda: [Masks(False), Masks(True), nn.Tanh()],
    "norm": lambda: [nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH)],
    "noise": lambda: [nn.Dropout(), linear(), nn.Dropout()],
}
"""Layers between a model's first and last. The model is cut behind its second layer, or behind each of the
first three.
"""


def subject(
    case: Case, placement: tuple[int, ...] = (), count: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Setup, int]:
    """The model of a case, equal in every process, and the size of a mini-batch; without a placement this
    process has all of it.
    """
    torch.manual_seed(SEED)
    count = case.num_microbatches or count
    layers: list[nn.Module] = [linear(), *MIDDLES[case.middle](), linear()]
    for layer in layers:
        layer.to(dtype)
    if case.shared:
        layers[-1].weight = layers[0].weight
    ends = (0, 1, 2, 3, 5) if len(placement) == 4 else (0, 2, 5)
    spans = tuple(range(*each) for each in pairwise(ends))
    still = {"": (), "first layers": range(3), "last stage": spans[-1]}[case.frozen]
    for index in still:
        layers[index].requires_grad_(False)
    return Setup(
        layers, spans, count, case.remat, torch.device("cpu"),
        dist.group.WORLD if placement else None, placement if len(placement) > 2 else (),
    ), count * case.examples + case.ragged  # fmt: skip


# The cases


class Case(NamedTuple):
    """A case: a failure of pipelines and how to check for it.

    Args:
        name: the failure, or what should work
        expected: what is right, in a few words
        meaning: what a failure means for training
        source: where users met it
        ask: the check of an engine that was built for the case
        middle: a key of `MIDDLES`
        shared, frozen: whether the first and last layer share a weight; which layers do not train
    """

    name: str
    expected: str
    meaning: str
    source: str = ""
    ask: Callable[[Given], Said] = trains
    middle: str = "chain"
    remat: str = "never"
    examples: int = 2  # per micro-batch
    ragged: int = 0  # additional examples of the mini-batch
    num_microbatches: int | None = None  # default: those of the variations
    shared: bool = False
    frozen: str = ""  # "first layers" or "last stage"


_HUB = "https://github.com/"
BASE = (
    Case("step", "a method step(batch, target, loss_fn)", "it is no engine"),
    Case("micro-batches", "each stage takes all forward and backward", "less is computed than is timed"),
    Case("gradients", "those of the uncut model", "another function is minimized"),
    Case("summed loss", "the mean over the mini-batch", "the learning rate is off by a factor",
         _HUB + "pytorch/torchtitan/issues/2972"),
    Case("later steps", "each with its own weights and batch", "training goes wrong after a good start"),
    Case("returned loss", "the mean over the mini-batch, or None", "curves cannot be compared"),
    Case("left alone", "nothing but .grad changes", "what follows a step is not what was meant"),
    Case("memory over steps", "nothing is kept for long", "memory grows until there is none"),
)  # fmt: skip
CASES = (
    *BASE,
    Case("accumulation over steps", "two steps add up", "earlier steps count less, or not at all",
         _HUB + "pytorch/torchtitan/issues/1733", adds_up),
    Case("clipping over stages", "one norm over all stages", "stages are scaled apart: the direction is lost",
         _HUB + "pytorch/torchtitan/issues/596", clips),
    Case("evaluation first", "training after it is right", "validating before training spoils or ends it",
         _HUB + "pytorch/pytorch/issues/162822", evaluates_first),
    Case("frozen stage", "gradients pass through it", "what lies before an adapter does not train",
         _HUB + "pytorch/PiPPy/issues/1122", frozen, frozen="last stage"),
    Case("frozen first layers", "no gradient is asked of them", "the last layers cannot be fine-tuned",
         _HUB + "pytorch/pytorch/issues/153484", frozen, frozen="first layers"),
    Case("shared weights", "each use gets the sum of both", "tied embeddings drift apart",
         _HUB + "uw-syfi/piper/issues/13", shared=True),
    Case("a skip", "both tensors bring gradients back", "residual paths do not train",
         _HUB + "pytorch/pytorch/issues/127964", middle="skip"),
    Case("masks per micro-batch", "each has its own, without gradient", "tokens get another batch's mask",
         _HUB + "pytorch/torchtitan/issues/1723", middle="masks"),
    Case("loss scaling", "every stage scales alike", "fp16 steps are wrong or skipped on one stage",
         _HUB + "NVIDIA-NeMo/Megatron-Bridge/pull/5591", scaled),
    Case("batch norm's averages", "every example counts once", "evaluation uses wrong statistics",
         _HUB + "kakaobrain/torchgpipe/issues/14", averages, "norm"),
    Case("remat except_last", "recomputed, with equal gradients", "memory is not what was asked for",
         remat="except_last"),
    Case("remat always", "recomputed, with equal gradients", "memory is not what was asked for",
         remat="always"),
    Case("dropout under recomputation", "the forward's mask again", "gradients are another network's",
         _HUB + "allenai/OLMo-core/pull/828", masks_again, "noise", "always"),
    Case("batch norm, recomputed", "every example counts once", "evaluation uses wrong statistics",
         _HUB + "kakaobrain/torchgpipe/issues/14", averages, "norm", "always"),
    Case("M < K", "one micro-batch on two stages", "few, long micro-batches hang",
         _HUB + "pytorch/torchtitan/issues/775", examples=8, num_microbatches=1),
    Case("ragged mini-batch", "2 or 3 examples each, once", "an epoch's last batch hangs or weighs more",
         _HUB + "pytorch/pytorch/issues/126600", ragged=2),
)  # fmt: skip
"""Cases in running order: those that are most often refused come last and need no new processes."""
GROUPS: tuple[tuple[Case, ...], ...] = (BASE, *((case,) for case in CASES[len(BASE) :]))
