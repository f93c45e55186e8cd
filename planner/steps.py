"""How long a step takes, for many cuts of one model under one schedule.

A search looks at hundreds of thousands of stages, so the seconds of any are a few look-ups (`LayerTimes`) and
a step is one pass over lists of numbers (`QuickSteps`). A grid adds collectives to them (`Collectives`):

    tensor parallel    a layer's work divided, two sums of its activations in F and in B that nothing hides
    fsdp, level 3      parameters are gathered in every pass, beside the computation
    fsdp, level 2      gathered once in a step, from its beginning on, beside the first forward
    dp, fsdp           gradients are summed from the last backward on; what that does not hide comes after it

Tensor parallelism adds up layer by layer. The others depend on which layers a stage has: they are found for
each stage that is laid out, as the replay of a prediction has them (`predict`), and remembered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from operator import add
from typing import NamedTuple

from gpipe_bench.pipeline.plan.links import FREE, Bucket, Gather, Link
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, execution_order
from gpipe_bench.planner.candidate import Grid
from gpipe_bench.planner.collectives import Collectives, all_reduce_s, forward_kind
from gpipe_bench.planner.costs import Costs, ShardCosts
from gpipe_bench.planner.request import Topology

_SUMMED = ("forward_s", "again_s", "backward_s", "inputs_s", "weights_s", "update_s")


def recomputed(remat: str, num_microbatches: int) -> int:
    """The micro-batches below this number are recomputed."""
    return {"never": 0, "except_last": num_microbatches - 1, "always": num_microbatches}[remat]


class StageTimes(NamedTuple):
    """Seconds of a stage: of each action of one micro-batch, and after its last action."""

    forward_s: float
    again_s: float  # R
    backward_s: float  # B
    inputs_s: float  # I
    weights_s: float  # W
    after_s: float  # the optimizer
    buckets: tuple[Bucket, ...] = ()
    gathers: tuple[Gather, ...] = ()


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of every layer on one micro-batch, and what lies between the layers.

    Args:
        forward_s: F
        backward_s: B
        inputs_s, weights_s: I and W; empty for schedules that have none
        activation_bytes, gradient_bytes: between layer i and i + 1, of one micro-batch each way
        update_s: of the optimizer
        again_s: R; as F if not given
        action_s: of an action of a stage whatever its layers, by kind
        collectives: what a grid adds; nothing if not given

    They go with each other as those of `Costs` do, which has checked them.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    inputs_s: Sequence[float] = ()
    weights_s: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()
    gradient_bytes: Sequence[float] = ()
    update_s: Sequence[float] = ()
    again_s: Sequence[float] = ()
    action_s: Mapping[str, float] = field(default_factory=dict)
    collectives: Collectives | None = None
    _stages: dict[tuple[int, int], StageTimes] = field(default_factory=dict, repr=False, compare=False)
    _sums: dict[str, list[float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        layers = self.num_layers
        seconds = {name: getattr(self, name) or [0.0] * layers for name in _SUMMED}
        seconds["again_s"] = self.again_s or self.forward_s
        seconds["back_s"] = seconds["least_s"] = self.backward_s
        if self.inputs_s:
            seconds["back_s"] = list(map(min, self.backward_s, self.inputs_s))
            seconds["least_s"] = list(map(min, self.backward_s, map(add, self.inputs_s, self.weights_s)))
        more = self.collectives
        seconds["gather_s"] = more.gather_s() if more and more.every_pass else [0.0] * layers
        seconds["sums_s"] = (more.sums_s() if more else []) or [0.0] * layers
        self._sums.update({name: list(accumulate(each, initial=0.0)) for name, each in seconds.items()})

    @property
    def num_layers(self) -> int:
        return len(self.forward_s)

    def stage(self, start: int, stop: int) -> StageTimes:
        """Of layers start..stop - 1."""
        known = self._stages.get((start, stop))
        if known is None:
            known = self._stages[start, stop] = self._with_collectives(start, stop)
        return known

    def _with_collectives(self, start: int, stop: int) -> StageTimes:
        alone, more, span = self._alone(start, stop), self.collectives, range(start, stop)
        if more is None:
            return alone
        ahead_s, back_s = more.passes_s(span)
        return alone._replace(
            forward_s=alone.forward_s + ahead_s,
            again_s=alone.again_s + ahead_s,
            backward_s=alone.backward_s + back_s,
            buckets=more.buckets(span),
            gathers=more.gathers(span),
        )

    def _alone(self, start: int, stop: int) -> StageTimes:
        """As if the collectives that depend on a stage's layers took no time."""
        more, halved = self.action_s, bool(self.inputs_s)
        forward, again, backward, inputs, weights, update = (self._of(n, start, stop) for n in _SUMMED)
        return StageTimes(
            forward + more.get("F", 0.0),
            again + more.get("R", 0.0),
            backward + more.get("B", 0.0),
            inputs + more.get("I", 0.0) * halved,
            weights + more.get("W", 0.0) * halved,
            update,
        )

    def at_least(self, start: int, stop: int) -> StageTimes:
        """What `stage` takes at least, from additions over layers alone, so that a longer stage takes more.
        What the last backward cannot hide of sums over replicas is in `after_s`.
        """
        alone, gather_s = self._alone(start, stop), self._of("gather_s", start, stop)
        hides_s = alone.weights_s if self.inputs_s else alone.backward_s
        if gather_s:
            alone = alone._replace(
                forward_s=max(alone.forward_s, gather_s),
                again_s=max(alone.again_s, gather_s),
                backward_s=max(alone.backward_s, 2 * gather_s),
            )
            hides_s = inf  # how much longer the last backward is depends on the stage's layers
        behind_s = max(0.0, self._of("sums_s", start, stop) - hides_s)
        return alone._replace(after_s=alone.after_s + behind_s)

    def _of(self, name: str, start: int, stop: int) -> float:
        sums = self._sums[name]
        return sums[stop] - sums[start]

    def least_s(self, start: int, stop: int) -> float:
        """Work of layers start..stop - 1 on one micro-batch at least, its backward whole or in halves."""
        gather_s = self._of("gather_s", start, stop)
        ahead_s, back_s = self._of("forward_s", start, stop), self._of("least_s", start, stop)
        return max(ahead_s, gather_s) + max(back_s, 2 * gather_s)

    def ahead_s(self, layer: int) -> float:
        """Forwards of all layers before this one, at least."""
        return max(self._sums["forward_s"][layer], self._sums["gather_s"][layer])

    def back_s(self, layer: int) -> float:
        """Until a gradient has been back through all layers before this one, at least."""
        return max(self._sums["back_s"][layer], 2 * self._sums["gather_s"][layer])

    def beyond_s(self, layer: int) -> float:
        """There and back through this layer and all after it, at least."""
        last, gather_s = self.num_layers, self._of("gather_s", layer, self.num_layers)
        ahead_s, back_s = self._of("forward_s", layer, last), self._of("back_s", layer, last)
        return max(ahead_s, gather_s) + max(back_s, 2 * gather_s)

    def message(self, boundary: int) -> tuple[float, float]:
        """Bytes over a cut in front of layer `boundary`, forward and back."""
        if not self.activation_bytes:
            return 0.0, 0.0
        ahead = self.activation_bytes[boundary - 1]
        return ahead, self.gradient_bytes[boundary - 1] if self.gradient_bytes else ahead


