"""Schedules as text: tables for files, with commas between the cells, and grids for people.

The table has a row for each worker and a cell for each action, in the form that torch's
`_PipelineScheduleRuntime` reads and writes as `compute_only`, so a schedule of torch's runs here and one of
ours runs there. Two things differ. A recomputation is a cell such as `2R0`, which torch has no word for:
files that hold one are read here only. And torch takes whatever begins like an action for one, while a cell
that is none is an error here. The placement is not written down: a worker holds the stages that are in its
row.

    0F0,0F1,3F0,3I0,0F2,...        worker 0 of two, in a V
    1F0,2F0,1F1,2F1,2I0,...

A schedule is best checked by looking at it, in a terminal, a test or a review, so the grid (`draw`) needs no
plotting library; a picture for browsers is `svg`.

Where a schedule would stop, and who waits for whom there, a run of the rows says with no time in it. Somebody
else's list of actions may hang on real devices for three reasons, and one mixes up its data:

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

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from gpipe_bench.pipeline.plan.edges import SENDS_ON_THE_WAY, Edge
from gpipe_bench.pipeline.plan.portals import described
from gpipe_bench.pipeline.plan.remat import Remat
from gpipe_bench.pipeline.plan.schedule import (
    Action,
    Kind,
    Schedule,
    Transfer,
    channels,
    check_complete,
    dependencies,
    ends_of,
)
from gpipe_bench.pipeline.plan.timeline import Timeline

# What torch's runtime adds for itself: messages, sharded parameters, sums over replicas.
_LOWERED = re.compile(
    r"\d+((SEND|RECV|WAIT_RECV|WAIT_SEND)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD|WAIT_\w+)", re.ASCII
)
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """One line per worker, its actions in order, e.g. `0F0,0F1,0B1,0B0`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [str(action) for action in row] for row in schedule.actions
    )
    return out.getvalue()


def from_csv(text: str, name: str = "csv", remat: Remat | None = None) -> Schedule:
    """Reads what `to_csv` or torch writes. `remat` is recognised from the recomputations unless it is given.

    Empty cells, which are idle slots, and what torch's runtime adds (`0SEND_F1`, `0UNSHARD`) are left out;
    the parts of an overlapped pair such as `(0F7;7B3)OVERLAP_F_B` are taken in their order. The result is not
    yet validated: see `validate`.

    Raises:
        ValueError: the text is no table, holds no actions or something that is not an action, or leaves out
            a stage.
    """
    table = csv.reader(io.StringIO(text))
    try:
        rows = [[action for cell in cells for action in _actions(cell)] for cells in table if cells]
    except csv.Error as error:
        raise ValueError(f"the text is no table ({error}); write actions with commas between them") from error
    except ValueError as error:
        raise ValueError(f"line {table.line_num}: {error}") from error
    if not any(rows):
        raise ValueError("the text holds no actions; write one line per worker, such as 0F0,0F1,0B1,0B0")
    return _schedule(rows, name, remat)


def read(text: str, name: str = "schedule", remat: Remat | None = None) -> tuple[Schedule, str]:
    """A schedule as somebody else's program prints it, and whose form that is; recognized by what it holds.

    Beside tables (`from_csv`) there are two forms that number the stages of each worker, as chunks:

    - Primus' `print_schedule_table`: `Rank 0: (F|0|0),(SF|0|0),(BW|0|0)`, kind, micro-batch and chunk, also
      out of a log
    - zero-bubble's `print_schedule` (sail-sg): `f0 sf0 F0 b0 w0`, a worker on each line, the second chunk in
      capitals

    There B is the first half of a backward wherever the row has a W for it. What they say of messages,
    offloading and validation is left out: messages follow from the rows. Two chunks are in a V or in a loop,
    whichever comes further when it is run (`stop_of`).

    Raises:
        ValueError: with the line and what to do, for what is none of the three.
    """
    if _PRIMUS.search(text):
        return _of_chunks(_primus_rows(text), name, remat), "Primus' table"
    if re.match(r"\s*[A-Za-z]", text):
        return _of_chunks(_zero_bubble_rows(text), name, remat), "zero-bubble's rows"
    return from_csv(text, name, remat), "a table of actions"


