"""A stage that says when its parameters get gradients, to what joins these with those of other processes.

Replicas of a stage sum their gradients once a step, and the sum is to leave while the last backward still
runs. For that somebody has to know when a backward begins and ends and which one is the last, and the stage
alone does. Stages without a grid are of the class `Stage` and pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.stage.stage import Gradients, Stage
from gpipe_bench.pipeline.stage.tensors import is_divided

Result = TypeVar("Result")


class Reduction:
    """What joins the gradients of one stage with those of other processes.

    In a training step it is told, in this order: `begin`; before and after every action that runs backward
    (B, or I and W); `finish`. A pass of forwards alone ends with `evaluated`, whatever fails with `reset`.
    Parameters get gradients in B and W, and in I where a graph cannot be split.
    """

    def begin(self, num_microbatches: int, *, sync: bool) -> None:
        """A training step of so many micro-batches begins. Without `sync` it leaves this process's own
        gradients, which a later step joins with those of the others.
        """

    def before(self, kind: Kind, m: int, *, last: bool) -> None:
        """Right before B, I or W of micro-batch `m`. `last`: after this action no other one of the stage
        makes gradients of parameters in this step.
        """

    def after(self, kind: Kind, m: int, *, last: bool) -> None:
        """Right after it, before its gradients are sent to the stage before. Must not wait for others."""

    def finish(self) -> None:
        """The step is over on this process: waits for the others; `.grad` is what the optimizer may use."""

    def evaluated(self) -> None:
        """A pass of forwards alone is over."""

    def reset(self) -> None:
        """Drops what it holds of the step, after an error."""

    def refresh(self) -> None:
        """Other parameters may be trained from now on, or come in in another order."""


class ReducedStage(Stage):
    """A `Stage` whose backwards are told to the `Reduction` that `reduction` makes for it."""

    def __init__(
        self,
        *arguments: Any,
        reduction: Callable[[Stage], Reduction],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.reduction = reduction(self)
        self._last: Action | None = None
        self._is_new = True  # the graphs of its first step are looked through

    def follow(self, schedule: Schedule) -> None:
        """The steps take this schedule from now on."""
        self.lay_out(schedule)
        self.reduction.refresh()  # a W makes gradients in another order than a B

    def lay_out(self, schedule: Schedule) -> None:
        """The same for a step with fewer micro-batches, of which other replicas may have all."""
        self._last = last_gradients(schedule, self.index)

    def refresh(self) -> None:
        super().refresh()
        self.reduction.refresh()
        self._is_new = True

    def backward(self, m: int, gradients: Gradients) -> Gradients:
        return self._told(Kind.B, m, super().backward, m, gradients)

    def backward_inputs(self, m: int, gradients: Gradients) -> Gradients:
        return self._told(Kind.I, m, super().backward_inputs, m, gradients)

    def backward_weights(self, m: int) -> None:
        self._told(Kind.W, m, super().backward_weights, m)

    def _refuse_others(self, m: int) -> None:
        """`ValueError` before a backward for parameters that get a gradient in it and are of no layer and of
        no loss that is a module: nobody would sum it over replicas.
        """
        known = set(self.receiving)
        if any(map(is_divided, known)):  # their graph has other leaves
            return
        todo: list[Any] = [edge.node for edge in self._microbatches[m].edges]
        seen = {None}
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            todo += [each for each, _ in node.next_functions]
            parameter = getattr(node, "variable", None)
            if isinstance(parameter, nn.Parameter) and parameter not in known:
                raise ValueError(
                    f"stage {self.index} trains a parameter of shape {tuple(parameter.shape)} that none of "
                    "its layers has, so its gradients would not be summed over replicas; register it in a "
                    "layer, or pass loss_fn as the nn.Module that has it"
                )

    def _told(self, kind: Kind, m: int, action: Callable[..., Result], *arguments: Any) -> Result:
        last = self._last is not None and (kind, m) == (self._last.kind, self._last.microbatch)
        if self._is_new:
            self._refuse_others(m)
            self._is_new = not last
        self.reduction.before(kind, m, last=last)
        result = action(*arguments)
        self.reduction.after(kind, m, last=last)
        return result


def last_gradients(schedule: Schedule, stage: int) -> Action:
    """The action of a stage after which no gradient of its parameters comes in any more."""
    return next(action for action in reversed(schedule.row(stage)) if action.kind in (Kind.B, Kind.W))
