"""Runs one mini-batch through this process's stages; even a failure ends the step on every rank.

The schedule gives the order of the actions, stages compute them, and the transport moves tensors. `prepare`
looks up once what the loop over actions (`run`) needs. `Steps` gives the stages their micro-batches and
targets, and ends a failed step on every rank. An evaluation takes the forward actions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from . import devices
from .clock import Clock
from .errors import ActionError
from .mesh.gradients import TiedWeights
from .mesh.reduce import DataParallel
from .plan.edges import Edge, chain
from .plan.schedule import Action, Kind, Schedule, shortened
from .plan.simulate import SLOTS, replay
from .plan.walk import execution_order, validate
from .ranks.distributed import PointToPoint
from .stage.layers import LossFn
from .stage.stage import Stage
from .stage.trees import Nested, Tree, divide, flatten, num_examples, sizes
from .transport import EdgeTransport, StepPlan

Observer = Callable[[Action], AbstractContextManager[object]]
_UNOBSERVED = nullcontext()
F, R, B, I, W = Kind  # noqa: E741
T = TypeVar("T", bound=BaseException)


class Steps:
    """Takes mini-batches through this process's stages (`stages`, by index; `stage_devices` are of all
    stages). `elsewhere` maps the id of a parameter that another process trains to a weak reference and its
    name.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        stage_devices: Sequence[torch.device],
        transport: EdgeTransport,
        tied: TiedWeights | None = None,
        data_parallel: DataParallel | None = None,
        elsewhere: Mapping[int, tuple[ref[nn.Parameter], str]] | None = None,
    ) -> None:
        self._schedule, self._stages, self._data_parallel = schedule, stages, data_parallel
        self._devices = tuple(stage_devices)
        self._transport, self._tied, self._elsewhere = transport, tied, elsewhere or {}
        self._has_last = schedule.num_stages - 1 in stages
        self._device_types = tuple(dict.fromkeys(("cpu", *(device.type for device in stage_devices))))
        self._on_accelerators = any(map(devices.is_accelerator, stage_devices))
        self._ranks = transport if isinstance(transport, PointToPoint) else None
        self._turn = Lock()  # one pass at a time
        self._programs: dict[tuple[int, bool], tuple[tuple[Instruction, ...], Clock]] = {}
        self._rows = schedule  # of the latest step
        self.latest = schedule  # of the latest step that trained
        self._program(schedule, training=True)

    @property
    def clock(self) -> Clock:
        """The clock of the latest training step."""
        return self._programs[self.latest.num_microbatches, True][1]

    def take(
        self,
        model: nn.Module,
        number: int,
        batch: Tree | None,
        target: Tree | None = None,
        loss_fn: LossFn | None = None,
        observe: Observer | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor | None:
        """Takes a mini-batch: a training step if there is a `loss_fn`, else forwards alone, which leave their
        outputs in the last stage. `model` is the `Pipeline`, `number` keys the random streams, `scaler`
        scales the gradients. Returns the mean loss of a training step.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                "the pipeline is in a step, in another thread or a hook; take one after the other"
            )
        # A tensor cached without a graph must not be used in one, and caches would copy every weight.
        casts, parametrized = torch.is_autocast_cache_enabled(), parametrize._cache_enabled
        torch.set_autocast_cache_enabled(False)
        parametrize._cache_enabled = 0
        try:
            plan, microbatches = self._plan(model, batch, training=loss_fn is not None)
            if plan.num_microbatches != self._rows.num_microbatches:
                self._follow(plan.num_microbatches)
            self._feed(number, plan, microbatches, target, loss_fn, scaler)
            if 0 in self._stages and (first := self._stages[0].first) is not None:
                first.begin(batch, target)
            key = plan.num_microbatches, plan.training
            program, clock = self._programs.get(key) or self._program(self._rows, training=plan.training)
            if self._on_accelerators:
                observe = self._on_their_devices(observe)
            run(program, self._transport, clock, observe)
            loss = self._transport.finish()
            if self._data_parallel is not None:
                if loss is None:
                    self._data_parallel.evaluated()
                else:
                    loss = self._data_parallel.finish(loss)
            if loss is not None and self._tied is not None:
                self._tied.sum_gradients()
            for stage in self._stages.values():
                stage.finish()
            return loss
        except BaseException as error:
            failure = self._give_up(error)
            if self._ranks is not None and self._ranks.is_let_down(error):
                raise failure from error
            raise
        finally:
            torch.set_autocast_cache_enabled(casts)
            parametrize._cache_enabled = parametrized
            self._turn.release()

    def refused(self, error: T) -> T:
        """Tells the other ranks not to wait after bad arguments; returns their `error`."""
        if self._ranks is not None:
            self._give_up(error)
        return error

    def _give_up(self, error: BaseException) -> ActionError:
        """Ends the step on all ranks. Returns the error, with what any rank knows of its cause."""
        for stage in self._stages.values():
            stage.finish(complete=False)
        if self._tied is not None:
            self._tied.restore()
        if self._data_parallel is not None:
            self._data_parallel.reset()
        return error if isinstance(error, ActionError) else self._transport.abort(None, error)

    def _plan(
        self, model: nn.Module, batch: Tree | None, *, training: bool
    ) -> tuple[StepPlan, Sequence[Tree]]:
        """Returns the plan of the step for all ranks; the first stage makes it and divides the mini-batch."""
        if 0 not in self._stages:
            return self._transport.begin(None, None), ()
        examples = num_examples(batch)
        count = max(1, min(examples, self._schedule.num_microbatches))
        sizes(examples, count)  # refuses an empty mini-batch before another rank is told of it
        if self._data_parallel is not None:
            count = self._data_parallel.agree(count)
        tensors, structure = flatten(batch, "the mini-batch")
        if any(tensor.requires_grad for tensor in tensors):
            raise ValueError("the batch requires a gradient, which no pipeline computes; pass batch.detach()")
        plan = StepPlan(examples, count, training)
        signature: Hashable = None
        if self._ranks is not None:  # what the shapes, dtypes and gradients of all messages may depend on
            kind = structure.kind() if isinstance(structure, Nested) else structure
            casts = tuple(
                (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in self._device_types
            )
            shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
            trained = tuple(p.requires_grad for p in model.parameters())
            signature = (training, count, model.training, kind, shapes, trained, casts)
        return self._transport.begin(plan, signature), divide(batch, sizes(examples, count))

    def _follow(self, num_microbatches: int) -> None:
        """Sets the number of micro-batches of the next steps, which may be fewer than the schedule has."""
        is_whole = num_microbatches == self._schedule.num_microbatches
        self._rows = self._schedule if is_whole else shortened(self._schedule, num_microbatches)
        for stage in self._stages.values():
            stage.follow(self._rows)

    def _feed(
        self,
        number: int,
        plan: StepPlan,
        microbatches: Sequence[Tree],
        target: Tree | None,
        loss_fn: LossFn | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """Gives each stage its micro-batches or targets, and each micro-batch's weight in the loss."""
        lengths = sizes(plan.examples, plan.num_microbatches)
        shares: Sequence[float] = ()
        targets: Sequence[Tree | None] = ()
        if plan.training:
            self.latest = self._rows
            if self._tied is not None:
                self._tied.begin()
            if self._data_parallel is not None:
                shares = self._data_parallel.begin(lengths, loss_fn, has_loss=self._has_last)
            else:
                shares = tuple([length / plan.examples for length in lengths])
            if self._has_last and target is not None:
                if (found := num_examples(target, "the target")) != plan.examples:
                    raise ValueError(f"the mini-batch has {plan.examples} examples but the target {found}")
                targets = divide(target, lengths, "the target")
            elif self._has_last:
                targets = [None] * len(lengths)
        for stage in self._stages.values():
            stage.begin(
                number,
                plan.num_microbatches,
                training=plan.training,
                feed=microbatches if stage.is_first else (),
                targets=targets if stage.is_last else (),
                loss_fn=loss_fn,
                shares=shares,
                scaler=scaler if stage.is_last else None,
            )
            if plan.training and self._elsewhere:
                for parameter in stage.parameters:
                    if id(parameter) in self._elsewhere:
                        refuse_elsewhere(self._elsewhere, parameter)
            if scaler is not None:  # it learns its device, and all ranks begin with the same scale
                scaler.scale(torch.zeros((), device=stage.device))

    def _program(self, rows: Schedule, *, training: bool) -> tuple[tuple[Instruction, ...], Clock]:
        """Returns the program of the schedule `rows` and the clock that times its actions; cached."""
        key = rows.num_microbatches, training
        if key not in self._programs:
            program = prepare(rows, self._stages, training=training)
            clock = Clock([instruction.action for instruction in program], self._devices)
            self._programs[key] = program, clock
        return self._programs[key]

    def _on_their_devices(self, observe: Observer | None) -> Observer:
        """Wraps `observe`: the device of an action's stage is the current one, for layers that name none."""

        @contextmanager
        def guarded(action: Action) -> Iterator[None]:
            observed = _UNOBSERVED if observe is None else observe(action)
            with devices.on(self._stages[action.stage].device), observed:
                yield

        return guarded


def refuse_elsewhere(elsewhere: Mapping[int, tuple[ref[nn.Parameter], str]], parameter: nn.Parameter) -> None:
    """`ValueError` for a parameter that another process trains; `elsewhere` as for `Steps`."""
    found, name = elsewhere.get(id(parameter), (None, ""))
    if found is not None and found() is parameter:
        raise ValueError(
            f"a layer of this process, or loss_fn, uses {name}, which a stage of another process trains, and "
            "has not registered it; set it as an attribute of the layer (self.weight = ...) before "
            "the pipeline is built, so that the copies are kept equal, and give loss_fn parameters of its own"
        )


class Instruction(NamedTuple):
    """One instruction of a prepared program."""

    kind: Kind
    stage: Stage
    microbatch: int
    graph: bool  # F: build the graph, because no recomputation follows
    before: Edge | None  # from the stage before
    behind: Edge | None  # to the next stage
    action: Action


def prepare(
    schedule: Schedule, stages: Mapping[int, Stage], *, training: bool = True
) -> tuple[Instruction, ...]:
    """The actions that this process takes, in order, with everything looked up that a step needs: for one
    worker its row of the schedule. Workers on one device take turns (`walk.execution_order`); with several
    devices, actions are sorted by the time they would start. `training=False` leaves the forwards only.
    """
    validate(schedule)
    workers = {schedule.worker(stage) for stage in stages}
    actions = schedule.actions[workers.pop()] if len(workers) == 1 else execution_order(schedule)
    if len({stage.device for stage in stages.values()}) > 1:
        actions = tuple(event.action for event in replay(schedule, SLOTS).events)
    edges = (None, *chain(schedule.num_stages), None)
    return tuple(
        Instruction(
            action.kind,
            stages[action.stage],
            action.microbatch,
            training and not schedule.recomputes(action.microbatch, action.stage),
            edges[action.stage],
            edges[action.stage + 1],
            action,
        )
        for action in actions
        if action.stage in stages and (training or action.kind is Kind.F)
    )


def run(
    program: Sequence[Instruction], transport: EdgeTransport, clock: Clock, observe: Observer | None = None
) -> None:
    """Takes every action of `program` once, `observe` entered around each. Stages and transport have begun;
    the caller finishes them. An exception in an action becomes the `ActionError` naming it.
    """
    action: Action | None = None
    clock.complete = False
    if clock.begins:
        clock.begin()
    try:
        for position, instruction in enumerate(program):
            action = instruction.action
            if observe is None:
                _take(instruction, position, transport, clock)
            else:
                with observe(action):
                    _take(instruction, position, transport, clock)
    except Exception as error:
        raise transport.abort(action, error) from error
    clock.complete = True


def _take(instruction: Instruction, position: int, transport: EdgeTransport, clock: Clock) -> None:
    """Takes one action: waits for its message, computes, and sends the result."""
    kind, stage, m, graph, before, behind, _ = instruction
    passed: Any = None  # what comes, then what goes
    if kind is F:
        if before is not None:
            passed = transport.receive(before, m)
    elif kind is B or kind is I:
        passed = () if behind is None else transport.receive_back(behind, m)
    place, times, read = 2 * position, clock.times, clock.read
    times[place] = read[place]()
    if kind is F:
        passed = stage.forward(m, passed, graph)
    elif kind is B or kind is I:
        passed = stage.backward(m, passed, kind)
    elif kind is R:
        stage.recompute(m)
    else:
        stage.backward_weights(m)
    times[place + 1] = read[place + 1]()
    if kind is F:
        if behind is not None:
            transport.send(behind, m, passed)
        elif passed is not None:
            transport.send_loss(passed)
    elif kind is not R:
        if kind is not I and transport.release is not None:
            transport.release(stage.index, m)
        if kind is not W and before is not None:
            transport.send_back(before, m, passed)
