"""Activations that wait in the memory of the host: copies out and in, as actions beside those of a worker.

A copy engine moves bytes while its worker computes: one copy after another, each not before the worker comes
to a place in its row. The graph of a micro-batch takes no memory from the end of its copy out to the begin of
its copy in, and its backward waits for the end of that. Two rules say which copies there are and when:

    at once     out behind F, in from the backward before on, each way on an engine of its own
    in slots    one engine, out and in by turns; of the slots the first behind F, and the last before the
                backward

The first is what Megatron's fine-grained offloading does with the inputs of modules, here with whole stages.
The second is PipeOffload's (arXiv 2503.01328, section 4.2), which moves what waits longest. What would
have to come back before it is gone stays. None of this is run: steps are replayed (`simulate`) and memory
is modelled (`memory.workers`). Only the standard library is imported.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.timeline import Timeline

BACKWARD = (Kind.B, Kind.I)


class Copy(NamedTuple):
    """The graph of a micro-batch on its way out to the host, or `back`."""

    stage: int
    microbatch: int
    back: bool
    place: int
    """In its worker's row: it begins when all actions before are done, or later."""

    def __str__(self) -> str:
        return f"{'in' if self.back else 'out'} {self.stage}F{self.microbatch}"


@dataclass(frozen=True)
class Offload:
    """What is copied in a step.

    Args:
        copies: of each worker, in the order in which its engines take them.
        copy_s: by stage, seconds of a micro-batch's graph one way.
        engines: of each worker: one for both ways, or two.

    Raises:
        ValueError: other numbers of engines, or seconds that cannot be.
    """

    copies: tuple[tuple[Copy, ...], ...]
    copy_s: tuple[float, ...]
    engines: int

    def __post_init__(self) -> None:
        if self.engines not in (1, 2):
            raise ValueError(f"engines is {self.engines}; a worker has 1 for both ways, or 2")
        for stage, seconds in enumerate(self.copy_s):
            if not 0 <= seconds < inf:
                raise ValueError(f"copy_s[{stage}] is {seconds}; it must be finite and not negative")

    def check(self, schedule: Schedule) -> None:
        """ValueError unless each graph goes out behind its forward and then in, and no backward waits for a
        copy behind it.
        """
        if len(self.copies) != schedule.num_workers:
            raise ValueError(
                f"copies of {len(self.copies)} workers for {schedule.num_workers}; give a row each"
            )
        for worker, copies in enumerate(self.copies):
            waits = {row[0]: row[1:] for row in _waits(schedule, worker, schedule.stages_of(worker))}
            latest = 0
            gone: set[tuple[int, int]] = set()
            for copy in copies:
                graph, latest = copy[:2], max(latest, copy.place)
                if graph not in waits or copy.back != (graph in gone):
                    raise ValueError(f"{copy}: a graph that a worker keeps goes out once and then in once")
                first, last = waits[graph]
                if copy.place <= first or (copy.back and latest > last):
                    raise ValueError(
                        f"{copy} at place {copy.place}: it begins behind its forward, at {first}, and all "
                        f"up to it before its backward, at {last}"
                    )
                (gone.remove if copy.back else gone.add)(graph)
                if copy.back:
                    del waits[graph]
            if gone:
                raise ValueError(f"the graph of {min(gone)} goes out and does not come in again")


def at_once(
    schedule: Schedule, stages: Collection[int], copy_s: Sequence[float], engines: int = 2
) -> Offload:
    """Each graph of these stages out as soon as it is there, and in from the worker's backward before on.

    What is recomputed stays. ValueError as of `Offload`.
    """
    found = []
    for worker, row in enumerate(schedule.actions):
        backwards = [place for place, action in enumerate(row) if action.kind in BACKWARD]
        copies = []
        for graph, first, last in _waits(schedule, worker, stages):
            earlier = bisect_left(backwards, last)
            back = max(first + 1, backwards[earlier - 1] if earlier else last - 1)
            if back < last:
                copies += [Copy(*graph, False, first + 1), Copy(*graph, True, back)]
        found.append(tuple(sorted(copies, key=lambda copy: (copy.place, copy.back))))
    return Offload(tuple(found), tuple(copy_s), engines)


