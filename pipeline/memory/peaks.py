"""The peak memory of a worker: numbers of micro-batches in flight, times the bytes of its stages.

    gpipe, remat, M = 3     F0  F1  F2  R2  B2  R1  B1  R0  B0
    boundary inputs held     1   2   3   3   3   2   2   1   1      one per micro-batch in flight
    graphs held              0   0   0   1   1   1   1   1   1      one at a time

What is alive follows from the schedule alone. So a row is walked once in numbers of micro-batches
(`row_moments`), which are multiplied by the bytes of stages, for one cut or for hundreds (`Worker`). Stages
of one worker peak at different times, so their bytes are added action by action, and not their peaks.

Peaks are those of a steady training step: optimizer state exists; gradients are None between steps and appear
in the first backward; the optimizer updates one tensor at a time (`foreach=False`). All micro-batches have
the same size: profiles of the larger ones bound a step with unequal ones. The losses that the last stage
collects, a number per micro-batch, are left out.

Re-materialization copies what changes between F and R. Of an input that a layer overwrites, F and R use a
copy each. A buffer that a layer updates is copied for each micro-batch that waits for its R, and once more
for R. Other buffers are copied once:

    overwritten input, in one process     F           waits     R           R .. B
    as it was received                    1           1         until it    -
    copy                                  1           -         is copied   1

Inputs in memory that exists anyway do not count, as the user's mini-batch on the first stage. Between
processes, a buffer of the ring holds the received input until the end of B, and the copy comes on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import add, ge, mul
from typing import NamedTuple

from ..plan.schedule import Action, Kind
from .stage_bytes import Bytes, Halves, StageBytes

# Counts of micro-batches


class Counts(NamedTuple):
    """How many micro-batches a stage holds something of."""

    whole: int  # whole inputs held: of micro-batches without a graph, and of the one in F or R
    graphs: int  # graphs and the inputs they keep; without the action's own
    halves: int  # micro-batches between I and W; without the action's own
    inputs_ahead: int  # posted receives of further inputs
    gradients: int  # received gradients and posted receives, without the one in use
    unrecomputed: int  # that wait for their R, and those in F and R
    after_backward: int  # 1 after the first B or W
    after_inputs: int  # 1 after the first B or I


class Step(NamedTuple):
    """An action, whether its micro-batch is recomputed, and the counts it finds."""

    action: Action
    recomputed: bool
    counts: Counts

    @property
    def alike(self) -> tuple[Kind, bool, int, int]:
        """Key that is equal for steps whose actions add the same bytes."""
        return self.action.kind, self.recomputed, self.counts.after_backward, self.counts.after_inputs


Inbox = tuple[int, bool]
"""The receiving stage of a message, and whether the message is a gradient."""


class Moment(NamedTuple):
    """An action of a worker: its step, counts of the worker's other stages, received messages not yet used
    (if they are counted), and bytes of sends in progress.
    """

    step: Step
    others: tuple[tuple[int, Counts], ...] = ()
    waiting: tuple[tuple[Inbox, int], ...] = ()
    sent_bytes: int = 0


class StageCounter:
    """Counts what a stage holds as its actions run one after another. ``receive_ahead`` messages of each
    direction are received beyond the one in use; None where the caller counts what has arrived.
    """

    def __init__(self, actions: Sequence[Action], receive_ahead: int | None = 0) -> None:
        self._again = {action.microbatch for action in actions if action.kind is Kind.R}
        self._to_receive = sum(action.kind is Kind.F for action in actions)
        self._to_send_back = sum(action.kind in (Kind.B, Kind.I) for action in actions)
        self._ahead = receive_ahead or 0
        self._waits = receive_ahead is not None  # in R the gradient has already come
        self._whole = self._graphs = self._halves = 0
        self._unrecomputed = 0
        self._after_backward = self._after_inputs = 0

    def _counts(self, gradients: int, own_whole: int = 0) -> Counts:
        return Counts(
            self._whole + own_whole, self._graphs, self._halves,
            min(self._ahead, self._to_receive), gradients,
            self._unrecomputed, self._after_backward, self._after_inputs,
        )  # fmt: skip

    @property
    def rest(self) -> Counts:
        """Counts between this stage's actions."""
        return self._counts(min(self._ahead, self._to_send_back) if self._after_inputs else 0)

    def take(self, action: Action) -> Step:
        """Runs the next action and returns the counts that it finds."""
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
        elif kind is Kind.W:
            self._halves -= 1
            found = self._counts(0)
            self._after_backward = 1
        else:
            self._to_send_back -= 1
            self._graphs -= 1
            found = self._counts(min(self._ahead, self._to_send_back))
            self._halves += kind is Kind.I
            self._after_backward = self._after_backward or int(kind is Kind.B)
            self._after_inputs = 1
        return Step(action, again, found)


