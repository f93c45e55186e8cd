"""`check-engine`: cases in which pipelines train wrongly, by the name of the failure.

Each case is what users of some engine have met; `source` is the public thread. It is asked of an engine on a
model so small that a step takes milliseconds, in one process and over two, and what it says is held against
the uncut model. What an engine refuses by a ValueError, or has no method for, can't be asked and is no
mistake. The first cases, `BASE`, share a step; only where that one fails, nothing else can be asked. A case
in which an engine hangs or ends its processes, or raises in one of two, costs that case alone: the next ones
run in new processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.checks import (
    Count,
    check_counts,
    counted_step,
    gradient_error,
    gradients_of,
    named_parameters,
    reference,
)
from gpipe_bench.experiments.engines.isolated import Fault, IsolatedError, Tell, fault_of, run_isolated
from gpipe_bench.experiments.engines.setup import (
    Engine,
    NoStepError,
    Setup,
    build,
    clear,
    placement_of,
    resolve,
)

NUM_MICROBATCHES, WIDTH, SEED = 4, 6, 1811
PLACES = {"one process": 1, "two processes": 2}
OK, FAILED, BROKEN, CANNOT, UNTRIED = "ok", "failed", "broken", "cannot be asked", "not tried"
"""Verdicts. `broken`: it raised, hung or ended its process; `cannot be asked`: it says so itself, by a
ValueError, or has no method for it.
"""
AS_BEFORE = "as before"
"""Of a case where gradients alone are wrong, which says nothing new if they are wrong without it, too."""
_SAME = 1e-6  # two factors that differ by less are one
_SCALE = 2.0**16  # as a scaler of gradients begins with

Said = tuple[str, str]
"""A verdict, and what is said."""


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


class Given(NamedTuple):
    """An engine, what it was built from, and the uncut model: its layers and the gradients of all of them."""

    engine: Engine
    setup: Setup
    batch: Tensor
    target: Tensor
    plain: Sequence[nn.Module]
    everything: Mapping[str, Tensor]

    def step(self) -> Any:
        """One step without earlier gradients."""
        clear(self.setup.layers)
        return self.engine.step(self.batch, self.target, mean_square)

    @property
    def expected(self) -> dict[str, Tensor]:
        """The gradients that a step must leave in this process."""
        return {name: self.everything[name] for name in named_parameters(self.setup)}


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The loss: the mean over what it is given."""
    return ((output - target) ** 2).mean()


# What is asked


def _base(given: Given) -> list[Said]:
    """One counted step, for all cases of `BASE`."""
    counted, loss = counted_step(given.engine, given.setup, given.batch, given.target, mean_square)
    how, said = _compared(given)
    with torch.no_grad():
        wanted = float(mean_square(nn.Sequential(*given.plain)(given.batch), given.target))
    summed = {
        "right": (OK, "the gradients are those of the mean loss"),
        "times": (FAILED, said),
        "wrong": (UNTRIED, "its gradients are wrong in another way"),
    }
    return [
        (OK, f"{type(given.engine).__name__} has step(batch, target, loss_fn)"),
        _counts(counted, given),
        (FAILED, said) if how == "wrong" else (OK, said if how == "right" else "right but for a factor"),
        summed[how],
        _loss(loss, wanted),
    ]


def _trains(given: Given) -> Said:
    """Right gradients, by as many forwards and backwards as asked for."""
    counted, _ = counted_step(given.engine, given.setup, given.batch, given.target, mean_square)
    verdict, said = _counts(counted, given)
    return (verdict, said) if verdict != OK else _right(given, said)


def _frozen(given: Given) -> Said:
    given.step()
    given.step()
    local = [p for layer in given.setup.local_layers for p in layer.parameters()]
    if any(p.grad is not None and not p.requires_grad for p in local):
        return FAILED, "a frozen parameter has a gradient"
    return _right(given)


def _adds_up(given: Given) -> Said:
    """Held against its own gradients, right or wrong."""
    given.step()
    once = _left(given)
    given.engine.step(given.batch, given.target, mean_square)
    twice = _left(given)
    try:
        gradient_error(twice, {name: 2 * gradient for name, gradient in once.items()}, "the engine")
    except RuntimeError:
        times = _factor(twice, once)
        of = (
            f"{times:.6g} times the gradients of one" if times is not None else "neither once nor twice these"
        )
        return FAILED, f"two steps do not leave the sum of their gradients but {of}; a step must add to .grad"
    return OK, "two steps leave the sum of their gradients"


