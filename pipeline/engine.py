"""Runs a schedule on stages through a transport.

The engine decides nothing: the schedule says what happens in which order, the stages know how, the transport
moves what has to move. What is left is a loop. Everything that does not change between steps is looked up
once, in `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.errors import ActionError
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, execution_order, validate
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.pipeline.times.clock import Clock
from gpipe_bench.pipeline.transport import Transport

__all__ = ["ActionError", "Instruction", "Observer", "Program", "on_their_devices", "prepare", "run"]

Observer = Callable[[Action], AbstractContextManager[object]]
_UNOBSERVED = nullcontext()


class Instruction(NamedTuple):
    """One instruction of a prepared program."""

    kind: Kind
    stage: Stage
    microbatch: int
    graph: bool  # F: build the graph, because no recomputation follows
    action: Action


Program = tuple[Instruction, ...]


def prepare(schedule: Schedule, stages: Mapping[int, Stage], *, training: bool = True) -> Program:
    """The actions that this process takes, in order, with everything looked up that a step needs.

    With the stages of one worker that is its row. Several workers on one device take turns
    (`order.execution_order`); on devices of their own, which work side by side, they are served in the order
    in which their actions would start. `training=False` leaves the forwards only.
    """
    validate(schedule)
    workers = {schedule.worker(stage) for stage in stages}
    actions = schedule.actions[workers.pop()] if len(workers) == 1 else execution_order(schedule)
    if len({stage.device for stage in stages.values()}) > 1:
        actions = tuple(event.action for event in replay(schedule, SLOTS).events)
    return tuple(
        Instruction(
            action.kind,
            stages[action.stage],
            action.microbatch,
            training and not schedule.recomputes(action.microbatch, action.stage),
            action,
        )
        for action in actions
        if action.stage in stages and (training or action.kind is Kind.F)
    )


def on_their_devices(stages: Mapping[int, Stage], observe: Observer | None) -> Observer:
    """`observe`, with the device of an action's stage as the current one in the action: layers may ask for
    "the" accelerator without saying which. Where there are only CPUs there is no need of it.
    """

    @contextmanager
    def guarded(action: Action) -> Iterator[None]:
        with devices.on(stages[action.stage].device), _UNOBSERVED if observe is None else observe(action):
            yield

    return guarded


def run(program: Program, transport: Transport, clock: Clock, observe: Observer | None = None) -> None:
    """Takes every action of `program` once. Stages and transport have begun; the caller finishes them.

    `observe` is entered around each action. An exception in an action becomes the `ActionError` naming it.
    """
    action: Action | None = None
    clock.begin()
    try:
        for position, (kind, stage, m, graph, action) in enumerate(program):
            with _UNOBSERVED if observe is None else observe(action):
                match kind:
                    case Kind.F:
                        message = None if stage.is_first else transport.receive_activation(stage.index, m)
                        clock.start(position)
                        message = stage.forward(m, message, graph)
                        clock.stop(position)
                        if message is not None:
                            transport.send_activation(stage.index, m, message)
                        elif (loss := stage.loss()) is not None:
                            transport.send_loss(loss)
                        del message
                    case Kind.R:
                        clock.start(position)
                        stage.recompute(m)
                        clock.stop(position)
                    case Kind.B | Kind.I:
                        gradients = () if stage.is_last else transport.receive_gradient(stage.index, m)
                        clock.start(position)
                        if kind is Kind.B:
                            gradients = stage.backward(m, gradients)
                        else:
                            gradients = stage.backward_inputs(m, gradients)
                        clock.stop(position)
                        if kind is Kind.B:
                            transport.release(stage.index, m)
                        if not stage.is_first:
                            transport.send_gradient(stage.index, m, gradients)
                        del gradients
                    case Kind.W:
                        clock.start(position)
                        stage.backward_weights(m)
                        clock.stop(position)
                        transport.release(stage.index, m)
    except Exception as error:
        raise transport.abort(action, error) from error
    clock.complete = True
