"""The faults that `faults.py` plants: what breaks, in which rank, when, and over which transport.

Every kind of fault in every rank of two and of three, in every kind of action, over both transports, makes
two hundred. Around the steps there are more places where ranks wait for each other, and ranks with several
stages send to each other both ways.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

# Ends the process; stops it, which closes no connection; raises; raises what a full device raises.
KINDS = ("kill", "stop", "raise", "memory")
TRANSPORTS = ("gloo", "shared memory")
ACTIONS = ("F", "R", "B", "I", "W")
NUM_MICROBATCHES = 3
# Around the steps: instead of the call or inside of it.
PLACES = (
    "before construction", "in construction", "between steps", "before clipping", "before timeline",
    "before saving", "in saving", "before loading", "in loading",
)  # fmt: skip
# More of them while ranks get to know each other, and one where they need each other no longer.
BEGINNINGS = ("before the store", "while meeting", "before agreeing")
END = "before closing"
REDUCING = "before reducing"  # of a grid: the step is over but for what its replicas do together


@dataclass(frozen=True)
class Fault:
    """`place` is an action such as `1R2`, met in training step `step`, or one around the steps."""

    kind: str
    rank: int
    num_ranks: int
    transport: str
    place: str
    step: int
    schedule: str

    @property
    def is_action(self) -> bool:
        return self.place not in (*PLACES, *BEGINNINGS, END, REDUCING)

    def __str__(self) -> str:
        when = f" of step {self.step}, {self.schedule}" if self.is_action else ""
        return f"{self.kind} rank {self.rank} of {self.num_ranks}, {self.transport}, {self.place}{when}"


@dataclass(frozen=True)
class GridFault(Fault):
    """One in a grid of `dp` pipelines beside each other, each of `num_ranks // dp` ranks."""

    dp: int = 2

    @property
    def pp(self) -> int:
        return self.num_ranks // self.dp

    @property
    def coordinates(self) -> str:
        return f"dp={self.rank // self.pp} pp={self.rank % self.pp}"

    def __str__(self) -> str:
        return f"{super().__str__()}, grid of {self.dp} x {self.pp}"


def faults(seed: int) -> tuple[Fault, ...]:
    """All of them; `seed` decides micro-batch, step and schedule of each."""
    draw = random.Random(seed)
    found = []
    for num_ranks in (2, 3):
        for kind, rank, action, transport in itertools.product(KINDS, range(num_ranks), ACTIONS, TRANSPORTS):
            place = f"{rank}{action}{draw.randrange(NUM_MICROBATCHES)}"
            step, schedule = draw.randrange(2), draw.choice(("gpipe", "1f1b"))
            found.append(Fault(kind, rank, num_ranks, transport, place, step, schedule))
    for place, kind, rank in itertools.product(PLACES, ("kill", "stop", "raise"), range(3)):
        found.append(Fault(kind, rank, 3, draw.choice(TRANSPORTS), place, 0, "gpipe"))
    return tuple(found)


def every(seed: int) -> tuple[Fault, ...]:
    """The faults on record are those of seed 0."""
    return (*faults(seed), *several_stages(seed), *beginnings_and_ends(), *on_grids(seed))


def several_stages(seed: int) -> tuple[Fault, ...]:
    """More of them, in the second stage of a rank that has two: in a V, where that is on the way back and the
    first rank has the loss, and in a loop, where the last rank sends to the first.
    """
    draw = random.Random(seed)
    found = []
    for schedule, num_ranks in (("zb-v", 2), ("zb-v", 3), ("interleaved", 2), ("interleaved", 3)):
        actions = ("F", "R", "I", "W") if schedule == "zb-v" else ("F", "R", "B")
        for kind, rank, transport in itertools.product(KINDS, range(num_ranks), TRANSPORTS):
            stage = 2 * num_ranks - 1 - rank if schedule == "zb-v" else num_ranks + rank
            place = f"{stage}{draw.choice(actions)}{draw.randrange(NUM_MICROBATCHES)}"
            found.append(Fault(kind, rank, num_ranks, transport, place, draw.randrange(2), schedule))
    return tuple(found)


def beginnings_and_ends() -> tuple[Fault, ...]:
    """More of them, before the first step and after the last, in the rank that holds the store and in
    another.
    """
    return tuple(
        Fault(kind, rank, 3, "shared memory", place, 0, "gpipe")
        for place, kind, rank in itertools.product((*BEGINNINGS, END), ("kill", "stop"), (0, 1))
    )


def on_grids(seed: int) -> tuple[GridFault, ...]:
    """More of them: in each rank of two pipelines of two ranks, in an action of the first step or a later
    one, where ranks wait for each other in a sum over replicas, and while the grid is built; and in one of
    four pipelines of one rank, where all that ranks wait for is such a sum.
    """
    draw = random.Random(seed)
    found = []
    for step, kind, rank in itertools.product((0, 1), ("kill", "stop", "raise"), range(4)):
        place = f"{rank % 2}{draw.choice('FRB')}{draw.randrange(NUM_MICROBATCHES)}"
        transport, schedule = draw.choice(TRANSPORTS), draw.choice(("gpipe", "1f1b"))
        found.append(GridFault(kind, rank, 4, transport, place, step, schedule))
    others = ("before construction", *BEGINNINGS, "in construction", REDUCING, "before saving", "in saving",
              "before loading", "in loading", END)  # fmt: skip
    for place, kind, rank in itertools.product(others, ("kill", "stop"), (0, 3)):
        found.append(GridFault(kind, rank, 4, "shared memory", place, 0, "gpipe"))
    for kind, rank in itertools.product(("kill", "stop", "raise"), (0, 2)):
        found.append(GridFault(kind, rank, 4, "gloo", "0B1", 1, "gpipe", dp=4))
    return tuple(found)
