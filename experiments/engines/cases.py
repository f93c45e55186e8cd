"""What pipelines train wrongly, as cases that an engine is asked, by the name of the failure.

Each case is what users of some engine have met; `source` is the public thread. It is asked of an engine on a
model so small that a step takes milliseconds, in one process and over two, in float64 and float32, with four
and six micro-batches, and over `STEPS` steps with another mini-batch each and an optimizer's update between
them: what is stale, or wrong from some step on, shows only so. What an engine leaves is held against the
uncut model, and named by what would explain it (`judging.py`). What it refuses by a ValueError, or has no
method for, can't be asked and is no mistake. The first cases, `BASE`, share their steps; only where these
fail, nothing else can be asked. A case in which an engine hangs or ends its processes, or raises in one of
two, costs that case alone: the next ones run in new processes.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe_bench.experiments.engines.checks import check_counts
from gpipe_bench.experiments.engines.given import SEED, STEPS, WIDTH, Given, Step, drawn, mean_square
from gpipe_bench.experiments.engines.isolated import Fault, IsolatedError, Tell, fault_of, run_isolated
from gpipe_bench.experiments.engines.judging import (
    BROKEN,
    CANNOT,
    FAILED,
    OK,
    UNTRIED,
    Said,
    compared,
    factor_of,
    left,
    loss_said,
    round_norm,
    same,
)
from gpipe_bench.experiments.engines.setup import (
    NoStepError,
    Setup,
    build,
    placement_of,
    resolve,
)

VARIATIONS = tuple((count, dtype) for dtype in (torch.float64, torch.float32) for count in (4, 6))
"""Micro-batches and precision, in which every case is asked."""
PLACES = {"one process": 1, "two processes": 2}
AS_BEFORE = "as before"
"""Of a case in which a step is wrong as it is in the first cases, which says nothing new."""
_SCALE = 2.0**16  # as a scaler of gradients begins with


@dataclass(frozen=True)
class Row:
    """What one case found in one place."""

    place: str
    case: str
    verdict: str
    text: str
    expected: str = ""
    meaning: str = ""
    source: str = ""


# What is asked


def _base(given: Given) -> list[Said]:
    """A few counted steps, for all cases of `BASE`."""
    counts: Said = (OK, "")
    first = summed = later = loss = counts
    alive: list[list[Callable[[], bool]]] = [[]]
    wanted: float | None = None

    def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.grad_fn is not None:
            storage = StorageWeakRef(output.untyped_storage())  # type: ignore[no-untyped-call]
            alive[-1].append(lambda: not storage.expired())  # type: ignore[no-untyped-call]

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
        (FAILED, f"{kept} activations or graphs of two steps are kept over {STEPS}")
        if kept
        else (OK, "what a step has made is gone two steps later"),
    ]


class _Watched(torch.autograd.Function):
    """Hands a loss on; its node lives as long as the graph that it is in."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _trains(given: Given) -> Said:
    """Right gradients, by as many forwards and backwards as asked for."""
    for step in given.train(3):
        said = _counted(step, given)
        if said[0] != OK:
            return said if given.setup.remat != "never" else (AS_BEFORE, said[1])
        right = _right(given, said[1])
        if right[0] != OK:
            return right
    return right


def _frozen(given: Given) -> Said:
    local = [p for layer in given.setup.local_layers for p in layer.parameters()]
    for step in given.train(3):
        if any(p.grad is not None and not p.requires_grad for p in local):
            return FAILED, "a frozen parameter has a gradient"
        if (said := _right(given))[0] != OK:
            return said
        del step
    return said


def _adds_up(given: Given) -> Said:
    """In a third step, and held against its own gradients, right or wrong."""
    _begin(given)
    given.step()
    once = left(given.setup)
    given.step(clean=False)
    twice = left(given.setup)
    if same(twice, {name: 2 * gradient for name, gradient in once.items()}):
        return OK, "two steps leave the sum of their gradients"
    if norm := round_norm(twice):
        return AS_BEFORE, f"two steps leave gradients of norm {norm}: the engine clips by itself"
    times = factor_of(twice, once)
    of = f"{times:.6g} times the gradients of one" if times is not None else "neither once nor twice these"
    return AS_BEFORE, f"two steps do not leave the sum of their gradients but {of}; a step must add to .grad"


