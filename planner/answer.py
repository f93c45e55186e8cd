"""The answer to a request: the best few ways to train a model, predicted.

    found = plan(model_of("gpt2", 64), request)
    found.best.step_s, found.best.candidate, found.script()

The layers are timed once, or laid under a roofline; then everything is searched, and the few that are left
are laid out by the replay with their ranges and parts. The best one is also a script that trains with it, and
settings for other engines (`formats`).
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from gpipe_bench.pipeline.plan.links import LINKS
from gpipe_bench.pipeline.plan.partition import Partition, partition

from .accelerators import accelerator
from .candidate import Prediction, Way
from .costs import Costs
from .formats import FORMATS, NAME, Written, as_run, command, written
from .measured import ROUNDS, timed
from .memory import Room, Rooms
from .model import Model
from .predict import Layout, predict
from .request import MEASURED, Request, Space, check, splits_some, ways
from .roofline import by_roofline
from .search import KEPT, Found, Search
from .steps import filled, moved

SHOWN = 5
"""Number of ways that are printed."""

Progress = Callable[[str, int, int], None]
"""Callback that gets the name of the current work, how many parts are done, and how many there are."""


@dataclass(frozen=True)
class Plan:
    """The answer to a request: the best ways to train.

    Args:
        model, request: what was asked
        predictions: the best of each grid and schedule, the fastest first
        tried, skipped: ways that were looked at, and that could not be among the best
        costs: of the layers
    """

    model: Model
    request: Request
    predictions: tuple[Prediction, ...]
    tried: int
    skipped: int
    costs: Costs = field(repr=False, compare=False)

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    def script(self) -> str:
        """Python code that trains with the best plan."""
        return self.written().text

    def as_run(self, form: str = "script") -> Prediction:
        """The best plan as a format runs it, predicted again where that differs; ValueError, with what to ask
        instead, if the format can't run the plan or lacks memory for it.
        """
        candidate, request = as_run(form, self.model, self.best.candidate, self.request)
        halves = [each.gathers_half(candidate.grid.fsdp) for each in (request, self.request)]
        if candidate == self.best.candidate and halves[0] == halves[1]:
            return self.best
        found = predict(candidate, self.costs, request)
        if found.peak > request.usable_bytes:
            raise ValueError(
                f"--format {form} runs this plan otherwise ({', '.join(dict.fromkeys(candidate.remat))} "
                f"recomputed{', autocast' * request.autocast}), which needs {found.peak / 2**30:.1f} GiB; "
                "give another --format, --pp or --num-microbatches"
            )
        return found

    def written(self, form: str = "script", name: str = NAME) -> Written:
        """The best plan in a format of `formats.FORMATS`, for a file `name`. Errors as in `as_run`."""
        return written(form, self.model, self.best.candidate, self.request, name)

    def forms(self) -> tuple[str, ...]:
        """The formats that can express the best plan."""
        found = []
        for form in FORMATS:
            with suppress(ValueError):
                self.written(form)
                found.append(form)
        return tuple(found)

    def command(self, name: str = NAME) -> str:
        """The command line that starts the training."""
        return command(self.request, name, self.best.candidate.grid.accelerators)

    def describe(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        asked = (
            "accelerators", "memory_bytes", "batch_size", "optimizer", "precision", "device_type", "hosts",
            "compiled",
        )  # fmt: skip
        request = self.request
        return {
            "model": self.model.name,
            "num_parameters": self.model.num_parameters,
            **{name: getattr(request, name) for name in asked},
            "reserve_bytes": request.held_back_bytes,
            "link": request.link.name,
            "between": request.between.name if request.between else None,
            "tried": self.tried,
            "skipped": self.skipped,
            "plans": [e.describe() | {"slower": e.step_s / self.best.step_s - 1} for e in self.predictions],
            "command": self.command(),
            "cards": request.cards_per_host,
        }


def plan(
    model: Model,
    request: Request,
    *,
    space: Space | None = None,
    costs: Costs | None = None,
    shown: int = SHOWN,
    rounds: int = ROUNDS,
    shown_rounds: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Plan:
    """The best ways to train `model` as `request` says. ValueError where nothing fits or is to be tried, with
    the smallest peak, where it is and what would help, or what cannot be divided; for an unknown accelerator.

    Args:
        model: as `model.model_of` builds it, for the request's mini-batch.
        request: machines and a way to train.
        space: what may be chosen; everything but tensor parallelism if not given.
        costs: of the layers; timed here or by a roofline, as the request's device type says, if not given.
        shown: ways to predict, of which the first is the plan.
        rounds, shown_rounds: of steps in which layers are timed, where they are; whether each is announced.
        progress: told how far it is.
    """
    model, given = as_on(model, request), space or Space()
    space = on_engine(model, request, given)
    check(request, space, len(model.layers))
    for ranks in space.tp or (request.accelerators,):
        model.check_divisible(ranks)
    # Before layers are timed for minutes. Otherwise the search says whether there is a cut that fits.
    if costs is None and request.device_type == MEASURED:
        _least_that_fits(model, request, space, given)
    if costs is None:
        sizes = sorted({way.microbatch_size for way in ways(request, space, len(model.layers))})
        progress("layers", 0, len(sizes))
        few = sizes[: bisect(sizes, False, key=lambda size: not _may_fit(model, request, space, size))]
        if not few:
            raise _too_large(model, request, given)
        if request.device_type == MEASURED:
            costs = timed(model, request, few, rounds, sharded=space.sharded, shown=shown_rounds)
        else:
            costs = by_roofline(model, request, few)
    if costs.link is not None and request.link == LINKS["loopback"]:  # which was timed, too
        request = replace(request, link=costs.link)
    search = Search(costs, request, space, model.ties_over, partial(progress, "ways"))
    found = search.run(max(KEPT, shown))
    if not found:  # the search looks at good cuts alone
        least = _least_that_fits(model, request, space, given)
        found = (replace(least, step_s=search.step_s(least.candidate)),)
    best = sorted((predicted(each, search) for each in found), key=lambda each: (each.step_s, each.peak))
    parts = [Layout(e.candidate, costs, search.request).parts_s(e.step_s) for e in best[:shown]]
    predictions = tuple(replace(each, parts_s=own) for each, own in zip(best, parts, strict=False))
    return Plan(model, search.request, predictions, search.tried, search.skipped, costs)


def as_on(model: Model, request: Request) -> Model:
    """The model with the attention of the request's accelerator, by which its layers are profiled."""
    if request.precision == "bfloat16-pure":
        model = model.in_half()
    if request.device_type == MEASURED:
        return model
    return replace(model, attention=accelerator(request.device_type, request.precision).attention)


