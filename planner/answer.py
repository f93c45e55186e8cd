"""The answer to a request: the best few ways to train a model, predicted.

    found = plan(model_of("gpt2", 64), request)
    found.best.step_s, found.best.candidate, found.script()

The layers are timed once, or laid under a roofline; then everything is searched, and the few that are left
are laid out by the replay with their ranges and parts. `costs` may be given instead, such as those of a file.

The best one is also a script that trains with it, and settings for other engines (`formats`).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gpipe_bench.planner.accelerators import accelerator
from gpipe_bench.planner.candidate import Prediction
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.formats import FORMATS, NAME, Written, as_run, command, written
from gpipe_bench.planner.infeasible import nothing_fits, on_engine, smallest
from gpipe_bench.planner.measured import ROUNDS, as_measured
from gpipe_bench.planner.model import Model
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.request import MEASURED, Request, Space, check, sizes_of, splits_some
from gpipe_bench.planner.search import KEPT, Found, Search

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
        """Returns the best plan as a format of `formats.FORMATS` runs it, predicted again where that differs.
        Raises ValueError, with what to ask instead, if the format can't run the plan or lacks memory for it.
        """
        candidate, request = as_run(form, self.model, self.best.candidate, self.request)
        halves = [each.gathers_half(candidate.fsdp) for each in (request, self.request)]
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
        """Writes the best plan in a format of `formats.FORMATS`, for a file `name`. Errors as in `as_run`."""
        return written(form, self.model, self.best.candidate, self.request, name)

    def forms(self) -> tuple[str, ...]:
        """The formats that can express the best plan."""
        found = []
        for form in FORMATS:
            try:
                self.written(form)
            except ValueError:
                continue
            found.append(form)
        return tuple(found)

    def command(self, name: str = NAME) -> str:
        """The command line that starts the training."""
        return command(self.request, name, self.best.candidate.accelerators)

    def describe(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        request = self.request
        return {
            "model": self.model.name,
            "num_parameters": self.model.num_parameters,
            "accelerators": request.accelerators,
            "memory_bytes": request.memory_bytes,
            "reserve_bytes": request.held_back_bytes,
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
    """The best ways to train `model` as `request` says.

    Args:
        model: as `model.model_of` builds it, for the request's mini-batch.
        request: machines and a way to train.
        space: what may be chosen; everything but tensor parallelism if not given.
        costs: of the layers; timed here or by a roofline, as the request's device type says, if not given.
        shown: ways to predict, of which the first is the plan.
        rounds, shown_rounds: of steps in which layers are timed, where they are; whether each is announced.
        progress: told how far it is.

    Raises:
        ValueError: nothing fits, or nothing is to be tried; the message says the smallest peak, where it is
            and what would help, or what cannot be divided. An unknown accelerator.
    """
    model = as_on(model, request)
    search = search_for(
        model, request, space=space, costs=costs, rounds=rounds, shown_rounds=shown_rounds, progress=progress
    )
    found = search.run(max(KEPT, shown))
    if not found:  # the search looks at good cuts alone
        least = smallest(model, request, search.space, request.usable_bytes)
        if least is None or least.peak > request.usable_bytes:
            raise ValueError(_too_large(model, request, space or Space()))
        step_s = search.step_s(least.way, least.candidate.cut, least.candidate.remat)
        found = (replace(least, step_s=step_s),)
    ways = sorted((predicted(each, search) for each in found), key=lambda each: (each.step_s, each.peak))
    return Plan(model, search.request, tuple(ways[:shown]), search.tried, search.skipped, search.costs)


def search_for(
    model: Model,
    request: Request,
    *,
    space: Space | None = None,
    costs: Costs | None = None,
    rounds: int = ROUNDS,
    shown_rounds: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Search:
    """The search among all that may be chosen, with the costs of every size that may fit; arguments and
    errors as of `plan`, but that it is not yet known whether a cut fits.
    """
    model, space = as_on(model, request), space or Space()
    given, num_layers = space, len(model.layers)
    space = on_engine(model, request, space)
    check(request, space, num_layers)
    for ranks in space.tp or (request.accelerators,):
        model.check_divisible(ranks)
    if costs is None:
        # Before layers are timed for minutes. Otherwise the search says whether there is a cut that fits.
        if request.device_type == MEASURED:
            known = smallest(model, request, space, request.usable_bytes)
            if known is not None and known.peak > request.usable_bytes:
                raise ValueError(_too_large(model, request, given))
        sizes = sizes_of(request, space, num_layers)
        progress("layers", 0, len(sizes))
        few = sizes[: bisect(sizes, False, key=lambda size: not _may_fit(model, request, space, size))]
        if not few:
            raise ValueError(_too_large(model, request, given))
        costs = costs_for(model, request, few, rounds, sharded=space.sharded, shown=shown_rounds)
    return Search(costs, as_measured(request, costs), space, model.ties_over, partial(progress, "ways"))


def as_on(model: Model, request: Request) -> Model:
    """The model with the attention of the request's accelerator, by which its layers are profiled."""
    if request.precision == "bfloat16-pure":
        model = model.in_half()
    if request.device_type == MEASURED:
        return model
    return replace(model, attention=accelerator(request.device_type, request.precision).attention)


def costs_for(model: Model, request: Request, sizes: Sequence[int], rounds: int, **timing: bool) -> Costs:
    """Costs measured on this machine's device, or by a roofline of the requested device."""
    if request.device_type == MEASURED:
        from gpipe_bench.planner.measured import timed

        return timed(model, request, sizes, rounds, **timing)
    from gpipe_bench.planner.roofline import by_roofline

    return by_roofline(model, request, sizes)


def predicted(found: Found, search: Search) -> Prediction:
    """A way that was found, laid out by the replay; the bytes are those that the search found room for."""
    prediction = predict(found.candidate, replace(search.costs, profiles=None), search.request)
    return replace(
        prediction,
        peak_bytes=tuple(each.peak for each in found.memory),
        peak_when=tuple(each.when for each in found.memory),
        provenance={**prediction.provenance, "peak": _held(found, search.request)},
    )


def _held(found: Found, request: Request) -> str:
    """Describes what the fullest worker holds at its peak."""
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
    if request.precision == "float32":
        return f"{words} GiB"
    return f"{words} GiB; each graph keeps a copy in {request.precision} of the weights that it multiplies by"


def _may_fit(model: Model, request: Request, space: Space, size: int) -> bool:
    """Whether no single layer needs more than there is for a micro-batch of that size."""
    ranks = max((n for n in space.tp or (1,) if n == 1 or model.is_divisible(n)), default=1)
    sharded = space.sharded and request.gathers_half(request.accelerators)
    profile = model.profile_of(
        size, request.precision, tp=ranks, sharded=sharded, split_backward=splits_some(request, space)
    )
    return all(
        layer.inputs.num_bytes + layer.free.forward_peak <= request.usable_bytes for layer in profile.layers
    )


def _too_large(model: Model, request: Request, space: Space) -> str:
    least = smallest(model, request, space)
    assert least is not None  # `check` has found ways
    return nothing_fits(model, request, space, least)
