"""What pipelines train wrongly, as cases that an engine is asked, by the name of the failure.

Each case is what users of some engine have met; `source` is the public thread. It is asked of an engine on a
model so small that a step takes milliseconds, in one process and over two, in float64 and float32, with four
and six micro-batches, and over three or four steps with another mini-batch each and an optimizer's update
between them: what is stale, or wrong from some step on, shows only so. What is asked stands in `asks.py`.
What an engine refuses by a ValueError, or has no method for, can't be asked and is no mistake. The first
cases, `BASE`, share their steps; where these are wrong, nothing else is asked. A case in which an engine
hangs or ends its processes, or raises in one of two, costs that case alone: the next ones run in new
processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.experiments.engines.asks import (
    Masks,
    Skip,
    adds_up,
    averages,
    clips,
    evaluates_first,
    first_steps,
    frozen,
    linear,
    masks_again,
    scaled,
    trains,
)
from gpipe_bench.experiments.engines.checks import (
    BROKEN,
    CANNOT,
    FAILED,
    OK,
    SEED,
    UNTRIED,
    WIDTH,
    Given,
    Said,
    drawn,
)
from gpipe_bench.experiments.engines.isolated import Fault, IsolatedError, Tell, fault_of, run_isolated
from gpipe_bench.experiments.engines.setup import NoStepError, Setup, build, placement_of, resolve

VARIATIONS = tuple((count, dtype) for dtype in (torch.float64, torch.float32) for count in (4, 6))
"""Micro-batches and precision, in which every case is asked."""
PLACES = {"one process": 1, "two processes": 2}


@dataclass(frozen=True)
class Row:
    """Result of one case in one place."""

    place: str
    case: str
    verdict: str
    text: str
    expected: str = ""
    meaning: str = ""
    source: str = ""


MIDDLES: dict[str, Callable[[], list[nn.Module]]] = {
    "chain": lambda: [linear(), linear(), nn.Tanh()],
    "skip": lambda: [Skip(False), Skip(True), nn.Tanh()],
    "masks": lambda: [Masks(False), Masks(True), nn.Tanh()],
    "norm": lambda: [nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH)],
    "noise": lambda: [nn.Dropout(), linear(), nn.Dropout()],
}
"""Layers between the first of a model and the last. The model is cut behind its second layer, or behind
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
    ask: Callable[[Given], Said] = trains
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
"""Cases in the order in which they run: those refused most often come last and cost no new processes."""
GROUPS: tuple[tuple[Case, ...], ...] = (BASE, *((case,) for case in CASES[len(BASE) :]))


def faults(rows: Sequence[Row]) -> list[Row]:
    """Rows that are wrong, the engine's errors first. An engine that can do nothing at all is wrong, too."""
    bad = [row for verdict in (BROKEN, FAILED) for row in rows if row.verdict == verdict]
    if not bad and not any(row.verdict == OK for row in rows):
        return [row for row in rows if row.verdict == CANNOT][:1]
    return bad


def in_place(name: str, place: str, timeout_s: float, wanted: Collection[str] = ()) -> list[Row]:
    """Rows of the cases of these names in a place, by default of all; the first cases always run. ValueError
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
                rows += _joined(by_rank)
        if fault is not None:
            rows.append(_row(place, GROUPS[last][0], _raised(fault)))
        if fault is None or not are_right(rows):
            break
        chosen = [index for index in chosen if index > last]
    return settled(rows)


def are_right(rows: Sequence[Row]) -> bool:
    """Whether the first cases are, of which these are the rows or the first ones."""
    return all(row.verdict == OK for row in rows[: len(BASE)])


def settled(rows: list[Row]) -> list[Row]:
    """The rows, and those of the cases that were not asked as the first ones are wrong."""
    if are_right(rows) or rows[0].verdict == CANNOT:
        return rows
    return rows + [
        _row(rows[0].place, case, (UNTRIED, "the first steps are wrong")) for case in CASES[len(BASE) :]
    ]


def _row(place: str, case: Case, said: Said) -> Row:
    return Row(place, case.name, *said, case.expected, case.meaning, case.source)


def _raised(fault: Fault) -> Said:
    return CANNOT if fault.refused else BROKEN, fault.reason.removeprefix("ValueError: ")


def _told(
    name: str, place: str, chosen: Sequence[int], timeout_s: float
) -> tuple[dict[int, list[list[Row]]], int, Fault | None]:
    """Rows that the processes find in these groups of cases, by group; the last group that a process has
    begun, and what ended the processes there. ValueError where the name leads nowhere.
    """
    fault = None
    try:
        told = run_isolated(trial, PLACES[place], name, place, chosen, timeout_s=timeout_s)
    except IsolatedError as error:
        told, fault = error.told, error.fault
    found: dict[int, list[list[Row]]] = {}
    last = chosen[0]
    for index, rows in (news for of_rank in told for news in of_rank):
        if index is None:
            raise ValueError(rows)
        last = max(last, index)
        if rows is not None:
            found.setdefault(index, []).append(rows)
    return found, last, fault


def _joined(by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """For each case, the worst row of any process; its text names the process if not all say the same."""
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


def trial(tell: Tell, name: str, place: str, chosen: Sequence[int]) -> list[tuple[int | None, Any]]:
    """Runs in each process: tells `(index, None)` before each of these groups and `(index, rows)` after it;
    `(None, reason)` where the name leads nowhere. Returns all of it.
    """
    told: list[tuple[int | None, Any]] = []

    def say(index: int | None, what: Any) -> None:
        told.append((index, what))
        tell((index, what))

    try:
        resolve(name)
    except ValueError as error:
        say(None, str(error))
        return told
    for index in chosen:
        say(index, None)
        rows = examine(name, GROUPS[index], place)
        say(index, rows)
        if GROUPS[index] == BASE and not _everywhere(are_right(rows)):
            break
    return told


def _everywhere(is_right: bool) -> bool:
    """Whether all processes say so: one that went on alone would wait for the others."""
    said: list[bool] = [True] * dist.get_world_size()
    dist.all_gather_object(said, is_right)
    return all(said)


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


_SEVERITY = (BROKEN, FAILED, UNTRIED, OK, CANNOT)
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
        found = first_steps(given) if group == BASE else [case.ask(given)]
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