def predicted(found: Found, search: Search) -> Prediction:
    """A way that was found, laid out by the replay, without its parts; the bytes are those that the search
    found room for.
    """
    prediction = predict(found.candidate, replace(search.costs, profiles=None), search.request, parts=False)
    return replace(
        prediction,
        peak_bytes=tuple(each.peak for each in found.memory),
        peak_when=tuple(each.when for each in found.memory),
        provenance={**prediction.provenance, "peak": _held(found, search.request)},
    )


def _held(found: Found, request: Request) -> str:
    """Says in words what the fullest worker holds at its peak."""
    worst = max(found.memory, key=lambda each: each.peak)
    parts = {
        "float32 weights": worst.parameters,
        "gradients": worst.gradients,
        "state of the optimizer": worst.optimizer_state,
        "messages and inputs": worst.boundary,
        "graphs": worst.activations,
        "what an action needs": worst.transients + worst.buffers,
    }
    words = ", ".join(f"{what} {size / 2**30:.2f}" for what, size in parts.items())
    copies = f"; each graph keeps a copy in {request.precision} of the weights that it multiplies by"
    return f"{words} GiB{copies * (request.precision != 'float32')}"


def _may_fit(model: Model, request: Request, space: Space, size: int) -> bool:
    """Whether every layer by itself fits into memory with a micro-batch of that size."""
    ranks = max((n for n in space.tp or (1,) if n == 1 or model.is_divisible(n)), default=1)
    sharded = space.sharded and request.gathers_half(request.accelerators)
    with torch.no_grad():  # no backward, which profiles for another purpose would have
        profile = model.changed().profile_of(size, request.precision, tp=ranks, sharded=sharded)
    needed = (layer.inputs.num_bytes + layer.free.forward_peak for layer in profile.layers)
    return max(needed) <= request.usable_bytes