_PRIMUS = re.compile(r"\((\w+)\|(\d+)\|(\d+)\)", re.ASCII)
_ZERO_BUBBLE = re.compile(r"([a-z]+|[A-Z]+)(\d+)", re.ASCII)
_WORK = {"F": Kind.F, "R": Kind.R, "B": Kind.B, "BW": Kind.B, "W": Kind.W}
_NO_WORK = frozenset(("SF", "RF", "SB", "RB", "PV", "RPV", "SPV", "OSS", "OSE", "ORP", "ORS", "ORE", "OB"))
"""Messages, the optimizer's validation and offloading."""

_Chunks = list[tuple[Kind, int, int]]
"""A worker's actions: kind, chunk, micro-batch."""


def _primus_rows(text: str) -> list[_Chunks]:
    found: dict[int, _Chunks] = {}
    for number, line in enumerate(text.splitlines(), 1):
        nodes = _PRIMUS.findall(line)
        if not nodes:
            continue  # of the log
        said = re.search(r"Rank (\d+):", line)
        rank = int(said[1]) if said else len(found)
        if rank in found:
            raise ValueError(f"line {number}: rank {rank} has had its line; leave one schedule in the file")
        if re.search(r"\(\w+\|", _PRIMUS.sub("", line)):
            raise ValueError(f"line {number} is cut off inside a node; write it whole, such as (F|0|0)")
        found[rank] = [(kind, int(c), int(m)) for name, m, c in nodes for kind in _kinds(name, number)]
    missing = next((rank for rank in range(len(found)) if rank not in found), None)
    if missing is not None:
        raise ValueError(f"no line is of rank {missing}, but one of rank {max(found)}; give the lines of all")
    return [found[rank] for rank in sorted(found)]


def _zero_bubble_rows(text: str) -> list[_Chunks]:
    rows: list[_Chunks] = []
    for number, line in enumerate(text.splitlines(), 1):
        row: _Chunks = []
        for word in line.split():
            node = _ZERO_BUBBLE.fullmatch(word)
            if node is None:
                raise ValueError(
                    f"line {number}: {word!r} is no action; leave nothing but zero-bubble's rows, such as "
                    "'f0 b0 w0', or write a table: 0F0,0I0,0W0"
                )
            chunk = int(node[1].isupper())
            new = [(kind, chunk, int(node[2])) for kind in _kinds(node[1].upper(), number)]
            if new and new[0] in row:
                raise ValueError(
                    f"line {number} has {word!r} twice; these rows tell two chunks apart and no parts of a "
                    "sequence. Write a table with a number for each stage: 0F0,2F0"
                )
            row += new
        if row:
            rows.append(row)
    return rows


def _kinds(name: str, line: int) -> list[Kind]:
    if name in _NO_WORK:
        return []
    if name not in _WORK:
        raise ValueError(
            f"line {line}: {name} is none of the passes of a schedule here ({', '.join(_WORK)}); print it "
            "without divided vocabulary and joined passes"
        )
    return [_WORK[name]]


