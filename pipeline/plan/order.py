"""The order in which one process takes all actions of a schedule.

Workers that share a process take turns. Any order that keeps the rows and the dependencies gives the same
numbers; this one keeps few messages and few recomputed graphs alive. Finding it also shows whether the rows
wait for each other in a circle. Only the standard library is imported.
"""

from __future__ import annotations

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, dependencies, derived, transfers


@derived
def execution_order(schedule: Schedule) -> tuple[Action, ...]:
    """The order in which a single process takes all actions: each row in its own order, dependencies first.

    A message is consumed before another is produced where the rows allow it: next comes the worker that
    received the last action's message, then the same worker if it has only recomputed, then the one that can
    go on with the latest stage. So one stage's recomputed activations are alive at a time. `ValueError` names
    the actions that wait for each other if the schedule deadlocks.
    """
    needs = dependencies(schedule)
    consumer = {transfer.source: schedule.worker(transfer.target.stage) for transfer in transfers(schedule)}
    rows, position = schedule.actions, [0] * schedule.num_workers
    done: set[Action] = set()
    order: list[Action] = []

    def ready(worker: int) -> bool:
        return position[worker] < len(rows[worker]) and all(
            a in done for a in needs[rows[worker][position[worker]]]
        )

    last = schedule.worker(schedule.num_stages - 1)
    worker = schedule.worker(0)
    total = sum(len(row) for row in rows)
    while len(order) < total:
        if not ready(worker):
            waiting = [w for w in range(schedule.num_workers) if ready(w)]
            if not waiting:
                stuck = [row[i] for row, i in zip(rows, position, strict=True) if i < len(row)]
                reasons = "; ".join(
                    f"{a} waits for {', '.join(str(need) for need in needs[a] if need not in done)}"
                    for a in stuck
                )
                raise ValueError(f"schedule {schedule.name!r} deadlocks: {reasons}")
            worker = max(waiting, key=lambda w: rows[w][position[w]].stage)
        action = rows[worker][position[worker]]
        position[worker] += 1
        done.add(action)
        order.append(action)
        worker = consumer.get(action, worker if action.kind is Kind.R else last)
    return tuple(order)
