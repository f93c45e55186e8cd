"""Tensor parallelism: layers that several processes compute together, by torch's tensor-parallel plans.

The user applies a plan before building the pipeline (`torch.distributed.tensor.parallel.parallelize_module`,
or `models.parallel` for our Transformers). This module does what plans leave undone:

    a head count that is still the whole model's    refused: `view(..., -1)` hides it, and gradients are wrong
    plain parameters beside divided ones            refused: optimizers with `foreach` stop at the first step,
                                                    and nobody sums a gradient over parts of a sequence
    gradients laid out unlike their parameters      laid out like them: what is whole and should be a part
                                                    is cut as it comes, what is a part of a sum is summed
                                                    once, when the step is over

Messages between stages are plain tensors, whole or this process's part, as the layers return them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from ..plan.schedule import Kind
from ..stage.stage import Gradients, Reduction, Stage
from ..stage.tensors import here, is_divided
from ..stage.trees import Message
from .grid import Grid

_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
_WIDTHS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_FUSED = (1, 3)  # queries alone, or queries, keys and values in one matrix


def check_divided(layers: Mapping[str, nn.Module], grid: Grid) -> None:
    """`ValueError` for layers that do not fit a grid with several processes along `tp`, or would compute
    something else there.
    """
    ranks = grid.size("tp")
    divided = {name: p for name, p in _parameters(layers) if isinstance(p, DTensor)}
    if not divided:
        raise ValueError(
            f"the mesh has {ranks} processes along 'tp', but no layer is divided over them; apply a plan to "
            "the layers before, with parallelize_module or models.parallel.tensor_parallel"
        )
    along_tp = grid.mesh["tp"].mesh.tolist()
    for name, parameter in divided.items():
        # Meshes are compared by ranks: equal ones may be different objects.
        if parameter.device_mesh.mesh.tolist() != along_tp:
            raise ValueError(
                f"{name} is divided over {parameter.device_mesh}, which is not the 'tp' of the pipeline's "
                "mesh; apply the plan with mesh['tp']"
            )
    for name, layer in layers.items():
        for path, module in layer.named_modules():
            _check_heads(f"{name}.{path}" if path else name, module, ranks)


def refuse_mixed(layers: Mapping[str, nn.Module]) -> None:
    """`ValueError` if one process's layers have both plain and divided parameters for its optimizer."""
    names: dict[bool, str] = {}
    for name, parameter in _parameters(layers):
        names.setdefault(isinstance(parameter, DTensor), name)
    divided, plain = names.get(True), names.get(False)
    if divided and plain:
        raise ValueError(
            f"the plan divides {divided} and leaves {plain} a plain tensor, and optimizers do not take both "
            "together (foreach); give its module a style too, such as models.parallel.Gathered(Replicate()) "
            "for a normalization"
        )


def _parameters(layers: Mapping[str, nn.Module]) -> Iterable[tuple[str, nn.Parameter]]:
    for name, layer in layers.items():
        for path, parameter in layer.named_parameters():
            yield f"{name}.{path}", parameter


def _check_heads(name: str, module: nn.Module, ranks: int) -> None:
    """`ValueError` if a module's head count is the whole layer's; a warning if that is unknown."""
    attribute, heads = _number(module, _HEADS)
    columns = [
        (child.weight.size(0), child.weight.to_local().size(0))
        for child in module.children()
        if isinstance(child, nn.Linear) and isinstance(child.weight, DTensor)
        if child.weight.placements[0].is_shard(0)
    ]
    if not heads or not columns:
        return
    _, width = _number(module, _WIDTHS)
    if width is None:
        warnings.warn(
            f"whether {name}.{attribute}={heads} is divided by tp={ranks} can't be told, because {name} has "
            "no head_dim; if it is not, the results are wrong",
            stacklevel=2,
        )
        return
    expected = {heads * width * fused for fused in _FUSED}
    if not any(mine in expected for _, mine in columns) and any(whole in expected for whole, _ in columns):
        raise ValueError(
            f"{name}.{attribute} is {heads}, the heads of the whole layer, but this process has 1 / {ranks} "
            f"of its columns; set it to {heads} // {ranks} after applying the plan"
        )


def _number(module: nn.Module, names: Iterable[str]) -> tuple[str, int | None]:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int):
            return name, value
    return "", None


class DividedStage(Stage):
    """A stage with divided layers. The tensors that it sends are plain and complete."""

    def forward(self, m: int, received: Message | None, graph: bool) -> Message | Tensor | None:
        message = super().forward(m, received, graph)
        if not isinstance(message, Message):
            return message
        if any(map(is_divided, message.tensors)):
            raise TypeError(
                f"{self.output_name} is a DTensor, and messages between stages are "
                "plain tensors; let the plan of that layer end with use_local_output=True"
            )
        return message._replace(tensors=tuple(map(here, message.tensors)))

    def backward(self, m: int, gradients: Gradients, kind: Kind = Kind.B) -> Gradients:
        found = super().backward(m, gradients, kind)
        return tuple([None if gradient is None else here(gradient) for gradient in found])


class Layouts(Reduction):
    """The `Reduction` of a divided stage: gives gradients the layouts of their parameters. `over_replicas`
    sums them over replicas.
    """

    def __init__(self, stage: Stage, over_replicas: Reduction) -> None:
        self._replicas = over_replicas
        self.before, self.after = over_replicas.before, over_replicas.after  # type: ignore[method-assign]
        self.reset = over_replicas.reset  # type: ignore[method-assign]
        found = dict.fromkeys(p for layer in stage.layers for p in layer.parameters())
        self._parameters = [parameter for parameter in found if isinstance(parameter, DTensor)]
        self._cut: set[DTensor] = set()
        self._summed: dict[DTensor, tuple[Placement, ...]] = {}  # placements of partial gradients

    def begin(self) -> None:
        for parameter in self._parameters:  # only trained tensors can have a hook
            if parameter.requires_grad and parameter not in self._cut:
                self._cut.add(parameter)
                if any(placement.is_shard() for placement in parameter.placements):
                    parameter.register_hook(partial(_part_of_whole, parameter.placements))
        for parameter, placements in self._summed.items():  # type: ignore[assignment]
            if isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements:
                parameter.grad = _one_part(parameter.grad, placements)
        self._replicas.begin()

    def finish(self) -> None:
        """Waits for the replicas, and sums partial gradients; all processes along `tp` must call it."""
        self._replicas.finish()
        for parameter in self._parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
                if any(placement.is_partial() for placement in gradient.placements):
                    self._summed[parameter] = gradient.placements
                parameter.grad = gradient.redistribute(placements=parameter.placements)


def _part_of_whole(placements: tuple[Placement, ...], gradient: Tensor) -> Tensor | None:
    """Hook of a divided parameter: takes this process's part of a whole gradient."""
    if isinstance(gradient, DTensor) and all(each.is_replicate() for each in gradient.placements):
        return gradient.redistribute(placements=placements)
    return None


def _one_part(gradient: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """Turns an earlier step's gradient into a partial one, to which partial gradients can be added: the first
    process along `tp` keeps all of it.
    """
    mesh, mine = gradient.device_mesh, gradient.to_local()
    if mesh.get_local_rank() > 0:
        mine = torch.zeros_like(mine)
    shape, stride = gradient.shape, gradient.stride()
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=shape, stride=stride)
