"""Schedules in a V with two stages per worker: ZB-V, DualPipeV, V-Half and V-Min.

More stages than workers make a bubble smaller: a micro-batch comes to the last worker sooner, because each
stage on its way is shorter. In a V it comes back the way it went, so that the worker that has the first stage
has the last one too: the backward of the first micro-batch begins there, and every worker finishes at nearly
the same time.

    loop, 3 workers    0 1 2 0 1 2        V, 3 workers    0 1 2 2 1 0

V-Half and V-Min (arXiv 2405.15362) were made for their memory. What a worker keeps is the time that a
micro-batch spends between its forward and its backward there. So the way of one micro-batch through the V is
laid out first, and then repeated every six slots: two stages with F, I and W each. Where the way falls into
no slot of a period twice, all micro-batches fit. Of the near stages the first worker keeps most and of the
far ones the last, and a worker has one of each, so all keep the same.

V-Min on 4 workers, the way of micro-batch 0, without a pause between two steps:

    worker 0 | 0F .  .  .  .  .  .  7F 7I .  .  .  .  .  .  0I
    worker 1 | .  1F .  .  .  .  6F .  .  6I .  .  .  .  1I
    worker 2 | .  .  2F .  .  5F .  .  .  .  5I .  .  2I
    worker 3 | .  .  .  3F 4F .  .  .  .  .  .  4I 3I
"""

from __future__ import annotations

from collections import Counter, deque

from .list_scheduler import Policy, Work, rows
from .schedule import Action, Kind, Schedule, check_sizes
from .simulate import SLOTS, replay

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
_PERIOD = 6  # slots of one micro-batch on a worker: F, I and W of two stages


def vee(num_workers: int, stages_per_worker: int = 2) -> tuple[int, ...]:
    """The worker of each stage when every second round goes back. `ValueError` for sizes below 1."""
    check_workers(num_workers, stages_per_worker)
    there = tuple(range(num_workers))
    return tuple(
        worker for turn in range(stages_per_worker) for worker in (there[::-1] if turn % 2 else there)
    )


def shared_by(num_workers: int, num_stages: int) -> tuple[int, ...]:
    """The worker of each stage where nothing else is wanted: a V, or one stage each. `ValueError` if the
    workers cannot have equally many.
    """
    if num_workers < 1 or num_stages % num_workers:
        raise ValueError(
            f"num_stages={num_stages} cannot be shared by num_workers={num_workers} workers; give a multiple"
        )
    return vee(num_workers, num_stages // num_workers)


def check_workers(num_workers: int, stages_per_worker: int = 1) -> None:
    """`ValueError` for sizes below 1."""
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}; a pipeline has at least 1 worker")
    if stages_per_worker < 1:
        raise ValueError(f"stages_per_worker is {stages_per_worker}; a worker holds at least 1 stage")


