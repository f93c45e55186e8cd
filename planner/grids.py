"""What a grid makes of the seconds of layers: shares of the work, and collectives that are waited for.

A search over grids wants times that still add up layer by layer, so each collective is charged to its layer:

    tensor parallel    a layer's work divided, two sums of its activations in F and in B that nothing hides
    fsdp, level 3      a layer's parameters are gathered beside the computation: the longer of the two counts
    fsdp, level 2      gathered once in a step, before it begins
    dp, fsdp           gradients are summed from the last backward on; what that does not hide comes after it

The prediction of a candidate lays out the same collectives one by one. Only the standard library and
`pipeline.plan` are imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpipe_bench.pipeline.plan.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from gpipe_bench.planner.candidate import Candidate
from gpipe_bench.planner.costs import Costs, ShardCosts
from gpipe_bench.planner.layer_times import LayerTimes
from gpipe_bench.planner.links import Topology


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """Accelerators by what they do: workers of a pipeline, replicas, those that share a layer.

    `fsdp_level` is as `Candidate` has it.
    """

    pp: int
    dp: int = 1
    fsdp: int = 1
    fsdp_level: int = 0
    tp: int = 1

    @property
    def replicas(self) -> int:
        return self.dp * self.fsdp

    @property
    def accelerators(self) -> int:
        return self.pp * self.replicas * self.tp

    def __str__(self) -> str:
        sharded = f"fsdp {self.fsdp} (ZeRO-{self.fsdp_level})" if self.fsdp > 1 else ""
        parts = [f"pp {self.pp}", f"dp {self.dp}" * (self.dp > 1), sharded, f"tp {self.tp}" * (self.tp > 1)]
        return " x ".join(part for part in parts if part)


def grid_of(candidate: Candidate) -> Grid:
    """What a candidate makes of its accelerators."""
    return Grid(candidate.num_workers, candidate.dp, candidate.fsdp, candidate.fsdp_level, candidate.tp)


def times_on(
    grid: Grid,
    costs: Costs,
    microbatch_size: int,
    near: Topology,
    *,
    split: bool,
    shards: ShardCosts | None = None,
) -> LayerTimes:
    """The times of the layers on a grid; `split` where the schedule has I and W in the place of B. What
    `shards` of parameters were timed to add takes the place of fsdp's collectives.
    """
    size = costs.at(microbatch_size)
    if grid.tp > 1:
        sums_s = [2 * all_reduce_s(each, grid.tp, near.ring("tp")) for each in (*size.activation_bytes, 0.0)]
        costs = divided(costs, microbatch_size, grid.tp)
        size = costs.at(microbatch_size)
        size = replace(
            size,
            layers_s={
                kind: seconds if kind.startswith("W") else _added(seconds, sums_s)
                for kind, seconds in size.layers_s.items()
            },
        )
    ahead, backs = "G" if "G" in size.layers_s else "F", ("B", "I") if split else ("B",)
    takes_s = {kind: list(size.layers_s.get(kind, size.layers_s[ahead])) for kind in (ahead, "R", *backs)}
    held = [sum(layer) for layer in costs.parameter_bytes] or [0] * costs.num_layers
    gathers_s = [all_gather_s(each, grid.fsdp, near.ring("fsdp")) for each in held]
    if shards is not None:
        gathers_s = [0.0] * len(held)
        for kind, seconds in takes_s.items():
            takes_s[kind] = [
                max(0.0, each + shards.more(kind, range(layer, layer + 1)))
                for layer, each in enumerate(seconds)
            ]
    if grid.fsdp_level == 3:
        takes_s = {kind: list(map(max, seconds, gathers_s)) for kind, seconds in takes_s.items()}
    reduce_s = [0.0] * len(held)
    if grid.fsdp > 1:
        reduce_s = [reduce_scatter_s(each, grid.fsdp, near.ring("fsdp")) for each in held]
    if shards is not None:
        reduce_s = list(shards.once_s)
    if grid.dp > 1:
        reduce_s = _added(
            reduce_s, [all_reduce_s(each / grid.fsdp, grid.dp, near.ring("dp")) for each in held]
        )
    update_s = [each / grid.fsdp for each in costs.update_s] or [0.0] * len(held)
    if shards is not None:
        update_s = list(shards.update_s)
    if grid.fsdp_level == 2:
        update_s = _added(update_s, gathers_s)
    more_s = {"F": size.action_s.get(ahead, 0.0), **{kind: size.action_s.get(kind, 0.0) for kind in "RBIW"}}
    return LayerTimes(
        takes_s[ahead],
        takes_s["B"],
        takes_s["I"] if split else (),
        size.layers_s["W"] if split else (),
        size.activation_bytes,
        size.gradient_bytes,
        update_s,
        reduce_s,
        takes_s["R"],
        more_s,
    )


def divided(costs: Costs, microbatch_size: int, tp: int) -> Costs:
    """The costs of one size as each of `tp` accelerators has them that compute every layer together, without
    the sums.
    """
    size = costs.at(microbatch_size)
    layers_s = {kind: [each / tp for each in seconds] for kind, seconds in size.layers_s.items()}
    return replace(
        costs,
        sizes={microbatch_size: replace(size, layers_s=layers_s, whole_s={}, shards_s={})},
        update_s=[each / tp for each in costs.update_s],
        parameter_bytes=[[each // tp for each in layer] for layer in costs.parameter_bytes],
    )


def _added(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]
