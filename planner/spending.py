"""What is timed, and how often, where there is a budget of seconds: first everything once, then what matters.

Micro-batch sizes for which there is no time even once are left out, the largest first, and those that only a
pipeline of one micro-batch could have are not timed at all. After every round the likely ways are predicted
with what is known by then, and only what the best of them depend on is timed again:

    round 1      every size    layers, replicas, shards of both levels
    round 2 ..   the sizes and kinds of all ways within a quarter of the fastest
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, TextIO

from gpipe_bench.planner.request import Request

STEPS_OF_A_SIZE = 9.0
"""What one round takes of a size, in passes forward and back over all examples of a probe."""
PROBES_OF_A_SIZE = 8


class About(NamedTuple):
    """What a probe tells of: layers in a pipeline ("layers"), replicas (0), or shards (their level)."""

    size: int
    kind: str | int


def sizes_worth(sizes: Sequence[int], request: Request) -> list[int]:
    """Without those that only one micro-batch in a pipeline has, which keeps one worker busy at a time."""
    if request.accelerators == 1:
        return sorted(sizes)
    return sorted(size for size in sizes if 2 * size <= request.batch_size) or sorted(sizes)


def affordable(
    sizes: Sequence[int], example_s: float, reference_s: float, microbatches: int, budget_s: float
) -> list[int]:
    """The sizes whose warm-up and first round there is time for; at least the smallest.

    Args:
        sizes: of micro-batches
        example_s: of one example, forward and back
        reference_s: of the step that stands before every probe
        microbatches: of a probe
        budget_s: all that there is
    """
    kept: list[int] = []
    left_s = budget_s
    for size in sorted(sizes):
        left_s -= 2 * STEPS_OF_A_SIZE * microbatches * size * example_s + PROBES_OF_A_SIZE * reference_s
        if kept and left_s < 0:
            break
        kept.append(size)
    return kept


@dataclass
class Budget:
    """Seconds that may be spent, and whether somebody is told how far it is."""

    seconds: float = inf
    shown: bool = False
    out: TextIO | None = None

    def lasts(self, spent_s: float, round_s: float) -> bool:
        """Whether there is time for one more round like that."""
        return spent_s + round_s <= self.seconds

    def tell(self, what: str, spent_s: float) -> None:
        """On a terminal one line that is written over; elsewhere a line each."""
        out = self.out or sys.stderr
        if not self.shown:
            return
        words = f"timing layers: {what}, {spent_s:.0f} s"
        if self.seconds < inf:
            words += f", at most {max(0.0, self.seconds - spent_s):.0f} s to go"
        print(
            *((f"\r{words:<70}",) if out.isatty() else (words,)),
            end="" if out.isatty() else "\n",
            file=out,
            flush=True,
        )
