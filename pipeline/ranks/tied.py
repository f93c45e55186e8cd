"""Weights that stages of several processes share, such as an embedding that is the output layer too.

Each process that uses such a weight has a copy of it, and all copies must take the same steps. So after the
last backward of a step the gradients are summed once, in the order in which a plain backward meets the uses
(the last one first), and every owner gets the sum: equal optimizers then keep the copies equal, bit for bit.
What was in `.grad` before the step is set aside meanwhile, or it would be summed again.

The sum is made by the first owner and travels through the host's memory, beside the messages of the stages:
it is one message there and one back for each further owner in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.ranks.together import Together


@dataclass(frozen=True)
class Tie:
    """A parameter that has several places in the model."""

    parameter: nn.Parameter
    names: tuple[str, ...]  # in the plain model; checkpoints use the first
    ranks: tuple[int, ...]  # whose stages use it, each where its last use comes, the last use first
    first: int  # the rank of the first use, which makes the sum


def find_ties(
    named: Sequence[tuple[str, nn.Module]], spans: Iterable[range], homes: Sequence[int]
) -> tuple[Tie, ...]:
    """The parameters with several places in the layers; `homes` are the ranks of the stages.

    A layer's name stands before those of its parameters; without one they have the model's names already, and
    a module that several layers use has but one.
    """
    places: dict[nn.Parameter, list[tuple[str, int]]] = {}
    for home, span in zip(homes, spans, strict=True):
        for prefix, layer in named[span.start : span.stop]:
            for name, parameter in layer.named_parameters(remove_duplicate=False):
                places.setdefault(parameter, []).append((f"{prefix}.{name}" if prefix else name, home))
    return tuple(
        Tie(
            parameter,
            tuple(dict.fromkeys(name for name, _ in found)),
            tuple(dict.fromkeys(home for _, home in reversed(found))),
            found[0][1],
        )
        for parameter, found in places.items()
        if len(found) > 1
    )


class Ranks(Protocol):
    """What is asked of the transport."""

    rank: int

    def together(self) -> AbstractContextManager[Together]:
        """For what ranks do outside of the schedule."""


class TiedWeights:
    """One rank's part in keeping the copies of tied weights equal.

    Args:
        ties: those of the whole model.
        ranks: the transport.
        model: what this rank has of the model.
        bears: whether this replica keeps what was in `.grad` before steps without `sync`.
    """

    def __init__(self, ties: Iterable[Tie], ranks: Ranks, model: nn.Module, *, bears: bool = True) -> None:
        self._ranks, self._bears = ranks, bears
        self._ties = [tie for tie in ties if len(tie.ranks) > 1 and ranks.rank in tie.ranks]
        tied = {tie.parameter: tie for tie in self._ties}
        self._places = [
            (module._parameters, name, tied[parameter])
            for module in (model.modules() if tied else ())
            for name, parameter in module._parameters.items()
            if parameter in tied
        ]
        self._held: list[Tensor | None] = []
        self._own = False  # what is in .grad is of this owner alone
        self.copies = frozenset(tie.parameter for tie in self._ties if tie.first != ranks.rank)
        """The parameters of this rank that another one counts."""

    def share_values(self) -> None:
        """All owners begin with the first one's values."""
        if not self._ties:
            return
        with self._ranks.together() as together, torch.no_grad():
            for tie in self._ties:
                if self._ranks.rank == tie.first:
                    self._send(together, tie, tie.parameter)
                else:
                    value = together.receive_tensor(tie.parameter, tie.first)
                    assert value is not None
                    tie.parameter.copy_(value)

    def begin(self) -> None:
        """Sets aside what is in `.grad` before a training step.

        `RuntimeError` if another parameter stands where the weight was: its gradients would not be summed.
        """
        for parameters, name, tie in self._places:
            if parameters.get(name) is not tie.parameter:
                raise RuntimeError(
                    f"the parameter of {tie.names[0]!r} is another one than when the pipeline was built, and "
                    "stages of other processes share it; change its values in place, as load_state_dict does "
                    "without assign=True, or build a new pipeline on every rank"
                )
        if self._own:
            return
        self._held = [tie.parameter.grad for tie in self._ties]
        for tie in self._ties:
            tie.parameter.grad = None

    def sum_gradients(self, *, sync: bool = True) -> None:
        """Ends a training step: every owner has the sum in `.grad`, added to what it held before.

        Without `sync` each keeps its own, until a step sums them. What was held is a sum already, so one
        owner alone keeps it.
        """
        self._own = not sync
        if not sync:
            self._held = [
                held if self._bears and tie.first == self._ranks.rank else None
                for tie, held in zip(self._ties, self._held, strict=False)
            ]
        elif self._ties:
            with self._ranks.together() as together, torch.no_grad():
                for tie in self._ties:
                    tie.parameter.grad = self._sum(together, tie)
        self.restore()

    def restore(self) -> None:
        """Adds what was set aside."""
        for tie, held in zip(self._ties, self._held, strict=False):
            gradient = tie.parameter.grad
            if held is not None:
                tie.parameter.grad = held if gradient is None else held.add_(gradient)
        self._held = []

    def _sum(self, together: Together, tie: Tie) -> Tensor | None:
        mine = tie.parameter.grad
        if mine is not None and mine.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {tie.names[0]!r}, which stages of several processes share, is sparse and "
                "cannot be summed over them; use sparse=False"
            )
        if self._ranks.rank != tie.first:
            together.send_tensor(mine, tie.first)
            return together.receive_tensor(tie.parameter, tie.first)
        total: Tensor | None = None
        for rank in tie.ranks:
            found = mine if rank == tie.first else together.receive_tensor(tie.parameter, rank)
            if found is not None:
                total = found if total is None else total + found
        self._send(together, tie, total)
        return total

    def _send(self, together: Together, tie: Tie, tensor: Tensor | None) -> None:
        for rank in tie.ranks:
            if rank != tie.first:
                together.send_tensor(tensor, rank)
