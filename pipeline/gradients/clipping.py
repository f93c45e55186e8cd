"""Clipping by the norm of all gradients of a model whose stages may be in several processes.

The norm is made of one norm per parameter in the model's order, wherever the stages and the parts of the
parameters are, so that every number of stages gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.ranks.mesh.divided.norms import norms_of
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.pipeline.stage.tensors import is_divided, local


def clip(
    stages: Mapping[int, Stage],
    copies: Collection[nn.Parameter],
    gather: Callable[[list[tuple[int, Tensor]]], list[list[tuple[int, Tensor]]]] | None,
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Scales the gradients of all `stages` so that the norm of all together is at most `max_norm`.

    Args:
        stages: those of this process, by their index
        copies: parameters among theirs that another rank counts
        gather: what every rank brings, in the order of the ranks; None where all stages are in this process
        max_norm: what the norm may be
        norm_type: which norm

    Returns the norm before, a float64 scalar.
    """
    layers = [layer for stage in stages.values() for layer in stage.layers]
    everything = list(dict.fromkeys(p for layer in layers for p in layer.parameters()))
    parameters = [parameter for parameter in everything if parameter not in copies]
    device = next(iter(stages.values())).device
    norms = norms_of(parameters, norm_type, device)
    if gather is not None:
        # The parameters of a rank come stage by stage.
        counts: dict[int, int] = {}
        seen: set[nn.Parameter] = set(copies)
        for index, stage in stages.items():
            own = {p for layer in stage.layers for p in layer.parameters()} - seen
            counts[index] = len(own)
            seen |= own
        of_stages = zip(counts, norms.cpu().split(list(counts.values())), strict=True)
        found_norms = dict(pair for of_rank in gather(list(of_stages)) for pair in of_rank)
        norms = torch.cat([found_norms[stage] for stage in sorted(found_norms)]).to(device)
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    whole = [parameter for parameter in everything if not is_divided(parameter)]
    torch.nn.utils.clip_grads_with_norm_(whole, max_norm, total)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch has it, which takes no mixture
    for parameter in everything:
        if is_divided(parameter) and (gradient := local(parameter.grad)) is not None:
            gradient.mul_(scale)
    return total
