"""The answer to a request: the best few ways to train a model, predicted, and what less memory would cost.

    found = plan(model_of("gpt2", 64), request)
    found.best.step_s, found.best.candidate, found.script()

The layers are timed once, or laid under a roofline; then everything is searched, and the few that are left
are laid out by the replay with their ranges and parts. `costs` may be given instead, such as those of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import inf
from typing import Any

from gpipe_bench.experiments.planning.accelerators import accelerator
from gpipe_bench.experiments.planning.costs.costs import Costs
from gpipe_bench.experiments.planning.costs.measured import as_measured
from gpipe_bench.experiments.planning.costs.timed import Timing
from gpipe_bench.experiments.planning.likely import worth
from gpipe_bench.experiments.planning.models import Model
from gpipe_bench.experiments.planning.predict import predict
from gpipe_bench.experiments.planning.prediction import Prediction
from gpipe_bench.experiments.planning.request import MEASURED, Request
from gpipe_bench.experiments.planning.script import NAME, command, script
from gpipe_bench.experiments.planning.searching.found import Found
from gpipe_bench.experiments.planning.searching.grids import Grid
from gpipe_bench.experiments.planning.searching.search import KEPT, Search
from gpipe_bench.experiments.planning.searching.shortfall import nothing_fits, smallest
from gpipe_bench.experiments.planning.searching.space import Space, Way, check, sizes_of

SHOWN = 5
"""Ways that are printed."""
CAPS = (0.85, 0.7, 0.55, 0.4, 0.3, 0.2)
"""Of the memory, under which the fastest ways are cut again for the frontier."""

Progress = Callable[[str, int, int], None]
"""Told what is done, how many of it, of how many."""


@dataclass(frozen=True)
class Point:
    """A way on the frontier: nothing that was looked at is faster with as little memory."""

    peak_bytes: int
    step_s: float
    prediction: Prediction


@dataclass(frozen=True)
class Plan:
    """What was found for a request.

    Args:
        model, request: what was asked
        predictions: the best of each grid and schedule, the fastest first
        frontier: from little memory to much
        tried, skipped: ways that were looked at, and that could not be among the best
    """

    model: Model
    request: Request
    predictions: tuple[Prediction, ...]
    frontier: tuple[Point, ...]
    tried: int
    skipped: int

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    def script(self) -> str:
        """Python that trains with the best one."""
        return script(self.model, self.best.candidate, self.request)

    def command(self, name: str = NAME) -> str:
        """The line that starts it."""
        return command(self.request, name)

    def describe(self) -> dict[str, Any]:
        """As plain data."""
        request = self.request
        return {
            "model": self.model.name,
            "num_parameters": self.model.num_parameters,
            "accelerators": request.accelerators,
            "memory_bytes": request.memory_bytes,
            "batch_size": request.batch_size,
            "optimizer": request.optimizer,
            "precision": request.precision,
            "device_type": request.device_type,
            "link": request.link.name,
            "between": request.between.name if request.between else None,
            "hosts": request.hosts,
            "compiled": request.compiled,
            "tried": self.tried,
            "skipped": self.skipped,
            "plans": [
                each.describe() | {"slower": each.step_s / self.best.step_s - 1} for each in self.predictions
            ],
            "frontier": [
                {
                    "peak_bytes": point.peak_bytes,
                    "step_s": point.step_s,
                    **point.prediction.candidate.describe(),
                }
                for point in self.frontier
            ],
            "command": self.command(),
            "script": self.script(),
        }


def plan(
    model: Model,
    request: Request,
    *,
    space: Space | None = None,
    costs: Costs | None = None,
    shown: int = SHOWN,
    timing: Timing | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Plan:
    """The best ways to train `model` as `request` says.

    Args:
        model: as `models.model_of` builds it, for the request's mini-batch.
        request: machines and a way to train.
        space: what may be chosen; everything but tensor parallelism if not given.
        costs: of the layers; timed here or by a roofline, as the request's device type says, if not given.
        shown: ways to predict, of which the first is the plan.
        timing: how layers are timed, where they are.
        progress: told how far it is.

    Raises:
        ValueError: nothing fits, or nothing is to be tried; the message says the smallest peak, where it is
            and what would help, or what cannot be divided. An unknown accelerator.
    """
    model = as_on(model, request)
    search = search_for(model, request, space=space, costs=costs, timing=timing, progress=progress)
    found = search.run(max(KEPT, shown))
    if not found:
        raise ValueError(_too_large(model, search.request, search.space))
    predictions = tuple(sorted((predicted(each, search) for each in found), key=lambda each: each.step_s))
    return Plan(
        model,
        search.request,
        predictions[:shown],
        frontier(found, predictions, search),
        search.tried,
        search.skipped,
    )


def search_for(
    model: Model,
    request: Request,
    *,
    space: Space | None = None,
    costs: Costs | None = None,
    timing: Timing | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Search:
    """The search among all that may be chosen, with the costs of every size that may fit; arguments and
    errors as of `plan`, but that it is not yet known whether a cut fits.
    """
    model, space = as_on(model, request), space or Space()
    if why_whole(model, request):
        space = replace(space, sharded=False)
    num_layers = len(model.layers)
    check(request, space, num_layers)
    for ranks in space.tp or (request.accelerators,):
        if ranks > 1 and (why := why_whole(model, request)):
            raise ValueError(f"--tp {ranks}: no layer can be divided, {why}; leave --tp out")
        model.check_divisible(ranks)
    least = smallest(model, request, space, request.memory_bytes)
    if least is None or least.peak > request.memory_bytes:
        raise ValueError(_too_large(model, request, space))
    if costs is None:
        sizes = sizes_of(request, space, num_layers)
        progress("layers", 0, len(sizes))
        few = list(takewhile(partial(_may_fit, model, request), sizes))
        costs = costs_for(
            model,
            request,
            few,
            replace(timing or Timing(), sharded=space.sharded, worth=partial(worth, request)),
        )
    return Search(costs, as_measured(request, costs), space, model.ties, partial(progress, "ways"))


def as_on(model: Model, request: Request) -> Model:
    """The model with the attention of the request's accelerator, by which its layers are profiled."""
    if request.device_type == MEASURED:
        return model
    return replace(model, attention=accelerator(request.device_type, request.precision).attention)


