"""Where a schedule would stop, and who waits for whom there: a run of the rows with no time in it.

Somebody else's list of actions may hang on real devices for three reasons, and one mixes up its data:

- an action needs one that stands behind it in its own row, or two rows wait for each other;
- what is received has no buffer: a worker has `buffers` for each direction of an edge, gives one back when it
  is done with a micro-batch, and a sender goes on while at most `SENDS_ON_THE_WAY` messages have none;
- messages from one worker to another of one direction are matched by their order alone, as NCCL does: whoever
  is sent another micro-batch than it takes next computes with the wrong one.

Every worker does the same whoever goes first, since it waits for one thing at a time and nothing that it has
can be taken away; so the places where all stand at last are those of every run. The rules are those of
`edges`, which makes rings of a size that no valid schedule stops at. Only the standard library is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from gpipe_bench.pipeline.plan.edges import SENDS_ON_THE_WAY
from gpipe_bench.pipeline.plan.schedule import Action, Schedule, Transfer, channels, dependencies, ends_of

Why = Literal["own", "message", "buffer", "order"]


class Wait(NamedTuple):
    """Where a worker stands. It cannot begin `action` before worker `by` has taken `needs`; where the `order`
    is wrong `needs` is what it was sent instead.
    """

    worker: int
    action: Action
    why: Why
    needs: Action
    by: int


@dataclass(frozen=True)
class Stop:
    """How far a schedule comes: actions that each worker has taken, where each that is not through stands,
    and of these the ones that wait for each other in turn, or the one that was sent something else.
    """

    taken: tuple[int, ...]
    waits: tuple[Wait, ...]
    circle: tuple[Wait, ...]

    def done(self, schedule: Schedule) -> Schedule:
        """What can be run of the schedule, for a picture; it is no valid one."""
        rows = (row[:number] for row, number in zip(schedule.actions, self.taken, strict=True))
        return replace(schedule, actions=tuple(rows))

    def words(self) -> Iterator[str]:
        """The circle, a sentence for each worker in it."""
        stands = {wait.worker: wait.action for wait in self.waits}
        for worker, action, why, needs, by in self.circle:
            behind = "" if needs == stands.get(by) else f" only behind {stands.get(by)}"
            begin = f"worker {worker} stands at {action}"
            if why == "own":
                yield f"{begin}, which needs {needs}; that stands behind it in the same row"
            elif why == "order":
                yield (
                    f"{begin} and is sent what {needs} made: worker {by} sends that first, and messages "
                    "between two workers are matched by their order"
                )
            elif why == "message":
                yield f"{begin} and waits for what {needs} makes, which worker {by} takes{behind or ' next'}"
            elif by == worker:
                yield f"{begin}, whose message has no buffer; {needs} gives one back, which stands behind it"
            else:
                yield (
                    f"{begin} and waits until worker {by} has buffers for what it was sent; {needs} gives "
                    f"one back, which worker {by} takes{behind or ' next'}"
                )


@dataclass
class _Line:
    """Messages of one direction from one worker to another, in the order in which they are needed."""

    source: int
    target: int
    back: bool
    messages: list[Transfer]
    sent: list[Action] = field(default_factory=list)
    posted: int = 0

    def ring(self, index: int) -> tuple[int, bool]:
        """The ring of buffers of a message: its edge, by the stage before it, and its direction."""
        return min(stage.stage for stage in self.messages[index]), self.back


def stop_of(schedule: Schedule, buffers: int | None = None) -> Stop | None:
    """Where `schedule` stops with so many buffers for each direction of an edge, None if it runs to its end.

    Without a number there is a buffer for every message. The rows must be complete (`check_complete`).
    """
    return _Run(schedule, buffers).stop()


class _Run:
    def __init__(self, schedule: Schedule, buffers: int | None) -> None:
        self.rows, self.buffers = schedule.actions, buffers
        self.needs = dependencies(schedule)
        self.home = {action: worker for worker, row in enumerate(self.rows) for action in row}
        self.ends = {a for stage in range(schedule.num_stages) for a in ends_of(schedule.row(stage))}
        self.into: list[list[_Line]] = [[] for _ in self.rows]
        self.out_of: list[list[_Line]] = [[] for _ in self.rows]
        self.leaving: dict[Action, _Line] = {}
        self.arriving: dict[Action, tuple[_Line, int]] = {}
        for ends, messages in channels(schedule).items():
            line = _Line(*ends, messages)
            self.into[line.target].append(line)
            self.out_of[line.source].append(line)
            for index, message in enumerate(line.messages):
                self.leaving[message.source] = line
                self.arriving[message.target] = line, index
        self.in_use: Counter[tuple[int, bool]] = Counter()
        self.taken = [0] * len(self.rows)
        self.done: set[Action] = set()

    def stop(self) -> Stop | None:
        going = True
        for worker in range(len(self.rows)):
            self._post(worker)
        while going:
            going = False
            for worker, row in enumerate(self.rows):
                while self.taken[worker] < len(row) and self._wait(worker) is None:
                    self._take(row[self.taken[worker]])
                    self.taken[worker] += 1
                    going = True
        waits = {worker: wait for worker in range(len(self.rows)) if (wait := self._wait(worker)) is not None}
        if not waits:
            return None
        path: list[int] = []
        worker = next(iter(waits))
        while worker not in path and waits[worker].why != "order":
            path.append(worker)
            worker = waits[worker].by
        circle = path[path.index(worker) :] if worker in path else [worker]
        return Stop(tuple(self.taken), tuple(waits.values()), tuple(waits[each] for each in circle))

    def _take(self, action: Action) -> None:
        self.done.add(action)
        if action in self.leaving:
            self.leaving[action].sent.append(action)
        if action in self.ends:
            self.in_use[action.stage - 1, False] -= 1
            self.in_use[action.stage, True] -= 1
            self._post(self.home[action])

    def _post(self, worker: int) -> None:
        """Gives a worker's messages buffers while it has some, in the order in which they are needed."""
        for line in self.into[worker]:
            while line.posted < len(line.messages):
                ring = line.ring(line.posted)
                if self.buffers is not None and self.in_use[ring] >= self.buffers:
                    break
                self.in_use[ring] += 1
                line.posted += 1

    def _wait(self, worker: int) -> Wait | None:
        """What a worker waits for before its next action, if it waits."""
        row, at = self.rows[worker], self.taken[worker]
        if at == len(row):
            return None
        action = row[at]
        for line in self.out_of[worker]:
            if len(line.sent) - line.posted > SENDS_ON_THE_WAY:
                return Wait(worker, action, "buffer", self._gives_back(line), line.target)
        for need in self.needs[action]:
            if self.home[need] == worker and need not in self.done:
                return Wait(worker, action, "own", need, worker)
        if action not in self.arriving:
            return None
        line, index = self.arriving[action]
        if line.posted <= index:
            return Wait(worker, action, "buffer", self._gives_back(line), worker)
        source = line.messages[index].source
        if len(line.sent) <= index:
            return Wait(worker, action, "message", source, line.source)
        return (
            None
            if line.sent[index] == source
            else Wait(worker, action, "order", line.sent[index], line.source)
        )

    def _gives_back(self, line: _Line) -> Action:
        """The action with which the receiver gives back the buffer that the next message of a line needs."""
        stage, row = line.messages[line.posted].target.stage, self.rows[line.target]
        rest = row[self.taken[line.target] :]
        return next(action for action in rest if action in self.ends and action.stage == stage)
