"""One mini-batch through the stages of this process: divided, run, and ended on every rank whatever happens.

Nothing is decided here: the schedule says what happens in which order, the stages know how, the transport
moves what has to move. What is left is a loop (`run`) over what `prepare` has looked up once. A training step
and a forward-only pass differ in a loss and in which actions are left. Around the loop is what must hold for
both (`Steps`): the stages get their micro-batches and targets, all ranks learn how many examples there are,
no cast is cached across the pass, and a failure leaves no rank waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.clock import Clock
from gpipe_bench.pipeline.errors import ActionError
from gpipe_bench.pipeline.mesh.reduce import DataParallel
from gpipe_bench.pipeline.plan.edges import Edge, chain
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, execution_order, validate
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.ranks.distributed import PointToPoint
from gpipe_bench.pipeline.ranks.tied import TiedWeights
from gpipe_bench.pipeline.stage.layers import LossFn
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.pipeline.stage.trees import (
    Keywords,
    Message,
    Nested,
    Tree,
    divide,
    flatten,
    flatten_shared,
    num_examples,
    shared_versions,
    sizes,
    unflatten_shared,
)
from gpipe_bench.pipeline.transport import EdgeTransport, Plan, PortalTransport, ShortBatchError, rows_for

Observer = Callable[[Action], AbstractContextManager[object]]
_UNOBSERVED = nullcontext()
F, R, B, I, W = Kind  # noqa: E741


class Steps:
    """Takes mini-batches through `stages`, those of this process by their indices.

    `stage_devices` is the device of each stage of the pipeline; `tied` are the weights that stages of
    several processes use; `joint` is what is done with other replicas; `is_own` as in `rows_for`. `elsewhere`
    are the parameters of the layers of other processes, by their id, as far as this process still has them,
    with their names. `keywords` are what the layers may share.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        stage_devices: Sequence[torch.device],
        transport: EdgeTransport,
        tied: TiedWeights | None = None,
        joint: DataParallel | None = None,
        elsewhere: Mapping[int, tuple[ref[nn.Parameter], str]] | None = None,
        keywords: Keywords | None = None,
        *,
        is_own: bool = False,
    ) -> None:
        self._schedule, self._stages, self._joint = schedule, stages, joint
        self._is_own, self._devices = is_own, tuple(stage_devices)
        self._transport, self._tied, self._elsewhere = transport, tied, elsewhere or {}
        self._keywords = keywords
        self._has_last = schedule.num_stages - 1 in stages
        self._device_types = tuple(dict.fromkeys(("cpu", *(device.type for device in stage_devices))))
        self._on_accelerators = any(map(devices.is_accelerator, stage_devices))
        messages = transport.inner if isinstance(transport, PortalTransport) else transport
        self._asks = isinstance(messages, PointToPoint)  # which mini-batches have messages of equal shapes
        self._is_let_down = (
            messages.is_let_down if isinstance(messages, PointToPoint) else lambda error: False
        )
        self._turn = Lock()  # one pass at a time
        self._programs: dict[tuple[int, bool], tuple[tuple[Instruction, ...], Clock]] = {}
        self._rows = schedule  # of the latest step
        self.latest = schedule  # of the latest step that trained
        self._program(schedule, training=True)

    def _program(self, schedule: Schedule, *, training: bool) -> tuple[tuple[Instruction, ...], Clock]:
        program = prepare(schedule, self._stages, training=training)
        journal = None if self._joint is None else self._joint.journal
        clock = Clock([instruction.action for instruction in program], self._devices, journal)
        self._programs[schedule.num_microbatches, training] = program, clock
        return program, clock

    @property
    def clock(self) -> Clock:
        """Of the latest training step."""
        return self._programs[self.latest.num_microbatches, True][1]

    def take(
        self,
        model: nn.Module,
        number: int,
        batch: Tree | None,
        target: Tree | None = None,
        loss_fn: LossFn | None = None,
        observe: Observer | None = None,
        shared: Mapping[str, Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        sync: bool = True,
        inference: bool = False,
    ) -> Tensor | None:
        """One pass over a mini-batch: a training step if there is a `loss_fn`, else forwards only.

        `model` is the whole module of this process, `number` keys the random streams, `shared` are keyword
        arguments of the layers, `scaler` scales the gradients; without `sync` they stay this replica's own;
        with `inference` the layers run in torch's inference mode.
        Returns the mean loss of a training step; the outputs of forwards are left in the last stage.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                "the pipeline is in the middle of a step or an evaluation, in another thread or in a hook; "
                "take one after the other, or build a pipeline for each thread"
            )
        # What is cached without a graph must not meet one, and the caches would keep a copy of every weight.
        casts, parametrized = torch.is_autocast_cache_enabled(), parametrize._cache_enabled
        torch.set_autocast_cache_enabled(False)
        parametrize._cache_enabled = 0
        try:
            plan, feed = self._plan(model, batch, shared, training=loss_fn is not None)
            program, clock = self._begin(
                number, plan, feed, target, loss_fn, scaler, sync=sync, inference=inference
            )
            if 0 in self._stages and (first := self._stages[0].first) is not None:
                first.begin(batch, target)
            versions = None if plan.shared is None else shared_versions(plan.shared)
            if self._on_accelerators:
                observe = on_their_devices(self._stages, observe)
            run(program, self._transport, clock, observe)
            if plan.shared is not None and versions != shared_versions(plan.shared):
                raise RuntimeError(
                    "a layer has changed a tensor of shared in place, which all layers and micro-batches "
                    "use; use the out-of-place form of the operation"
                )
            return self._finish(sync=sync)
        except ShortBatchError:
            raise  # on every rank alike, and nothing has begun
        except BaseException as error:
            for stage in self._stages.values():
                stage.finish(complete=False)
            if self._tied is not None:
                self._tied.restore()
            if self._joint is not None:
                self._joint.reset()
            # The others must not wait.
            failure = error if isinstance(error, ActionError) else self._transport.abort(None, error)
            if self._is_let_down(error):
                raise failure from error
            raise
        finally:
            torch.set_autocast_cache_enabled(casts)
            parametrize._cache_enabled = parametrized
            self._turn.release()

    def _plan(
        self, model: nn.Module, batch: Tree | None, shared: Mapping[str, Any] | None, *, training: bool
    ) -> tuple[Plan, Sequence[Tree]]:
        """What all ranks must know of the step, from the first stage, which divides the mini-batch."""
        if 0 not in self._stages:
            return self._transport.begin(None, None), ()
        if shared and self._keywords is not None:
            self._keywords.check(shared)
        examples = num_examples(batch)
        count = max(1, min(examples, self._schedule.num_microbatches))
        sizes(examples, count)  # refuses an empty mini-batch before another rank is told of it
        if self._joint is not None:
            count = self._joint.agree(count, training=training, is_own=self._is_own)
        tensors, structure = flatten(batch, "the mini-batch")
        if any(tensor.requires_grad for tensor in tensors):
            raise ValueError(
                "the batch requires a gradient, which a pipeline does not compute; pass batch.detach()"
            )
        plan = Plan(examples, count, training, flatten_shared(shared) if shared else None)
        signature: Hashable = None
        if self._asks:  # what the shapes, dtypes and gradients of all messages may depend on
            signature = (
                training,
                count,
                model.training,
                _outline(Message(tensors, structure, ())),
                _outline(plan.shared),
                tuple(p.requires_grad for p in model.parameters()),
                tuple(
                    (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in self._device_types
                ),
            )
        return self._transport.begin(plan, signature), divide(batch, sizes(examples, count))

    def _begin(
        self,
        number: int,
        plan: Plan,
        feed: Sequence[Tree],
        target: Tree | None,
        loss_fn: LossFn | None,
        scaler: torch.amp.GradScaler | None,
        *,
        sync: bool,
        inference: bool,
    ) -> tuple[tuple[Instruction, ...], Clock]:
        """Gives each stage its part of the step; the actions to take."""
        count, training = plan.num_microbatches, plan.training
        schedule = self._schedule
        if count != schedule.num_microbatches:
            schedule = rows_for(schedule, plan, is_own=self._is_own)
        if schedule is not self._rows:
            self._rows = schedule
            for stage in self._stages.values():
                stage.follow(schedule, short=True)
        lengths = sizes(plan.examples, count)
        shares: Sequence[float] = tuple([length / plan.examples for length in lengths])
        if training:
            self.latest = schedule
            if self._tied is not None:
                self._tied.begin()
            if self._joint is not None:
                shares = self._joint.begin(lengths, loss_fn, sync=sync, has_loss=self._has_last)
        for stage in self._stages.values():
            targets: Sequence[Tree | None] = ()
            if stage.is_last and training:
                targets = [None] * count
                if target is not None:
                    found = num_examples(target, "the target")
                    if found != plan.examples:
                        raise ValueError(
                            f"the mini-batch has {plan.examples} examples but the target {found}"
                        )
                    targets = divide(target, lengths, "the target")
            stage.begin(
                number,
                count,
                training=training,
                inference=inference,
                feed=feed if stage.is_first else (),
                targets=targets,
                loss_fn=loss_fn,
                shares=shares,
                shared=None if plan.shared is None else unflatten_shared(plan.shared, stage.device),
                scaler=scaler if stage.is_last else None,
            )
            if training and self._elsewhere:
                self._refuse_elsewhere(stage)
            if scaler is not None:  # it learns its device, and all ranks begin with the same scale
                scaler.scale(torch.zeros((), device=stage.device))
        return self._programs.get((count, training)) or self._program(schedule, training=training)

    def _finish(self, *, sync: bool) -> Tensor | None:
        """All actions are taken: the loss of a training step, and gradients that the optimizer may use."""
        loss = self._transport.finish()
        if self._joint is not None:
            if loss is None:
                self._joint.evaluated()
            else:
                loss = self._joint.finish(loss)
        if loss is not None and self._tied is not None:
            self._tied.sum_gradients(sync=sync)
        for stage in self._stages.values():
            stage.finish()
        return loss

    def _refuse_elsewhere(self, stage: Stage) -> None:
        """`ValueError` where a layer or the loss has got a weight that another process trains."""
        for parameter in stage.parameters:
            refuse_elsewhere(self._elsewhere, parameter)


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
    """The actions that this process takes, in order, with everything looked up that a step needs.

    With the stages of one worker that is its row. Several workers on one device take turns
    (`schedule.execution_order`); on devices of their own, which work side by side, they are served in the
    order in which their actions would start. `training=False` leaves the forwards only.
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


def on_their_devices(stages: Mapping[int, Stage], observe: Observer | None) -> Observer:
    """`observe`, with the device of an action's stage as the current one in the action: layers may ask for
    "the" accelerator without saying which. Where there are only CPUs there is no need of it.
    """

    @contextmanager
    def guarded(action: Action) -> Iterator[None]:
        with devices.on(stages[action.stage].device), _UNOBSERVED if observe is None else observe(action):
            yield

    return guarded


def run(
    program: Sequence[Instruction], transport: EdgeTransport, clock: Clock, observe: Observer | None = None
) -> None:
    """Takes every action of `program` once. Stages and transport have begun; the caller finishes them.

    `observe` is entered around each action. An exception in an action becomes the `ActionError` naming it.
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
    """One action, from what it waits for to what it sends."""
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
    elif kind is B:
        passed = stage.backward(m, passed)
    elif kind is R:
        stage.recompute(m)
    elif kind is I:
        passed = stage.backward_inputs(m, passed)
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


def _outline(message: Message | None) -> Hashable:
    """What shapes may depend on of tensors and what comes with them."""
    if message is None:
        return None
    structure = message.structure
    kind = structure.kind() if isinstance(structure, Nested) else structure
    return kind, tuple([(tensor.shape, tensor.dtype) for tensor in message.tensors])
