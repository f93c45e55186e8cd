"""GPipe's step in one pass: when each stage is done, and where its time goes.

The replay (pipeline/plan/simulate.py) lays out one step in milliseconds. GPipe's order on every stage and
every link is known beforehand, so its times follow from one pass over stages and micro-batches, in which
every time may be an array over settings. Tests hold it to the replay, and its shares to the breakdown
(planner/breakdown.py), number by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ZERO: Array = np.zeros(())


@dataclass(frozen=True)
class Steps:
    """Steps of one schedule under many settings; every entry is an array over the settings, or one number.

    Args:
        num_microbatches: M
        remat: "never", "always" or "except_last"
        forward_s, backward_s: by stage, of one micro-batch; a recomputation takes as long as a forward
        activation_bytes, gradient_bytes: of one micro-batch over each of the K - 1 boundaries
        bandwidth_bytes_per_s, latency_s: of every link
        setup_s: on the first stage, before its first action
        update_s: by stage, after its last action
    """

    num_microbatches: int
    remat: str
    forward_s: Sequence[Array]
    backward_s: Sequence[Array]
    activation_bytes: Sequence[Array] = ()
    gradient_bytes: Sequence[Array] = ()
    bandwidth_bytes_per_s: Array | float = np.inf
    latency_s: Array | float = 0.0
    setup_s: Array | float = 0.0
    update_s: Sequence[Array] = ()

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @property
    def num_recomputed(self) -> int:
        """Micro-batches that are computed a second time."""
        return {"never": 0, "always": self.num_microbatches, "except_last": self.num_microbatches - 1}[
            self.remat
        ]

    def makespan_s(self) -> Array:
        """Seconds of the step."""
        last, count = self.num_stages - 1, self.num_microbatches
        free: list[Array] = []
        inputs: list[Array] = [ZERO] * count
        for stage, forward_s in enumerate(self.forward_s):
            time = ZERO + (self.setup_s if stage == 0 else 0.0)
            ends = []
            for arrival in inputs:
                time = np.maximum(time, arrival) + forward_s
                ends.append(time)
            free.append(time)
            if stage < last:
                inputs = self._sent(ends, self.activation_bytes[stage])
        gradients: list[Array] = [ZERO] * count  # in the order of the drain, last micro-batch first
        makespan = ZERO
        for stage in range(last, -1, -1):
            time, ends = free[stage], []
            for number, arrival in enumerate(gradients):
                if number >= count - self.num_recomputed:
                    time = time + self.forward_s[stage]
                time = np.maximum(time, arrival) + self.backward_s[stage]
                ends.append(time)
            if stage:
                gradients = self._sent(ends, self.gradient_bytes[stage - 1])
            makespan = np.maximum(makespan, time + (self.update_s[stage] if self.update_s else 0.0))
        return makespan

    def _sent(self, ends: Sequence[Array], num_bytes: Array) -> list[Array]:
        """When messages arrive that queue for a link in this order."""
        takes = num_bytes / self.bandwidth_bytes_per_s
        free, arrivals = ZERO, []
        for end in ends:
            free = np.maximum(free, end) + takes
            arrivals.append(free + self.latency_s)
        return arrivals

    def shares(self) -> dict[str, dict[str, Array]]:
        """Where the time goes, in shares of it: of all accelerators together, and of the one that works most.

        What is lost to the link, to waiting for the set-up and to uneven stages is the difference of two
        steps, one with and one without it, at most what is idle; that is divided among the idle time of
        whichever is looked at.
        """
        k, m = self.num_stages, self.num_microbatches
        free = self._with_free_link()
        ready = replace(free, setup_s=0.0)
        steps = [each.makespan_s() for each in (self, free, ready, ready.balanced())]
        updates = self.update_s or [ZERO] * k
        setups = [ZERO + (self.setup_s if stage == 0 else 0.0) for stage in range(k)]
        computing = [m * (f + b) for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        again = [self.num_recomputed * f for f in self.forward_s]
        work = [computing, again, updates, setups]
        each = [np.broadcast_arrays(*part, steps[0])[:k] for part in work]
        busy = np.sum([np.stack(part) for part in each], axis=0)
        slowest = busy.argmax(axis=0)[None]
        whole = [np.stack(part).sum(axis=0) for part in each]
        alone = [np.take_along_axis(np.stack(part), slowest, 0)[0] for part in each]
        return {
            "all accelerators": _attributed(whole, steps, k),
            "the slowest accelerator": _attributed(alone, steps, 1),
        }

    def _with_free_link(self) -> Steps:
        nothing = [ZERO] * (self.num_stages - 1)
        return replace(
            self,
            activation_bytes=nothing,
            gradient_bytes=nothing,
            bandwidth_bytes_per_s=np.inf,
            latency_s=0.0,
        )

    def balanced(self) -> Steps:
        """The same work, evenly over the stages."""

        def mean(parts: Sequence[Array]) -> list[Array]:
            return [sum(parts, ZERO) / len(parts)] * len(parts) if parts else []

        return replace(
            self,
            forward_s=mean(self.forward_s),
            backward_s=mean(self.backward_s),
            update_s=mean(self.update_s),
        )


def _attributed(work: Sequence[Array], steps: Sequence[Array], count: int) -> dict[str, Array]:
    """Shares of `count` times the step, by reason, as planner/breakdown.py names and counts them."""
    step, free, ready, even = steps
    computing, again, update, setup = work
    total = count * step
    idle = total - sum(work)

    def lost(longer: Array, than: Array, left: Array, known: Array = ZERO) -> Array:
        found: Array = np.minimum(np.maximum(count * (longer - than) - known, 0), left)
        return found

    communication = lost(step, free, idle)
    waiting = lost(free, ready, idle - communication, setup)
    imbalance = lost(ready, even, idle - communication - waiting)
    parts = {
        "computation": computing,
        "recompute": again,
        "weight update": update,
        "setup": setup + waiting,
        "communication": communication,
        "load imbalance": imbalance,
        "bubble": idle - communication - waiting - imbalance,
    }
    return {part: seconds / total for part, seconds in parts.items()}
