"""Which graphs a worker can keep under its cap, those first whose recomputation would cost most.

A micro-batch that waits for its backward is an interval of its worker's row, as wide as its graph's bytes,
and each action has so much room beside what is there anyway. Where all intervals are equally wide and equally
dear, taking the one that ends first, as long as it fits, keeps as many as can be kept; so the number to be
recomputed at least is known exactly. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from gpipe_bench.pipeline.plan.recomputing.held import Ledger, Unit
from gpipe_bench.pipeline.plan.schedule import Action, Kind


class Rooms:
    """The bytes for graphs of other micro-batches in each action of a worker's row, where all others are
    recomputed, and the positions of F and of B or I of each micro-batch.
    """

    def __init__(self, ledger: Ledger) -> None:
        held, cap_bytes = ledger.held, ledger.cap_bytes
        self.extra = {stage: held.graphs[stage] - held.inputs[stage] for stage in ledger.stages}
        self.first: dict[Unit, int] = {}
        self.last: dict[Unit, int] = {}
        self.recomputed: list[float] = []  # if the action's own micro-batch is recomputed
        self.kept: list[float] = []  # if it keeps its graph
        waiting = 0.0
        for position, action in enumerate(ledger.row):
            unit = (action.stage, action.microbatch)
            if action.kind in (Kind.B, Kind.I):
                self.last[unit] = position
                waiting -= held.inputs[action.stage]
            room = cap_bytes - waiting
            self.kept.append(room - held.own(action, False))
            own = held.own(action, True)
            if action.kind is Kind.F:
                self.first[unit] = position
                waiting += held.inputs[action.stage]
            elif action.kind is not Kind.W:
                own = max(own, held.own(Action(action.stage, Kind.R, action.microbatch), True))
            self.recomputed.append(room - own)


def packed(ledger: Ledger, weights: Mapping[Unit, float]) -> frozenset[Unit]:
    """The micro-batches that keep their graphs: those that cannot be recomputed, then the dearest, of equally
    dear ones those whose backward comes first.
    """
    rooms = Rooms(ledger)
    room = [*rooms.recomputed]
    found = set()

    def rank(unit: Unit) -> tuple[bool, float, int]:
        last = rooms.last[unit]
        return rooms.recomputed[last] >= 0, -weights[unit], last

    for unit in sorted(rooms.last, key=rank):
        first, last, extra = rooms.first[unit], rooms.last[unit], rooms.extra[unit[0]]
        change = rooms.kept[first] - rooms.recomputed[first]
        if room[first] + change < 0 or min(room[first + 1 : last], default=inf) < extra:
            continue
        found.add(unit)
        room[first] += change
        room[last] += rooms.kept[last] - rooms.recomputed[last]
        for position in range(first + 1, last):
            room[position] -= extra
    return frozenset(found)


def fewest_recomputed(ledger: Ledger) -> int:
    """No fewer of the worker's micro-batches must be recomputed under its cap."""
    rooms = Rooms(ledger)
    extra = min(rooms.extra.values())
    if extra <= 0:
        return 0
    room = [max(pair) for pair in zip(rooms.recomputed, rooms.kept, strict=True)]
    number = 0
    for unit in sorted(rooms.last, key=rooms.last.__getitem__):
        first, last = rooms.first[unit], rooms.last[unit]
        if rooms.kept[first] < 0 or min(room[first + 1 : last], default=inf) < extra:
            number += 1
            continue
        for position in range(first + 1, last):
            room[position] -= extra
    return number
