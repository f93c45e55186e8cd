"""Weights that several stages share, such as an embedding that is the output layer too.

Stages of one process share the parameter itself, and autograd adds up what they give it. Each further process
that uses such a weight has a copy of it, and all copies must take the same steps. So what is in `.grad` after
the last backward of a step is summed over the owners once, and every owner gets the sum: equal optimizers
then keep the copies equal, bit for bit. Sums round in the order in which they are made, so a model with such
a weight agrees over numbers of stages to rounding, where any other agrees in all bits.

The owners tell the one of the first use, in turn, which tells them the sum: through the host's memory, beside
the messages of the stages. On a grid it sums over the replicas, too, because the stages of a weight end their
backwards at different times and none of them knows that its gradient is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .control import ObjectCollectives
from .distributed import PointToPoint


@dataclass(frozen=True)
class Tie:
    """A parameter that has several places in the model.

    Args:
        parameter: which
        names: in the plain model; checkpoints use the first
        stages: that use it, in order
        ranks: whose stages these are, each once, that of the first stage first
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def find_ties(
    named: Sequence[tuple[str, nn.Module]], spans: Iterable[range], homes: Sequence[int]
) -> tuple[Tie, ...]:
    """The parameters with several places in the layers; `homes` are the ranks of the stages.

    A layer's name stands before those of its parameters; without one they have the model's names already, and
    a module that several layers use has but one.
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
    """This rank's part in keeping the copies of tied weights equal.

    Args:
        ties: that several stages have, and this rank.
        ranks: the transport.
        model: what this rank has of the model.
        over_replicas: the sum of what the replicas of this rank bring, each a gradient of the parameter or
            None; None where there are no replicas.
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
        self._held: dict[nn.Parameter, Tensor | None] = {}  # what was in .grad before the step

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

        `RuntimeError` if another parameter stands where the weight was: its gradients would not be summed.
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
        for rank in reversed(others):  # in the order in which a plain backward meets the uses
            theirs = collectives.receive_tensor(tie.parameter, rank)
            if theirs is not None:
                total = theirs if total is None else theirs.add_(total)
        return total

    def _of_first(self, collectives: ObjectCollectives, tie: Tie, tensor: Tensor | None) -> Tensor | None:
        """The tensor of the first owner, on every owner."""
        first, *others = tie.ranks
        if self._ranks.rank != first:
            return collectives.receive_tensor(tie.parameter, first)
        for rank in others:
            collectives.send_tensor(tensor, rank)
        return tensor
