"""How long a step takes, for many cuts under one schedule.

The replay lays out one step with all its events; a search asks for the end of thousands of steps of one
schedule. Which action comes after which is then known beforehand, so all of it is put into lists of numbers
once, and each step is one pass over them. It takes the same rules to the same numbers as the replay, but for
a link whose two directions wait for each other, where it takes each direction for itself: who comes first is
not known before the times are. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.order import execution_order
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.planner.layer_times import StageTimes


class QuickSteps:
    """Steps of a schedule without recomputation; what is recomputed is said for each step.

    `links` has a link for each boundary between stages, or is empty where messages take no time. Raises
    ValueError for a schedule that recomputes by itself, or another number of links.
    """

    def __init__(self, schedule: Schedule, links: Sequence[Link] = ()) -> None:
        if any(action.kind is Kind.R for action in schedule):
            raise ValueError(
                f"schedule {schedule.name!r} recomputes already; give it with remat='never', and say with "
                "each step what is recomputed"
            )
        boundaries = schedule.num_stages - 1
        if links and len(links) != boundaries:
            raise ValueError(f"{len(links)} links for {boundaries} boundaries; give one for each")
        self.schedule = schedule
        self.links = tuple(links) or (FREE,) * boundaries
        self.num_actions = sum(map(len, schedule.actions))
        homes = [schedule.worker(stage) for stage in range(schedule.num_stages)]
        self._workers = schedule.num_workers
        self._homes = homes
        self._order = _some_order(schedule, homes)
        # Links from worker to worker by number, each direction for itself; -1 within a worker.
        numbers: dict[tuple[int, int], int] = {}
        self._ahead, self._back = (
            [
                -1
                if homes[stage] == homes[stage + 1]
                else numbers.setdefault(
                    (homes[stage], homes[stage + 1]) if forward else (homes[stage + 1], homes[stage]),
                    len(numbers),
                )
                for stage in range(boundaries)
            ]
            for forward in (True, False)
        )
        self._num_links = len(numbers)

    def makespan_s(
        self,
        stages: Sequence[StageTimes],
        remat: Sequence[str],
        messages: Sequence[tuple[float, float]] = (),
    ) -> float:
        """Seconds of a step.

        Args:
            stages: of each stage.
            remat: what each stage recomputes, one of `times.REMATS`.
            messages: bytes over each boundary between stages, forward and back; none if not given.
        """
        last, count = len(stages) - 1, self.schedule.num_microbatches
        given = messages or [(0.0, 0.0)] * last
        ahead_s = [link.occupied_s(size) for link, (size, _) in zip(self.links, given, strict=True)]
        back_s = [link.occupied_s(size) for link, (_, size) in zip(self.links, given, strict=True)]
        latency_s = [link.latency_s for link in self.links]
        forward_s = [stage.forward_s for stage in stages]
        again_s = [stage.again_s for stage in stages]
        backward_s = [stage.backward_s for stage in stages]
        inputs_s = [stage.inputs_s for stage in stages]
        weights_s = [stage.weights_s for stage in stages]
        # The micro-batches below this number are recomputed.
        again = [{"never": 0, "always": count, "except_last": count - 1}[each] for each in remat]
        inputs = [[0.0] * count for _ in stages]
        gradients = [[0.0] * count for _ in stages]
        free = [0.0] * self._workers
        busy = [0.0] * self._num_links
        through_ahead, through_back = self._ahead, self._back
        for code, stage, microbatch, worker in self._order:
            now = free[worker]
            if code == 0:
                arrival = inputs[stage][microbatch]
                now = (arrival if arrival > now else now) + forward_s[stage]
                if stage < last:
                    link = through_ahead[stage]
                    if link < 0:
                        inputs[stage + 1][microbatch] = now
                    else:
                        start = busy[link]
                        sent = busy[link] = (start if start > now else now) + ahead_s[stage]
                        inputs[stage + 1][microbatch] = sent + latency_s[stage]
            elif code < 3:
                if microbatch < again[stage]:
                    now += again_s[stage]
                arrival = gradients[stage][microbatch]
                takes_s = backward_s[stage] if code == 1 else inputs_s[stage]
                now = (arrival if arrival > now else now) + takes_s
                if stage:
                    link = through_back[stage - 1]
                    if link < 0:
                        gradients[stage - 1][microbatch] = now
                    else:
                        start = busy[link]
                        sent = busy[link] = (start if start > now else now) + back_s[stage - 1]
                        gradients[stage - 1][microbatch] = sent + latency_s[stage - 1]
            else:
                now += weights_s[stage]
            free[worker] = now
        for stage, worker in enumerate(self._homes):
            free[worker] += stages[stage].after_s
        return max(free)


_CODES = {Kind.F: 0, Kind.B: 1, Kind.I: 2, Kind.W: 3}
_Coded = tuple[int, int, int, int]
"""Kind, stage, micro-batch, worker."""


def _some_order(schedule: Schedule, homes: Sequence[int]) -> list[_Coded]:
    """All actions, each behind what it waits for: every worker goes on as far as it can, in turn.

    Which of the many such orders it is does not matter: messages leave a worker in the order of its row.
    """
    rows = [
        [(_CODES[action.kind], action.stage, action.microbatch, homes[action.stage]) for action in row]
        for row in schedule.actions
    ]
    last, count = schedule.num_stages - 1, schedule.num_microbatches
    # Whether the input and the gradient of a micro-batch have been made; one more place stays untouched.
    inputs = [bytearray(count) for _ in range(last + 2)]
    gradients = [bytearray(count) for _ in range(last + 1)]
    inputs[0], gradients[last] = bytearray(b"\1" * count), bytearray(b"\1" * count)
    order: list[_Coded] = []
    places = [0] * len(rows)
    waiting = list(range(len(rows)))[::-1]
    while waiting:
        worker = waiting.pop()
        row = rows[worker]
        for place in range(places[worker], len(row)):
            code, stage, microbatch, _ = each = row[place]
            target = worker
            if code == 0:
                if not inputs[stage][microbatch]:
                    break
                inputs[stage + 1][microbatch] = 1
                if stage < last:
                    target = homes[stage + 1]
            elif code < 3:
                if not (gradients[stage][microbatch] and inputs[stage + 1][microbatch]):
                    break
                if stage:
                    gradients[stage - 1][microbatch] = 1
                    target = homes[stage - 1]
            order.append(each)
            places[worker] = place + 1
            if target != worker and target not in waiting:
                waiting.append(target)
    if len(order) < sum(map(len, rows)):
        execution_order(schedule)  # says what waits for what
    return order
