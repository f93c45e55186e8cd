"""What the actions of a worker find alive, in numbers of micro-batches: its row walked without sizes.

    zb-h1, M = 3, stage 0 of 2      F0  F1  I0  W0  F2  I1  W1  I2  W2
    graphs of others held            0   1   1   1   1   1   1   0   0
    between I and W, others          0   0   0   0   0   0   0   0   0

What is alive when follows from the schedule alone, whichever sizes, cuts and transports there are. So a row
is walked once, and `peaks` puts the bytes of stages in the place of the numbers, for one cut or for hundreds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from ..plan.schedule import Action, Kind, Schedule
from ..plan.walk import execution_order


class Counts(NamedTuple):
    """Numbers of micro-batches of which a stage holds something."""

    whole: int  # boundary inputs held whole: of those without a graph, its own in F and R
    graphs: int  # graphs, with their parts of the boundary inputs; of others in an action
    halves: int  # between I and W; others in an action
    inputs_ahead: int  # posted receives of further inputs
    gradients: int  # gradients received or posted, beside the one that a backward works on
    unrecomputed: int  # that wait for their R, those in F and R too
    again_graphs: int  # of the graphs, its own in B and I too, those that R has made
    again_halves: int  # of those between I and W, those whose graph R has made
    after_backward: int  # 1 when a B or W is done
    after_inputs: int  # 1 when a B or I is done


class Step(NamedTuple):
    """An action without sizes: whether its micro-batch is one whose forward runs twice; what it finds."""

    action: Action
    recomputed: bool
    counts: Counts

    @property
    def alike(self) -> tuple[Kind, bool, int, int]:
        """Key that is equal for steps whose actions add the same bytes."""
        return self.action.kind, self.recomputed, self.counts.after_backward, self.counts.after_inputs


Inbox = tuple[int, bool]
"""The stage that waits for a message, and whether for a gradient."""


class Moment(NamedTuple):
    """An action of a worker: its step, what the worker's other stages hold, the messages that have come and
    are not needed yet, if they are counted, and the bytes of those that have not left.
    """

    step: Step
    others: tuple[tuple[int, Counts], ...] = ()
    waiting: tuple[tuple[Inbox, int], ...] = ()
    sent_bytes: int = 0


class StageCounter:
    """Counts what a stage holds as its actions run one after another.

    ``receive_ahead`` is the number of messages of each direction that are received beyond the one in use;
    None where the caller counts what has arrived.
    """

    def __init__(self, actions: Sequence[Action], receive_ahead: int | None = 0) -> None:
        self._again = {action.microbatch for action in actions if action.kind is Kind.R}
        self._to_receive = sum(action.kind is Kind.F for action in actions)
        self._to_send_back = sum(action.kind in (Kind.B, Kind.I) for action in actions)
        self._ahead = receive_ahead or 0
        self._waits = receive_ahead is not None  # the gradient of what is recomputed has come
        self._whole = self._graphs = self._halves = 0
        self._unrecomputed = self._again_graphs = self._again_halves = 0
        self._after_backward = self._after_inputs = 0

    def _counts(self, gradients: int, own_whole: int = 0) -> Counts:
        return Counts(
            self._whole + own_whole, self._graphs, self._halves,
            min(self._ahead, self._to_receive), gradients,
            self._unrecomputed, self._again_graphs, self._again_halves,
            self._after_backward, self._after_inputs,
        )  # fmt: skip

    @property
    def rest(self) -> Counts:
        """Counts of what the stage holds while another stage works."""
        return self._counts(min(self._ahead, self._to_send_back) if self._after_inputs else 0)

    def take(self, action: Action) -> Step:
        """Takes the next action and returns the counts that it finds."""
        kind, again = action.kind, action.microbatch in self._again
        if kind is Kind.F:
            self._to_receive -= 1
            self._unrecomputed += again
            found = self._counts(0, own_whole=1)
            self._whole, self._graphs = self._whole + again, self._graphs + (not again)
        elif kind is Kind.R:
            self._whole -= 1
            gradients = 1 + min(self._ahead, self._to_send_back - 1) if self._waits else 0
            found = self._counts(gradients, own_whole=1)
            self._graphs += 1
            self._unrecomputed -= 1
            self._again_graphs += 1
        elif kind is Kind.W:
            self._halves -= 1
            self._again_halves -= again
            found = self._counts(0)
            self._after_backward = 1
        else:
            self._to_send_back -= 1
            self._graphs -= 1
            found = self._counts(min(self._ahead, self._to_send_back))
            self._again_graphs -= again
            self._halves += kind is Kind.I
            self._again_halves += again and kind is Kind.I
            self._after_backward = self._after_backward or int(kind is Kind.B)
            self._after_inputs = 1
        return Step(action, again, found)


@lru_cache(maxsize=1024)
def steps(actions: tuple[Action, ...], receive_ahead: int = 0) -> tuple[Step, ...]:
    """The distinct steps of a stage alone on its worker, without those that another one of their kind exceeds
    in everything; the earliest of equals.
    """
    counter = StageCounter(actions, receive_ahead)
    alike: dict[object, list[Step]] = {}
    for action in actions:
        step = counter.take(action)
        rivals = alike.setdefault(step.alike, [])
        if not any(all(map(ge, rival.counts, step.counts)) for rival in rivals):
            rivals[:] = [each for each in rivals if not all(map(ge, step.counts, each.counts))] + [step]
    return tuple(step for rivals in alike.values() for step in rivals)


def moments(schedule: Schedule, receive_ahead: int | None, *, all_wait: bool = False) -> Iterator[Moment]:
    """Each action of all workers.

    Args:
        schedule: any that `validate` accepts.
        receive_ahead: as for `StageCounter`.
        all_wait: messages of all workers wait with their receivers, as in one process. When they come depends
            on the other workers, so all rows are walked together, in the order in which one process takes
            them; without it row by row.
    """
    if not all_wait:
        for row in schedule.actions:
            yield from row_moments(row, receive_ahead)
        return
    homes = {stage: schedule.stages_of(schedule.worker(stage)) for stage in range(schedule.num_stages)}
    yield from row_moments(execution_order(schedule), receive_ahead, homes)


def row_moments(
    actions: Sequence[Action],
    receive_ahead: int | None,
    homes: Mapping[int, tuple[int, ...]] | None = None,
) -> Iterator[Moment]:
    """Each action of a worker's row, or of all workers in turn. `homes` are, for each stage whose messages
    count, all stages of its worker; without them messages wait from a stage of the row for another.
    """
    if homes is None:
        stages = tuple(sorted({action.stage for action in actions}))
        homes = dict.fromkeys(stages, stages)
    rows: dict[int, list[Action]] = {stage: [] for stage in homes}
    for action in actions:
        rows[action.stage].append(action)
    counters = {stage: StageCounter(row, receive_ahead) for stage, row in rows.items()}
    resting = {stage: counter.rest for stage, counter in counters.items()}
    waiting: dict[int, dict[Inbox, int]] = {stage: {} for stage in homes}  # by the stage that waits
    for action in actions:
        stage, kind = action.stage, action.kind
        moves, back = kind in (Kind.F, Kind.B, Kind.I), kind is not Kind.F
        if moves:
            for inbox, count in waiting[stage].items():
                if inbox[1] is back and count:
                    waiting[stage][inbox] = count - 1
        step, mine = counters[stage].take(action), homes[stage]
        others = tuple([(other, resting[other]) for other in mine if other != stage])
        found = tuple([each for other in mine for each in waiting[other].items() if each[1]])
        yield Moment(step, others, found)
        resting[stage] = counters[stage].rest
        if moves:
            target = stage - 1 if back else stage + 1
            if target in homes:
                waiting[target][target, back] = waiting[target].get((target, back), 0) + 1