def times_on(
    grid: Grid,
    costs: Costs,
    microbatch_size: int,
    near: Topology,
    *,
    split: bool,
    ahead: bool,
    shards: ShardCosts | None = None,
) -> LayerTimes:
    """The times of the layers on a grid; arguments as of `Collectives`, but the costs are whole."""
    summed = costs.at(microbatch_size).summed_bytes
    sums_s = [
        2 * all_reduce_s(summed[layer], grid.tp, near.ring("tp")) if layer in summed else 0.0
        for layer in range(costs.num_layers)
    ]
    costs = divided(costs, microbatch_size, grid.tp)
    size, layers = costs.at(microbatch_size), costs.num_layers
    forward, backs = forward_kind(size.layers_s), ("B", "I") if split else ("B",)
    takes_s = {kind: list(size.layers_s.get(kind, size.layers_s[forward])) for kind in (forward, "R", *backs)}
    if grid.tp > 1:
        takes_s = {kind: list(map(add, seconds, sums_s)) for kind, seconds in takes_s.items()}
    update_s = [each / grid.fsdp for each in costs.update_s] or [0.0] * layers
    if shards is not None:
        update_s = list(shards.update_s)
        for kind, seconds in takes_s.items():
            more_s = [shards.more(kind, range(layer, layer + 1)) for layer in range(layers)]
            takes_s[kind] = [max(0.0, each + more) for each, more in zip(seconds, more_s, strict=True)]
    action_s = {kind: size.action_s.get(kind, 0.0) for kind in "RBIW"}
    return LayerTimes(
        takes_s[forward],
        takes_s["B"],
        takes_s["I"] if split else (),
        size.layers_s["W"] if split else (),
        size.activation_bytes,
        size.gradient_bytes,
        update_s,
        takes_s["R"],
        action_s | {"F": size.action_s.get(forward, 0.0)},
        Collectives(grid, near, costs, microbatch_size, split=split, ahead=ahead, shards=shards),
    )