@lru_cache(maxsize=1024)
def steps(actions: tuple[Action, ...], receive_ahead: int = 0) -> tuple[Step, ...]:
    """The steps of a stage alone on its worker, without those that another step of their kind exceeds in
    every count; of equal steps the first.
    """
    counter = StageCounter(actions, receive_ahead)
    alike: dict[object, list[Step]] = {}
    for action in actions:
        step = counter.take(action)
        rivals = alike.setdefault(step.alike, [])
        if not any(all(map(ge, rival.counts, step.counts)) for rival in rivals):
            rivals[:] = [each for each in rivals if not all(map(ge, step.counts, each.counts))] + [step]
    return tuple(step for rivals in alike.values() for step in rivals)


def row_moments(
    actions: Sequence[Action],
    receive_ahead: int | None,
    homes: Mapping[int, tuple[int, ...]] | None = None,
) -> Iterator[Moment]:
    """Each action of a worker's row, or of all workers in turn. `homes` gives, for each stage whose messages
    count, all stages of its worker; without it, messages between stages of the row count.
    """
    if homes is None:
        stages = tuple(sorted({action.stage for action in actions}))
        homes = dict.fromkeys(stages, stages)
    rows: dict[int, list[Action]] = {stage: [] for stage in homes}
    for action in actions:
        rows[action.stage].append(action)
    counters = {stage: StageCounter(row, receive_ahead) for stage, row in rows.items()}
    resting = {stage: counter.rest for stage, counter in counters.items()}
    inboxes = {mine: [(stage, back) for stage in mine for back in (False, True)] for mine in homes.values()}
    waiting: dict[Inbox, int] = dict.fromkeys(chain.from_iterable(inboxes.values()), 0)
    for action in actions:
        stage, kind = action.stage, action.kind
        moves, back = kind in (Kind.F, Kind.B, Kind.I), kind is not Kind.F
        if moves and waiting[stage, back]:
            waiting[stage, back] -= 1
        step, mine = counters[stage].take(action), homes[stage]
        others = tuple([(other, resting[other]) for other in mine if other != stage])
        yield Moment(step, others, tuple([(each, waiting[each]) for each in inboxes[mine] if waiting[each]]))
        resting[stage] = counters[stage].rest
        target = stage - 1 if back else stage + 1, back
        if moves and target in waiting:
            waiting[target] += 1


# Bytes


@dataclass(frozen=True)
class Optimizer:
    """Bytes an optimizer needs per byte of parameter, beside the parameters and their gradients."""

    state: int  # parameter-sized tensors kept between steps
    temporaries: int  # parameter-sized temporaries while one tensor is updated
    counts_steps: bool  # keeps a 4-byte step count for each parameter tensor

    @classmethod
    def named(cls, name: str) -> Optimizer:
        """The optimizer of that name; `ValueError` if it is unknown."""
        if name not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {name!r}: use one of {', '.join(OPTIMIZERS)}")
        return OPTIMIZERS[name]

    def state_bytes(self, sizes: tuple[int, ...]) -> int:
        """Bytes that the optimizer keeps for parameters of these sizes."""
        return self.state * sum(sizes) + 4 * len(sizes) * self.counts_steps

    def update_bytes(self, sizes: tuple[int, ...]) -> int:
        """Bytes of temporaries while it updates tensors of these sizes in turn; a variable of torch's loop
        keeps one alive while the next tensor is updated.
        """
        each = map(add, map(self.temporaries.__mul__, sizes), (0, *sizes))  # as long as `sizes`
        return max(each, default=0) if self.temporaries else 0


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(state=0, temporaries=0, counts_steps=False),
    # Mean square and momentum; with the parameter the paper's 12 bytes per float32 value.
    "rmsprop": Optimizer(state=2, temporaries=1, counts_steps=True),
    "adam": Optimizer(state=2, temporaries=2, counts_steps=True),
}


