"""Predicts a candidate's step: its real schedule laid out with the costs of its layers, and workers' peaks.

Actions are never all at their median, and a pipeline waits for whichever is late: so a measured machine's
jitter is drawn from the steps in which the layers were timed. Without jitter the step is the replay itself:

    step_s = median over draws of replay(seconds of each action x how that action differed in one timed step)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

from gpipe_bench.pipeline.plan.links import FREE, Between, Bucket, Gather, Link
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import ActionTimes, duration_of, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

from .candidate import Candidate, Prediction
from .costs import Costs, kinds_of
from .request import Request
from .steps import times_on

if TYPE_CHECKING:
    from gpipe_bench.pipeline.memory.peaks import StageMemory

DRAWS = 64
"""Number of simulated steps whose median is the prediction, where there is jitter."""
SEED = 1811


class Layout:
    """One candidate with its costs, ready to be laid out at any speed of its workers. ValueError for a
    micro-batch size, a kind of action or a grid that the costs know nothing of.
    """

    def __init__(self, candidate: Candidate, costs: Costs, request: Request) -> None:
        if candidate.cut[-1].stop != costs.num_layers:
            raise ValueError(f"the cut holds {candidate.cut[-1].stop} layers, the costs {costs.num_layers}")
        self.schedule = candidate.rows()
        self.size = candidate.microbatch_size
        share = candidate.grid.replicas * candidate.num_microbatches
        if share * self.size != request.batch_size:
            raise ValueError(
                f"{share} micro-batches of {self.size} examples are not a mini-batch of {request.batch_size}"
            )
        self.candidate, self.costs, split = candidate, costs, candidate.splits
        times = times_on(candidate.grid, costs, self.size, request, split=split)
        assert times.collectives is not None
        self.at, self._collectives = times.size, times.collectives
        self.topology = self._collectives.near
        if split and self._collectives.every_pass:
            raise ValueError(
                f"schedule {candidate.schedule!r} splits backwards, and W needs whole parameters: take ZeRO-2"
            )
        kinds = kinds_of(self.schedule)
        stages = list(zip(candidate.cut, candidate.remat, strict=True))
        action_s = cache(lambda stage, kind: times.action_s(kind, *stages[stage]) + costs.gap_s)
        self.action_s: dict[Action, float] = {a: action_s(a.stage, kind) for a, kind in kinds.items()}
        self._stages = [times.stage(span.start, span.stop, remat) for span, remat in stages]

    def timeline(
        self, speeds: Sequence[float] | None = None, factors: dict[Action, float] | None = None
    ) -> Timeline:
        """The step, `speeds` times as long on each worker, each action times its factor, if any."""
        slower = speeds or [1.0] * self.schedule.num_workers
        duration = {
            action: seconds * slower[self.schedule.worker(action.stage)] * (factors or {}).get(action, 1.0)
            for action, seconds in self.action_s.items()
        }
        return replay(self.schedule, duration.__getitem__, self.topology.between, **self._rest(slower))

    def drawn_s(self) -> list[float]:
        """Sorted seconds of steps with the jitter of steps that were timed; of one without any."""
        if not self.costs.jitter:
            return [float(self.timeline().makespan_s)]
        generator = random.Random(SEED)
        found = []
        for _ in range(DRAWS):
            run = generator.choice(self.costs.jitter)
            rows = (run[self.schedule.worker(action.stage) % len(run)] for action in self.schedule)
            factors = dict(zip(self.schedule, map(generator.choice, rows), strict=True))
            found.append(float(self.timeline(factors=factors).makespan_s))
        return sorted(found)

    def parts_s(self, step_s: float) -> dict[str, float]:
        """Where the time goes, in seconds of the step by reason; what only jitter explains is one of them."""
        rest, action_s = self._rest([1.0] * self.schedule.num_workers), self.action_s.__getitem__
        split = breakdown(self.schedule, action_s, self.topology.between, **rest)
        parts = {part: float(share) * split.makespan_s for part, share in split.shares.items()}
        return parts | {"jitter": step_s - sum(parts.values())}

    def _rest(self, slower: Sequence[float]) -> dict[str, Any]:
        """Returns the arguments of the replay other than the actions."""
        candidate, schedule = self.candidate, self.schedule
        worker = [slower[schedule.worker(stage)] for stage in range(schedule.num_stages)]
        ends = [span.stop - 1 for span in candidate.cut[:-1]]
        found: dict[str, Any] = {
            "setup_s": [self.costs.step_s * worker[0], *[0.0] * (schedule.num_stages - 1)],
            "update_s": [each.after_s * b for each, b in zip(self._stages, worker, strict=True)],
        }
        if self.at.activation_bytes:
            found["activation_bytes"] = [self.at.activation_bytes[end] for end in ends]
        if self.at.gradient_bytes:
            found["gradient_bytes"] = [self.at.gradient_bytes[end] for end in ends]
        if candidate.grid.replicas > 1:
            found["reductions"] = [each.buckets for each in self._stages]
        if candidate.grid.fsdp_level == 2:
            found["gathers"] = [each.gathers for each in self._stages]
        if self._collectives.every_pass or candidate.grid.tp > 1:
            waits_s = found["collective_s"] = dict[tuple[int, Kind], float]()
            each_s = map(self._collectives.waits_s, candidate.cut, candidate.remat)
            for stage, (ahead_s, back_s) in enumerate(each_s):
                kinds_s = {Kind.F: ahead_s, Kind.R: ahead_s, Kind.B: back_s, Kind.I: back_s, Kind.W: 0.0}
                waits_s |= {(stage, kind): seconds for kind, seconds in kinds_s.items()}
        return found


def predict(candidate: Candidate, costs: Costs, request: Request, *, parts: bool = True) -> Prediction:
    """Seconds of a step with their range, bytes of every worker, and where each number comes from. The range
    holds 95 % of the drawn steps, and what the costs do not know of themselves. ValueError as of `Layout`.

    Args:
        candidate: complete
        costs: of the micro-batch size that follows from it; without `profiles` there are no bytes, 0 each
        request: machines, mini-batch, optimizer
        parts: whether to say where the time goes, too
    """
    layout = Layout(candidate, costs, request)
    drawn = layout.drawn_s()
    step_s = median(drawn)
    edge = round(0.025 * (len(drawn) - 1))
    beside = {"grid": layout.topology.describe()} if request.hosts > 1 else {}
    held: tuple[StageMemory, ...] = ()
    if costs.profiles is not None:
        from .memory import Rooms

        room = Rooms(layout.costs.profiles, request, lambda tp: (), split=candidate.splits)(candidate)
        held = room.counted(candidate.cut, candidate.remat)
    workers = candidate.grid.pp
    return Prediction(
        candidate=candidate,
        batch_size=request.batch_size,
        step_s=step_s,
        low_s=drawn[edge] * costs.low,
        high_s=drawn[-1 - edge] * costs.high,
        peak_bytes=tuple(each.peak for each in held) or (0,) * workers,
        peak_when=tuple(each.when for each in held) or ("",) * workers,
        parts_s=layout.parts_s(step_s) if parts else {},
        provenance={**costs.provenance, **beside},
    )


# Where the time of a step goes: every device-second of workers x makespan has one reason. A stage may wait
# for a slow link, for a fuller stage, or because any pipeline fills and drains: so the same step is laid out
# again under circumstances that lack one reason at a time, and the difference is what that reason costs (the
# paper's overhead breakdown, v1 Figure 4, v5 section 3.1):
#
#     the step itself      - what its actions, its weight update and its set-up fill is known
#     with a free link     - the difference is communication
#     without collectives  - the difference, with the collectives inside actions: collectives
#     without set-up       - the difference, less the set-up itself, is waiting for it: counted as set-up
#     with even stages     - every stage takes the mean: the difference is load imbalance
#     what is still idle   - bubble
#
# Uneven stages can happen to be faster than even ones; then nothing is lost to imbalance. All arithmetic is
# on fractions: the parts add up exactly.

PARTS = (
    "computation", "recompute", "weight update", "setup", "communication", "load imbalance", "bubble",
)  # fmt: skip
"""The reasons, named as in the paper, from work to waiting."""
COLLECTIVES = "collectives"
"""One more reason if there are collectives: gathers, sums over replicas and inside tensor-parallel layers."""


@dataclass(frozen=True)
class Breakdown:
    """Exact device-seconds of the step `timeline` by reason: PARTS, and COLLECTIVES where it has any."""

    seconds: dict[str, Fraction]
    num_workers: int
    timeline: Timeline

    @property
    def shares(self) -> dict[str, Fraction]:
        """Shares of workers x makespan; they add up to exactly 1. All zero for a step that takes no time."""
        total = sum(self.seconds.values(), Fraction(0))
        return {part: value / total if total else Fraction(0) for part, value in self.seconds.items()}

    @property
    def makespan_s(self) -> float:
        return float(sum(self.seconds.values(), Fraction(0)) / self.num_workers)


def breakdown(schedule: Schedule, action_s: ActionTimes, link: Between = FREE, **beside: Any) -> Breakdown:
    """Attributes every device-second of the replayed step. Arguments and errors are those of `replay`."""
    timeline = replay(schedule, action_s, link, **beside)  # which refuses what cannot be
    if (waits_s := beside.pop("collective_s", None)) is not None:
        beside["collective_s"] = dict(zip(schedule, map(duration_of(waits_s), schedule), strict=True))
    work = _exact(dict(zip(schedule, map(duration_of(action_s), schedule), strict=True)))
    beside = _exact(beside)
    setup, update = (beside.pop(name, []) for name in ("setup_s", "update_s"))
    grid = {n: beside.pop(n) for n in ("gathers", "reductions", "collective_s") if beside.get(n)}

    def lay_out(
        actions: Mapping[Action, Any], through: Between, before: Any, after: Any, **more: Any
    ) -> Timeline:
        ends = {"setup_s": before, "update_s": after}
        return replay(schedule, actions.__getitem__, through, **ends, **beside, **more)

    step = lay_out(work, _exact(link), setup, update, **grid)
    free = lay_out(work, FREE, setup, update, **grid)
    alone = lay_out(work, FREE, setup, update) if grid else free
    ready = lay_out(work, FREE, (), update)
    homes = [schedule.worker(stage) for stage in range(len(update))]
    even_update = [sum(update) / schedule.num_workers / homes.count(home) for home in homes]
    even = lay_out(even_stages(work, schedule), FREE, (), even_update)

    recompute = sum(seconds for action, seconds in work.items() if action.kind is Kind.R)
    worked, set_up, idle = sum(work.values()), sum(setup), Fraction(step.idle_s)
    communication = _lost(step, free, idle)
    # What actions wait for inside is not idle; with a slow link they begin later, and may wait for less.
    waiting_inside, known = (
        sum(Fraction(e.duration_s) for e in each.events) - worked for each in (step, free)
    )
    waiting_for_others = _lost(free, alone, idle - communication, known=known)
    rest = idle - communication - waiting_for_others
    waiting_for_setup = _lost(alone, ready, rest, known=set_up)
    imbalance = _lost(ready, even, rest - waiting_for_setup)
    seconds = {
        "computation": worked - recompute,
        "recompute": recompute,
        "weight update": sum(update),
        "setup": set_up + waiting_for_setup,
        "communication": communication,
        "load imbalance": imbalance,
        "bubble": rest - waiting_for_setup - imbalance,
    }
    if grid:
        seconds[COLLECTIVES] = waiting_inside + waiting_for_others
    return Breakdown(seconds, schedule.num_workers, timeline)


def even_stages(work: Mapping[Action, float], schedule: Schedule) -> dict[Action, float]:
    """Spreads each kind of work on a micro-batch evenly over the workers, and over a worker's stages."""
    alike: dict[tuple[Kind, int], list[Action]] = {}
    for action in work:
        alike.setdefault((action.kind, action.microbatch), []).append(action)
    found: dict[Action, float] = {}
    for group in alike.values():
        total = sum(work[action] for action in group)
        homes = [schedule.worker(action.stage) for action in group]
        found |= {
            action: total / len(set(homes)) / homes.count(home)
            for action, home in zip(group, homes, strict=True)
        }
    return {action: found[action] for action in work}


def _lost(to: Timeline, instead: Timeline, idle: Fraction, known: Fraction = Fraction(0)) -> Fraction:
    """Device-seconds by which one step is longer than the other, less the known ones; at most those idle."""
    longer = to.num_workers * (Fraction(to.makespan_s) - Fraction(instead.makespan_s))
    return min(max(longer - known, Fraction(0)), idle)


def _exact(value: Any) -> Any:
    """The same in fractions: numbers, also in mappings, sequences, links, gathers and buckets."""
    if isinstance(value, Link | Gather | Bucket):
        return replace(value, **{each.name: _exact(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, Mapping):
        return {key: _exact(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_exact, value)]
    if callable(value):
        return lambda *workers: _exact(value(*workers))
    return value if isinstance(value, str | bool) or value == inf else Fraction(value)
