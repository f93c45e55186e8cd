"""Links by the names that people use for them, and which of a grid's neighbours have which one.

"nvlink" and "infiniband" are generations of links; which one is meant follows from the accelerator. Ranks are
counted as the plan's mesh has them, the pipeline outermost and tensor parallelism innermost:

    2 hosts of 4, mesh pp 2 x dp 2 x tp 2     host 0: pp 0, all of dp and tp     host 1: pp 1

so what sends most is nearest. Only the standard library and `pipeline.plan` are imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpipe_bench.experiments.planning.request import Request
from gpipe_bench.pipeline.plan.links import LINKS, Link

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
class Places:
    """What connects the ranks of a grid: the next worker of a pipeline, and all along a dimension."""

    boundaries: tuple[Link, ...]  # from each stage to the next
    dp: Link
    fsdp: Link
    tp: Link


def places(request: Request, *, pp: int, dp: int, fsdp: int, tp: int, placement: Sequence[int]) -> Places:
    """The links of a grid; `placement` has the worker of each stage."""
    far = request.between or request.link
    sizes = dict(zip(DIMENSIONS, (pp, dp, fsdp, tp), strict=True))
    strides = {}
    stride = 1
    for name in reversed(DIMENSIONS):
        strides[name] = stride
        stride *= sizes[name]

    def along(name: str) -> Link:
        """Of a ring over a dimension: it is as slow as its slowest hop."""
        return request.link if strides[name] * sizes[name] <= request.per_host else far

    def between(a: int, b: int) -> Link:
        block = strides["pp"]  # ranks of one worker, in all replicas
        same = all(
            (a * block + each) // request.per_host == (b * block + each) // request.per_host
            for each in range(block)
        )
        return request.link if same else far

    boundaries = tuple(between(a, b) for a, b in pairwise(placement))
    return Places(boundaries, along("dp"), along("fsdp"), along("tp"))