def _scaled(given: Given) -> Said:
    """Held against its own gradients, right or wrong."""
    given.step()
    once = _left(given)
    clear(given.setup.layers)
    given.engine.step(given.batch, given.target, lambda *values: _SCALE * mean_square(*values))
    found = _left(given)
    try:
        gradient_error(found, {name: _SCALE * gradient for name, gradient in once.items()}, "the engine")
    except RuntimeError as error:
        return FAILED, f"with the loss times {_SCALE:g} {str(error).partition(';')[0]}"
    return OK, f"the loss times {_SCALE:g} gives gradients times {_SCALE:g}"


def _clips(given: Given) -> Said:
    clip = getattr(given.engine, "clip", None)
    if clip is None:
        return CANNOT, "it has no method clip(max_norm)"
    given.step()
    if (verdict := _right(given))[0] != OK:
        return verdict
    norm = float(torch.cat([gradient.flatten() for gradient in given.everything.values()]).norm())
    returned = clip(norm / 4)
    found = _left(given)
    for name, wanted in given.expected.items():
        if not torch.allclose(found[name], wanted / 4, rtol=1e-4, atol=1e-12):
            times = float(found[name].norm() / (wanted / 4).norm())
            return FAILED, f"{name} is {times:.4g} times what clipping by the norm of all stages leaves"
    if returned is not None and abs(float(returned) - norm) > 1e-4 * norm:
        return FAILED, f"clip returned {float(returned):.6g}; the norm of all gradients was {norm:.6g}"
    return OK, "all gradients are scaled by the norm over all stages"


def _evaluates_first(given: Given) -> Said:
    evaluate = getattr(given.engine, "evaluate", None)
    if evaluate is None:
        return CANNOT, "it has no method evaluate(batch, target, loss_fn)"
    with torch.no_grad():
        wanted = float(mean_square(nn.Sequential(*given.plain)(given.batch), given.target))
    verdict, said = _loss(evaluate(given.batch, given.target, mean_square), wanted)
    if verdict != OK:
        return verdict, f"evaluate {said}"
    local = given.setup.local_layers
    if any(p.grad is not None for layer in local for p in layer.parameters()):
        return FAILED, "evaluate leaves gradients"
    if not all(layer.training for layer in local):
        return FAILED, "the layers stay in evaluation mode"
    given.step()
    return _right(given, "the step after it is right")


def _averages(given: Given) -> Said:
    """After one step, the first, batch normalization's averages are those of its micro-batches in turn, or of
    the mini-batch at once.
    """
    seen: dict[int, list[Tensor]] = {}
    for index, layer in enumerate(given.plain):
        if isinstance(layer, nn.BatchNorm1d):
            layer.reset_running_stats()
            layer.register_forward_pre_hook(
                lambda _, inputs, index=index: seen.setdefault(index, []).append(inputs[0].detach())
            )
    model = nn.Sequential(*given.plain)
    for part in given.batch.tensor_split(given.setup.num_microbatches):
        model(part)
    given.step()
    count = given.setup.num_microbatches
    for index in [index for stage in given.setup.local_stages for index in given.setup.partition[stage]]:
        if index not in seen:
            continue
        found, plain = (each[index].state_dict() for each in (given.setup.layers, given.plain))
        number, values = int(found["num_batches_tracked"]), torch.cat(seen[index])
        at_once = {"running_mean": 0.1 * values.mean(0), "running_var": 0.9 + 0.1 * values.var(0)}
        right = {count: plain, 1: at_once}.get(number)
        if right is None:
            return FAILED, f"layer {index} has counted {number} batches; there were {count} micro-batches"
        if not all(torch.allclose(found[name], right[name]) for name in at_once):
            return FAILED, f"layer {index} has averages of other examples, or of some of them twice"
    return OK, "the averages are those of the examples, once each"


def _masks_again(given: Given) -> Said:
    """Of each input of a `Noise`, every forward has drawn the same mask."""
    given.step()
    noises = [(i, layer) for i, layer in enumerate(given.setup.layers) if isinstance(layer, Noise)]
    for _, noise in noises:
        noise.drawn.clear()
    given.step()
    for index, noise in noises:
        for place, (inputs, mask) in enumerate(noise.drawn):
            for before, other in noise.drawn[:place]:
                if torch.equal(inputs, before) and not torch.equal(mask, other):
                    return FAILED, f"layer {index} drew another mask when a micro-batch was recomputed"
    return OK, "every recomputation draws the mask of the forward"


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
    batch_size: int = 8
    num_microbatches: int = NUM_MICROBATCHES
    shared: bool = False
    frozen: str = ""  # "first layers" or "last stage"


