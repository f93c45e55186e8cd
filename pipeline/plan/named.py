"""The named schedules, as functions of the numbers of workers and micro-batches.

With v stages per worker, the bubble of W workers is (W - 1)(F + B) / v, for v times as many messages. No
worker waits for gradients of weights; so where the backward is split (arXiv 2401.10241), weight gradients may
fill idle time. A loop assigns stages to workers in rounds; in a V the worker with the first stage has the
last one too, so that all workers finish at nearly the same time.

    loop, 3 workers    0 1 2 0 1 2        V, 3 workers    0 1 2 2 1 0
"""

from __future__ import annotations

import difflib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from .schedule import Action, Kind, Remat, Schedule, check_sizes, recomputed

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
_PERIOD = 6  # slots of one micro-batch on a worker: F, I and W of two stages


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'table1'?)` for a misspelled name; else nothing."""
    by_small = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), list(by_small), n=1)
    return f" (did you mean {by_small[close[0]]!r}?)" if close else ""


def named(
    name: str,
    num_workers: int,
    num_microbatches: int,
    *,
    remat: Remat = "never",
    stages_per_worker: int | None = None,
) -> Schedule:
    """The schedule of that name, with a recomputation right before each backward for which `remat` asks.

    Args:
        num_workers: processes or devices.
        num_microbatches: M.
        remat: "never", "always" or "except_last", or one of them for each stage.
        stages_per_worker: for schedules that allow any number; default 2.

    Raises:
        ValueError: an unknown name, a size below 1, or a number of stages that the schedule does not allow.
    """
    if name not in NAMED:
        close = suggestion(str(name), NAMED)
        raise ValueError(f"schedule is {name!r}{close}; choose one of {', '.join(NAMED)}")
    check_workers(num_workers)
    make, fixed = NAMED[name]
    if fixed is None:
        schedule = make(num_workers, num_microbatches, stages_per_worker or 2)
    elif stages_per_worker not in (None, fixed):
        raise ValueError(
            f"schedule {name!r} has {fixed} stage{'s' * (fixed > 1)} per worker, not {stages_per_worker}; "
            f"leave stages_per_worker out, or choose one of "
            f"{', '.join(each for each, known in NAMED.items() if known.stages_per_worker is None)}"
        )
    else:
        schedule = make(num_workers, num_microbatches)
    return schedule if remat == "never" else recomputed(schedule, remat)


def naive(num_stages: int, num_microbatches: int = 1, remat: Remat = "never") -> Schedule:
    """Model parallelism without a pipeline: each micro-batch finishes before the next begins; with one
    micro-batch, the paper's naive baseline.
    """
    check_sizes(num_stages, num_microbatches, remat)
    rows = [
        [Action(s, kind, m) for m in range(num_microbatches) for kind in (F, B)] for s in range(num_stages)
    ]
    return recomputed(_schedule("naive", num_microbatches, rows), remat)


def gpipe(num_stages: int, num_microbatches: int, remat: Remat = "always") -> Schedule:
    """GPipe (paper section 2.3): all forwards, then all backwards in reverse order of the micro-batches, so
    that the last one may keep its activations (`except_last`).
    """
    check_sizes(num_stages, num_microbatches, remat)
    rows = []
    for s in range(num_stages):
        row = [Action(s, F, m) for m in range(num_microbatches)]
        rows.append([*row, *(Action(s, B, m) for m in reversed(range(num_microbatches)))])
    return recomputed(_schedule("gpipe", num_microbatches, rows), remat)


def one_f_one_b(num_stages: int, num_microbatches: int, remat: Remat = "never") -> Schedule:
    """One forward, one backward (PipeDream-flush): at most K - k micro-batches are in flight on stage k.

    Stage k starts with as many forwards as there are stages behind it, then alternates; M < K is allowed.
    """
    check_sizes(num_stages, num_microbatches, remat)
    return recomputed(_in_turn("1f1b", num_stages, num_microbatches), remat)


def zb_h1(num_workers: int, num_microbatches: int) -> Schedule:
    """The memory of 1F1B's first worker, K micro-batches, on every worker, and a third of 1F1B's bubble: (K -
    1)(F + I - W).

    1F1B with I for B, and on worker k with W k micro-batches later.

    3 workers, M = 4:

        stage 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return _in_turn("zb-h1", num_workers, num_microbatches, late=range(num_workers))


def zb_h2(num_workers: int, num_microbatches: int) -> Schedule:
    """No worker idles between its first and its last action: forwards lead twice as far as in ZB-H1, up to 2K
    - 1 micro-batches on every worker, or as many as there are.

    3 workers, M = 5:

        stage 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        stage 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        stage 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    further = max(0, min(num_workers - 1, num_microbatches - num_workers))
    late = [worker + min(worker, further) for worker in range(num_workers)]
    return _in_turn("zb-h2", num_workers, num_microbatches, lead=2, late=late)


def _in_turn(
    name: str, num_workers: int, num_microbatches: int, *, lead: int = 1, late: Sequence[int] | None = None
) -> Schedule:
    """Rows that start with `lead` forwards per worker behind, then alternate F and a backward: B, or I with W
    `late` micro-batches later, by worker.
    """
    check_sizes(num_workers, num_microbatches, "never")
    rows = []
    for worker in range(num_workers):
        warm_up = min(num_microbatches, lead * (num_workers - 1 - worker))
        row = [Action(worker, F, m) for m in range(warm_up)]
        for m in range(num_microbatches):
            if m + warm_up < num_microbatches:
                row.append(Action(worker, F, m + warm_up))
            row.append(Action(worker, B if late is None else I, m))
            if late is not None and m >= late[worker]:
                row.append(Action(worker, W, m - late[worker]))
        if late is not None:
            left = range(max(0, num_microbatches - late[worker]), num_microbatches)
            row += [Action(worker, W, m) for m in left]
        rows.append(row)
    return _schedule(name, num_microbatches, rows)


def loop(num_workers: int, stages_per_worker: int) -> tuple[int, ...]:
    """The worker of each stage where stages are assigned in rounds. `ValueError` for sizes below 1."""
    check_workers(num_workers, stages_per_worker)
    return tuple(range(num_workers)) * stages_per_worker


def interleaved(num_workers: int, num_microbatches: int, stages_per_worker: int = 2) -> Schedule:
    """Megatron's interleaved 1F1B (arXiv 2104.04473, section 2.2): a group of micro-batches passes all stages
    of a worker before the next group.

    A group has as many micro-batches as there are workers, so that its first micro-batch returns to the first
    worker when its last has left. If M is no multiple, the first groups are larger.

    2 workers with stages 0 2 and 1 3, M = 3, which is one group:

        worker 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   2B0 2B0 .   2B1 2B1 .   2B2 2B2 0B0 0B0 0B1 0B1 0B2 0B2
        worker 1 | .   1F0 1F1 1F2 3F0 3B0 3B0 3F1 3B1 3B1 3F2 3B2 3B2 1B0 1B0 1B1 1B1 1B2 1B2
    """
    check_sizes(num_workers, num_microbatches, "never")
    placement, turns = loop(num_workers, stages_per_worker), range(stages_per_worker)
    num_groups = max(1, num_microbatches // num_workers)
    size, over = divmod(num_microbatches, num_groups)
    forwards: list[tuple[int, int]] = []  # (turn, micro-batch)
    backwards: list[tuple[int, int]] = []
    first = 0
    for group in range(num_groups):
        microbatches = range(first, first + size + (group < over))
        forwards += [(turn, m) for turn in turns for m in microbatches]
        backwards += [(turn, m) for turn in reversed(turns) for m in microbatches]
        first = microbatches.stop
    largest = size + (over > 0)
    rows = []
    for worker in range(num_workers):
        warm_up = 2 * (num_workers - 1 - worker) + (stages_per_worker - 1) * largest
        taken = [(F, *each) for each in forwards[:warm_up]]
        for position, backward in enumerate(backwards):
            taken += [(F, *each) for each in forwards[warm_up + position : warm_up + position + 1]]
            taken.append((B, *backward))
        rows.append([Action(turn * num_workers + worker, kind, m) for kind, turn, m in taken])
    return _schedule("interleaved", num_microbatches, rows, placement)


def breadth_first(num_workers: int, num_microbatches: int, stages_per_worker: int = 2) -> Schedule:
    """Breadth-first (arXiv 2211.05953): all micro-batches through a worker's first stage, then all through
    its second, and backwards in reverse. GPipe in a loop: the bubble of `interleaved`, the activations of
    GPipe. A stage's weights are used in two runs per step, which suits sharded parameters.

    2 workers with stages 0 2 and 1 3, M = 2:

        worker 0 | 0F0 0F1 2F0 2F1 .   .   .   2B1 2B1 2B0 2B0 0B1 0B1 0B0 0B0
        worker 1 | .   1F0 1F1 3F0 3F1 3B1 3B1 3B0 3B0 1B1 1B1 1B0 1B0
    """
    check_sizes(num_workers, num_microbatches, "never")
    placement = loop(num_workers, stages_per_worker)
    rows = []
    for worker in range(num_workers):
        stages = range(worker, len(placement), num_workers)
        there = [Action(stage, F, m) for stage in stages for m in range(num_microbatches)]
        rows.append([*there, *(Action(stage, B, m) for stage, _, m in reversed(there))])
    return _schedule("breadth-first", num_microbatches, rows, placement)


# Two stages per worker, in a V


def vee(num_workers: int, stages_per_worker: int = 2) -> tuple[int, ...]:
    """The worker of each stage where every second round is reversed. `ValueError` for sizes below 1."""
    check_workers(num_workers, stages_per_worker)
    there = tuple(range(num_workers))
    return tuple(
        worker for turn in range(stages_per_worker) for worker in (there[::-1] if turn % 2 else there)
    )


def shared_by(num_workers: int, num_stages: int) -> tuple[int, ...]:
    """The default worker of each stage: a V, or one stage each. `ValueError` if the workers cannot have
    equally many.
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

    The rows are written for at least 2K - 1 micro-batches, which fill the V; with fewer, actions of missing
    ones are left out, as in torch.

    2 workers with stages 0 3 and 1 2, M = 3:

        worker 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        worker 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    total = max(num_microbatches, 2 * num_workers - 1)

    def parts(worker: int) -> list[tuple[int, str]]:
        behind = num_workers - 1 - worker
        return [
            (2 * behind + 1, "nF"), (worker, "fF nF"), (behind + 1, "fF fI fW"),
            (total - num_workers - behind, "nF nI nW fF fI fW"), (behind, "nI nW fF fI fW"),
            (worker, "nI fI"), (behind + 1, "nI nW"), (worker, "fW"), (worker, "nW"),
        ]  # fmt: skip

    return _in_parts("zb-v", num_workers, num_microbatches, parts)


def dualpipe_v(num_workers: int, num_microbatches: int) -> Schedule:
    """DualPipeV (DeepSeek; torch's `ScheduleDualPipeV`): pairs of a forward in one direction and a backward
    in the other, which hardware may overlap; here they follow each other. One activation more than ZB-V on
    the first worker, and whole backwards where none must be split.

    The rows are written for at least 2K micro-batches; with fewer, actions of missing ones are left out.

    2 workers with stages 0 3 and 1 2, M = 3:

        worker 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 3B1 3F2 .   0B0 0B0 3B2 3B2 0B1 0B1 .   .   0I2 0W2
        worker 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 2B1 2B1 1B1 1B1 2B2 2B2 1B2 1B2
    """
    total = max(num_microbatches, 2 * num_workers)

    def parts(worker: int) -> list[tuple[int, str]]:
        behind = num_workers - 1 - worker
        # From the middle of the drain on, W fills idle time.
        middle = (worker + 1) // 2
        return [
            (2 * behind, "nF"), (worker + 1, "nF fF"), (behind, "fI W fF"),
            (total - num_workers - behind, "nF fB fF nB"), (behind, "fB fF nB"),
            (middle, "fB nB"), (1, "fI nI" if worker % 2 else "fB nI"), (worker - middle, "fI nI"),
            (behind, "W nI"), (worker + 1, "W"),
        ]  # fmt: skip

    return _in_parts("dualpipe-v", num_workers, num_microbatches, parts)


def _in_parts(
    name: str, num_workers: int, num_microbatches: int, parts: Callable[[int], list[tuple[int, str]]]
) -> Schedule:
    """A V schedule from the parts of each worker's row: repetitions, and actions in turn. `nF` is the next
    forward of the near stage; `fB`, `fI` and `fW` are the far stage's next backward or halves of one; `W` is
    the first W that waits. Actions of missing micro-batches are left out.
    """
    check_sizes(num_workers, num_microbatches, "never")
    rows = []
    for worker in range(num_workers):
        homes = {"n": worker, "f": 2 * num_workers - 1 - worker}
        row, waiting, done = list[Action](), list[Action](), Counter[tuple[int, bool]]()
        for what in [what for times, each in parts(worker) for what in times * each.split()]:
            stage, kind = homes.get(what[:-1]), Kind(what[-1])
            if kind is W:
                action = next(each for each in waiting if stage in (None, each.stage))
                waiting.remove(action)
            else:
                assert stage is not None, "only W is taken of any stage"
                action = Action(stage, kind, done[stage, kind is F])
                done[stage, kind is F] += 1
                if kind is I:
                    waiting.append(action._replace(kind=W))
            if action.microbatch < num_microbatches:
                row.append(action)
        rows.append(row)
    return _schedule(name, num_microbatches, rows, vee(num_workers))


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

    Every step takes one slot, as drawn in `_repeated`; where K is a multiple of 3 two pauses keep the slots
    apart.
    """
    pauses = (0, 0, 0) if num_workers % 3 else (2, 0, 2)
    return _repeated("v-min", num_workers, num_microbatches, 1, pauses)


def _repeated(
    name: str, num_workers: int, num_microbatches: int, down: int, pauses: tuple[int, int, int]
) -> Schedule:
    """V-Half and V-Min, which save memory (arXiv 2405.15362): every micro-batch takes the same path, a period
    after the one before, and W takes free slots.

    If the path uses no slot of a period twice, all micro-batches fit. The first worker keeps near-stage
    activations longest and the last one far-stage activations; each worker has one of each, so all keep the
    same. V-Min on 4 workers, the path of micro-batch 0, without pauses:

        worker 0 | 0F .  .  .  .  .  .  7F 7I .  .  .  .  .  .  0I
        worker 1 | .  1F .  .  .  .  6F .  .  6I .  .  .  .  1I
        worker 2 | .  .  2F .  .  5F .  .  .  .  5I .  .  2I
        worker 3 | .  .  .  3F 4F .  .  .  .  .  .  4I 3I

    The path takes `down` slots per worker down the V and one back up, and pauses where it turns: at the last
    worker, at the first before its backward, and at the last one again.
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
        found.append([*row, *weights])
    return _schedule(name, num_microbatches, found, vee(num_workers))


def _schedule(
    name: str, num_microbatches: int, rows: Sequence[Sequence[Action]], placement: tuple[int, ...] = ()
) -> Schedule:
    actions = tuple(map(tuple, rows))
    return Schedule(name, len(placement or rows), num_microbatches, "never", actions, placement)


SCHEDULES: dict[str, Callable[..., Schedule]] = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}
"""Schedules with one stage per worker and a whole backward, which every experiment can run."""


class Named(NamedTuple):
    """Makes a schedule without recomputation; `stages_per_worker` is None if any number is allowed."""

    make: Callable[..., Schedule]
    stages_per_worker: int | None


NAMED: dict[str, Named] = {
    **{name: Named(partial(make, remat="never"), 1) for name, make in SCHEDULES.items()},
    "interleaved": Named(interleaved, None),
    "breadth-first": Named(breadth_first, None),
    "zb-h1": Named(zb_h1, 1),
    "zb-h2": Named(zb_h2, 1),
    "zb-v": Named(zb_v, 2),
    "v-half": Named(v_half, 2),
    "v-min": Named(v_min, 2),
    "dualpipe-v": Named(dualpipe_v, 2),
}
