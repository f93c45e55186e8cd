"""Operations on all gradients of a step: sums over stages that share a weight, clipping, loss scaling; and
the check for optimizers that need more than one rank's gradients.

The norm is computed from one norm per parameter in the model's order, so that every number of stages gives
the same bits. Where processes have parts of a gradient, the norms of the parts are gathered along each such
dimension of the mesh; the result equals the plain model's to rounding.

A weight that several stages share, such as an embedding that is also the output layer, is one parameter
within a process, where autograd sums its gradients. Each further process that uses it has a copy, and all
copies must take the same steps. So after the last backward of a step `.grad` is summed over the owners,
through the host's memory, and every owner gets the sum: equal optimizers then keep the copies equal, bit for
bit. On a grid the first owner also sums over the replicas, because the stages of a weight end their backwards
at different times, and none knows when the gradient is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..ranks.distributed import PointToPoint
from ..ranks.wire import ObjectCollectives
from ..stage.stage import Stage
from ..stage.tensors import is_divided, local


def clip(
    stages: Mapping[int, Stage],
    copies: Collection[nn.Parameter],
    gather: Callable[[list[tuple[int, Tensor]]], list[list[tuple[int, Tensor]]]] | None,
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Scales the gradients of all `stages` so that their joint norm is at most `max_norm`. `copies` are
    parameters that another rank counts. `gather` returns all ranks' objects in the order of ranks; None: all
    stages are in this process.

    Returns the norm before, a float64 scalar.
    """
    own: dict[int, list[nn.Parameter]] = {}  # each counts for the first stage that has it
    everything = dict.fromkeys(copies)
    for index, stage in stages.items():
        of_stage = dict.fromkeys(p for layer in stage.layers for p in layer.parameters())
        own[index] = [parameter for parameter in of_stage if parameter not in everything]
        everything |= of_stage
    device = next(iter(stages.values())).device
    norms = _norms([parameter for of_stage in own.values() for parameter in of_stage], norm_type, device)
    if gather is not None:
        of_stages = zip(own, norms.cpu().split([len(of_stage) for of_stage in own.values()]), strict=True)
        found_norms = dict(pair for of_rank in gather(list(of_stages)) for pair in of_rank)
        norms = torch.cat([found_norms[stage] for stage in sorted(found_norms)]).to(device)
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    whole = [parameter for parameter in everything if not is_divided(parameter)]
    torch.nn.utils.clip_grads_with_norm_(whole, max_norm, total)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's formula; its function takes no mixture
    for parameter in everything:
        if is_divided(parameter) and (gradient := local(parameter.grad)) is not None:
            gradient.mul_(scale)
    return total


def _norms(parameters: Sequence[nn.Parameter], norm_type: float, device: torch.device) -> Tensor:
    """The norm of the gradient of each parameter, float64; 0 where there is none.

    All processes that have parts of the parameters call.
    """
    norms = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    if norm_type == -math.inf:
        norms.fill_(math.inf)  # the minimum of no elements
    present = [(i, g) for i, p in enumerate(parameters) if (g := local(p.grad)) is not None and g.numel()]
    if present:
        found = torch._foreach_norm([gradient for _, gradient in present], norm_type)
        norms[[i for i, _ in present]] = torch.stack([norm.to(norms) for norm in found])
    for groups, places in _groups_of_parts(parameters).items():
        mine = norms[places]
        for group in groups:
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine, group=group)
            joined = torch.stack(parts)
            mine = joined.sum(0) if norm_type == 0 else torch.linalg.vector_norm(joined, norm_type, dim=0)
        norms[places] = mine
    if norm_type == -math.inf:
        norms[[i for i, p in enumerate(parameters) if p.grad is None]] = 0.0
    return norms