def _begin(given: Given) -> None:
    """Two steps of training, and the mini-batch of the third."""
    for _ in given.train(2):
        pass
    given.draw(3)


def _scaled(given: Given) -> Said:
    """In a third step, and held against its own gradients, right or wrong."""
    _begin(given)
    given.step()
    once = left(given.setup)
    given.step(lambda *values: _SCALE * mean_square(*values))
    found = left(given.setup)
    if not same(found, {name: _SCALE * gradient for name, gradient in once.items()}):
        if norm := round_norm(found):
            return AS_BEFORE, f"all gradients are scaled down to a norm of {norm}: the engine clips by itself"
        if same(found, once):
            return AS_BEFORE, "its gradients are those of the loss function of an earlier step"
        times = factor_of(found, once)
        of = f"{times:.6g} times" if times is not None else "not by one factor"
        return AS_BEFORE, f"with the loss times {_SCALE:g} the gradients are {of} those without"
    given.step(lambda *values: float("inf") * mean_square(*values))
    if all(bool(gradient.isfinite().all()) for gradient in left(given.setup).values()):
        return FAILED, "an infinite loss leaves finite gradients: a scaler would not see the overflow"
    return OK, f"the loss times {_SCALE:g} gives gradients times {_SCALE:g}, and an overflow is seen"


def _clips(given: Given) -> Said:
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


def _evaluates_first(given: Given) -> Said:
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
        if (verdict := _right(given, "the steps after it are right"))[0] != OK:
            break
    return verdict


def _averages(given: Given) -> Said:
    """After each step batch normalization's averages are those of its micro-batches in turn, or of the
    mini-batch at once.
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
            if number == int(plain.num_batches_tracked or 0):  # else at once, which is another average
                for mine, theirs in zip(layer.buffers(), plain.buffers(), strict=True):
                    if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5):
                        return (
                            AS_BEFORE,
                            f"layer {index} has averages of other examples, or of some of them twice",
                        )
    return OK, "the averages are those of the examples, once each"


def _masks_again(given: Given) -> Said:
    """Of each input of a `Noise`, every forward has drawn the same mask; the next step draws others."""
    noises = [(i, layer) for i, layer in enumerate(given.setup.layers) if isinstance(layer, Noise)]
    local = {id(layer) for layer in given.setup.local_layers}
    earlier: dict[int, list[Tensor]] = {}
    for step in given.train(3):
        for index, noise in noises:
            for place, (inputs, mask) in enumerate(noise.drawn):
                for before, other in noise.drawn[:place]:
                    if step.number > 1 and torch.equal(inputs, before) and not torch.equal(mask, other):
                        return FAILED, f"layer {index} drew another mask when a micro-batch was recomputed"
            masks = [mask for _, mask in noise.drawn]
            known = earlier.get(index, [])
            again = bool(masks) and len(masks) == len(known) and all(map(torch.equal, masks, known))
            if again and id(noise) in local:
                return FAILED, f"layer {index} drew the masks of the step before: they are no longer random"
            earlier[index] = masks
            noise.drawn.clear()
    return OK, "every recomputation draws the mask of the forward, and every step its own"


# Models


class Skip(nn.Module):
    """A layer that passes its input on beside its output, as AmoebaNet's cells do, or joins the two."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.linear, self.joins = nn.Linear(WIDTH, WIDTH), joins

    def forward(self, value: Any) -> Any:
        if self.joins:
            return self.linear(value[0]) + value[1]
        return torch.tanh(self.linear(value)), value


class Masks(Skip):
    """A layer that makes a mask of each example, which needs no gradient, or applies it."""

    def forward(self, value: Any) -> Any:
        if self.joins:
            return self.linear(value[0] * value[1])
        return torch.tanh(self.linear(value)), value > 0


