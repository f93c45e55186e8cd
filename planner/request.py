"""The request for a plan: machines and the links between them, how the model is to be trained, and what
a plan may choose (`Space`). The module `candidate` holds one choice of all, with its costs.

Ranks are counted as the plan's mesh has them, the pipeline outermost and tensor parallelism innermost, so
what sends most is nearest:

    2 hosts of 4, mesh pp 2 x dp 2 x tp 2     host 0: pp 0, all of dp and tp     host 1: pp 1

A ring of ranks over several hosts uses all network cards of a host at a time (NCCL's rails), unless other
rings pass the same hosts: with tp 8 there are eight rings of fsdp, and each has one of eight cards. Only the
standard library and `pipeline.plan` are imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod

from gpipe_bench.pipeline.plan.links import LINKS, Link
from gpipe_bench.pipeline.plan.named import NAMED, suggestion

from .candidate import LEVELS, REMATS, Grid, Way, splits

OPTIMIZERS = ("sgd", "rmsprop", "adam")
PRECISIONS = ("float32", "bfloat16", "float16", "bfloat16-pure")
"""Mixed precision keeps weights in float32: what is gathered (fsdp) is gathered in 16 bits, all else is
autocast's; float16 has a scaled loss. Pure has everything in bfloat16, the optimizer's state too."""

RING_REACHES = 0.8
"""Share of a link's bandwidth that a ring of large tensors reaches: 78 % on eight A100, 80 to 82 % on eight
H200 (stas00/ml-engineering, network/README.md, revision 744d01e)."""

MEASURED = "measured"
"""The device type of a plan for the device that this machine has, on which the layers are timed."""

RESERVED_BYTES = 3 * 2**29
"""1.5 GiB of an accelerator for what a process holds beside tensors: context and loaded kernels (1 to 2 GB,
1.3 of them measured on a V100: Hugging Face, "Model training anatomy"), workspaces of products (32 MiB a
stream on an H100), buffers of collectives. The allocator's fragments may need more.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Machines and a way to train. ValueError for a number below 1, hosts that do not divide the accelerators
    or have nothing between them, an unknown optimizer or precision, or as much held back as there is.

    Args:
        accelerators: all of them, on all hosts
        memory_bytes: of one accelerator
        reserve_bytes: of these, held back for what is no tensor; None for RESERVED_BYTES of an accelerator
            that is named, none where the layers are timed here
        batch_size: examples of a mini-batch, over all replicas
        link: between two accelerators of one host
        between: between two accelerators of different hosts; None where there is one host
        hosts: a divisor of the accelerators, which are spread evenly
        optimizer: one of OPTIMIZERS
        precision: one of PRECISIONS
        device_type: MEASURED, or the name of an accelerator whose peaks are known
        compiled: each layer runs under `torch.compile`
        autocast: shards are gathered in 32 bits and cast by autocast, as on this engine; not in 16 bits, as
            FSDP's mixed precision does
        cards: network cards of a host; None for one for each accelerator where NVLink connects them, else 1
    """

    accelerators: int
    memory_bytes: int
    batch_size: int
    link: Link
    between: Link | None = None
    hosts: int = 1
    optimizer: str = "adam"
    precision: str = "float32"
    device_type: str = MEASURED
    compiled: bool = False
    reserve_bytes: int | None = None
    autocast: bool = False
    cards: int | None = None

    def __post_init__(self) -> None:
        for name in ("accelerators", "memory_bytes", "batch_size", "hosts", "cards_per_host"):
            if getattr(self, name) < 1:
                given = name.removesuffix("_per_host")
                raise ValueError(f"{given} is {getattr(self, name)}; give 1 or more")
        if self.accelerators % self.hosts:
            raise ValueError(
                f"hosts is {self.hosts}, no divisor of {self.accelerators} accelerators; give one"
            )
        if self.hosts > 1 and self.between is None:
            raise ValueError(f"{self.hosts} hosts have no link between them; give one, such as infiniband")
        if self.optimizer not in OPTIMIZERS:
            close = suggestion(self.optimizer, OPTIMIZERS)
            raise ValueError(f"optimizer is {self.optimizer!r}{close}; choose one of {', '.join(OPTIMIZERS)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; choose one of {', '.join(PRECISIONS)}")
        if not 0 <= self.held_back_bytes < self.memory_bytes:
            held, memory = (each / 2**30 for each in (self.held_back_bytes, self.memory_bytes))
            raise ValueError(f"{held:g} GiB are held back of {memory:g}: hold back less (--reserve-gib)")

    @property
    def held_back_bytes(self) -> int:
        """Bytes of each accelerator that are reserved for what is no tensor."""
        usual = RESERVED_BYTES if self.accelerated else 0
        return usual if self.reserve_bytes is None else self.reserve_bytes

    @property
    def gathered_share(self) -> float:
        """Share of a parameter's bytes that a gather sends."""
        return 0.5 if self.precision in ("bfloat16", "float16") and not self.autocast else 1.0

    def gathers_half(self, fsdp: int) -> bool:
        """Whether layers read parameters that were gathered in 16 bits."""
        return fsdp > 1 and self.gathered_share < 1

    @property
    def usable_bytes(self) -> int:
        """Bytes of each accelerator that tensors may use."""
        return self.memory_bytes - self.held_back_bytes

    @property
    def accelerated(self) -> bool:
        """Whether the plan is for a named accelerator, not for layers timed on this host."""
        return self.device_type != MEASURED

    @property
    def cards_per_host(self) -> int:
        """Number of network cards of one host."""
        usual = self.per_host if self.link.name.startswith("nvlink") else 1
        return usual if self.cards is None else self.cards

    @property
    def per_host(self) -> int:
        """Number of accelerators of one host."""
        return self.accelerators // self.hosts


