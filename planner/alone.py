"""What a step takes at least because of one of its stages.

The stage is laid out alone: its first input comes when a micro-batch has been through all layers before it,
further ones are there at once; a gradient comes back as soon as its micro-batch has been through all layers
behind and back, however many of them are on their way; and when the stage is done, its last gradient still
has all layers before to go. Nothing of that depends on where the other stages are cut, and every real step
waits at least as long. So it is a bound from below on all cuts that have this stage.

It holds where every stage has a worker of its own. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.planner.layer_times import LayerTimes, StageTimes

_CODES = {Kind.F: 0, Kind.B: 1, Kind.I: 2, Kind.W: 3}


class AloneBound:
    """Bounds for the stages of one schedule without recomputation; `links` as `quick.QuickSteps` has them."""

    def __init__(self, schedule: Schedule, times: LayerTimes, links: Sequence[Link]) -> None:
        self._times, self._links, self._count = times, links, schedule.num_microbatches
        self._rows = [_coded(row) for row in schedule.actions]
        self._known: dict[tuple[object, ...], float] = {}

    def least_s(self, stage: int, start: int, stop: int, remat: str, *, messages: bool = True) -> float:
        """Seconds that a step takes at least with layers start..stop - 1 as this stage. Without `messages`
        they take no time, so that longer stages never have a smaller bound.
        """
        times = self._times
        head_s, tail_s = times.ahead_s(start), times.back_s(start)
        round_s = times.beyond_s(stop)
        if messages and start:
            link, (ahead, back) = self._links[stage - 1], times.message(start)
            head_s += link.occupied_s(ahead) + link.latency_s
            tail_s += link.occupied_s(back) + link.latency_s
        if messages and stop < times.num_layers:
            link, (ahead, back) = self._links[stage], times.message(stop)
            round_s += link.occupied_s(ahead) + link.occupied_s(back) + 2 * link.latency_s
        again = {"never": 0, "always": self._count, "except_last": self._count - 1}[remat]
        return self._laid_out(stage, times.stage(start, stop), again, head_s, round_s, tail_s)

    def _laid_out(
        self, stage: int, takes: StageTimes, again: int, head_s: float, round_s: float, tail_s: float
    ) -> float:
        forward_s, again_s, backward_s, inputs_s, weights_s, after_s = takes
        key = (stage, takes[:5], again, round_s)
        # The head only shifts everything; what is left is known by these.
        if key not in self._known:
            now = sent = 0.0
            done = [0.0] * self._count
            for code, microbatch in self._rows[stage]:
                if code == 0:
                    now += forward_s
                    done[microbatch] = now
                elif code < 3:
                    if microbatch < again:
                        now += again_s
                    arrival = done[microbatch] + round_s
                    takes_s = backward_s if code == 1 else inputs_s
                    sent = now = (arrival if arrival > now else now) + takes_s
                else:
                    now += weights_s
            self._known[key] = now
            self._known[(*key, "sent")] = sent
        ends_s, sent_s = self._known[key], self._known[(*key, "sent")]
        return head_s + max(ends_s + after_s, sent_s + tail_s)


def _coded(row: Sequence[Action]) -> list[tuple[int, int]]:
    return [(_CODES[action.kind], action.microbatch) for action in row]
