"""Schedules in a V whose memory was chosen first: V-Half and V-Min (arXiv 2405.15362).

What a worker keeps is the time that a micro-batch spends between its forward and its backward there. So the
way of one micro-batch through the V is laid out first, and then repeated every six slots: two stages with F,
I and W each. Where the way falls into no slot of a period twice, all micro-batches fit. Of the near stages
the first worker keeps most and of the far ones the last, and a worker has one of each, so all keep the same.

V-Min on 4 workers, the way of micro-batch 0, without a pause between two steps:

    worker 0 | 0F .  .  .  .  .  .  7F 7I .  .  .  .  .  .  0I
    worker 1 | .  1F .  .  .  .  6F .  .  6I .  .  .  .  1I
    worker 2 | .  .  2F .  .  5F .  .  .  .  5I .  .  2I
    worker 3 | .  .  .  3F 4F .  .  .  .  .  .  4I 3I
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, check_sizes
from gpipe_bench.pipeline.plan.schedules.placement import vee

_PERIOD = 6  # slots of one micro-batch on a worker: F, I and W of two stages


@dataclass(frozen=True)
class _Way:
    """Slots that a micro-batch needs from worker to worker down the V and back, and pauses where it turns: at
    the last worker, at the first one before its backward, and at the last one again.
    """

    down: int
    back: int
    pauses: tuple[int, int, int]

    def slots(self, num_workers: int, worker: int) -> tuple[int, int, int, int]:
        """Of micro-batch 0 on a worker: F of its near stage, F and I of its far one, I of the near one."""
        far, behind = num_workers - 1, num_workers - 1 - worker
        turned = self.down * far + 1 + self.pauses[0]
        backward = turned + self.back * far + 1 + self.pauses[1]
        returned = backward + self.down * far + 1 + self.pauses[2]
        return (
            self.down * worker,
            turned + self.back * behind,
            backward + self.down * worker,
            returned + self.back * behind,
        )


def v_half(num_workers: int, num_microbatches: int) -> Schedule:
    """Half the activations of 1F1B, (K + 2) // 2 of a worker's, and about half its bubble.

    A step down the V takes two slots, one back up takes one. 2 workers with stages 0 3 and 1 2, M = 3:

        worker 0 | 0F0 .   .   3F0 0F1 3I0 3W0 3F1 0F2 0I0 0W0 3I1 3W1 3F2 .   0I1 0W1 3I2 3W2 .   0I2 0W2
        worker 1 | .   1F0 2F0 .   .   1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1W1 .   2I2 1I2 2W2 1W2
    """
    pauses = (1, 0 if num_workers % 2 else 3, 0)
    return _repeated("v-half", num_workers, num_microbatches, _Way(2, 1, pauses))


def v_min(num_workers: int, num_microbatches: int) -> Schedule:
    """A third of the activations of 1F1B, (K + 4) // 3 of a worker's, and about two thirds of its bubble.

    Every step takes one slot, as drawn above; where K is a multiple of 3 two pauses keep the slots apart.
    """
    pauses = (0, 0, 0) if num_workers % 3 else (2, 0, 2)
    return _repeated("v-min", num_workers, num_microbatches, _Way(1, 1, pauses))


def _repeated(name: str, num_workers: int, num_microbatches: int, way: _Way) -> Schedule:
    """The way of every micro-batch, a period after the one before, with W in the slots that are left."""
    check_sizes(num_workers, num_microbatches, "never")
    rows = []
    for worker in range(num_workers):
        near, far = worker, 2 * num_workers - 1 - worker
        slots = way.slots(num_workers, worker)
        steps = list(zip(slots, (near, far, far, near), (Kind.F, Kind.F, Kind.I, Kind.I), strict=True))
        planned = {
            _PERIOD * m + slot: Action(stage, kind, m)
            for m in range(num_microbatches)
            for slot, stage, kind in steps
        }
        taken = {slot % _PERIOD for slot in slots}
        row: list[Action] = []
        weights: deque[Action] = deque()
        for slot in range(max(planned) + 1):
            action = planned.get(slot)
            if action is not None:
                row.append(action)
                if action.kind is Kind.I:
                    weights.append(Action(action.stage, Kind.W, action.microbatch))
            elif weights and slot % _PERIOD not in taken:
                row.append(weights.popleft())
        rows.append((*row, *weights))
    return Schedule(name, 2 * num_workers, num_microbatches, "never", tuple(rows), vee(num_workers))