def _of_chunks(rows: list[_Chunks], name: str, remat: Remat | None) -> Schedule:
    num_workers, chunks = len(rows), 1 + max((chunk for row in rows for _, chunk, _ in row), default=0)
    if not any(rows):
        raise ValueError("the text holds no passes; give a line for each worker, such as 'f0 f1 b0 b1'")

    def stage(worker: int, chunk: int, in_a_v: bool) -> int:
        return (
            (chunk + 1) * num_workers - 1 - worker if in_a_v and chunk % 2 else chunk * num_workers + worker
        )

    found = []
    for in_a_v in (True, False) if chunks == 2 else (False,):
        actions: list[list[Action]] = []
        for worker, row in enumerate(rows):
            halved = {(chunk, m) for kind, chunk, m in row if kind is Kind.W}
            actions.append([])
            for kind, chunk, m in row:
                first = kind is Kind.B and (chunk, m) in halved
                actions[-1].append(Action(stage(worker, chunk, in_a_v), Kind.I if first else kind, m))
        found.append(_schedule(actions, name, remat))
    return max(found, key=_comes)


def _comes(schedule: Schedule) -> int:
    """How many actions are taken until a schedule stops."""
    try:
        check_complete(schedule)
    except ValueError:
        return 0
    stop = stop_of(schedule)
    return sum(map(len, schedule.actions) if stop is None else stop.taken)


def _schedule(rows: Sequence[Sequence[Action]], name: str, remat: Remat | None) -> Schedule:
    """Of complete lines: the placement is that of the rows, the recomputations are those that are there."""
    holders: dict[int, int] = {}
    for worker, row in enumerate(rows):
        for action in row:
            holders.setdefault(action.stage, worker)
    missing = next((stage for stage in range(len(holders)) if stage not in holders), None)
    if missing is not None:
        raise ValueError(
            f"no line holds stage {missing}, but one holds stage {max(holders)}; stages count from 0 without "
            "gaps"
        )
    num_microbatches = 1 + max(action.microbatch for row in rows for action in row)
    if remat is None:
        recomputed: list[list[int]] = [[] for _ in holders]
        for action in (action for row in rows for action in row if action.kind is Kind.R):
            recomputed[action.stage].append(action.microbatch)
        remat = recomputed
    placement = tuple(holders[stage] for stage in range(len(holders)))
    return Schedule(name, len(holders), num_microbatches, remat, tuple(map(tuple, rows)), placement)


def _actions(cell: str) -> list[Action]:
    """Those that a cell holds: none, one, or the parts of a pair."""
    cell = cell.strip()
    if not cell or _LOWERED.fullmatch(cell):
        return []
    pair = _TOGETHER.fullmatch(cell)
    return [Action.parse(part) for part in (pair[1].split(";") if pair else (cell,))]


def draw(
    timeline: Timeline, portals: Sequence[Edge] = (), stands: Mapping[int, Action] = MappingProxyType({})
) -> str:
    """A timeline in whole slots, such as `replay(schedule, SLOTS)`, as a grid of workers x time slots.

    A slot names kind and micro-batch, a dot is an idle slot; where a worker holds several stages, a slot
    names the stage too, as in `2F0`::

        stage 0 | F0 F1 .  .  B1 B1 B0 B0
        stage 1 | .  F0 F1 B1 B1 B0 B0

    A worker that `stands` somewhere says so behind its slots, as in `| stands at 2B0`.

    Below stand the `portals`, each line of them from the stage that stashes to the one that pops::

        portals | stage 0 -> stage 3: skip
    """
    several = bool(timeline.placement)

    def short(action: Action) -> str:
        return str(action) if several else f"{action.kind.value}{action.microbatch}"

    width = max((len(short(event.action)) for event in timeline.events), default=0)
    margin = len(str(timeline.num_workers - 1))
    lines = []
    for worker in range(timeline.num_workers):
        slots: list[str] = []
        for event in timeline.of_worker(worker):
            slots += ["."] * (round(event.start_s) - len(slots))
            slots += [short(event.action)] * round(event.duration_s)
        grid = " ".join(slot.ljust(width) for slot in slots).rstrip()
        here = f" | stands at {stands[worker]}" if worker in stands else ""
        lines.append(f"{'worker' if several else 'stage'} {worker:>{margin}} | {grid}{here}")
    lines += [f"portals | {described(line)}" for line in portals]
    return "\n".join(lines)


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
