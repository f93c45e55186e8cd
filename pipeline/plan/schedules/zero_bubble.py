"""Zero bubble with one stage per worker (arXiv 2401.10241): ZB-H1 and ZB-H2.

Nobody waits for the gradients of the weights, so W may fill what would be idle. Both schedules are 1F1B with
I in the place of B, and W later: on worker k as many micro-batches later as the worker holds fewer forwards
than the first one does. So every worker keeps as many activations as the first.
"""

from __future__ import annotations

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, check_sizes


def zb_h1(num_workers: int, num_microbatches: int) -> Schedule:
    """The memory of 1F1B, K micro-batches on every worker, and a third of its bubble: (K - 1)(F + I - W).

    3 workers, M = 4:

        stage 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return _halved("zb-h1", num_workers, num_microbatches, lead=1, late=[*range(num_workers)])


def zb_h2(num_workers: int, num_microbatches: int) -> Schedule:
    """No bubble but the skew: the forwards lead twice as far, so that no worker waits between its first and
    its last action, for 2K - 1 micro-batches on every worker. With fewer of them, as far as they go.

    3 workers, M = 5:

        stage 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        stage 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        stage 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    further = max(0, min(num_workers - 1, num_microbatches - num_workers))
    late = [worker + min(worker, further) for worker in range(num_workers)]
    return _halved("zb-h2", num_workers, num_microbatches, lead=2, late=late)


def _halved(name: str, num_workers: int, num_microbatches: int, *, lead: int, late: list[int]) -> Schedule:
    """F as far ahead as `lead` per worker behind, then F and I in turn, and W `late` micro-batches later."""
    check_sizes(num_workers, num_microbatches, "never")
    rows = []
    for worker in range(num_workers):
        warm_up = min(num_microbatches, lead * (num_workers - 1 - worker))
        row = [Action(worker, Kind.F, m) for m in range(warm_up)]
        for m in range(num_microbatches):
            if m + warm_up < num_microbatches:
                row.append(Action(worker, Kind.F, m + warm_up))
            row.append(Action(worker, Kind.I, m))
            if m >= late[worker]:
                row.append(Action(worker, Kind.W, m - late[worker]))
        row += [
            Action(worker, Kind.W, m)
            for m in range(max(0, num_microbatches - late[worker]), num_microbatches)
        ]
        rows.append(tuple(row))
    return Schedule(name, num_workers, num_microbatches, "never", tuple(rows))