DIMENSIONS = ("pp", "dp", "fsdp", "tp")
"""Dimensions of a plan's mesh, from the outermost."""

_GENERATIONS: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "nvlink": (
        (("v100",), "nvlink2"), (("a100", "a800"), "nvlink3"),
        (("h100", "h200", "gh200"), "nvlink4"), (("b100", "b200", "gb200"), "nvlink5"),
    ),
    "pcie": (
        (("p100", "p40", "v100", "t4"), "pcie3-host"), (("h100", "h200", "b100", "b200"), "pcie5-host"),
        (("",), "pcie4-host"),
    ),
    "infiniband": (
        (("p100", "p40", "v100", "t4"), "infiniband-edr"), (("a100", "a800"), "infiniband-hdr"),
        (("",), "infiniband-ndr"),
    ),
    "ethernet": ((("",), "ethernet-25g"),),
}  # fmt: skip
"""Link generations by the first part of an accelerator's name that fits; an empty one fits all others."""


def link_named(name: str, device_type: str = "") -> Link:
    """The preset of that name, or its generation for an accelerator; ValueError for none."""
    if name in LINKS:
        return LINKS[name]
    if name not in _GENERATIONS:
        known = [*_GENERATIONS, *LINKS]
        raise ValueError(f"unknown link {name!r}{suggestion(name, known)}; known: {', '.join(known)}")
    words = device_type.lower()
    for starts, link in _GENERATIONS[name]:
        if words.startswith(starts):
            return LINKS[link]
    raise ValueError(f"no {name} of {device_type or 'no device type'} is known; use pcie, or a preset's name")


def link_within(device_type: str) -> Link:
    """The default link in a host: NVLink where the card has it, else PCIe; ValueError for TPUs."""
    if device_type.lower().startswith("tpu"):
        raise ValueError(f"what connects {device_type} is no preset; give one that is like it, or free")
    has_nvlink = device_type.lower().startswith(tuple(s for ours, _ in _GENERATIONS["nvlink"] for s in ours))
    return link_named("nvlink" if has_nvlink else "pcie", device_type)


