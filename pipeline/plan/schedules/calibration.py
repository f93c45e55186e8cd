"""How a pipeline with `schedule="auto"` finds its schedule: the first training steps are timed.

What is timed are steps that train: no layer runs on made-up data, or once more, so nothing of the model moves
that would not have moved anyway, and no step is lost. The first steps split their backwards, the next ones do
not, so both are known. Then the first rank chooses (`plan.schedules.automatic`) and tells all others. Every
schedule on the way takes the micro-batches of a stage in order, so that the weights do not depend, not even
in their last bit, on what is chosen, or when.

    step      0         1     2      3      4      5 ...
    backward  split     split split  whole  whole  as chosen
              warm-up   timed timed  timed  timed
"""

from __future__ import annotations

from gpipe_bench.pipeline.plan.remat import Remat
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.schedules.automatic import automatic, first_of_all, link_s_of, times_of
from gpipe_bench.pipeline.plan.timeline import Timeline

WARM_UP_STEPS = 1
TIMED_STEPS = 2  # of each kind of backward


class Calibration:
    """Which schedule the next step takes, until there are times enough to choose one.

    `link_s` is given where it need not be measured; `most_alive` as for `generate`.
    """

    def __init__(
        self,
        placement: tuple[int, ...],
        num_microbatches: int,
        remat: Remat,
        *,
        link_s: float | None = None,
        most_alive: int | None = None,
    ) -> None:
        self._placement, self._num_microbatches, self._remat = placement, num_microbatches, remat
        self._link_s, self._most_alive = link_s, most_alive
        split, whole = [
            first_of_all(placement, num_microbatches, split=split, remat=remat, most_alive=most_alive)
            for split in (True, False)
        ]
        self._steps = [split] * (WARM_UP_STEPS + TIMED_STEPS) + [whole] * TIMED_STEPS
        self._timelines: list[Timeline] = []
        self.is_due = False  # a step was taken that has not been noted

    @property
    def schedule(self) -> Schedule:
        """What the next step takes."""
        return self._steps[len(self._timelines)]

    def note(self, timeline: Timeline) -> bool:
        """Keeps what a step took; whether that was the last one to be timed."""
        self.is_due = False
        self._timelines.append(timeline)
        return len(self._timelines) == len(self._steps)

    def choose(self) -> Schedule:
        """The schedule for the times of all steps but the warm-up."""
        timed = self._timelines[WARM_UP_STEPS:]
        return automatic(
            self._placement,
            self._num_microbatches,
            times_of(timed),
            link_s=link_s_of(timed) if self._link_s is None else self._link_s,
            remat=self._remat,
            most_alive=self._most_alive,
        )
