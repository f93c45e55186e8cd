"""Weights that stages of several processes share, such as an embedding that is the output layer too.

Each process that uses such a weight has a copy of it, and all copies must take the same steps. So after the
last backward of a step the gradients of its layers (`stage.tied`) are summed once, in the order in which a
plain backward meets the uses (the last one first), and every owner gets the sum: equal optimizers then keep
the copies equal, bit for bit, and equal to those of one process.

The sum travels from owner to owner, each adding what its layers have, to that of the first use, who sends it
to all: through the host's memory, beside the messages of the stages. Where the layers of each owner lie
together, that is one message there and one back for each further owner in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.ranks.control import Together
from gpipe_bench.pipeline.ranks.distributed import PointToPoint
from gpipe_bench.pipeline.stage.tied import Leaves, plus


@dataclass(frozen=True)
class Tie:
    """A parameter that has several places in the model.

    Args:
        parameter: which
        names: in the plain model; checkpoints use the first
        uses: the layers that use it, each with the rank of its stage, the last first
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    uses: tuple[tuple[int, int], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whose stages use it, each where its last use comes, the last use first."""
        return tuple(dict.fromkeys(rank for _, rank in self.uses))

    @property
    def first(self) -> int:
        """The rank of the first use, which ends the sum."""
        return self.uses[-1][1]

    def runs(self) -> list[tuple[int, list[int]]]:
        """The uses that follow one another on a rank: the rank, and the layers."""
        return [(rank, [layer for layer, _ in run]) for rank, run in groupby(self.uses, itemgetter(1))]


def find_ties(
    named: Sequence[tuple[str, nn.Module]], spans: Iterable[range], homes: Sequence[int]
) -> tuple[Tie, ...]:
    """The parameters with several places in the layers; `homes` are the ranks of the stages.

    A layer's name stands before those of its parameters; without one they have the model's names already, and
    a module that several layers use has but one.
    """
    places: dict[nn.Parameter, list[tuple[str, tuple[int, int]]]] = {}
    for home, span in zip(homes, spans, strict=True):
        for index in span:
            prefix, layer = named[index]
            for name, parameter in layer.named_parameters(remove_duplicate=False):
                place = (f"{prefix}.{name}" if prefix else name, (index, home))
                places.setdefault(parameter, []).append(place)
    return tuple(
        Tie(
            parameter,
            tuple(dict.fromkeys(name for name, _ in found)),
            tuple(dict.fromkeys(use for _, use in reversed(found))),
        )
        for parameter, found in places.items()
        if len(found) > 1
    )


class TiedWeights:
    """One rank's part in keeping the copies of tied weights equal.

    Args:
        ties: those of the whole model.
        ranks: the transport.
        model: what this rank has of the model.
        leaves: of the tied weights of this rank.
        replicated: whether there are replicas, which sum the gradients of each leaf.
        bears: whether this replica keeps what was in `.grad` before steps without `sync`.
    """

    def __init__(
        self,
        ties: Iterable[Tie],
        ranks: PointToPoint,
        model: nn.Module,
        leaves: Leaves,
        *,
        replicated: bool = False,
        bears: bool = True,
    ) -> None:
        self._ranks, self._leaves = ranks, leaves
        self._replicated, self._bears = replicated, bears
        self._ties = [tie for tie in ties if len(tie.ranks) > 1 and ranks.rank in tie.ranks]
        tied = {tie.parameter: tie for tie in self._ties}
        self._places = [
            (module._parameters, name, tied[parameter])
            for module in (model.modules() if tied else ())
            for name, parameter in module._parameters.items()
            if parameter in tied
        ]
        self.copies = frozenset(tie.parameter for tie in self._ties if tie.first != ranks.rank)
        """The parameters of this rank that another one counts."""

    def share_values(self) -> None:
        """All owners begin with the first one's values."""
        if not self._ties:
            return
        with self._ranks.together() as together, torch.no_grad():
            for tie in self._ties:
                value = self._of_first(together, tie, tie.parameter)
                assert value is not None
                if value is not tie.parameter:
                    tie.parameter.copy_(value)

    def begin(self) -> None:
        """Before a training step.

        `RuntimeError` if another parameter stands where the weight was: its gradients would not be summed.
        """
        for parameters, name, tie in self._places:
            if parameters.get(name) is not tie.parameter:
                raise RuntimeError(
                    f"the parameter of {tie.names[0]!r} is another one than when the pipeline was built, and "
                    "stages of other processes share it; change its values in place, as load_state_dict does "
                    "without assign=True, or build a new pipeline on every rank"
                )
        self._leaves.begin(self.copies)

    def sum_gradients(self, *, sync: bool = True) -> None:
        """Ends a training step: every owner has the sum in `.grad`, added to what it held before.

        Without `sync` it is the sum of this replica, which a later step adds to those of the others. What was
        held is a sum of all replicas already, so one of them alone keeps it.
        """
        if self._replicated:
            self._leaves.refuse_others()
        sums: dict[nn.Parameter, Tensor | None] = {}
        if self._ties:
            with self._ranks.together() as together, torch.no_grad():
                for tie in self._ties:
                    sums[tie.parameter] = self._sum(together, tie)
        self._leaves.end(sums, own=not sync, keeps=self._bears)

    def restore(self) -> None:
        """Ends a step that failed."""
        self._leaves.restore()

    def _sum(self, together: Together, tie: Tie) -> Tensor | None:
        total: Tensor | None = None
        runs, mine = tie.runs(), self._ranks.rank
        for position, (rank, layers) in enumerate(runs):
            if rank != mine:
                continue
            if position:
                total = together.receive_tensor(tie.parameter, runs[position - 1][0])
            found = [self._leaves.take(tie.parameter, layer) for layer in layers]
            if all(later != mine for later, _ in runs[position + 1 :]):
                found.append(tie.parameter.grad)  # what did not come by the leaves
            for gradient in found:
                if gradient is not None and gradient.layout is not torch.strided:
                    raise RuntimeError(
                        f"the gradient of {tie.names[0]!r}, which stages of several processes share, is "
                        "sparse and cannot be summed over them; use sparse=False"
                    )
                total = plus(total, gradient)
            if position < len(runs) - 1:
                together.send_tensor(total, runs[position + 1][0])
        return self._of_first(together, tie, total)

    def _of_first(self, together: Together, tie: Tie, tensor: Tensor | None) -> Tensor | None:
        """The tensor of the first use's rank, on every owner."""
        if self._ranks.rank != tie.first:
            return together.receive_tensor(tie.parameter, tie.first)
        for rank in tie.ranks:
            if rank != tie.first:
                together.send_tensor(tensor, rank)
        return tensor