def why_whole(model: Model, request: Request) -> str:
    """Why the engine divides no parameters of this model, neither over fsdp nor over tp; empty if it does."""
    if model.ties:
        return "since layers share a weight"
    return "since compiled layers keep their parameters whole" if request.compiled else ""


def costs_for(model: Model, request: Request, sizes: Sequence[int], timing: Timing | None = None) -> Costs:
    """Measured on this machine's device, or by a roofline of the one that is asked for."""
    if request.device_type == MEASURED:
        from gpipe_bench.experiments.planning.costs.timed import timed

        return timed(model, request, sizes, timing or Timing())
    from gpipe_bench.experiments.planning.costs.roofline import by_roofline

    return by_roofline(model, request, sizes)


def predicted(found: Found, search: Search) -> Prediction:
    """A way that was found, laid out by the replay; the bytes are those that the search found room for."""
    prediction = predict(found.candidate, replace(search.costs, profiles=None), search.request)
    return replace(
        prediction,
        peak_bytes=tuple(each.peak for each in found.memory),
        peak_when=tuple(each.when for each in found.memory),
    )


def frontier(found: Sequence[Found], predictions: Sequence[Prediction], search: Search) -> tuple[Point, ...]:
    """The fastest steps under less and less memory, of the ways that were found and with fewer examples.

    `predictions` are those of what was found: by the replay steps and their order differ a little.
    """
    every = list(found)
    request = search.request
    ways = [_way(each, request) for each in found[:4]]
    smaller = [
        replace(way, num_microbatches=count, microbatch_size=size)
        for way in ways[:2]
        for size in search.costs.sizes
        if size < way.microbatch_size
        and (count := request.batch_size // way.grid.replicas // size) * size * way.grid.replicas
        == request.batch_size
    ]
    for share in CAPS:
        cap, least_s = int(share * max(each.peak for each in found)), inf
        for way in dict.fromkeys([*ways, *smaller]):
            # What is slower under this cap is asked again under the next one, which it may keep.
            other = search.best_of(way, 50_000, cap, below_s=least_s)
            if other is not None:
                every.append(other)
                least_s = other.step_s
    every.sort(key=lambda each: (each.step_s, each.peak))
    kept: list[Found] = []
    for each in every:
        if not kept or each.peak < kept[-1].peak:
            kept.append(each)
    known = {each.candidate: each for each in predictions}
    known |= {each.candidate: predicted(each, search) for each in kept if each.candidate not in known}
    points = sorted(
        (Point(each.peak, each.step_s, each) for each in known.values()),
        key=lambda point: (point.peak_bytes, point.step_s),
    )
    return tuple(
        point
        for index, point in enumerate(points)
        if all(other.step_s > point.step_s for other in points[:index])
    )


def _way(found: Found, request: Request) -> Way:
    candidate = found.candidate
    return Way(
        Grid(candidate.num_workers, candidate.dp, candidate.fsdp, candidate.fsdp_level, candidate.tp),
        candidate.schedule, candidate.stages_per_worker, candidate.num_microbatches,
        candidate.microbatch_size(request.batch_size),
    )  # fmt: skip


def _may_fit(model: Model, request: Request, size: int) -> bool:
    """Whether no single layer needs more than there is for a micro-batch of that size."""
    profile = model.profile_of(size, request.precision, compiled=request.compiled)
    return all(
        layer.inputs.num_bytes + layer.free.forward_peak <= request.memory_bytes for layer in profile.layers
    )


def _too_large(model: Model, request: Request, space: Space) -> str:
    least = smallest(model, request, space)
    assert least is not None  # `check` has found ways
    if least.peak <= request.memory_bytes:
        return (
            f"no schedule of {', '.join(space.schedules)} fits, though {least.peak / 2**30:.2f} GiB would do "
            f"under {least.schedule}: allow {least.schedule} or more re-materialization"
        )
    return nothing_fits(model, request, space, least)
