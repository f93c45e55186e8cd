"""Our engine over two processes with schedules beyond GPipe's, some with two stages in each process."""

from __future__ import annotations

from statistics import median
from typing import Any

from torch import Tensor
from torch import distributed as dist

from gpipe_bench.experiments.engines.known import Ours, TorchZeroBubble
from gpipe_bench.experiments.engines.setup import LossFn, Setup, clear
from gpipe_bench.experiments.timed.results import samples_of
from gpipe_bench.pipeline.plan.files import to_csv
from gpipe_bench.pipeline.plan.generate import generate
from gpipe_bench.pipeline.plan.named import loop
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.vee import vee

TIMED_STEPS = 4  # of which the first does not count


class ZBH1(Ours):
    """Zero bubble within the memory of 1F1B."""

    schedule = "zb-h1"


class Interleaved(Ours):
    """Two stages in each process, in a loop."""

    schedule, placement = "interleaved", loop(2, 2)


class Borrowed(Ours):
    """Torch's own rows of interleaved zero bubble, which has no name here. Refused where torch refuses it."""

    placement = loop(2, 2)

    def rows(self, setup: Setup) -> Schedule:
        return TorchZeroBubble(setup).rows("interleaved zero bubble")


class ZBV(Ours):
    """Zero bubble in a V."""

    schedule, placement = "zb-v", vee(2)


class PutOff(Ours):
    """GPipe with W put off into the bubble."""

    def rows(self, setup: Setup) -> Schedule:
        return put_off(setup.num_microbatches)


class Generated(Ours):
    """Rows made for what the actions of all stages take, those of the other processes too: medians of some
    steps by a schedule with a name, before the first step. `made` holds what the generator went by and what
    it made.
    """

    schedule = "zb-h1"
    placement: tuple[int, ...] = (0, 1)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.setup = setup

    def step(self, batch: Any, target: Any, loss_fn: LossFn) -> Tensor:
        if not self.made:
            timelines = []
            for _ in range(TIMED_STEPS):
                super().step(batch, target, loss_fn)
                clear(self.setup.layers)
                timelines.append(self.timeline)
            mine = {key: median(samples) for key, samples in samples_of(timelines[1:]).items()}
            everyone: list[dict[tuple[int, Kind], float]] = [{}] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            times = {key: seconds for each in everyone for key, seconds in each.items()}
            rows = generate(
                self.placement, self.setup.num_microbatches, times, remat=self.setup.remat,
                most_alive=len(self.placement), name="generated",
            )  # fmt: skip
            ms = {f"{stage}{kind.value}": 1e3 * s for (stage, kind), s in sorted(times.items())}
            self.made = {"actions_ms": ms, "generated": to_csv(rows)}
            self.pipeline = self.running(self.setup, rows)
        return super().step(batch, target, loss_fn)


class GeneratedV(Generated):
    """The same with two stages in each process, in a V."""

    schedule, placement = "zb-v", vee(2)


def put_off(number: int) -> Schedule:
    """GPipe on two workers with every micro-batch recomputed and W where it delays nobody, for two graphs
    alive on each. M = 2, every action one slot:

        stage 0 | F0 F1 R1 R0 .  I1 W1 I0 W0
        stage 1 | .  F0 F1 R1 I1 R0 I0 W1 W0
    """
    order = list(reversed(range(number)))
    first = [Action(0, Kind.F, m) for m in range(number)]
    first += [Action(0, Kind.R, m) for m in order[:2]]
    last = [Action(1, Kind.F, m) for m in range(number)]
    for place, m in enumerate(order):
        first += [Action(0, Kind.R, m)] if place > 1 else []
        first += [Action(0, Kind.I, m), Action(0, Kind.W, m)]
        last += [Action(1, Kind.R, m), Action(1, Kind.I, m)]
        last += [Action(1, Kind.W, order[place - 1])] if place else []
    last.append(Action(1, Kind.W, order[-1]))
    return Schedule("gpipe, W put off", 2, number, "always", (tuple(first), tuple(last)))