def _least_that_fits(model: Model, request: Request, space: Space, given: Space) -> Found:
    """A way that fits, without a cost; ValueError, saying what would help in the `given` space, for none."""
    least = smallest(model, request, space, request.usable_bytes)
    if least is None or least.peak > request.usable_bytes:
        raise _too_large(model, request, given)
    return least


def _too_large(model: Model, request: Request, space: Space) -> ValueError:
    """The `ValueError` for a request under which nothing fits."""
    least = smallest(model, request, space)
    assert least is not None  # `check` has found ways
    return ValueError(nothing_fits(model, request, space, least))


# The smallest peak there is, and what would help where that is still too much: for each grid, the cut whose
# fullest worker is smallest, at the smallest micro-batches. No layer has to be timed. So does `plan --bytes`.

GIB = 2**30
MOST_LAYERS = 256
"""Longest model whose cuts are searched by their peaks; longer ones are cut by what their layers hold."""
LOOKED_AT = 6
"""Number of ways, those with the smallest peaks when cut evenly, whose cuts are searched further."""


def on_engine(model: Model, request: Request, space: Space) -> Space:
    """The space without what can't run (for a plan on this engine, on it). ValueError for such a tp."""
    space = replace(space, least_examples=model.least_examples)
    if not _is_here(request):
        return replace(space, sharded_stages=space.sharded_stages and not model.ties)
    ranks = max(space.tp or (1,))
    if ranks > 1 and model.by_megatron:
        raise ValueError(
            f"--tp {ranks}: this engine divides no layer of {model.name}; leave --tp out, or name an "
            "accelerator with --device-type and give --format megatron"
        )
    return replace(space, sharded=space.sharded and not model.ties)


def _is_here(request: Request) -> bool:
    """Whether this engine is to run the plan: formats of other engines are for named accelerators."""
    return not request.accelerated or request.autocast


def smallest(model: Model, request: Request, space: Space, enough: int = 0) -> Found | None:
    """The smallest peak of all ways, each with its smallest micro-batches, or the first of at most `enough`
    bytes; None where there is no way. Each way is cut evenly, the LOOKED_AT with the smallest peaks then
    better. Each worker recomputes what needs least of what the space allows.
    """
    space = on_engine(model, request, space)
    profiles = partial(model.profile_of, precision=request.precision)
    room = Rooms(profiles, request, model.ties_over, split=splits_some(request, space))
    last = {(w.grid, w.schedule, w.stages_per_worker): w for w in ways(request, space, len(model.layers))}
    least = {way.grid: room(way).least_bytes() for way in last.values()}
    evens: list[_Cuts] = []
    # What holds least between steps comes first, and of its schedules those that need few graphs.
    order = sorted(last.values(), key=lambda way: (least[way.grid], -way.grid.pp, way.schedule != "1f1b"))
    for way in order:
        if evens and least[way.grid] >= min(each.fullest for each in evens):
            continue
        evens.append(_Cuts(room(way), way, space.remats))
        if evens[-1].fullest <= enough and (found := evens[-1].found()).peak <= enough:
            return found
    looked_at = sorted(evens, key=lambda each: each.fullest)[:LOOKED_AT]
    for each in looked_at:
        each.improve()
    best: Found | None = None
    for each in sorted(looked_at, key=lambda each: each.fullest):
        if best is None or each.fullest < best.peak:
            best = min(filter(None, (best, each.found())), key=lambda found: found.peak)
    return best


