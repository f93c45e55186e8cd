"""What the replicas of a pipeline do together in a step, as one process takes part in it.

Each of them takes a share of the batch. What a micro-batch counts for is its share of the examples of all,
and what is given back is the mean over all: of the loss, and of the gradients of each stage, which a
`Reduction` each joins.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gpipe_bench.pipeline.stage.reduced import Reduction


class Joint:
    """This process's part; `reductions` are those of its stages."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._reductions = tuple(reductions)

    def begin(self, lengths: Sequence[int], *, training: bool, sync: bool) -> Sequence[float]:
        """A step with micro-batches of `lengths` examples begins; what each of them counts for."""
        examples = sum(lengths)
        if training:
            for reduction in self._reductions:
                reduction.begin(sync=sync)
        return tuple([length / examples for length in lengths])

    def finish(self, loss: Tensor | None) -> Tensor | None:
        """All actions are taken. In a training step waits for the gradients; the loss over all replicas."""
        for reduction in self._reductions:
            if loss is None:
                reduction.evaluated()
            else:
                reduction.finish()
        return loss

    def reset(self) -> None:
        """Drops what is held of the step, after an error."""
        for reduction in self._reductions:
            reduction.reset()
