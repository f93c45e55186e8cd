"""Peak bytes of every stage, from layer profiles and a schedule.

The model replays a stage's action list with the footprint of one micro-batch per action; it reads the same
schedule as the engine, so what is alive when follows from the schedule and is written down nowhere else.

    gpipe, remat, M = 3     F0  F1  F2  R2  B2  R1  B1  R0  B0
    boundary inputs held     1   2   3   3   3   2   2   1   1      one per micro-batch in flight
    graphs held              0   0   0   1   1   1   1   1   1      one at a time

Peaks are those of a steady training step: optimizer state exists, gradients are set to None between steps and
appear at the first backward; the optimizer updates one tensor at a time (`foreach=False`). Micro-batches are
of one size: profiles of the larger ones bound a step whose last micro-batches have an example less. Left out:
the loss values that the last stage collects, one number per micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, attrgetter

from gpipe_bench.pipeline.memory.stages.copies import NO_COPIES, in_action, with_shadows
from gpipe_bench.pipeline.memory.stages.demands import Demand, demands
from gpipe_bench.pipeline.memory.stages.footprint import Footprint
from gpipe_bench.pipeline.memory.stages.moments import Moment
from gpipe_bench.pipeline.plan.schedule import Action, Kind


@dataclass(frozen=True)
class Optimizer:
    """Bytes an optimizer needs per byte of parameter, beside the parameters and their gradients."""

    state: int  # copies of the parameters kept between steps
    temporaries: int  # parameter-sized temporaries while one parameter is updated, one tensor at a time
    lingers: bool  # one of them lives on while the next parameter is updated: a variable of torch's loop
    counts_steps: bool  # keeps a 4-byte step count for each parameter tensor


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(state=0, temporaries=0, lingers=False, counts_steps=False),
    # Mean square and momentum: with the value the paper's 12 bytes per float32 parameter.
    "rmsprop": Optimizer(state=2, temporaries=1, lingers=True, counts_steps=True),
    "adam": Optimizer(state=2, temporaries=2, lingers=True, counts_steps=True),
}


@dataclass(frozen=True)
class StageMemory:
    """The fullest moment of a stage in a training step, in bytes; the parts add up to the peak."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    boundary: int  # inputs kept per micro-batch, or buffers of messages; the mini-batch and its targets
    activations: int  # held by the graphs of micro-batches in flight, recomputed or not
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
        """What comes and goes in a step: the paper's "activation memory" without gradients of parameters."""
        return self.boundary + self.activations + self.transients


def stage_memory(
    stage: Footprint,
    actions: tuple[Action, ...],
    optimizer: str = "rmsprop",
    *,
    is_first: bool,
    receive_ahead: int = 0,
) -> StageMemory:
    """Peak of one stage that executes ``actions``."""
    num_microbatches = sum(action.kind is Kind.F for action in actions)
    return fullest_moment(
        stage, demands(actions, receive_ahead), num_microbatches, optimizer, is_first=is_first
    )


def fullest_moment(
    stage: Footprint,
    demanded: Sequence[Demand],
    num_microbatches: int,
    optimizer: str = "rmsprop",
    *,
    is_first: bool,
) -> StageMemory:
    """The same from the `demands` of its actions, which stages of one schedule share."""
    rule = rule_of(optimizer)
    state = optimizer_state(stage, rule)
    stage = with_shadows(stage, demanded)
    fullest = memory_at(stage, None, rule, state, num_microbatches, is_first=is_first)
    for demand in demanded:
        candidate = memory_at(stage, demand, rule, state, num_microbatches, is_first=is_first)
        if candidate.peak > fullest.peak:
            fullest = candidate
    return fullest