def in_slots(
    schedule: Schedule, stages: Collection[int], copy_s: Sequence[float], timeline: Timeline
) -> Offload:
    """One copy out and one in by turns, at times of `timeline`, which is `schedule` replayed without copies.

    A slot has room for the largest of `copy_s`. ValueError as of `at_once`.
    """
    slot_s = max((copy_s[stage] for stage in stages), default=0) or 1e-12
    found = []
    for worker in range(schedule.num_workers):
        events = timeline.of_worker(worker)
        starts_s = [event.start_s for event in events]
        waits = [
            (graph, first, last) for graph, first, last in _waits(schedule, worker, stages)
            if events[last].start_s - events[first].end_s >= 2 * slot_s
        ]  # fmt: skip
        # Turn n has the time from 2n slots on: the first half for a copy out, the second for one in.
        out, turn = {}, 0
        for _, first, last in waits:
            turn = max(turn, ceil(events[first].end_s / (2 * slot_s)))
            out[last], turn = turn, turn + 1
        back: dict[int, int] = {}
        turn = ceil(timeline.makespan_s / slot_s)
        for *_, last in sorted(waits, key=lambda each: -each[2]):
            turn = min(turn - 1, int(events[last].start_s // (2 * slot_s)) - 1)
            back[last] = turn
        timed = []
        for graph, first, last in waits:
            if out[last] <= back[last]:
                timed += [(2 * out[last], graph, False, first), (2 * back[last] + 1, graph, True, first)]
        copies = []
        for half, graph, is_back, first in sorted(timed):
            # Not before the begin of the action that is under way in its slot.
            place = bisect_right(starts_s, half * slot_s) - 1 if is_back else first + 1
            copies.append(Copy(*graph, is_back, max(place, first + 1)))
        found.append(tuple(copies))
    return Offload(tuple(found), tuple(copy_s), 1)


def longest(timeline: Timeline, count: int) -> tuple[int, ...]:
    """Of each worker the `count` stages whose micro-batches wait longest between forward and backward."""
    waits_s = dict.fromkeys(range(timeline.num_stages), 0.0)
    for event in timeline.events:
        if event.action.kind is Kind.F:
            waits_s[event.action.stage] -= event.end_s
        elif event.action.kind in BACKWARD:
            waits_s[event.action.stage] += event.start_s
    found = []
    for worker in range(timeline.num_workers):
        found += sorted(timeline.stages_of(worker), key=lambda stage: (-waits_s[stage], stage))[:count]
    return tuple(sorted(found))


def away(timeline: Timeline) -> dict[Action, dict[int, int]]:
    """By action, how many graphs of each stage of its worker are with the host from its begin to its end."""
    found: dict[Action, dict[int, int]] = {}
    for worker in range(timeline.num_workers):
        mine = set(timeline.stages_of(worker))
        copies = [span for span in timeline.copies if span.stage in mine]
        left_s = {
            span.name.removeprefix("out "): span.end_s for span in copies if span.name.startswith("out")
        }
        gone = [
            (span.stage, left_s[span.name.removeprefix("in ")], span.start_s)
            for span in copies
            if span.name.startswith("in")
        ]
        for event in timeline.of_worker(worker):
            of_stage = found[event.action] = {}
            for stage, from_s, to_s in gone:
                if from_s <= event.start_s and event.end_s <= to_s:
                    of_stage[stage] = of_stage.get(stage, 0) + 1
    return found


def _waits(
    schedule: Schedule, worker: int, stages: Collection[int]
) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Graphs that these stages of the worker keep from F on, with the places of F and of the backward."""
    row = schedule.actions[worker]
    ends = {(a.stage, a.microbatch): place for place, a in enumerate(row) if a.kind in BACKWARD}
    for place, (stage, kind, microbatch) in enumerate(row):
        if kind is Kind.F and stage in stages and not schedule.recomputes(microbatch, stage):
            yield (stage, microbatch), place, ends[stage, microbatch]
