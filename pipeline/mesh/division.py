"""How parameters are divided over processes, and what a stage does about it.

Two dimensions of a mesh divide parameters. Along `fsdp` they are stored in parts and used whole
(`sharding`), along `tp` they are used in parts (`tensor_parallel`). Both are torch's, and what does them
takes half a second to load, so it is loaded where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from gpipe_bench.pipeline.mesh.collectives import Replicas
from gpipe_bench.pipeline.mesh.grid import Grid
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.ranks.tied import Tie
from gpipe_bench.pipeline.stage.stage import Reduction, Stage

LEVELS = (2, 3)


class Divided:
    """The division of the layers on a grid.

    Args:
        grid: with more than one process along `fsdp` or `tp`
        zero: what is stored in parts along `fsdp`: 2, gradients and the optimizer's state; 3, parameters too.
            None where there is no such dimension.
    """

    def __init__(self, grid: Grid, zero: int | None) -> None:
        self._grid, self._zero = grid, zero
        self._along_tp = grid.size("tp") > 1

    @property
    def by_layer(self) -> bool:
        """Whether all holders of a layer fetch its parameters whenever it runs, in step with each other."""
        return self._zero == 3

    @property
    def makes(self) -> Callable[..., Stage]:
        """The class of the stages."""
        if not self._along_tp:
            return Stage
        from gpipe_bench.pipeline.mesh.tensor_parallel import DividedStage

        return DividedStage

    def check(
        self,
        layers: Mapping[str, nn.Module],
        ties: Sequence[Tie],
        schedule: Schedule | None,
        *,
        compiles: bool,
        reduction: str,
    ) -> None:
        """`ValueError` for what cannot be done with divided parameters, and what can.

        Args:
            layers: those of the whole model
            ties: its weights with several places
            schedule: what the steps take; None where it is still to be found
            compiles: whether the layers are to be compiled
            reduction: how gradients are to be summed over replicas
        """
        if reduction == "tree":
            raise ValueError(
                "reduction='tree' adds up whole gradients, and those of divided parameters are not; use "
                "'buckets', or the dimension 'dp' instead of 'fsdp' and 'tp'"
            )
        if compiles:
            raise ValueError(
                "compile= makes programs of layers whose parameters are whole and stay where they are; leave "
                "it out, or use the dimension 'dp' instead of 'fsdp' and 'tp'"
            )
        homes = {parameter: name for name, layer in layers.items() for parameter in layer.parameters()}
        for tie in ties:
            used = [name for name, layer in layers.items() if tie.parameter in set(layer.parameters())]
            if len(used) > 1 or (self._along_tp and homes):
                raise ValueError(
                    f"{' and '.join(tie.names)} are one weight, which cannot be divided with each of the "
                    "modules that have it; give them weights of their own, or use the dimension 'dp' instead "
                    "of 'fsdp' and 'tp'"
                )
        if self._along_tp:
            from gpipe_bench.pipeline.mesh.tensor_parallel import check_divided

            check_divided(layers, self._grid)
        if self._zero is not None:
            from gpipe_bench.pipeline.mesh.sharding import check_sharded

            check_sharded(layers, schedule, self._zero)

    def check_own(self, layers: Mapping[str, nn.Module]) -> None:
        """`ValueError` for what cannot be done with the `layers` of this process."""
        if self._along_tp:
            from gpipe_bench.pipeline.mesh.tensor_parallel import refuse_mixed

            refuse_mixed(layers)

    def divide(self, layers: Mapping[str, nn.Module]) -> None:
        """Leaves this process its parts of the parameters of its `layers`, where it had all of them."""
        if self._zero is not None:
            from gpipe_bench.pipeline.mesh.sharding import shard_layers

            shard_layers(layers, self._grid, self._zero)

    def connect(self, replicas: Replicas, *, accelerated: bool) -> None:
        """Prepares the ways between processes that hold parts; all `replicas` of a stage call."""
        if self._zero is not None:
            from gpipe_bench.pipeline.mesh.sharding import Holders

            self._holders = Holders(replicas, self._grid, accelerated=accelerated)

    def reduction(self, stage: Stage, sums: Callable[[Stage], Reduction | None]) -> Reduction:
        """What joins the gradients of a stage; `sums` makes what sums over replicas."""
        if self._zero is not None:
            from gpipe_bench.pipeline.mesh.sharding import Shards

            return Shards(stage, self._zero, self._holders)
        from gpipe_bench.pipeline.mesh.tensor_parallel import Layouts

        return Layouts(stage, sums)


def divided_over(grid: Grid | None, zero: int | None) -> Divided | None:
    """The division that a grid asks for; None where every process has all parameters of its stages."""
    if zero is not None and zero not in LEVELS:
        raise ValueError(f"zero={zero!r} is not known; choose one of {', '.join(map(str, LEVELS))}")
    if zero is not None and (grid is None or "fsdp" not in grid):
        raise ValueError(f"zero={zero} divides along the dimension 'fsdp' of a mesh, and there is none")
    if grid is None or grid.size("fsdp") == grid.size("tp") == 1:
        return None
    return Divided(grid, None if grid.size("fsdp") == 1 else zero or LEVELS[0])
