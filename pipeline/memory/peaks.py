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
from functools import lru_cache
from operator import add, attrgetter

from gpipe_bench.pipeline.memory.footprint import Footprint, Moment, footprint
from gpipe_bench.pipeline.memory.story import LayerProfile
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


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
    boundary: int  # inputs kept per micro-batch; on the first and last stage the mini-batch itself
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


def pipeline_memory(
    layers: Sequence[LayerProfile],
    loss: LayerProfile,
    stages: Sequence[range],
    schedule: Schedule,
    optimizer: str = "rmsprop",
    *,
    receive_ahead: int = 0,
) -> tuple[StageMemory, ...]:
    """Peak of each stage when ``layers`` (profiled at the micro-batch size) are cut into ``stages``.

    ``receive_ahead`` is the number of boundary inputs and gradients a stage has posted receives for beyond
    the one in use: 1 over torch.distributed; 0 in one process, where gpipe and naive use every message as it
    comes (under 1f1b one may wait there too, and the peak is between that for 0 and that for 1). Raises
    ValueError for an unknown optimizer and for a schedule with another number of stages.
    """
    if len(stages) != schedule.num_stages:
        raise ValueError(f"{len(stages)} stages given for a schedule of {schedule.num_stages} stages")
    if schedule.placement:
        raise ValueError(
            f"schedule {schedule.name!r} gives a worker several stages; memory.workers.worker_memory says "
            "what each worker holds"
        )
    last = len(stages) - 1
    return tuple(
        stage_memory(
            footprint([layers[layer] for layer in stage], loss if index == last else None),
            schedule.actions[index],
            optimizer,
            is_first=index == 0,
            receive_ahead=receive_ahead,
        )
        for index, stage in enumerate(stages)
    )


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
}


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
    received, kept = (0, 0) if is_first else (stage.input_bytes, stage.kept_input_bytes)
    gradients, boundary, activations, receives = stage.gradient_bytes, 0, 0, 0
    if demand is None:
        moment = Moment(transients=_update_transients(rule, stage.trained_sizes))
    else:
        moment = _MOMENTS[demand.moment](stage)
        gradients = stage.gradient_bytes if demand.after_first_backward else 0
        boundary = demand.inputs * received + demand.graph_inputs * kept
        activations = demand.graphs * stage.saved_bytes
        receives = demand.inputs_ahead * received + demand.output_gradients * stage.output_gradient_bytes
    # The mini-batch and its targets are the user's tensors: alive, whole, all the time.
    user_bytes = num_microbatches * (stage.target_bytes + (stage.input_bytes if is_first else 0))
    return StageMemory(
        parameters=stage.parameter_bytes,
        buffers=stage.buffer_bytes,
        gradients=gradients + moment.gradients,
        optimizer_state=state,
        boundary=user_bytes + boundary,
        activations=activations + moment.activations,
        transients=moment.transients + receives,
        when="optimizer" if demand is None else demand.when,
    )


def _update_transients(rule: Optimizer, sizes: tuple[int, ...]) -> int:
    """Bytes of temporaries while an optimizer updates parameters of these sizes in turn."""
    if not rule.lingers:
        return rule.temporaries * max(sizes, default=0)
    before = (0, *sizes)  # one longer than the sizes, where `map` stops
    return max(map(add, map(rule.temporaries.__mul__, sizes), before), default=0)


@dataclass(frozen=True)
class Demand:
    """What an action finds alive on its stage, in numbers of micro-batches; independent of sizes."""

    moment: str  # which moment of the footprint it adds
    inputs: int  # boundary inputs held whole: those of micro-batches without a graph, its own in F and R
    graph_inputs: int  # boundary inputs of which a graph holds its part: all others
    graphs: int  # graphs held of other micro-batches
    inputs_ahead: int  # posted receives of further inputs
    output_gradients: int  # gradients received or posted, beside the one that a backward works on
    after_first_backward: bool
    when: str


class Walk:
    """What a stage holds as its actions go by, one after another, in numbers of micro-batches."""

    def __init__(self, actions: Sequence[Action], receive_ahead: int = 0) -> None:
        self._recomputed = {action.microbatch for action in actions if action.kind is Kind.R}
        self._to_receive = sum(action.kind is Kind.F for action in actions)
        self._to_send_back = sum(action.kind in (Kind.B, Kind.I) for action in actions)
        self._receive_ahead = receive_ahead
        self.whole = self.graphs = self.backwards = 0

    def take(self, action: Action) -> Demand:
        """What the next action finds alive."""
        graphs = self.graphs
        match action.kind:
            case Kind.F:
                self.whole, self._to_receive = self.whole + 1, self._to_receive - 1
                moment = "free" if action.microbatch in self._recomputed else "forward"
                gradients = 0
            case Kind.R:
                moment, gradients = "forward", 1 + min(self._receive_ahead, self._to_send_back - 1)
            case Kind.B:
                self._to_send_back -= 1
                graphs -= 1
                moment = "later" if self.backwards else "first"
                gradients = min(self._receive_ahead, self._to_send_back)
            case _:
                raise ValueError(f"no memory model for action {action}: split backwards are not modelled yet")
        in_graphs = graphs + (action.kind is Kind.B)
        found = Demand(
            moment,
            self.whole,
            in_graphs,
            graphs,
            self.inputs_ahead,
            gradients,
            self.backwards > 0,
            str(action),
        )
        if action.kind is Kind.B:
            self.backwards += 1
            self.graphs -= 1
        elif moment == "forward":
            self.whole, self.graphs = self.whole - 1, self.graphs + 1
        return found

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
    by_kind: dict[tuple[str, bool], list[tuple[tuple[int, ...], Demand]]] = {}
    for demand in found:
        counts = (
            demand.inputs, demand.graph_inputs, demand.graphs, demand.inputs_ahead, demand.output_gradients,
        )  # fmt: skip
        rivals = by_kind.setdefault((demand.moment, demand.after_first_backward), [])
        if any(all(a >= b for a, b in zip(rival, counts, strict=True)) for rival, _ in rivals):
            continue
        rivals[:] = [
            (rival, each)
            for rival, each in rivals
            if not all(a <= b for a, b in zip(rival, counts, strict=True))
        ] + [(counts, demand)]
    return tuple(demand for rivals in by_kind.values() for _, demand in rivals)