_HUB = "https://github.com/"
BASE = (
    Case("step", "a method step(batch, target, loss_fn)", "it is no engine"),
    Case("micro-batches", "each stage takes all forward and backward", "less is computed than is timed"),
    Case("gradients", "those of the uncut model", "another function is minimized"),
    Case("summed loss", "the mean over the mini-batch", "the learning rate is off by a factor",
         _HUB + "pytorch/torchtitan/issues/2972"),
    Case("returned loss", "the mean over the mini-batch, or None", "curves cannot be compared"),
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
         _HUB + "pytorch/torchtitan/issues/775", num_microbatches=1),
    Case("ragged mini-batch", "10 examples in 4 count once", "an epoch's last batch hangs or weighs more",
         _HUB + "pytorch/pytorch/issues/126600", batch_size=10),
)  # fmt: skip
"""In the order in which they are asked: what is refused most comes last and costs no new processes."""
GROUPS: tuple[tuple[Case, ...], ...] = (BASE, *((case,) for case in CASES[len(BASE) :]))


def examination(name: str, timeout_s: float) -> list[Row]:
    """Every case in every place. ValueError where the name leads to no engine."""
    return [row for place in PLACES for row in _in_place(name, place, timeout_s)]


def faults(rows: Sequence[Row]) -> list[Row]:
    """What is wrong, the engine's own errors first. An engine that can do nothing at all is wrong, too."""
    bad = [row for verdict in (BROKEN, FAILED) for row in rows if row.verdict == verdict]
    if not bad and not any(row.verdict == OK for row in rows):
        return [row for row in rows if row.verdict == CANNOT][:1]
    return bad


def _in_place(name: str, place: str, timeout_s: float) -> list[Row]:
    rows: list[Row] = []
    first = 0
    while first < len(GROUPS):
        told, last, fault = _told(name, place, first, timeout_s)
        for _, by_rank in sorted(told.items()):
            if len(by_rank) == PLACES[place]:
                rows += _joined([found for _, found in sorted(by_rank.items())])
        if fault is not None:
            rows.append(_row(place, GROUPS[last][0], _raised(fault)))
        if fault is None or rows[0].verdict != OK:
            break
        first = last + 1
    return settled(rows)


def settled(rows: Sequence[Row]) -> list[Row]:
    """Without the findings that say again what others have said."""
    if rows[0].verdict == BROKEN:
        rest = [_row(rows[0].place, case, (UNTRIED, "its step is broken")) for case in CASES[len(BASE) :]]
        return [rows[0], *rest]
    is_wrong = any(row.case in ("gradients", "summed loss") and row.verdict == FAILED for row in rows)
    again = UNTRIED, "its gradients are wrong without that, too"
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
    name: str, place: str, first: int, timeout_s: float
) -> tuple[dict[int, dict[int, list[Row]]], int, Fault | None]:
    """What the processes find from the `first` group of cases on, by group and rank; the last group that one
    has begun, and what ended them there.
    """
    told: dict[int, dict[int, list[Row]]] = {}
    begun = [first]

    def hear(rank: int, news: tuple[int | None, Any]) -> None:
        index, found = news
        if index is None:
            raise ValueError(found)
        begun.append(index)
        if found is not None:
            told.setdefault(index, {})[rank] = found

    try:
        run_isolated(trial, PLACES[place], name, place, first, timeout_s=timeout_s, on_news=hear)
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


def trial(tell: Tell, name: str, place: str, first: int) -> None:
    """What each process does: tells `(index, None)` before each group from the `first` on and
    `(index, rows)` after it; `(None, reason)` where the name leads nowhere.
    """
    try:
        resolve(name)
    except ValueError as error:
        tell((None, str(error)))
        return
    for index in range(first, len(GROUPS)):
        tell((index, None))
        rows = examine(name, GROUPS[index], place)
        tell((index, rows))
        if GROUPS[index] == BASE and rows[0].verdict != OK:
            return  # nothing else can be asked


def examine(name: str, group: tuple[Case, ...], place: str) -> list[Row]:
    """All findings of a group of cases in this process. Over processes what an engine raises is raised: the
    others may wait for this one. But what a factory refuses in one, all leave alone.
    """
    case, alone = group[0], PLACES[place] == 1
    setup, batch, target = subject(case, () if alone else placement_of(name) or (0, 1))
    plain = copy.deepcopy(setup.layers)
    whole = replace(setup, layers=plain, group=None)
    everything = {} if case.middle == "noise" else reference(whole, batch, target, mean_square)
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
            return [_row(place, case, (CANNOT, refused))]
        given = Given(engine, setup, batch, target, plain, everything)
        found = _base(given) if group == BASE else [case.ask(given)]
    except Exception as error:
        if not alone:
            raise
        return [_row(place, case, _raised(fault_of(error)))]
    return [_row(place, *each) for each in zip(group, found, strict=True)]