def _groups_of_parts(parameters: Sequence[nn.Parameter]) -> dict[tuple[dist.ProcessGroup, ...], list[int]]:
    """Groups the parameters by the processes that have parts of them, in the order of the parameters."""
    found: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for i, parameter in enumerate(parameters):
        if is_divided(parameter):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            groups = tuple(
                mesh.get_group(dimension)
                for dimension, placement in enumerate(parameter.placements)  # type: ignore[attr-defined]
                # Not `is_shard`: shards along fsdp of parts along tp are of another class.
                if not placement.is_replicate() and mesh.size(dimension) > 1
            )
            if groups:
                found.setdefault(groups, []).append(i)
    return found


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the gradients of a pipeline; made by `Pipeline.scaler`.

    torch's scaler skips an optimizer's step and lowers its scale where it finds an infinite gradient among
    the parameters that it sees, those of one rank. Here each rank tells all others before any decides: `step`
    and `unscale_` wait for all ranks, which must call them alike; a rank that does not come ends the pipeline
    as in a step. A rank without trainable parameters passes None for the optimizer. `state_dict` is the same
    on every rank.
    """

    def __init__(self, pipeline: Any, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self.pipeline = pipeline

    def step(self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Like torch's `step`; a rank without an optimizer joins the decision."""
        if optimizer is not None:
            return super().step(optimizer, *args, **kwargs)
        if self._enabled and not self._per_optimizer_states[id(None)]["found_inf_per_device"]:
            self.unscale_(None)  # type: ignore[arg-type]
        return None

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer | None,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Returns, by device, whether any rank found an infinite gradient; `step` and `unscale_` use it."""
        found: dict[torch.device, Tensor] = {}
        if optimizer is not None:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = found or {found_inf.device: found_inf}  # this rank has no gradients
        if self.pipeline.group is not None:
            anywhere = any(self.pipeline.gather(any(bool(flag) for flag in found.values())))
            for flag in found.values():
                flag.fill_(float(anywhere))
        return found


def refuse_optimizers(pipeline: nn.Module) -> None:
    """Makes optimizers raise `ValueError` in `step` if they would treat one rank's part of a `pipeline`
    differently from the plain model.
    """
    watched = ref(pipeline)

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = watched()
        if isinstance(optimizer, torch.optim.LBFGS) and alive is not None:
            own = set(alive.parameters())
            if any(each in own for group in optimizer.param_groups for each in group["params"]):
                raise ValueError(
                    "LBFGS decides by the gradients of all parameters, and each rank has only those of its "
                    "stages; use an optimizer that takes each parameter by itself, such as AdamW, or train "
                    "in one process"
                )

    finalize(pipeline, register_optimizer_step_pre_hook(refuse).remove).atexit = False


# Weights that several stages share


@dataclass(frozen=True)
class Tie:
    """A parameter that several layers share."""

    parameter: nn.Parameter
    names: tuple[str, ...]  # in the plain model; checkpoints use the first
    stages: tuple[int, ...]  # stages that use it, in order
    ranks: tuple[int, ...]  # the stages' ranks, each once, the first stage's first


def find_ties(
    named: Sequence[tuple[str, nn.Module]], spans: Iterable[range], homes: Sequence[int]
) -> tuple[Tie, ...]:
    """The parameters that several layers share, or one layer under several names; `homes` gives each stage's
    rank. Parameters of a layer without a name have the model's names already.
    """
    places: dict[nn.Parameter, list[tuple[str, int]]] = {}
    for stage, span in enumerate(spans):
        for index in span:
            prefix, layer = named[index]
            for name, parameter in layer.named_parameters(remove_duplicate=False):
                place = (f"{prefix}.{name}" if prefix else name, stage)
                places.setdefault(parameter, []).append(place)
    found = []
    for parameter, uses in places.items():
        if len(uses) > 1:
            stages = tuple(dict.fromkeys(stage for _, stage in uses))
            ranks = tuple(dict.fromkeys(homes[stage] for stage in stages))
            found.append(Tie(parameter, tuple(dict.fromkeys(name for name, _ in uses)), stages, ranks))
    return tuple(found)


class TiedWeights:
    """Keeps this rank's copies of the `ties` in its part of the `model` equal to the other ranks'.
    `over_replicas` sums a parameter's gradient over this rank's replicas, if it has any.
    """

    def __init__(
        self,
        ties: Iterable[Tie],
        ranks: PointToPoint,
        model: nn.Module,
        *,
        over_replicas: Callable[[Tensor, Tensor | None], Tensor | None] | None = None,
    ) -> None:
        self._ties, self._ranks, self._over_replicas = tuple(ties), ranks, over_replicas
        tied = {tie.parameter: tie for tie in self._ties}
        self._places = [
            (module._parameters, name, tied[parameter])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter in tied
        ]
        self.copies = frozenset(tie.parameter for tie in self._ties if tie.ranks[0] != ranks.rank)
        """Parameters of this rank whose first owner is another rank, which counts them."""
        self._held: dict[nn.Parameter, Tensor | None] = {}  # `.grad` from before the step

    def share_values(self) -> None:
        """Copies the first owner's values to all owners."""
        with self._ranks.collectives() as collectives, torch.no_grad():
            for tie in self._ties:
                value = self._of_first(collectives, tie, tie.parameter)
                assert value is not None
                if value is not tie.parameter:
                    tie.parameter.copy_(value)

    def begin(self) -> None:
        """Before a training step: sets aside what is in `.grad`.

        `RuntimeError` if the weight was replaced by another parameter, whose gradients would not be summed.
        """
        for parameters, name, tie in self._places:
            if parameters.get(name) is not tie.parameter:
                raise RuntimeError(
                    f"the parameter of {tie.names[0]!r} is another one than when the pipeline was built, and "
                    "stages of other processes share it; change its values in place, as load_state_dict does "
                    "without assign=True, or build a new pipeline on every rank"
                )
        for tie in self._ties:
            self._held[tie.parameter], tie.parameter.grad = tie.parameter.grad, None

    def sum_gradients(self) -> None:
        """Ends a training step: every owner has the sum in `.grad`, added to what it held before."""
        with self._ranks.collectives() as collectives, torch.no_grad():
            for tie in self._ties:
                total = self._sum(collectives, tie)
                if self._over_replicas is not None and self._ranks.rank == tie.ranks[0]:
                    total = self._over_replicas(tie.parameter, total)
                total = self._of_first(collectives, tie, total)
                held = self._held.get(tie.parameter)
                if held is not None:
                    total = held if total is None else held.add_(total)
                tie.parameter.grad = total
        self._held = {}

    def restore(self) -> None:
        """Ends a step that failed: `.grad` has what was there before."""
        for parameter, held in self._held.items():
            parameter.grad = held
        self._held = {}

    def _sum(self, collectives: ObjectCollectives, tie: Tie) -> Tensor | None:
        """Sums `.grad` on the first owner and returns the sum there; other owners send theirs."""
        total = tie.parameter.grad
        if total is not None and total.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {tie.names[0]!r}, which stages of several processes share, is sparse and "
                "cannot be summed over them; use sparse=False"
            )
        first, *others = tie.ranks
        if self._ranks.rank != first:
            collectives.send_tensor(total, first)
            return None
        for rank in reversed(others):  # the order of the uses in a plain backward
            theirs = collectives.receive_tensor(tie.parameter, rank)
            if theirs is not None:
                total = theirs if total is None else theirs.add_(total)
        return total

    def _of_first(self, collectives: ObjectCollectives, tie: Tie, tensor: Tensor | None) -> Tensor | None:
        """Sends the first owner's tensor to every owner."""
        first, *others = tie.ranks
        if self._ranks.rank != first:
            return collectives.receive_tensor(tie.parameter, first)
        for rank in others:
            collectives.send_tensor(tensor, rank)
        return tensor
