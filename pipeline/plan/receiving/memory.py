"""How much memory messages between workers may take: the engine's rules, which the memory model counts with.

What is received comes into the buffers of a ring, which stay from step to step. Where messages are small,
memory is not what counts, and a larger ring lets all receives be posted at once. What is sent stays where it
was made until its sender has waited for it: the latest ones of each way, of small messages all of a step.

    received, tight ring of 2 slots      [0][1]  0 is done  [2][1]  ...      2 messages, always
    sent, large messages                 0  0 1  1 2  2 3                    2 messages, until the step ends
    sent, small messages                 0  0 1  0 1 2  0 1 2 3              all of them

Only the standard library is imported.
"""

from __future__ import annotations

from typing import NamedTuple

from gpipe_bench.pipeline.plan.receiving.posting import postings
from gpipe_bench.pipeline.plan.receiving.ring import (
    SENDS_ON_THE_WAY,
    Ring,
    activation_ring,
    gradient_ring,
)
from gpipe_bench.pipeline.plan.schedule import Schedule

SMALL_BYTES = 2**18
"""Messages on their way, in one direction, whose memory does not matter."""


class Rings(NamedTuple):
    """The receives of one stage in one direction: the ring as a rule, and the one for small messages."""

    tight: Ring
    small: Ring

    def of(self, largest_bytes: int, small_bytes: int = SMALL_BYTES) -> Ring:
        """The one to use where no message takes more than `largest_bytes`."""
        return self.small if largest_bytes * self.small.num_slots <= small_bytes else self.tight


def rings(schedule: Schedule, stage: int, *, gradients: bool, accelerated: bool = False) -> Rings:
    """Of a stage that receives activations or gradients from another worker.

    Args:
        schedule: whose rows say when a buffer is free.
        stage: the one that receives.
        gradients: of its outputs; of activations otherwise.
        accelerated: whether messages travel from device to device, where rings need more slots
            (`posting`).
    """
    if accelerated:
        posting = postings(schedule)[stage, gradients]
        return Rings(posting.ring, posting.small)
    if gradients:
        return Rings(gradient_ring(schedule, stage), gradient_ring(schedule, stage, small=True))
    ring = activation_ring(schedule, stage)
    return Rings(ring, ring)


def is_one_too_many(number: int, oldest_bytes: int, small_bytes: int = SMALL_BYTES) -> bool:
    """Whether a sender waits for the oldest of so many messages before it goes on, and lets go of it."""
    return number > SENDS_ON_THE_WAY and number * oldest_bytes > small_bytes