@dataclass(frozen=True)
class StageMemory:
    """A stage's moment of peak memory in a training step, in bytes; the parts add up to the peak."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    boundary: int  # inputs kept per micro-batch, or buffers of messages; the mini-batch and its targets
    activations: int  # held by graphs of micro-batches in flight, recomputed ones too
    transients: int  # gradients of activations, passing outputs, temporaries, receive buffers
    when: str  # the action of the peak, or "optimizer"

    @property
    def peak(self) -> int:
        return (
            self.parameters + self.buffers + self.gradients + self.optimizer_state
            + self.boundary + self.activations + self.transients
        )  # fmt: skip

    @property
    def working_set(self) -> int:
        """Bytes that come and go in a step: the paper's activation memory, without parameter gradients."""
        return self.boundary + self.activations + self.transients


class Parts(NamedTuple):
    """Bytes by category, as in `StageMemory`."""

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    boundary: int = 0
    activations: int = 0
    transients: int = 0


class Place(NamedTuple):
    """The memory that a stage's messages are received in."""

    inputs_there: bool = False  # received inputs need no memory of their own, as on the first stage
    gradients_there: bool = False  # received gradients need no memory of their own
    buffer_bytes: int = 0  # of receive buffers that are kept


NOWHERE = Place()


class Placed:
    """A stage with its role in the pipeline: bytes per count and per action.

    Args:
        stage: what it holds of a micro-batch.
        rule: the optimizer.
        num_microbatches: in a step.
        is_first: whether it is the first stage, whose inputs are the user's.
        recomputes: whether any of its micro-batches is recomputed.
        stays: whether received inputs stay until the end of B, as between processes.
        place: the memory of its messages.
    """

    def __init__(
        self,
        stage: StageBytes,
        rule: Optimizer,
        num_microbatches: int,
        *,
        is_first: bool,
        recomputes: bool = False,
        stays: bool = False,
        place: Place = NOWHERE,
    ) -> None:
        self._stage, self._stays, self._place, self._rule = stage, stays, place, rule
        self._copied_bytes = stage.still_buffer_bytes if recomputes else 0
        self._is_apart = is_first or place.inputs_there
        halves = stage.halves or Halves()
        self._halves = halves = halves.apart(stage.received_bytes) if place.gradients_there else halves
        received = kept = waits = 0
        if not self._is_apart:
            received, kept, waits = stage.input_bytes, stage.kept_input_bytes, halves.kept_input_bytes
        gradient = 0 if place.gradients_there else stage.output_gradient_bytes
        self.message_bytes = (0 if place.inputs_there else stage.input_bytes, gradient)
        # Copies of overwritten inputs that graphs hold, counted for all micro-batches where the stage
        # recomputes any: an upper estimate.
        copied = again = 0
        if recomputes and self._is_apart:
            copied = stage.kept_copied_bytes
            again = min(halves.kept_input_bytes, stage.copied_input_bytes)
        elif recomputes and stays:
            copied = stage.copied_input_bytes
        self._own_kept = kept + copied
        self._per_count = (
            Parts(boundary=received),
            Parts(boundary=self._own_kept, activations=stage.saved_bytes),
            Parts(boundary=waits, activations=again + halves.saved_bytes),
            Parts(transients=received),
            Parts(transients=gradient),
            Parts(buffers=stage.changing_buffer_bytes),
            Parts(gradients=0 if halves.whole else stage.gradient_bytes),
            Parts(gradients=stage.gradient_bytes if halves.whole else 0),
        )
        # The mini-batch and its targets are the user's tensors: alive, whole, all the time.
        user_bytes = num_microbatches * (stage.target_bytes + (stage.input_bytes if is_first else 0))
        self._fixed = Parts(
            parameters=stage.parameter_bytes,
            buffers=stage.buffer_bytes + self._copied_bytes,
            optimizer_state=rule.state_bytes(stage.trained_sizes),
            boundary=user_bytes + place.buffer_bytes,
        )
        self._sizes = tuple(map(sum, self._per_count))
        self._fixed_bytes = sum(self._fixed)
        self._known: dict[Counts, int] = {}
        self._own: dict[object, Parts] = {}  # by Step.alike

    def bytes(self, counts: Counts) -> int:
        """Bytes of the stage between its actions; `adds` gives what an action adds."""
        found = self._known.get(counts)
        if found is None:
            found = self._known[counts] = self._fixed_bytes + sum(map(mul, counts, self._sizes))
        return found

    def parts(self, counts: Counts) -> Parts:
        """Same as `bytes`, by category."""
        times = zip(counts, self._per_count, strict=True)
        return _sum([self._fixed, *[[count * each for each in parts] for count, parts in times]])

    def update(self) -> Parts:
        """Bytes in the optimizer's step, when the copies of buffers are freed."""
        stage, buffers = self._stage, -self._copied_bytes
        gradients = stage.gradient_bytes - stage.summed_gradient_bytes
        temporaries = self._rule.update_bytes(stage.trained_sizes)
        return _sum([self._fixed, Parts(buffers=buffers, gradients=gradients, transients=temporaries)])

    def adds(self, step: Step) -> Parts:
        """Bytes that an action adds. `ValueError` for I and W without their profiles."""
        alike = step.alike
        if alike not in self._own:
            kind, stage = step.action.kind, self._stage
            if stage.halves is None and kind in (Kind.I, Kind.W):
                raise ValueError(
                    f"{step.action} is half a backward, which the profiles of its stage say nothing of; "
                    "profile with Profiler(split_backward=True)"
                )
            found = self._fullest(step)
            buffers, copied = 0, 0
            if kind is Kind.R:
                buffers, copied = stage.changing_buffer_bytes, stage.copied_input_bytes
                if not (self._is_apart or self._stays):
                    # Before the first layer runs, the copy replaces the received input.
                    copied = max(copied - found.total, 0)
            self._own[alike] = Parts(
                buffers=buffers,
                gradients=found.gradients,
                boundary=self._own_kept if kind in (Kind.B, Kind.I) else 0,
                activations=found.activations,
                transients=found.transients + copied,
            )
        return self._own[alike]

    def _fullest(self, step: Step) -> Bytes:
        """Returns the peak memory of the layers in an action."""
        stage, halves, counts, kind = self._stage, self._halves, step.counts, step.action.kind
        if kind in (Kind.F, Kind.R):
            return stage.free if kind is Kind.F and step.recomputed else stage.forward
        if kind is Kind.B or halves.whole:  # I does all of a backward
            if kind is Kind.W:
                return Bytes()
            is_later = counts.after_inputs if halves.whole else counts.after_backward
            found = stage.backward if is_later else stage.backward_first
            return found.without(stage.received_bytes) if self._place.gradients_there else found
        if kind is Kind.I:
            return halves.inputs
        # A recomputation's copy of a user's input stays until W as a received input does.
        own = self._is_apart and not (step.recomputed and stage.copied_input_bytes)
        return halves.weights(first=not counts.after_backward, own=own)