def rule_of(optimizer: str) -> Optimizer:
    """`ValueError` for an optimizer that is not known."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}: use one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optimizer]


def optimizer_state(stage: Footprint, rule: Optimizer) -> int:
    """Bytes that the optimizer keeps for a stage."""
    return rule.state * sum(stage.trained_sizes) + 4 * len(stage.trained_sizes) * rule.counts_steps


_MOMENTS = {
    "free": attrgetter("free"),
    "forward": attrgetter("forward"),
    "first": attrgetter("backward_first"),
    "later": attrgetter("backward"),
    "inputs": attrgetter("halves.inputs"),
    "first weights": attrgetter("halves.weights_first"),
    "later weights": attrgetter("halves.weights"),
}
_OWN_MOMENTS = {
    **_MOMENTS,
    "first weights": attrgetter("halves.own_weights_first"),
    "later weights": attrgetter("halves.own_weights"),
}


def _moment(stage: Footprint, demand: Demand, *, is_apart: bool) -> Moment:
    """What the action of a demand holds of its own; ValueError where the profiles know of no halves."""
    if (demand.is_half or demand.halves) and stage.halves is None:
        raise ValueError(
            f"{demand.when} is half a backward, which the profiles of its stage say nothing of; profile "
            "with Profiler(split_backward=True)"
        )
    if stage.halves is not None and stage.halves.whole:  # I does all of a backward
        if demand.moment in ("inputs", "first", "later"):
            return stage.backward if demand.after_first_inputs else stage.backward_first
        if demand.is_half:
            return Moment()
    if demand.is_recomputation and stage.again is not None:
        return stage.again
    # The copy of a user's input that a recomputation works on waits for W as what is received does.
    own = is_apart and not (demand.recomputed and stage.copied_input_bytes)
    moment: Moment = (_OWN_MOMENTS if own else _MOMENTS)[demand.moment](stage)
    return moment


def _has_gradients(stage: Footprint, demand: Demand) -> bool:
    """Whether an earlier action has made the gradients of parameters."""
    if stage.halves is not None and stage.halves.whole:
        return demand.after_first_inputs
    return demand.after_first_backward


def memory_at(
    stage: Footprint,
    demand: Demand | None,
    rule: Optimizer,
    state: int,
    num_microbatches: int,
    *,
    is_first: bool,
) -> StageMemory:
    """What a stage holds in the action of a demand, or in the optimizer's step; ``state`` as
    `optimizer_state` says.
    """
    # What is received into memory that stays is, like the user's, there anyway.
    is_apart = is_first or stage.messages.apart
    received, kept = (0, 0) if is_apart else (stage.input_bytes, stage.kept_input_bytes)
    gradients, boundary, activations, receives = stage.gradient_bytes, 0, 0, 0
    copies = NO_COPIES
    if demand is None:
        moment = Moment(transients=_update_transients(rule, stage.trained_sizes))
        gradients -= stage.summed_gradient_bytes
    else:
        moment = _moment(stage, demand, is_apart=is_apart)
        gradients = stage.gradient_bytes if _has_gradients(stage, demand) else 0
        boundary = demand.inputs * received + demand.graph_inputs * kept
        activations = demand.graphs * stage.saved_bytes
        if stage.halves is not None:
            boundary += 0 if is_apart else demand.halves * stage.halves.kept_input_bytes
            activations += demand.halves * stage.halves.saved_bytes
        receives = demand.inputs_ahead * received + demand.output_gradients * stage.output_gradient_bytes
        copies = in_action(stage, demand, moment.total, is_apart=is_apart)
    # The mini-batch and its targets are the user's tensors: alive, whole, all the time.
    user_bytes = num_microbatches * (stage.target_bytes + (stage.input_bytes if is_first else 0))
    return StageMemory(
        parameters=stage.parameter_bytes,
        buffers=stage.buffer_bytes + copies.buffers,
        gradients=gradients + moment.gradients,
        optimizer_state=state,
        boundary=user_bytes + stage.messages.buffer_bytes + boundary + copies.boundary,
        activations=activations + moment.activations + copies.activations,
        transients=moment.transients + receives + copies.transients,
        when="optimizer" if demand is None else demand.when,
    )


def _update_transients(rule: Optimizer, sizes: tuple[int, ...]) -> int:
    """Bytes of temporaries while an optimizer updates parameters of these sizes in turn."""
    if not rule.lingers:
        return rule.temporaries * max(sizes, default=0)
    before = (0, *sizes)  # one longer than the sizes, where `map` stops
    return max(map(add, map(rule.temporaries.__mul__, sizes), before), default=0)