class Noise(nn.Module):
    """Dropout that remembers what came and the mask that it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[Tensor, Tensor]] = []

    def forward(self, value: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(value))
        self.drawn.append((value.detach().clone(), mask))
        return value * mask


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


MIDDLES: dict[str, Callable[[], list[nn.Module]]] = {
    "chain": lambda: [_linear(), _linear(), nn.Tanh()],
    "skip": lambda: [Skip(False), Skip(True), nn.Tanh()],
    "masks": lambda: [Masks(False), Masks(True), nn.Tanh()],
    "norm": lambda: [nn.BatchNorm1d(WIDTH), _linear(), nn.BatchNorm1d(WIDTH)],
    "noise": lambda: [Noise(), _linear(), Noise()],
}
"""What stands between the first layer of a model and the last. It is cut behind its second layer, or behind
each of the first three.
"""


class Case(NamedTuple):
    """A case.

    Args:
        name: of the failure, or of what should work
        expected: what is right, in a few words
        meaning: what a failure means for training
        source: where users met it
        ask: what is asked of an engine that was built for it
        middle: of `MIDDLES`
        shared, frozen: whether the first and last layer share a weight; which layers do not train
    """

    name: str
    expected: str
    meaning: str
    source: str = ""
    ask: Callable[[Given], Said] = _trains
    middle: str = "chain"
    remat: str = "never"
    examples: int = 2  # of a micro-batch
    ragged: int = 0  # more examples than that
    num_microbatches: int | None = None  # by default those of the variations
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
         _HUB + "pytorch/torchtitan/issues/1733", _adds_up),
    Case("clipping over stages", "one norm over all stages", "stages are scaled apart: the direction is lost",
         _HUB + "pytorch/torchtitan/issues/596", _clips),
    Case("evaluation first", "training after it is right", "validating before training spoils or ends it",
         _HUB + "pytorch/pytorch/issues/162822", _evaluates_first),
    Case("frozen stage", "gradients pass through it", "what lies before an adapter does not train",
         _HUB + "pytorch/PiPPy/issues/1122", _frozen, frozen="last stage"),
    Case("frozen first layers", "no gradient is asked of them", "the last layers cannot be fine-tuned",
         _HUB + "pytorch/pytorch/issues/153484", _frozen, frozen="first layers"),
    Case("shared weights", "each use gets the sum of both", "tied embeddings drift apart",
         _HUB + "uw-syfi/piper/issues/13", shared=True),
    Case("a skip", "both tensors bring gradients back", "residual paths do not train",
         _HUB + "pytorch/pytorch/issues/127964", middle="skip"),
    Case("masks per micro-batch", "each has its own, without gradient", "tokens get another batch's mask",
         _HUB + "pytorch/torchtitan/issues/1723", middle="masks"),
    Case("loss scaling", "every stage scales alike", "fp16 steps are wrong or skipped on one stage",
         _HUB + "NVIDIA-NeMo/Megatron-Bridge/pull/5591", _scaled),
    Case("batch norm's averages", "every example counts once", "evaluation uses wrong statistics",
         _HUB + "kakaobrain/torchgpipe/issues/14", _averages, "norm"),
    Case("remat except_last", "recomputed, with equal gradients", "memory is not what was asked for",
         remat="except_last"),
    Case("remat always", "recomputed, with equal gradients", "memory is not what was asked for",
         remat="always"),
    Case("dropout under recomputation", "the forward's mask again", "gradients are another network's",
         _HUB + "allenai/OLMo-core/pull/828", _masks_again, "noise", "always"),
    Case("batch norm, recomputed", "every example counts once", "evaluation uses wrong statistics",
         _HUB + "kakaobrain/torchgpipe/issues/14", _averages, "norm", "always"),
    Case("M < K", "one micro-batch on two stages", "few, long micro-batches hang",
         _HUB + "pytorch/torchtitan/issues/775", examples=8, num_microbatches=1),
    Case("ragged mini-batch", "2 or 3 examples each, once", "an epoch's last batch hangs or weighs more",
         _HUB + "pytorch/pytorch/issues/126600", ragged=2),
)  # fmt: skip
"""In the order in which they are asked: what is refused most comes last and costs no new processes."""
GROUPS: tuple[tuple[Case, ...], ...] = (BASE, *((case,) for case in CASES[len(BASE) :]))


def faults(rows: Sequence[Row]) -> list[Row]:
    """What is wrong, the engine's own errors first. An engine that can do nothing at all is wrong, too."""
    bad = [row for verdict in (BROKEN, FAILED) for row in rows if row.verdict == verdict]
    if not bad and not any(row.verdict == OK for row in rows):
        return [row for row in rows if row.verdict == CANNOT][:1]
    return bad


