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
plotting library; a picture for browsers is `svg`. Only the standard library is imported.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.portals import described
from gpipe_bench.pipeline.plan.remat import Remat
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, check_complete
from gpipe_bench.pipeline.plan.stops import stop_of
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
    whichever comes further when it is run (`stops`).

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
