"""Norms of gradients, each over the whole tensor, where processes have a part of it each.

A part's norm is computed where the part is; what the parts of all gradients come to travels once for each
dimension of the mesh along which there are parts, and is added up in the order of the ranks, so that all of
them find the same bits. A gradient that is whole here gives the bits of the plain model; one in parts gives
them but for the rounding of a sum of squares that is grouped by parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline.stage.tensors import is_divided, local


def norms_of(parameters: Sequence[nn.Parameter], norm_type: float, device: torch.device) -> Tensor:
    """The norm of the gradient of each parameter, float64; 0 where there is none.

    All processes that have parts of the parameters call.
    """
    norms = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    if norm_type == -math.inf:
        norms.fill_(math.inf)  # of what is empty or absent, until something is found
    present = [(i, g) for i, p in enumerate(parameters) if (g := local(p.grad)) is not None and g.numel()]
    if present:
        found = torch._foreach_norm([gradient for _, gradient in present], norm_type)
        norms[[i for i, _ in present]] = torch.stack([norm.to(norms) for norm in found])
    for groups, places in _parts(parameters).items():
        mine = norms[places]
        for group in groups:
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine, group=group)
            mine = _together(torch.stack(parts), norm_type)
        norms[places] = mine
    if norm_type == -math.inf:
        norms[[i for i, p in enumerate(parameters) if p.grad is None]] = 0.0
    return norms


def _parts(parameters: Sequence[nn.Parameter]) -> dict[tuple[dist.ProcessGroup, ...], list[int]]:
    """The parameters by the processes that have parts of them, in the order of the parameters."""
    found: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for i, parameter in enumerate(parameters):
        if is_divided(parameter):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            groups = tuple(
                mesh.get_group(dimension)
                for dimension, placement in enumerate(parameter.placements)  # type: ignore[attr-defined]
                # Not `is_shard`: parts of parts, fsdp around tp, are of another class.
                if not placement.is_replicate() and mesh.size(dimension) > 1
            )
            if groups:
                found.setdefault(groups, []).append(i)
    return found


def _together(parts: Tensor, norm_type: float) -> Tensor:
    """The norms of whole tensors from those of their parts, one row of `parts` each."""
    if norm_type == math.inf:
        return parts.amax(0)
    if norm_type == -math.inf:
        return parts.amin(0)
    if norm_type == 0:
        return parts.sum(0)
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part**norm_type
    return total ** (1 / norm_type)