def zb_v(num_workers: int, num_microbatches: int) -> Schedule:
    """ZB-V (arXiv 2401.10241, section 6): the memory of 1F1B and no bubble but half a forward per worker.

    The rows are written for 2K - 1 micro-batches or more, which fill the V; with fewer, a list scheduler
    under the same memory leaves less idle.

    2 workers with stages 0 3 and 1 2, M = 3:

        worker 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        worker 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    check_sizes(num_workers, num_microbatches, "never")
    placement = vee(num_workers)
    if num_microbatches < 2 * num_workers - 1:
        return _short_zb_v(placement, num_microbatches)
    found = []
    for worker in range(num_workers):
        near, far, row = worker, 2 * num_workers - 1 - worker, _Row(num_microbatches)
        for _ in range(2 * (num_workers - worker) - 1):
            row.take(near, F)
        for _ in range(worker):
            row.take(far, F)
            row.take(near, F)
        for _ in range(num_workers - worker):
            row.take(far, F, I, W)
        while row.count(far, F) < num_microbatches:
            if row.count(near, F) < num_microbatches:
                row.take(near, F)
            row.take(near, I, W)
            row.take(far, F, I, W)
        for _ in range(worker):
            row.take(near, I)
            row.take(far, I)
        for _ in range(num_workers - worker):
            row.take(near, I, W)
        for stage in (far, near):
            while row.count(stage, W) < num_microbatches:
                row.take(stage, W)
        found.append(tuple(row.actions))
    return Schedule("zb-v", 2 * num_workers, num_microbatches, "never", tuple(found), placement)


def _short_zb_v(placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    num_stages = len(placement)
    num_workers = num_stages // 2
    free = [0.0] * (num_stages - 1)
    seconds = {kind: [slots] * num_stages for kind, slots in SLOTS.items()}
    work = Work(placement, num_microbatches, "never", True, seconds, free, free)
    # Groups leave less idle for some sizes and forwards first for others.
    choices = [
        rows(work, Policy(alive=(2 * num_workers,) * num_workers, group=num_workers, patience=1.0)),
        rows(work, Policy(alive=(2 * num_workers,) * num_workers, patience=1.0, forwards_first=True)),
    ]
    schedules = [
        Schedule("zb-v", num_stages, num_microbatches, "never", actions, placement) for actions in choices
    ]
    return min(schedules, key=lambda schedule: replay(schedule, SLOTS).makespan_s)


def dualpipe_v(num_workers: int, num_microbatches: int) -> Schedule:
    """DualPipeV (DeepSeek; torch's `ScheduleDualPipeV`): forwards of one direction beside backwards of the
    other, which hardware may overlap; here the parts of such a pair follow each other. One activation more
    than ZB-V on the first worker, and whole backwards where none needs to be split.

    The rows are written for 2K micro-batches or more; with fewer, those that are not there are left out.

    2 workers with stages 0 3 and 1 2, M = 3:

        worker 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 3B1 3F2 .   0B0 0B0 3B2 3B2 0B1 0B1 .   .   0I2 0W2
        worker 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 2B1 2B1 1B1 1B1 2B2 2B2 1B2 1B2
    """
    check_sizes(num_workers, num_microbatches, "never")
    total = max(num_microbatches, 2 * num_workers)
    found = []
    for worker in range(num_workers):
        near, far, row = worker, 2 * num_workers - 1 - worker, _Row(num_microbatches)
        behind = num_workers - 1 - worker
        for _ in range(2 * behind):
            row.take(near, F)
        for _ in range(worker + 1):
            row.take(near, F)
            row.take(far, F)
        for _ in range(behind):
            row.back(far, halved=True)
            row.weights(1)
            row.take(far, F)
        for _ in range(total - 2 * num_workers + worker + 1):
            row.take(near, F)
            row.back(far)
            row.take(far, F)
            row.back(near)
        for _ in range(behind):
            row.back(far)
            row.take(far, F)
            row.back(near)
        # From the middle of the drain on, W fills what the other workers leave idle.
        middle, halved = (worker + 1) // 2, False
        for step in range(worker + 1):
            halved = halved or (step == middle and worker % 2 == 1)
            row.back(far, halved=halved)
            halved = halved or (step == middle and worker % 2 == 0)
            row.back(near, halved=halved)
        for _ in range(behind):
            row.weights(1)
            row.back(near, halved=halved)
        row.weights(worker + 1)
        found.append(tuple(row.actions))
    placement = vee(num_workers)
    return Schedule("dualpipe-v", 2 * num_workers, num_microbatches, "never", tuple(found), placement)


class _Row:
    """The row of a worker as it is written: the micro-batches of a stage come in order."""

    def __init__(self, num_microbatches: int) -> None:
        self.actions: list[Action] = []
        self._number: Counter[tuple[int, Kind]] = Counter()
        self._weights: deque[Action] = deque()
        self._num_microbatches = num_microbatches

    def count(self, stage: int, kind: Kind) -> int:
        """How often the stage has come to `kind`."""
        return self._number[stage, kind]

    def take(self, stage: int, *kinds: Kind) -> None:
        """Adds the next micro-batch of each kind; adds nothing after the last micro-batch."""
        for kind in kinds:
            self._put(Action(stage, kind, self._number[stage, kind]))
            self._number[stage, kind] += 1

    def back(self, stage: int, *, halved: bool = False) -> None:
        """Adds the next backward: a whole one, or I, after which W waits for `weights`."""
        microbatch = self._number[stage, B]
        self._number[stage, B] += 1
        self._put(Action(stage, I if halved else B, microbatch))
        if halved:
            self._weights.append(Action(stage, W, microbatch))

    def weights(self, most: int) -> None:
        """Adds the first W that wait, at most `most` of them."""
        for _ in range(min(most, len(self._weights))):
            self._put(self._weights.popleft())

    def _put(self, action: Action) -> None:
        if action.microbatch < self._num_microbatches:
            self.actions.append(action)


def v_half(num_workers: int, num_microbatches: int) -> Schedule:
    """Half the activations of 1F1B, (K + 2) // 2 of a worker's, and about half its bubble.

    A step down the V takes two slots, one back up takes one. 2 workers with stages 0 3 and 1 2, M = 3:

        worker 0 | 0F0 .   .   3F0 0F1 3I0 3W0 3F1 0F2 0I0 0W0 3I1 3W1 3F2 .   0I1 0W1 3I2 3W2 .   0I2 0W2
        worker 1 | .   1F0 2F0 .   .   1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1W1 .   2I2 1I2 2W2 1W2
    """
    pauses = (1, 0 if num_workers % 2 else 3, 0)
    return _repeated("v-half", num_workers, num_microbatches, 2, pauses)


def v_min(num_workers: int, num_microbatches: int) -> Schedule:
    """A third of the activations of 1F1B, (K + 4) // 3 of a worker's, and about two thirds of its bubble.

    Every step takes one slot, as drawn above; where K is a multiple of 3 two pauses keep the slots apart.
    """
    pauses = (0, 0, 0) if num_workers % 3 else (2, 0, 2)
    return _repeated("v-min", num_workers, num_microbatches, 1, pauses)


def _repeated(
    name: str, num_workers: int, num_microbatches: int, down: int, pauses: tuple[int, int, int]
) -> Schedule:
    """The way of every micro-batch, a period after the one before, with W in the slots that are left.

    The way takes `down` slots from worker to worker down the V and one back, and pauses where it turns: at
    the last worker, at the first one before its backward, and at the last one again.
    """
    check_sizes(num_workers, num_microbatches, "never")
    end = num_workers - 1
    turned = down * end + 1 + pauses[0]
    backward = turned + end + 1 + pauses[1]
    returned = backward + down * end + 1 + pauses[2]
    found = []
    for worker in range(num_workers):
        near, far, behind = worker, 2 * num_workers - 1 - worker, end - worker
        steps = (
            (down * worker, near, F), (turned + behind, far, F),
            (backward + down * worker, far, I), (returned + behind, near, I),
        )  # fmt: skip
        planned = {
            _PERIOD * m + slot: Action(stage, kind, m)
            for m in range(num_microbatches)
            for slot, stage, kind in steps
        }
        taken = {slot % _PERIOD for slot, _, _ in steps}
        row: list[Action] = []
        weights: deque[Action] = deque()
        for slot in range(max(planned) + 1):
            action = planned.get(slot)
            if action is not None:
                row.append(action)
                if action.kind is I:
                    weights.append(Action(action.stage, W, action.microbatch))
            elif weights and slot % _PERIOD not in taken:
                row.append(weights.popleft())
        found.append((*row, *weights))
    return Schedule(name, 2 * num_workers, num_microbatches, "never", tuple(found), vee(num_workers))
