"""What the actions of a stage find alive, in numbers of micro-batches: a walk over the stage's row.

    zb-h1, M = 3, stage 0 of 2      F0  F1  I0  W0  F2  I1  W1  I2  W2
    graphs of others held            0   1   1   1   1   1   1   0   0
    between I and W, others          0   0   0   0   0   0   0   0   0

It knows no sizes. `peaks` and `workers` put the bytes of a stage's footprint in the place of the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpipe_bench.pipeline.plan.schedule import Action, Kind


@dataclass(frozen=True)
class Demand:
    """What an action finds alive on its stage, in numbers of micro-batches; independent of sizes."""

    moment: str  # which moment of the footprint it adds
    inputs: int  # boundary inputs held whole: those of micro-batches without a graph, its own in F and R
    graph_inputs: int  # boundary inputs of which a graph holds its part: all others
    graphs: int  # graphs held of other micro-batches
    halves: int  # other micro-batches between I and W
    inputs_ahead: int  # posted receives of further inputs
    output_gradients: int  # gradients received or posted, beside the one that a backward works on
    after_first_backward: bool  # a B or W is done
    after_first_inputs: bool  # a B or I is done
    recomputed: bool  # the micro-batch of the action is one whose forward runs twice
    unrecomputed: int  # micro-batches that wait for their R, those in F and R too
    again_graphs: int  # of the graphs, its own in B and I too, those that R has made
    again_halves: int  # of the other micro-batches between I and W, those whose graph R has made
    stays: bool  # what was received stays until the end of B, as over processes
    when: str

    @property
    def is_recomputation(self) -> bool:
        """Whether the action is R."""
        return self.recomputed and self.moment == "forward"

    @property
    def is_half(self) -> bool:
        """Whether the action is I or W."""
        return self.moment in ("inputs", "first weights", "later weights")


class Walk:
    """What a stage holds as its actions go by, one after another, in numbers of micro-batches.

    ``receive_ahead`` is the number of messages of each direction that are received beyond the one in use;
    None where whoever walks counts what has arrived.
    """

    def __init__(self, actions: Sequence[Action], receive_ahead: int | None = 0) -> None:
        self._recomputed = {action.microbatch for action in actions if action.kind is Kind.R}
        self._to_receive = sum(action.kind is Kind.F for action in actions)
        self._to_send_back = sum(action.kind in (Kind.B, Kind.I) for action in actions)
        self._receive_ahead = receive_ahead or 0
        self._waits = receive_ahead is not None  # the gradient of what is recomputed has come
        self.stays = bool(receive_ahead)
        self.whole = self.graphs = self.halves = 0
        self.unrecomputed = self.again_graphs = self.again_halves = 0
        self.after_first_backward = self.after_first_inputs = False

    def take(self, action: Action) -> Demand:
        """What the next action finds alive."""
        kind = action.kind
        found, gradients = (self.after_first_backward, self.after_first_inputs), 0
        recomputed = action.microbatch in self._recomputed
        if recomputed:
            self.unrecomputed += kind is Kind.F
            self.again_halves -= kind is Kind.W
        copies = (self.unrecomputed, self.again_graphs, self.again_halves)
        if recomputed:
            self._leave(kind)
        if kind is Kind.F or kind is Kind.R:
            if kind is Kind.F:
                self.whole, self._to_receive = self.whole + 1, self._to_receive - 1
            elif self._waits:
                gradients = 1 + min(self._receive_ahead, self._to_send_back - 1)
            is_free = kind is Kind.F and recomputed
            counts = (self.whole, self.graphs, self.graphs, self.halves)
            moment = "free" if is_free else "forward"
            if not is_free:
                self.whole, self.graphs = self.whole - 1, self.graphs + 1
        elif kind is Kind.W:
            self.halves -= 1
            counts = (self.whole, self.graphs, self.graphs, self.halves)
            moment = "later weights" if self.after_first_backward else "first weights"
            self.after_first_backward = True
        else:
            self._to_send_back -= 1
            gradients = self.gradients_ahead
            self.graphs -= 1
            counts = (self.whole, self.graphs + 1, self.graphs, self.halves)
            if kind is Kind.I:
                moment = "inputs"
                self.halves += 1
            else:
                moment = "later" if self.after_first_backward else "first"
                self.after_first_backward = True
            self.after_first_inputs = True
        ahead = (self.inputs_ahead, gradients)
        return Demand(moment, *counts, *ahead, *found, recomputed, *copies, self.stays, str(action))

    def _leave(self, kind: Kind) -> None:
        """What an action of a micro-batch that is recomputed leaves of copies."""
        if kind is Kind.R:
            self.unrecomputed -= 1
            self.again_graphs += 1
        elif kind is Kind.B or kind is Kind.I:
            self.again_graphs -= 1
            self.again_halves += kind is Kind.I

    @property
    def inputs_ahead(self) -> int:
        """Posted receives of further inputs."""
        return min(self._receive_ahead, self._to_receive)

    @property
    def gradients_ahead(self) -> int:
        """Posted receives of gradients."""
        return min(self._receive_ahead, self._to_send_back)


@lru_cache(maxsize=1024)
def demands(actions: tuple[Action, ...], receive_ahead: int = 0) -> tuple[Demand, ...]:
    """The distinct demands of a stage's actions, those left out that another one exceeds in everything."""
    walk = Walk(actions, receive_ahead)
    return _undominated([walk.take(action) for action in actions])


def _undominated(found: list[Demand]) -> tuple[Demand, ...]:
    """Of equal kinds only those that no other exceeds or equals in every count; the earliest of equals."""
    by_kind: dict[tuple[str, bool, bool, bool], list[tuple[tuple[int, ...], Demand]]] = {}
    for demand in found:
        counts = (
            demand.inputs, demand.graph_inputs, demand.graphs, demand.halves, demand.inputs_ahead,
            demand.output_gradients, demand.unrecomputed, demand.again_graphs, demand.again_halves,
        )  # fmt: skip
        kind = (demand.moment, demand.recomputed, demand.after_first_backward, demand.after_first_inputs)
        rivals = by_kind.setdefault(kind, [])
        if any(all(a >= b for a, b in zip(rival, counts, strict=True)) for rival, _ in rivals):
            continue
        rivals[:] = [
            (rival, each)
            for rival, each in rivals
            if not all(a <= b for a, b in zip(rival, counts, strict=True))
        ] + [(counts, demand)]
    return tuple(demand for rivals in by_kind.values() for _, demand in rivals)