def subject(case: Case, placement: tuple[int, ...] = ()) -> tuple[Setup, Tensor, Tensor]:
    """The same model and mini-batch in every process; without a placement all of it is in this one."""
    torch.manual_seed(SEED)
    layers: list[nn.Module] = [_linear(), *MIDDLES[case.middle](), _linear()]
    for layer in layers:
        layer.double()
    if case.shared:
        layers[-1].weight = layers[0].weight
    ends = (0, 1, 2, 3, 5) if len(placement) == 4 else (0, 2, 5)
    spans = tuple(range(*each) for each in pairwise(ends))
    still = {"": (), "first layers": range(3), "last stage": spans[-1]}[case.frozen]
    for index in still:
        layers[index].requires_grad_(False)
    batch, target = (torch.randn(case.batch_size, WIDTH, dtype=torch.float64) for _ in range(2))
    return Setup(
        layers, spans, case.num_microbatches, case.remat, torch.device("cpu"),
        dist.group.WORLD if placement else None, placement if len(placement) > 2 else (),
    ), batch, target  # fmt: skip


# Judging


def _counts(counted: Mapping[int, Count], given: Given) -> Said:
    try:
        count, sizes = check_counts("the engine", counted, given.setup, given.batch)
    except RuntimeError as error:
        return FAILED, str(error).partition(": ")[2]
    text = f"each stage ran {len(count.rows)} forwards and {count.backwards} backwards"
    return OK, f"{text} of {', '.join(map(str, sorted(set(sizes))))} examples"


def _left(given: Given) -> dict[str, Tensor]:
    """Copies of the gradients that a step has left; zeros where there is none."""
    parameters = named_parameters(given.setup)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}


def _right(given: Given, said: str = "") -> Said:
    """Whether the gradients are the uncut model's; else that may be said already."""
    how, why = _compared(given)
    return (OK, said or why) if how == "right" else (AS_BEFORE, why)


def _compared(given: Given) -> tuple[str, str]:
    """`right`; `times` where all gradients are as many times the uncut model's; else `wrong`; and why."""
    found: dict[str, Tensor] = {}
    try:
        found = gradients_of(named_parameters(given.setup), "the engine")
        share = gradient_error(found, given.expected, "the engine")
    except RuntimeError as error:
        return (_of_which(given, found) if found else None) or ("wrong", str(error))
    return "right", f"all {len(found)} are the plain model's, to {share:.0e}"


def _of_which(given: Given, found: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Which micro-batches count how often, where the gradients are sums of theirs with other factors."""
    count, batch, target = given.setup.num_microbatches, given.batch, given.target
    alone = replace(given.setup, layers=given.plain, num_microbatches=1)
    parts = [
        reference(alone, *part, mean_square)
        for part in zip(batch.tensor_split(count), target.tensor_split(count), strict=True)
    ]
    mine = torch.cat([found[name].flatten() for name in found])
    theirs = torch.stack([torch.cat([each[name].flatten() for name in found]) for each in parts], dim=1)
    theirs *= torch.tensor([len(part) / len(batch) for part in batch.tensor_split(count)])
    factors = torch.linalg.lstsq(theirs, mine[:, None]).solution.flatten()
    if not torch.allclose(theirs @ factors, mine, rtol=_SAME, atol=_SAME * float(theirs.abs().max())):
        return None
    times = [round(float(factor), 6) for factor in factors]
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


def _factor(found: Mapping[str, Tensor], once: Mapping[str, Tensor]) -> float | None:
    """What all gradients have been multiplied with, None if it is not one number."""
    mine, theirs = (torch.cat([each[name].flatten() for name in once]) for each in (found, once))
    times = float(mine @ theirs / (theirs @ theirs))
    return times if torch.allclose(mine, times * theirs, atol=_SAME * float(theirs.abs().max())) else None


def _loss(found: Any, wanted: float) -> Said:
    if found is None:
        return OK, "not returned by this process, which is allowed"
    value = float(found.detach() if isinstance(found, Tensor) else found)
    if abs(value - wanted) > _SAME * abs(wanted):
        return FAILED, f"returned {value:.6g}; the mean over the mini-batch is {wanted:.6g}"
    return OK, "what it returns is the mean over the mini-batch"
