"""What a worker holds in each action, as far as it hangs on what is recomputed.

A micro-batch waits for its backward as a graph or as the inputs alone. All else in an action is there anyway.
So the bytes of an action are a sum over the micro-batches that wait, and a choice is judged by going once
through a row:

    row of a stage      F0     F1     F2     R0     B0      ...        1 and 2 keep their graphs
    inputs that wait     0      i      i      i      0
    graphs that wait     0      0      g     2g     2g      beside what each action adds of its own

R stands right before its backward, so the others wait in R as they do in the backward. Only the standard
library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule

Unit = tuple[int, int]
"""A stage and a micro-batch."""


@dataclass(frozen=True)
class Held:
    """Bytes on the workers of one schedule.

    Args:
        inputs: of each stage, what a micro-batch without a graph takes while it waits.
        graphs: of each stage, the same with a graph.
        own: `own(action, recomputed)` is the most that the action's worker holds in it beside the inputs and
            graphs of other micro-batches that wait for B or I; whether its micro-batch is recomputed makes a
            difference in F, and R is asked for only then.
        at_rest: of each worker, the most outside of actions, as in the optimizer's step.
    """

    inputs: Sequence[float]
    graphs: Sequence[float]
    own: Callable[[Action, bool], float]
    at_rest: Sequence[float]


def simply_held(
    schedule: Schedule, inputs: Sequence[float], graphs: Sequence[float], fixed: Sequence[float]
) -> Held:
    """Where nothing else is known: an action holds the graph that it makes or uses up, and each worker
    `fixed` bytes all the time. Between I and W nothing waits.
    """

    def own(action: Action, recomputed: bool) -> float:
        is_free = action.kind is Kind.F and recomputed
        return fixed[schedule.worker(action.stage)] + (inputs if is_free else graphs)[action.stage]

    return Held(inputs, graphs, own, fixed)


@dataclass(frozen=True)
class Excess:
    """An action in which a worker holds too much, and whose graphs wait in it or are made by it: unless one
    of them is recomputed, it stays too much.
    """

    action: Action
    num_bytes: float
    alive: tuple[Unit, ...]


class Ledger:
    """The row of one worker with its bytes and its cap."""

    def __init__(self, schedule: Schedule, worker: int, held: Held, cap_bytes: float) -> None:
        self.worker, self.held, self.cap_bytes = worker, held, cap_bytes
        self.row = schedule.actions[worker]
        self.stages = schedule.stages_of(worker)

    def refuse(self) -> None:
        """`ValueError` where there is too much whatever is recomputed, with the worst moment."""
        most, when = self.held.at_rest[self.worker], "outside of its actions"
        waiting = 0.0
        for action in self.row:
            least = min(self.held.inputs[action.stage], self.held.graphs[action.stage])
            if action.kind in (Kind.B, Kind.I):
                waiting -= least
            num_bytes = waiting + min(self.held.own(action, False), self.held.own(action, True))
            if num_bytes > most:
                most, when = num_bytes, f"at {action}"
            if action.kind is Kind.F:
                waiting += least
        if most > self.cap_bytes:
            raise ValueError(
                f"worker {self.worker} holds at least {most:,.0f} bytes {when}, whatever is recomputed, and "
                f"the cap is {self.cap_bytes:,.0f}; use more stages or micro-batches, or a larger cap"
            )

    def excess(self, again: Set[Unit]) -> Excess | None:
        """The first action that holds too much if those are recomputed; None where all fit."""
        for action, num_bytes, alive in self._walk(again):
            if num_bytes > self.cap_bytes:
                return Excess(action, num_bytes, tuple(alive))
        return None

    def peak_bytes(self, again: Set[Unit]) -> float:
        """Most bytes if those are recomputed."""
        most = max(num_bytes for _, num_bytes, _ in self._walk(again))
        return max(most, self.held.at_rest[self.worker])

    def _walk(self, again: Set[Unit]) -> Iterator[tuple[Action, float, Mapping[Unit, None]]]:
        """Each action with its bytes and the micro-batches that keep their graphs, its own in F."""
        inputs, graphs, own, waiting = self.held.inputs, self.held.graphs, self.held.own, 0.0
        alive: dict[Unit, None] = {}
        for action in self.row:
            stage, kind = action.stage, action.kind
            unit = (stage, action.microbatch)
            recomputed = unit in again
            if kind is Kind.F:
                if not recomputed:
                    alive[unit] = None
                yield action, own(action, recomputed) + waiting, alive
                waiting += (inputs if recomputed else graphs)[stage]
                continue
            if kind is not Kind.W:
                waiting -= (inputs if recomputed else graphs)[stage]
                alive.pop(unit, None)
                if recomputed:
                    before = Action(stage, Kind.R, action.microbatch)
                    yield before, own(before, True) + waiting, alive
            yield action, own(action, recomputed) + waiting, alive
