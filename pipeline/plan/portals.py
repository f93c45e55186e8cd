"""Portals: tensors that go from the layer that makes them straight to the layers that use them.

A skip connection that passes through the stages between its ends is sent once for each of them and kept by
each. A portal has a name instead: one layer stashes, later ones pop. Which messages that makes follows from
the declarations and the cuts alone, before anything runs, and beside the schedule, whose order they cannot
break: a portal runs along the way that the activations take from stage to stage, and its gradient along
theirs, so both are always made before they are needed. The buffers to receive them in (`portal_rings`) are
chosen like those of the other messages (`ring`).

    layers     0 stash a   1   2 stash b   3 pop b   4   5 pop a          cut into three stages of two
    lines      stage 0 -> stage 2 with a,   stage 1 -> stage 1 is none: b stays in its stage

Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpipe_bench.pipeline.plan.receiving.ring import (
    Ring,
    Waits,
    circle,
    end_microbatches,
    ring_of,
    slots_of_rings,
    waits_for_slots,
    waits_of,
)
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, Transfer, channels, derived, ends_of


class Declared(NamedTuple):
    """What one layer says: the names that it stashes, and those that it pops."""

    stashes: tuple[str, ...] = ()
    pops: tuple[str, ...] = ()


class Line(NamedTuple):
    """The portals from one stage to another: one message for each micro-batch, one back for the gradients."""

    number: int
    source: int
    target: int
    names: tuple[str, ...]


class PortalTransfer(NamedTuple):
    """A message of a line: the action that makes it, and the one that needs it."""

    line: Line
    source: Action
    target: Action


def check(declared: Sequence[Declared]) -> None:
    """`ValueError`, which names the portal, unless each is stashed once and popped by later layers only."""
    home: dict[str, int] = {}
    for index, layer in enumerate(declared):
        for name in layer.stashes:
            if name in home:
                raise ValueError(
                    f"portal {name!r} is stashed by layer {home[name]} and by layer {index}; give each a "
                    "name of its own"
                )
            home[name] = index
    popped: set[str] = set()
    for index, layer in enumerate(declared):
        for name in layer.pops:
            if name not in home:
                raise ValueError(f"layer {index} pops portal {name!r}, which no layer stashes")
            if home[name] >= index:
                raise ValueError(
                    f"layer {index} pops portal {name!r}, which layer {home[name]} stashes; a portal leads "
                    "to a later layer"
                )
            if layer.pops.count(name) > 1:
                raise ValueError(f"layer {index} pops portal {name!r} more than once; it is given it once")
            popped.add(name)
    for name, index in home.items():
        if name not in popped:
            raise ValueError(f"layer {index} stashes portal {name!r}, which no later layer pops")


def lines_of(declared: Sequence[Declared], spans: Sequence[range]) -> tuple[Line, ...]:
    """The lines between stages of these layers, by source and target; `check` has passed."""
    stage_of = {layer: stage for stage, span in enumerate(spans) for layer in span}
    home = {name: stage_of[i] for i, layer in enumerate(declared) for name in layer.stashes}
    found: dict[tuple[int, int], dict[str, None]] = {}
    for name, source in home.items():
        for index, layer in enumerate(declared):
            if name in layer.pops and (target := stage_of[index]) != source:
                found.setdefault((source, target), {})[name] = None
    return tuple([Line(i, *ends, tuple(names)) for i, (ends, names) in enumerate(sorted(found.items()))])


def described(line: Line) -> str:
    """For people."""
    return f"stage {line.source} -> stage {line.target}: {', '.join(line.names)}"


def arriving(lines: Sequence[Line], stage: int) -> tuple[str, ...]:
    """Names of the portals that end in a stage and come from others, in the order of its lines."""
    return tuple([name for line in lines if line.target == stage for name in line.names])


def leaving(lines: Sequence[Line], stage: int) -> tuple[str, ...]:
    """Names of the portals that begin in a stage and end in others."""
    return tuple(dict.fromkeys(name for line in lines if line.source == stage for name in line.names))


def portal_transfers(schedule: Schedule, lines: Sequence[Line]) -> tuple[PortalTransfer, ...]:
    """Every message that the lines make in a step, in the order in which each stage needs them."""
    kinds = {(a.stage, a.microbatch): a.kind for a in schedule if a.kind in (Kind.B, Kind.I)}
    found = []
    for line in lines:
        source, target = line.source, line.target
        found += [
            PortalTransfer(line, Action(source, Kind.F, action.microbatch), action)
            for action in schedule.row(target)
            if action.kind is Kind.F
        ]
        for action in schedule.row(source):
            if action.kind in (Kind.B, Kind.I):
                m = action.microbatch
                found.append(PortalTransfer(line, Action(target, kinds[target, m], m), action))
    return tuple(found)


@derived
def portal_rings(schedule: Schedule, lines: tuple[Line, ...]) -> dict[tuple[int, bool], Ring]:
    """The receives of each line that joins two workers, by its number and whether of gradients.

    As many buffers as the source has micro-batches in flight, or the target if it keeps them longer; a buffer
    is a kept input of its micro-batch. Nobody waits for a send of a portal to leave, so all that could close
    a circle of waits is a receive that waits for its buffer: such a ring grows until there is none.
    """
    slots: dict[tuple[int, bool], int] = {}
    posted: dict[tuple[int, bool], list[PortalTransfer]] = {}
    lines = tuple([line for line in lines if schedule.worker(line.source) != schedule.worker(line.target)])
    for line in lines:
        halved = any(action.kind is Kind.W for action in schedule.row(line.target))
        kept = schedule.in_flight(line.target) + halved
        slots[line.number, False] = max(schedule.in_flight(line.source), kept)
        slots[line.number, True] = slots_of_rings(schedule)[line.source, True]
    messages = portal_transfers(schedule, lines)
    for message in messages:
        posted.setdefault((message.line.number, message.target.kind is not Kind.F), []).append(message)
    waits = waits_of(schedule)
    for message in messages:
        waits[message] = []  # type: ignore[index]
        waits[message.target] += [(message.source, None), (message, None)]  # type: ignore[list-item]
    ends = [ends_of(schedule.row(stage)) for stage in range(schedule.num_stages)]
    of_schedule = _others(schedule, ends)
    rows = {line.number: (line.source, line.target) for line in lines}
    while True:
        for_slots: Waits = dict(of_schedule)
        for (number, gradients), of_line in posted.items():
            of_stage = ends[rows[number][0 if gradients else 1]]
            num_slots = slots[number, gradients]
            for position in range(num_slots, len(of_line)):
                reason = (of_stage[position - num_slots], (number, gradients))
                for_slots[of_line[position]] = [reason]  # type: ignore[index]
        late = circle(waits, for_slots) & {key for key in slots if slots[key] < len(posted[key])}
        if not late:
            break
        for key in late:
            slots[key] += 1
    found = {}
    for key, num_slots in slots.items():
        row = schedule.row(rows[key[0]][0 if key[1] else 1])
        order = [message.target.microbatch for message in posted[key]]
        found[key] = ring_of(order, end_microbatches(row), num_slots)
    return found


def _others(schedule: Schedule, ends: list[list[Action]]) -> Waits:
    """The waits for buffers of the other messages; rings of theirs are none that could grow here."""
    posted: dict[tuple[int, bool], list[Transfer]] = {}
    for messages in channels(schedule).values():
        for message in messages:
            posted.setdefault((message.target.stage, message.target.kind is not Kind.F), []).append(message)
    found = waits_for_slots(posted, ends, slots_of_rings(schedule))
    return {message: [(action, None) for action, _ in reasons] for message, reasons in found.items()}