def divided(costs: Costs, microbatch_size: int, tp: int) -> Costs:
    """The costs of one size as each of `tp` accelerators has them that compute every layer together, without
    the sums.
    """
    if tp == 1:
        return costs
    size = costs.at(microbatch_size)
    layers_s = {kind: [each / tp for each in seconds] for kind, seconds in size.layers_s.items()}
    return replace(
        costs,
        sizes={microbatch_size: replace(size, layers_s=layers_s, whole_s={}, shards_s={})},
        update_s=[each / tp for each in costs.update_s],
        parameter_bytes=[[each // tp for each in layer] for layer in costs.parameter_bytes],
    )


class QuickSteps:
    """Steps of a schedule without recomputation; what is recomputed is said for each step.

    The replay lays out one step with all its events; a search asks for the end of thousands of steps. Which
    action comes after which is then known beforehand, so all of it is put into lists of numbers once. The
    same rules are taken to the same numbers as by the replay, but for a link whose two directions wait for
    each other, where each direction is taken for itself: who comes first is not known before the times are.

    `links` has a link for each boundary between stages, or is empty where messages take no time. Raises
    ValueError for a schedule that recomputes by itself, or another number of links.
    """

    def __init__(self, schedule: Schedule, links: Sequence[Link] = ()) -> None:
        if any(action.kind is Kind.R for action in schedule):
            raise ValueError(
                f"schedule {schedule.name!r} recomputes already; give it with remat='never', and say with "
                "each step what is recomputed"
            )
        boundaries = range(schedule.num_stages - 1)
        if links and len(links) != len(boundaries):
            raise ValueError(f"{len(links)} links for {len(boundaries)} boundaries; give one for each")
        self.schedule = schedule
        self.links = tuple(links) or (FREE,) * len(boundaries)
        self.num_actions = sum(map(len, schedule.actions))
        homes = self._homes = [schedule.worker(stage) for stage in range(schedule.num_stages)]
        self._order = _some_order(schedule, homes)
        # Links from worker to worker by number, each direction for itself; -1 within a worker.
        numbers: dict[tuple[int, int], int] = {}

        def number(a: int, b: int) -> int:
            return -1 if a == b else numbers.setdefault((a, b), len(numbers))

        self._ahead = [number(homes[stage], homes[stage + 1]) for stage in boundaries]
        self._back = [number(homes[stage + 1], homes[stage]) for stage in boundaries]
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
            remat: what each stage recomputes, one of REMATS.
            messages: bytes over each boundary between stages, forward and back; none if not given.
        """
        last, count = len(stages) - 1, self.schedule.num_microbatches
        given = messages or [(0.0, 0.0)] * last
        ahead_s = [link.occupied_s(size) for link, (size, _) in zip(self.links, given, strict=True)]
        back_s = [link.occupied_s(size) for link, (_, size) in zip(self.links, given, strict=True)]
        latency_s = [link.latency_s for link in self.links]
        forward_s, again_s, backward_s, inputs_s, weights_s, after_s, sums, gathers = zip(
            *stages, strict=True
        )
        again = [recomputed(each, count) for each in remat]
        inputs = [[0.0] * count for _ in stages]
        gradients = [[0.0] * count for _ in stages]
        free = [0.0] * self.schedule.num_workers
        busy = [0.0] * self._num_links
        ended = [(0.0, 0.0)] * len(stages)  # the last action: when, and how long it took
        waits = self._fetched(gathers)
        through_ahead, through_back = self._ahead, self._back
        for code, stage, microbatch, worker in self._order:
            now = free[worker]
            if code == 0:
                arrival = inputs[stage][microbatch]
                now = arrival if arrival > now else now
                if waits[stage]:
                    now = _waiting(waits[stage], now, forward_s[stage])
                    waits[stage] = ()
                now += forward_s[stage]
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
                ended[stage] = now, takes_s
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
                ended[stage] = now, weights_s[stage]
            free[worker] = now
        if any(sums):
            reduced = [0.0] * len(free)
            order = sorted(range(len(stages)), key=lambda stage: ended[stage][0])
            for stage in order:
                (end_s, takes_s), worker = ended[stage], self._homes[stage]
                for bucket in sums[stage]:
                    ready_s = end_s - takes_s + bucket.ready * takes_s
                    reduced[worker] = max(ready_s, reduced[worker]) + bucket.takes_s
            free = list(map(max, free, reduced))
        for worker, seconds in zip(self._homes, after_s, strict=True):
            free[worker] += seconds
        return max(free)

    def _fetched(self, gathers: Sequence[tuple[Gather, ...]]) -> list[tuple[tuple[float, float], ...]]:
        """By stage, after which share of its first forward it needs what comes when: each worker fetches from
        the beginning of the step on, one after the other.
        """
        ends, found = [0.0] * self.schedule.num_workers, []
        for worker, each in zip(self._homes, gathers, strict=True):
            there = []
            for gather in each:
                ends[worker] += gather.takes_s
                there.append((gather.needed, ends[worker]))
            found.append(tuple(there))
        return found


def _waiting(needs: Sequence[tuple[float, float]], start_s: float, takes_s: float) -> float:
    """When an action that waits inside for what it needs would have begun if it did not wait."""
    late_s = start_s
    for share, there_s in needs:
        late_s = max(late_s, there_s - share * takes_s)
    return late_s


_CODES = {Kind.F: 0, Kind.B: 1, Kind.I: 2, Kind.W: 3}


def coded(action: Action) -> tuple[int, int, int]:
    """Kind, stage and micro-batch as numbers."""
    return _CODES[action.kind], action.stage, action.microbatch


def _some_order(schedule: Schedule, homes: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """All actions with their workers, each behind what it waits for: every worker goes on as far as it can,
    in turn.

    Which of the many such orders it is does not matter: messages leave a worker in the order of its row.
    """
    rows = [[(*coded(action), homes[action.stage]) for action in row] for row in schedule.actions]
    last, every = schedule.num_stages - 1, range(schedule.num_microbatches)
    inputs, gradients = {(0, each) for each in every}, {(last, each) for each in every}  # that were made
    order: list[tuple[int, int, int, int]] = []
    places, before = [0] * len(rows), -1
    while before < len(order):
        before = len(order)
        for worker, row in enumerate(rows):
            for code, stage, microbatch, _ in row[places[worker] :]:
                if code == 0:
                    if (stage, microbatch) not in inputs:
                        break
                    inputs.add((stage + 1, microbatch))
                elif code < 3:
                    if (stage, microbatch) not in gradients or (stage + 1, microbatch) not in inputs:
                        break
                    gradients.add((stage - 1, microbatch))
                order.append(row[places[worker]])
                places[worker] += 1
    if len(order) < sum(map(len, rows)):
        execution_order(schedule)  # says what waits for what
    return order