def _sum(all_parts: Iterable[Sequence[int]]) -> Parts:
    return Parts(*map(sum, zip(*all_parts, strict=True)))


class Worker:
    """The memory of a worker. ``rests`` are its stages in the optimizer's step, if they differ."""

    def __init__(self, stages: Mapping[int, Placed], rests: Mapping[int, Placed] | None = None) -> None:
        self._stages, self._rests = stages, stages if rests is None else rests

    def update(self) -> StageMemory:
        """Bytes in the optimizer's step, which updates one tensor at a time, of any stage."""
        each = [stage.update() for stage in self._rests.values()]
        found, temporaries = StageMemory(*_sum(each), "optimizer"), [parts[-1] for parts in each]
        return replace(found, transients=max(temporaries)) if len(each) > 1 else found

    def bytes(self, moment: Moment) -> int:
        """Peak bytes in an action."""
        step, stages = moment.step, self._stages
        placed = stages[step.action.stage]
        others = [stages[stage].bytes(counts) for stage, counts in moment.others]
        own = placed.bytes(step.counts) + sum(placed.adds(step))
        return own + sum(others) + self._messages_bytes(moment)

    def _messages_bytes(self, moment: Moment) -> int:
        found = moment.sent_bytes
        for (stage, is_gradient), count in moment.waiting:
            found += count * self._stages[stage].message_bytes[is_gradient]
        return found

    def fullest(self, moments: Iterable[Moment], more: int = 0) -> StageMemory:
        """Returns the moment of the worker's peak, the first of equals; actions hold `more` bytes on top."""
        found, stages = self.update(), self._stages
        fullest = max(moments, key=self.bytes)
        if self.bytes(fullest) + more <= found.peak:
            return found
        step, others = fullest.step, [stages[stage].parts(counts) for stage, counts in fullest.others]
        placed = stages[step.action.stage]
        messages = Parts(transients=more + self._messages_bytes(fullest))
        parts = _sum([placed.parts(step.counts), placed.adds(step), *others, messages])
        return StageMemory(*parts, str(step.action))
