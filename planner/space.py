"""What a plan may choose: grids, schedules, numbers of micro-batches.

The accelerators are divided in every way into pipelines, replicas and those that share a layer. What no
sensible step has is left out here and nowhere else: naive pipelines, schedules of one worker but 1F1B, which
then is gradient accumulation, and halves of backwards where parameters are sharded between actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpipe_bench.pipeline.plan.named import NAMED
from gpipe_bench.planner.candidate import Grid, Way, splits
from gpipe_bench.planner.request import Request
from gpipe_bench.planner.steps import REMATS

MOST_ACTIONS = 200_000
"""Of a schedule; longer ones differ from shorter ones by their ends only."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Limits to what is tried; by default there are none but on tensor parallelism, which needs a plan.

    Args:
        schedules: names of `pipeline.plan.named.NAMED`
        microbatches: M; None for every one that divides the mini-batch
        pp, tp: sizes of these dimensions; None for every one that divides the accelerators
        remats: what stages may recompute
        sharded: whether parameters may be sharded (fsdp)
        fewer: whether accelerators may be left over: all but some hosts, or all but a part of one

    Raises:
        ValueError: an unknown schedule or `remat`.
    """

    schedules: tuple[str, ...] = tuple(name for name in NAMED if name != "naive")
    microbatches: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = (1,)
    remats: tuple[str, ...] = REMATS
    sharded: bool = True
    fewer: bool = True

    def __post_init__(self) -> None:
        for known, given, what in (
            (NAMED, self.schedules, "schedule"),
            (REMATS, self.remats, "re-materialization"),
        ):
            for name in given:
                if name not in known:
                    raise ValueError(f"unknown {what} {name!r}; known: {', '.join(known)}")


def divisors(number: int) -> list[int]:
    """All of them, from 1 on."""
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})


def grids(request: Request, space: Space) -> Iterator[Grid]:
    """Every division of the accelerators; replicas hold everything, or shards, or shards in groups."""
    for number in divisors(request.accelerators) if space.fewer else (request.accelerators,):
        if number % request.per_host and request.per_host % number:
            continue
        for tp in divisors(number):
            if (space.tp is not None and tp not in space.tp) or tp > request.per_host:
                continue
            for pp in divisors(number // tp):
                if space.pp is not None and pp not in space.pp:
                    continue
                replicas = number // tp // pp
                yield Grid(pp, replicas, tp=tp)
                for shards in divisors(replicas)[1:] if space.sharded else ():
                    yield from (Grid(pp, replicas // shards, shards, level, tp) for level in (2, 3))


def ways(request: Request, space: Space, num_layers: int) -> Iterator[Way]:
    """Every way to train that there is to look at."""
    for grid in grids(request, space):
        share, rest = divmod(request.batch_size, grid.replicas)
        if rest or grid.pp > num_layers:
            continue
        for name, per_worker in _schedules(request, space, grid):
            if grid.pp * per_worker > num_layers:
                continue
            for count in divisors(share):
                if space.microbatches is not None and count not in space.microbatches:
                    continue
                if 3 * grid.pp * per_worker * count <= MOST_ACTIONS:
                    yield Way(grid, name, per_worker, count, share // count)


def sizes_of(request: Request, space: Space, num_layers: int) -> Sequence[int]:
    """The micro-batch sizes that a search asks the costs of."""
    return sorted({way.microbatch_size for way in ways(request, space, num_layers)})


def _schedules(request: Request, space: Space, grid: Grid) -> Iterator[tuple[str, int]]:
    """Names with their stages per worker."""
    if grid.pp == 1:
        plain = [name for name in space.schedules if NAMED[name].stages_per_worker in (None, 1)]
        yield from [("1f1b" if "1f1b" in plain else name, 1) for name in plain[:1]]
        return
    for name in space.schedules:
        if splits(name) and (grid.fsdp_level == 3 or request.compiled):
            continue
        fixed = NAMED[name].stages_per_worker
        yield from ((name, each) for each in ((2,) if fixed is None else (fixed,)))


def check(request: Request, space: Space, num_layers: int) -> None:
    """`ValueError`, naming value and remedy, where nothing at all is to be tried."""
    if next(ways(request, space, num_layers), None) is not None:
        return
    all_grids = list(grids(request, space))
    if not all_grids:
        raise ValueError(
            f"no grid of {request.accelerators} accelerators has "
            + " and ".join(
                f"{name} of {' or '.join(map(str, given))}"
                for name, given in (("pp", space.pp), ("tp", space.tp))
                if given is not None
            )
            + ": give divisors of the accelerators, tp at most those of a host"
        )
    if all(grid.pp > num_layers for grid in all_grids):
        least = min(grid.pp for grid in all_grids)
        raise ValueError(
            f"cannot cut {num_layers} layers into {least} stages: use at most {num_layers} workers, or "
            "split the layers further"
        )
    fitting = sorted({grid.replicas for grid in all_grids if grid.pp <= num_layers})
    if all(request.batch_size % replicas for replicas in fitting):
        raise ValueError(
            f"a mini-batch of {request.batch_size} does not divide into {' or '.join(map(str, fitting))} "
            f"replicas: give a multiple of {fitting[0]}"
        )
    if space.microbatches is not None:
        shares = sorted({request.batch_size // r for r in fitting if request.batch_size % r == 0})
        counts = sorted({count for share in shares for count in divisors(share)})
        if not set(space.microbatches) & set(counts):
            raise ValueError(
                f"{' or '.join(map(str, space.microbatches))} micro-batches do not divide a mini-batch of "
                f"{request.batch_size} (a replica's share is {' or '.join(map(str, shares))}): use one of "
                f"{', '.join(map(str, counts))}"
            )
    raise ValueError(
        f"no schedule of {', '.join(space.schedules)} has {num_layers} layers' stages on these accelerators: "
        "name others, such as 1f1b"
    )