def in_place(name: str, place: str, timeout_s: float, wanted: Collection[str] = ()) -> list[Row]:
    """What the cases of these names find in a place, by default all; the first are always asked. ValueError
    where the name leads to no engine.
    """
    chosen = [
        index for index, group in enumerate(GROUPS)
        if not index or not wanted or any(case.name in wanted for case in group)
    ]  # fmt: skip
    rows: list[Row] = []
    while chosen:
        told, last, fault = _told(name, place, chosen, timeout_s)
        for _, by_rank in sorted(told.items()):
            if len(by_rank) == PLACES[place]:
                rows += _joined([found for _, found in sorted(by_rank.items())])
        if fault is not None:
            rows.append(_row(place, GROUPS[last][0], _raised(fault)))
        if fault is None or rows[0].verdict != OK:
            break
        chosen = [index for index in chosen if index > last]
    return settled(rows)


def settled(rows: Sequence[Row]) -> list[Row]:
    """Without the findings that say again what others have said."""
    if rows[0].verdict == BROKEN:
        rest = [_row(rows[0].place, case, (UNTRIED, "its step is broken")) for case in CASES[len(BASE) :]]
        return [rows[0], *rest]
    is_wrong = any(row.case in {case.name for case in BASE} and row.verdict == FAILED for row in rows)
    again = UNTRIED, "its steps are wrong without that, too"
    found = []
    for row in rows:
        verdict, text = (row.verdict, row.text) if row.verdict != AS_BEFORE else again
        if row.verdict == AS_BEFORE and not is_wrong:
            verdict, text = FAILED, row.text
        found.append(replace(row, verdict=verdict, text=text))
    return found


def _row(place: str, case: Case, said: Said) -> Row:
    return Row(place, case.name, *said, case.expected, case.meaning, case.source)


def _raised(fault: Fault) -> Said:
    return CANNOT if fault.refused else BROKEN, fault.reason.removeprefix("ValueError: ")


def _told(
    name: str, place: str, chosen: Sequence[int], timeout_s: float
) -> tuple[dict[int, dict[int, list[Row]]], int, Fault | None]:
    """What the processes find in these groups of cases, by group and rank; the last group that one has
    begun, and what ended them there.
    """
    told: dict[int, dict[int, list[Row]]] = {}
    begun = [chosen[0]]

    def hear(rank: int, news: tuple[int | None, Any]) -> None:
        index, found = news
        if index is None:
            raise ValueError(found)
        begun.append(index)
        if found is not None:
            told.setdefault(index, {})[rank] = found

    try:
        run_isolated(trial, PLACES[place], name, place, chosen, timeout_s=timeout_s, on_news=hear)
    except IsolatedError as error:
        return told, max(begun), error.fault
    return told, max(begun), None