class _Cuts:
    """The cuts of one way by their peaks: an even one, then better ones; messages are counted of the last."""

    def __init__(self, room: Room, way: Way, remats: tuple[str, ...]) -> None:
        self.room, self.way, self.remats = room, way, remats
        self.homes = tuple(room.schedule.stages_of(worker) for worker in range(way.grid.pp))
        held = [4 * e.parameter_bytes + e.first.kept_inside + e.outputs.num_bytes for e in room.layers]
        self.cut = partition(held, room.schedule.num_stages)

    def least(self, worker: int, stages: tuple[range, ...]) -> tuple[int, str]:
        """The smallest peak of a worker with these stages, and the recomputation that gives it."""
        every = [(self.room.memory(worker, stages, (r,) * len(stages)).peak, r) for r in self.remats]
        return min(every, key=lambda each: each[0])

    def peaks(self, cut: Partition) -> list[int]:
        return [self.least(worker, tuple(cut[s] for s in mine))[0] for worker, mine in enumerate(self.homes)]

    @property
    def fullest(self) -> int:
        return max(self.peaks(self.cut))

    def found(self) -> Found:
        """The cut, with its messages."""
        again: dict[int, str] = {}
        for worker, mine in enumerate(self.homes):
            again |= dict.fromkeys(mine, self.least(worker, tuple(self.cut[stage] for stage in mine))[1])
        remat = tuple(again[stage] for stage in range(len(self.cut)))
        return Found(self.way.candidate(self.cut, remat), self.room.counted(self.cut, remat))

    def improve(self) -> None:
        """Lowers the fullest worker's peak; several stages of a worker exchange a layer at a time."""
        layers = len(self.room.layers)
        if len(self.cut) == layers or layers > MOST_LAYERS:
            return
        if self.room.schedule.placement:
            while (better := self._moved()) is not None:
                self.cut = better
            return

        def peak(stage: int, start: int, stop: int) -> int:
            return self.least(stage, (range(start, stop),))[0]

        cut = filled(peak, layers, len(self.cut), 1e-9)
        self.cut = min(self.cut, cut or self.cut, key=lambda each: max(self.peaks(each)))

    def _moved(self) -> Partition | None:
        peaks = self.peaks(self.cut)
        worst = self.homes[peaks.index(max(peaks))]
        moves = [move for stage in worst for move in ((stage, 1), (stage + 1, -1))]
        others = filter(None, (moved(self.cut, *move) for move in moves if 0 < move[0] < len(self.cut)))
        best = min(others, key=lambda each: max(self.peaks(each)), default=self.cut)
        return best if max(self.peaks(best)) < max(peaks) else None


def nothing_fits(model: Model, request: Request, space: Space, least: Found, *, as_one: bool = False) -> str:
    """One line: the smallest peak, its place, and the remedies; with `as_one` for one pipeline over all."""
    needed = math.ceil((least.peak + request.held_back_bytes) / GIB * 100) / 100
    helps = [*_remedies(model, request, space, as_one), f"--memory-gib {needed:g}"]
    held = f", {request.held_back_bytes / GIB:g} of them held back (--reserve-gib)"
    return (
        f"{model.name} does not fit: the smallest peak is {least.peak / GIB:.2f} GiB, {least.where()}; there "
        f"are {request.memory_bytes / GIB:g} GiB{held * bool(request.held_back_bytes)}. What would do: "
        + ", or ".join(helps)
    )


def _remedies(model: Model, request: Request, space: Space, as_one: bool) -> Iterator[str]:
    """Yields single changes that make the model fit, as command-line options; given options come first."""

    def fits(within: Space = space, **changes: Any) -> bool:
        changed = replace(request, **changes)
        least = smallest(model, changed, within, changed.usable_bytes)
        return least is not None and least.peak <= changed.usable_bytes

    every = Space()
    given: dict[str, dict[str, Any]] = {"--num-microbatches": {"microbatches": None}}
    if not as_one:
        given |= {
            "--no-fsdp": {"sharded": True},
            "--pp": {"pp": None},
            "--schedule": {"schedules": space.possible},
            "--tp": {"tp": every.tp},
        }
    for option, change in given.items():
        within = replace(space, **change)
        if within != space and fits(within):
            yield f"no {option}"
    divides = space.tp == every.tp and not as_one and not (_is_here(request) and model.by_megatron)
    wider = (n for n in (2, 4, 8) if divides and model.is_divisible(n) and fits(replace(space, tp=(n,))))
    yield from (f"--tp {ranks}" for ranks in islice(wider, 1))
    if as_one and "always" not in space.remats and fits(replace(space, remats=("always",))):
        yield "--remat always"
    larger = (times * request.accelerators for times in (2, 4, 8))
    enough = (n for n in larger if fits(replace(space, pp=(n,)) if as_one else space, accelerators=n))
    yield from (f"--accelerators {number}" for number in islice(enough, 1))
    is_timed = request.device_type == MEASURED and not as_one  # in float32 alone
    has_bfloat16 = request.device_type == MEASURED or accelerator(request.device_type).bfloat16
    half = "bfloat16" if has_bfloat16 else "float16"
    if request.precision == "float32" and not is_timed and fits(precision=half):
        yield f"--precision {half}"
    if request.optimizer != "sgd" and fits(optimizer="sgd"):
        yield "--optimizer sgd"
