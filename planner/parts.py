"""What a search knows of single ways: rows, places, times, room. All of it is made once, for the ways that
come next have much of it in common.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.planner.bounds import Equals, Graphs, equals_of, graphs_of
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.footprints import Footprints
from gpipe_bench.planner.grids import times_on
from gpipe_bench.planner.lately import Lately
from gpipe_bench.planner.layer_times import LayerTimes
from gpipe_bench.planner.links import Topology
from gpipe_bench.planner.models import Tie
from gpipe_bench.planner.quick import QuickSteps
from gpipe_bench.planner.request import Request
from gpipe_bench.planner.room import Room, Rules, Walked
from gpipe_bench.planner.space import Way

Rows = tuple[str, int, int, int]


def rows_of(way: Way) -> Rows:
    """What the rows of its schedule depend on."""
    return way.schedule, way.grid.pp, way.stages_per_worker, way.num_microbatches


@dataclass
class Parts:
    """Of one search.

    Args:
        costs: of the layers, at every size that a way has
        request: machines and a way to train
        ties: of the model
    """

    costs: Costs
    request: Request
    ties: tuple[Tie, ...] = ()
    _footprints: dict[tuple[int, bool, int], Footprints] = field(default_factory=dict, repr=False)
    _boundaries: dict[tuple[object, ...], tuple[Link, ...]] = field(default_factory=dict, repr=False)
    _times: dict[tuple[object, ...], LayerTimes] = field(default_factory=dict, repr=False)
    _schedules: Lately[Schedule] = field(default_factory=lambda: Lately[Schedule](), repr=False)
    _quick: Lately[QuickSteps] = field(default_factory=lambda: Lately[QuickSteps](), repr=False)
    _walked: Lately[Walked] = field(default_factory=lambda: Lately[Walked](), repr=False)
    _equals: dict[tuple[object, ...], Equals | None] = field(default_factory=dict, repr=False)
    _graphs: dict[Rows, Graphs] = field(default_factory=dict, repr=False)

    def schedule(self, way: Way) -> Schedule:
        """Its rows without recomputation."""
        return self._schedules.of(
            rows_of(way),
            lambda: named(
                way.schedule, way.grid.pp, way.num_microbatches, stages_per_worker=way.stages_per_worker
            ),
        )

    def topology(self, way: Way) -> Topology:
        """What lies between its processes."""
        grid, sums = way.grid, self.costs.sums_beside(self.request.link)
        return Topology(self.request, grid.pp, grid.dp, grid.fsdp, grid.tp, sums)

    def boundaries(self, way: Way) -> tuple[Link, ...]:
        """What lies between its stages."""
        key = (way.schedule, way.grid, way.stages_per_worker)
        if key not in self._boundaries:
            small = named(way.schedule, way.grid.pp, 1, stages_per_worker=way.stages_per_worker)
            homes = [small.worker(stage) for stage in range(small.num_stages)]
            self._boundaries[key] = self.topology(way).boundaries(homes)
        return self._boundaries[key]

    def times(self, way: Way) -> LayerTimes:
        """What spans of layers take there."""
        key = (way.grid, way.microbatch_size, way.splits)
        if key not in self._times:
            self._times[key] = times_on(
                way.grid, self.costs, way.microbatch_size, self.topology(way), split=way.splits,
                shards=None if way.grid.tp > 1 else self.costs.shards(
                    way.microbatch_size, way.grid.fsdp, way.grid.fsdp_level, self.request.link
                ),
            )  # fmt: skip
        return self._times[key]

    def room(self, way: Way) -> Room:
        """The memory of its workers."""
        return Room(
            self.footprints(way.microbatch_size, way.splits, way.grid.tp),
            self.schedule(way),
            Rules(self.request.optimizer, way.grid, self.ties),
            self._walked.of(rows_of(way), Walked),
        )

    def footprints(self, microbatch_size: int, split: bool, tp: int = 1) -> Footprints:
        key = (microbatch_size, split, tp)
        if key not in self._footprints:
            if self.costs.profiles is None:
                raise ValueError(
                    "these costs have no profiles, so nobody knows what fits: time the layers anew"
                )
            self._footprints[key] = Footprints(self.costs.profiles(microbatch_size, split, tp))
        return self._footprints[key]

    def quick(self, way: Way) -> QuickSteps:
        """Steps of its rows, messages taking no time."""
        return self._quick.of(rows_of(way), lambda: QuickSteps(self.schedule(way)))

    def equals(self, way: Way) -> Equals | None:
        """Its layers by their kinds, if there are profiles."""
        key = (way.grid, way.microbatch_size, way.splits)
        if key not in self._equals:
            self._equals[key] = None
            if self.costs.profiles is not None:
                profile = self.costs.profiles(way.microbatch_size, False, way.grid.tp)
                self._equals[key] = equals_of(
                    profile, self.times(way), way.grid, self.request.optimizer, self.ties
                )
        return self._equals[key]

    def graphs(self, way: Way) -> Graphs:
        """Those of fewer micro-batches, where there are many: of more there are never fewer."""
        few = min(way.num_microbatches, 2 * way.grid.pp)
        key = rows_of(replace(way, num_microbatches=few))
        if key not in self._graphs:
            self._graphs[key] = graphs_of(
                named(way.schedule, way.grid.pp, few, stages_per_worker=way.stages_per_worker)
            )
        return self._graphs[key]