def _joined(by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """Of each case the worst that any process found; what it says names the process if not all say so."""
    joined = []
    for rows in zip(*by_rank, strict=False):  # one without `step` says no more
        bad = [rank for rank, row in enumerate(rows) if row.verdict != OK]
        if bad and len({row.text for row in rows}) > 1:
            said = rows[bad[0]]
            joined.append(replace(said, text=f"process {bad[0]}: {said.text}"))
        else:
            joined.append(rows[-1])  # the last stage knows the loss
    return joined


# In the processes


def trial(tell: Tell, name: str, place: str, chosen: Sequence[int]) -> None:
    """What each process does: tells `(index, None)` before each of these groups and
    `(index, rows)` after it; `(None, reason)` where the name leads nowhere.
    """
    try:
        resolve(name)
    except ValueError as error:
        tell((None, str(error)))
        return
    for index in chosen:
        tell((index, None))
        rows = examine(name, GROUPS[index], place)
        tell((index, rows))
        if GROUPS[index] == BASE and rows[0].verdict != OK:
            return  # nothing else can be asked


def examine(name: str, group: tuple[Case, ...], place: str, *, raises: bool = False) -> list[Row]:
    """All findings of a group of cases in this process, the worst of all variations. Over processes what an
    engine raises is raised: the others may wait for this one; with `raises`, also in one. But what a factory
    refuses in one, all leave alone.
    """
    worst: list[Row] = []
    for variation in VARIATIONS:
        if group[0].num_microbatches is not None and variation[0] != VARIATIONS[0][0]:
            continue
        rows = _examine(name, group, place, *variation, raises)
        if len(rows) == 1 and rows[0].verdict != OK and len(group) > 1:
            return rows
        how = "" if variation == VARIATIONS[0] else f"with M = {variation[0]} in {_named(variation[1])}: "
        for index, row in enumerate(rows):
            told = row if row.verdict == OK else replace(row, text=how + row.text)
            if not worst[index:]:
                worst.append(told)
            elif _SEVERITY.index(row.verdict) < _SEVERITY.index(worst[index].verdict):
                worst[index] = told
    return worst


_SEVERITY = (BROKEN, FAILED, AS_BEFORE, UNTRIED, OK, CANNOT)
"""What is refused in one variation is no mistake, and asked in the others."""


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _examine(
    name: str, group: tuple[Case, ...], place: str, count: int, dtype: torch.dtype, raises: bool
) -> list[Row]:
    case, alone = group[0], PLACES[place] == 1
    setup, size = subject(case, () if alone else placement_of(name) or (0, 1), count, dtype)
    plain = copy.deepcopy(setup.layers)
    try:
        refused, engine = "", None
        try:
            engine = build(name, setup)
        except NoStepError as error:
            return [_row(place, case, (FAILED, str(error)))]
        except ValueError as error:
            refused = _raised(fault_of(error))[1]
        if not alone:
            said: list[str] = [""] * dist.get_world_size()
            dist.all_gather_object(said, refused)
            refused = next(filter(None, said), "")
        if refused or engine is None:
            return [_row(place, each, (CANNOT, refused)) for each in group[:1]]
        given = Given(engine, setup, plain, *drawn(size, 0, dtype), compares=case.middle != "noise")
        found = _base(given) if group == BASE else [case.ask(given)]
    except Exception as error:
        if raises or not alone:
            raise
        return [_row(place, case, _raised(fault_of(error)))]
    return [_row(place, *each) for each in zip(group, found, strict=True)]


def subject(
    case: Case, placement: tuple[int, ...] = (), count: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Setup, int]:
    """The same model in every process, and the size of a mini-batch; without a placement all of it is in
    this one.
    """
    torch.manual_seed(SEED)
    count = case.num_microbatches or count
    layers: list[nn.Module] = [_linear(), *MIDDLES[case.middle](), _linear()]
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


def _counted(step: Step, given: Given) -> Said:
    """Not of the first step, in which an engine may agree on shapes."""
    if step.number == 1:
        return OK, ""
    try:
        count, sizes = check_counts("the engine", step.counts, given.setup, given.batch)
    except RuntimeError as error:
        return FAILED, str(error).partition(": ")[2]
    text = f"each stage ran {len(count.rows)} forwards and {count.backwards} backwards"
    return OK, f"{text} of {', '.join(map(str, sorted(set(sizes))))} examples"


def _right(given: Given, said: str = "") -> Said:
    """Whether the gradients are the uncut model's; else that may be said already."""
    how, why = compared(given)
    return (OK, said or why) if how == "right" else (AS_BEFORE, why)


def _plain_loss(given: Given) -> float:
    with torch.no_grad():
        return float(mean_square(nn.Sequential(*given.plain)(given.batch), given.target))