@dataclass(frozen=True)
class Topology:
    """Which link connects which of the first ranks; `sums`, if known, is that of sums over replicas."""

    request: Request
    grid: Grid
    sums: Link | None = None

    @cache  # noqa: B019
    def ring(self, name: str) -> Link:
        """The link of rings along a dimension: the slowest hop of them all."""
        if self.sums is not None and name in ("dp", "fsdp"):
            return self.sums
        stride, size = self._stride(name), getattr(self.grid, name)
        ranks = range(self.grid.accelerators)
        slowest = self._slowest(
            (rank, rank + stride * (1 if rank // stride % size + 1 < size else 1 - size)) for rank in ranks
        )
        ring = self._by_cards(slowest, stride)
        if not self.request.accelerated:
            return ring
        return replace(ring, bandwidth_bytes_per_s=RING_REACHES * ring.bandwidth_bytes_per_s)

    @cache  # noqa: B019
    def between(self, a: int, b: int) -> Link:
        """The link between two workers of a pipeline: the slowest of all replicas."""
        block = self._stride("pp")  # ranks of one worker, in all replicas
        slowest = self._slowest((a * block + each, b * block + each) for each in range(block))
        return self._by_cards(slowest, block)

    def boundaries(self, placement: Sequence[int]) -> tuple[Link, ...]:
        """The link from each stage to the next; `placement` has the worker of each stage."""
        return tuple(self.between(a, b) for a, b in pairwise(placement))

    def describe(self) -> str:
        """Describes in words the link of each dimension, and where a pipeline has two."""
        links: dict[str, list[str]] = {}
        for a, b in pairwise(range(self.grid.pp)):
            links.setdefault(self.between(a, b).name, []).append(f"{a}-{b}")
        several = len(links) > 1
        found = [f"pp {' '.join(ends) + ' ' if several else ''}{link}" for link, ends in links.items()]
        rings = (name for name in DIMENSIONS[1:] if getattr(self.grid, name) > 1)
        return ", ".join([*found, *(f"{name} {self.ring(name).name}" for name in rings)])

    def _stride(self, name: str) -> int:
        """Distance from a rank to its neighbour along a dimension."""
        return prod(getattr(self.grid, each) for each in DIMENSIONS[DIMENSIONS.index(name) + 1 :])

    def _by_cards(self, link: Link, together: int) -> Link:
        """A link between hosts, as seen by one of `together` ranks that share a host's network cards."""
        share = self.request.cards_per_host / min(together, self.request.per_host)
        if link is not self.request.between or share == 1:
            return link
        rate = link.bandwidth_bytes_per_s * share
        return replace(link, name=f"{link.name} x {share:g}", bandwidth_bytes_per_s=rate)

    def _slowest(self, hops: Iterable[tuple[int, int]]) -> Link:
        """Returns the slowest of the links between these pairs of ranks."""
        near, far, per_host = self.request.link, self.request.between, self.request.per_host
        links = {near if far is None or a // per_host == b // per_host else far for a, b in hops}
        return min(links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s, link.name))


# What may be chosen: grids, schedules, numbers of micro-batches. Only here is left out what is never
# sensible: naive pipelines; with one worker, all schedules but 1F1B (gradient accumulation); split backwards
# where parameters are resharded between actions.

MOST_ACTIONS = 200_000
"""Most actions of a schedule that is tried; longer schedules differ from shorter ones by their ends only."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Limits to what is tried; by default there are none but on tensor parallelism, which needs a plan.
    ValueError for an unknown schedule or `remat`.

    Args:
        schedules: names of `pipeline.plan.named.NAMED`
        possible: those that may be chosen where nobody names any; a refusal offers them
        microbatches: M; None for every one that divides the mini-batch
        pp, tp: sizes of these dimensions; None for every one that divides the accelerators
        least_examples: of a micro-batch
        remats: what stages may recompute
        sharded: whether parameters may be sharded (fsdp)
        sharded_stages: whether those of a pipeline's stages may be, too
        fewer: whether a plan may use only some of the hosts, or only a part of one
    """

    schedules: tuple[str, ...] = tuple(name for name in NAMED if name != "naive")
    possible: tuple[str, ...] = schedules
    microbatches: tuple[int, ...] | None = None
    least_examples: int = 1
    pp: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = (1,)
    remats: tuple[str, ...] = REMATS
    sharded: bool = True
    sharded_stages: bool = True
    fewer: bool = True

    def __post_init__(self) -> None:
        kinds = ((NAMED, self.schedules, "schedule"), (REMATS, self.remats, "re-materialization"))
        for known, given, what in kinds:
            for name in (each for each in given if each not in known):
                close = suggestion(name, known)
                raise ValueError(f"unknown {what} {name!r}{close}; known: {', '.join(known)}")


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number, from 1 on."""
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
                sharded = space.sharded and (pp == 1 or space.sharded_stages)
                for shards in divisors(replicas)[1:] if sharded else ():
                    yield from (Grid(pp, replicas // shards, shards, level, tp) for level in LEVELS)


def ways(request: Request, space: Space, num_layers: int) -> Iterator[Way]:
    """Yields every way to train that the search looks at."""
    for grid in grids(request, space):
        share, rest = divmod(request.batch_size, grid.replicas)
        if rest or grid.pp > num_layers:
            continue
        for name, per_worker in _schedules(request, space, grid):
            if grid.pp * per_worker > num_layers:
                continue
            for count in divisors(share):
                asked = space.microbatches is None or count in space.microbatches
                short = 3 * grid.pp * per_worker * count <= MOST_ACTIONS
                if asked and short and share // count >= space.least_examples:
                    yield Way(grid, name, per_worker, count, share // count)


def splits_some(request: Request, space: Space) -> bool:
    """Whether some way splits its backward; profiles then cover the halves for all ways."""
    tried = ("1f1b",) if space.pp == (1,) and "1f1b" in space.schedules else space.schedules
    return not request.compiled and any(map(splits, tried))


def _schedules(request: Request, space: Space, grid: Grid) -> Iterator[tuple[str, int]]:
    """Schedules' names with their stages per worker."""
    whole = grid.fsdp_level == 3 or request.compiled
    possible = [name for name in space.schedules if not (whole and splits(name))]
    if grid.pp == 1:
        plain = [name for name in possible if NAMED[name].stages_per_worker in (None, 1)]
        yield from [("1f1b" if "1f1b" in plain else name, 1) for name in plain[:1]]
        return
    for name in possible:
        yield name, NAMED[name].stages_per_worker or 2


def check(request: Request, space: Space, num_layers: int) -> None:
    """`ValueError`, naming value and remedy, where nothing at all is to be tried."""
    if next(ways(request, space, num_layers), None) is not None:
        return
    all_grids = list(grids(request, space))
    if not all_grids:
        given = {name: " or ".join(map(str, getattr(space, name) or ())) for name in ("pp", "tp")}
        raise ValueError(
            f"no grid of {request.accelerators} accelerators has "
            f"{' and '.join(f'{name} of {sizes}' for name, sizes in given.items() if sizes)}: give divisors "
            "of the accelerators, tp at most those of a host"
        )
    if (least := min(grid.pp for grid in all_grids)) > num_layers:
        raise ValueError(
            f"cannot cut {num_layers} layers into {least} stages: use at most {num_layers} workers"
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
    if space.least_examples > 1 and next(ways(request, replace(space, least_examples=1), num_layers), None):
        raise ValueError(
            f"the model takes {space.least_examples} examples a micro-batch or more: give fewer micro-batches"
        )
    known = ", ".join(space.schedules)
    raise ValueError(
        f"no schedule of {known} has stages of {num_layers} layers here: name others, such as 1f1b"
    )
