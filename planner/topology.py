"""Links by the names that people use for them, and which of a grid's neighbours have which one.

"nvlink" and "infiniband" are generations of links; which one is meant follows from the accelerator. Ranks are
counted as the plan's mesh has them, the pipeline outermost and tensor parallelism innermost:

    2 hosts of 4, mesh pp 2 x dp 2 x tp 2     host 0: pp 0, all of dp and tp     host 1: pp 1

so what sends most is nearest. A ring of ranks that lie on several hosts goes over one card of each, where
some libraries use all of them at a time (NCCL's rails): such sums are up to as many times faster as a host
has cards, unless a link stands for all of them. Only the standard library and `pipeline.plan` are imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod

from gpipe_bench.pipeline.plan.links import LINKS, Link
from gpipe_bench.planner.candidate import Grid
from gpipe_bench.planner.request import Request

DIMENSIONS = ("pp", "dp", "fsdp", "tp")
"""Of a plan's mesh, from the outermost."""

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
"""By the first of an accelerator's names that fits; an empty one is that of all others."""


def link_named(name: str, device_type: str = "") -> Link:
    """The preset of that name, or the generation of it that goes with an accelerator.

    `ValueError` for a name that neither is, or an accelerator that has none of it.
    """
    if name in LINKS:
        return LINKS[name]
    if name not in _GENERATIONS:
        known = ", ".join([*_GENERATIONS, *LINKS])
        raise ValueError(f"unknown link {name!r}; known: {known}")
    words = device_type.lower()
    for starts, link in _GENERATIONS[name]:
        if words.startswith(starts):
            return LINKS[link]
    raise ValueError(f"no {name} of {device_type or 'no device type'} is known; use pcie, or a preset's name")


def link_within(device_type: str) -> Link:
    """What is between the accelerators of a host where nobody says it: NVLink where the card has it, else
    PCIe.

    `ValueError` for TPUs, whose interconnect is no preset.
    """
    if device_type.lower().startswith("tpu"):
        raise ValueError(f"what connects {device_type} is no preset; give one that is like it, or free")
    has_nvlink = device_type.lower().startswith(tuple(s for ours, _ in _GENERATIONS["nvlink"] for s in ours))
    return link_named("nvlink" if has_nvlink else "pcie", device_type)


@dataclass(frozen=True)
class Topology:
    """Which link lies between which ranks, where a grid has the first ranks of the machines.

    `sums`, where it is known, is what sums over replicas take in the place of the links between them.
    """

    request: Request
    grid: Grid
    sums: Link | None = None

    @cache  # noqa: B019
    def ring(self, name: str) -> Link:
        """Around a dimension: as slow as the slowest hop of all such rings."""
        if self.sums is not None and name in ("dp", "fsdp"):
            return self.sums
        stride, size = self._stride(name), getattr(self.grid, name)
        ranks = range(self.grid.accelerators)
        return self._slowest(
            (rank, rank + stride * (1 if rank // stride % size + 1 < size else 1 - size)) for rank in ranks
        )

    @cache  # noqa: B019
    def between(self, a: int, b: int) -> Link:
        """From a worker of the pipeline to another: as slow as in the slowest replica."""
        block = self._stride("pp")  # ranks of one worker, in all replicas
        return self._slowest((a * block + each, b * block + each) for each in range(block))

    def boundaries(self, placement: Sequence[int]) -> tuple[Link, ...]:
        """From each stage to the next; `placement` has the worker of each stage."""
        return tuple(self.between(a, b) for a, b in pairwise(placement))

    def describe(self) -> str:
        """In words: the link of each dimension, and where a pipeline has two."""
        links: dict[str, list[str]] = {}
        for a, b in pairwise(range(self.grid.pp)):
            links.setdefault(self.between(a, b).name, []).append(f"{a}-{b}")
        several = len(links) > 1
        found = [f"pp {' '.join(ends) + ' ' if several else ''}{link}" for link, ends in links.items()]
        rings = (name for name in DIMENSIONS[1:] if getattr(self.grid, name) > 1)
        return ", ".join([*found, *(f"{name} {self.ring(name).name}" for name in rings)])

    def _stride(self, name: str) -> int:
        """From a rank to its neighbour along a dimension."""
        return prod(getattr(self.grid, each) for each in DIMENSIONS[DIMENSIONS.index(name) + 1 :])

    def _slowest(self, hops: Iterable[tuple[int, int]]) -> Link:
        """Of the links between these ranks."""
        near, far, per_host = self.request.link, self.request.between, self.request.per_host
        links = {near if far is None or a // per_host == b // per_host else far for a, b in hops}
        return min(links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s, link.name))
