"""One stage: how it takes actions on a micro-batch, and what it keeps between them.

`torch.utils.checkpoint` recomputes inside the backward, when the gradient has arrived. Here the graph is a
value that the stage holds: `recompute` builds it whenever the schedule says so, `backward` consumes it.
Between actions a stage holds, per micro-batch, either its boundary inputs (re-materialization) or its graph
(`tensors.MicrobatchState`).

Which outputs need a gradient and which inputs are overwritten shows only when the layers run, so it is found
in the first step of a kind and forgotten when another parameter is trained or a layer changes its mode. A
micro-batch's share of the examples and the scale of gradients enter where its backward begins, so that no
pass over the gradients follows, micro-batches may be uneven and steps add up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _set_grad_enabled as enable_grad  # `torch.set_grad_enabled` takes a microsecond more
from torch.autograd.graph import GradientEdge

from .. import devices
from ..devices import Transfers
from ..plan.schedule import Kind, Schedule
from .buffers import Buffers, Gather, Statistics
from .compiled import Compilation
from .first_step import FirstStep
from .layers import Arriving, LayerRunner, LossFn, deliver
from .split_backward import Split, Weights, run_engine
from .tensors import ENTRY, MicrobatchState, is_divided, overlapping, separate
from .trees import Message, Portals, Tree, flatten, unflatten, version

Gradients = tuple[Tensor | None, ...]  # one per tensor of a message
_AS_THEY_ARE = nullcontext()
_VERSION = attrgetter("_version")


class Reduction:
    """Joins the gradients of one stage with those of other processes.

    In a training step the engine calls `begin`, then `before` and `after` around every B, I and W, then
    `finish`. Parameters get gradients in B and W, and in I where a graph cannot be split.
    """

    def begin(self) -> None:
        """A training step begins."""

    def before(self, kind: Kind, m: int, *, last: bool) -> None:
        """Right before B, I or W of micro-batch `m`. `last`: after this action no other one of the stage
        makes gradients of parameters in this step.
        """

    def after(self, kind: Kind, m: int, *, last: bool) -> None:
        """Runs right after an action, before its gradients are sent. Must not wait for other processes."""

    def finish(self) -> None:
        """Waits for the other processes; then the optimizer may use `.grad`."""

    def evaluated(self) -> None:
        """Called when an evaluation is over."""

    def reset(self) -> None:
        """Called when a step or an evaluation has failed."""


class Stage:
    """Consecutive layers of the model on one device, and the actions of a schedule on them.

    `first_layer`, `seed`, `compilation`, `portals` and `first_microbatch` are as for `layers.LayerRunner`,
    `gather` as for `buffers.Statistics`. `tied` are weights that other stages use, too. `reduction` makes the
    `Reduction` of this stage. `elsewhere` is called with each parameter that is of no layer here, and raises
    if another process trains it.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[nn.Module],
        first_layer: int,
        *,
        device: torch.device,
        is_last: bool,
        seed: int = 0,
        gather: Gather | None = None,
        compilation: Compilation | None = None,
        portals: Sequence[Portals] = (),
        tied: Collection[nn.Parameter] = (),
        first_microbatch: int = 0,
        reduction: Callable[[Any], Reduction] | None = None,
        elsewhere: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        self.index, self.device = index, devices.exact(device)
        self.is_first, self.is_last = index == 0, is_last
        self.layers = tuple(layers)
        self.statistics = Statistics(self.layers, gather)
        self.outputs: list[Tree | None] = []  # of each micro-batch, on the last stage, when there is no loss
        # Those of the layers and, on the last stage, of a loss that is a module, each once, as last seen.
        self.parameters: tuple[nn.Parameter, ...] = ()
        self._loss_module: nn.Module | None = None
        self._buffers = Buffers(self.layers, first_layer, self.statistics.modules)
        self._runner = LayerRunner(
            self.layers, first_layer,
            device=self.device, seed=seed, statistics=self.statistics,
            compilation=compilation, first_microbatch=first_microbatch, portals=portals,
        )  # fmt: skip
        self._tied, self._places = frozenset(tied), range(first_layer, first_layer + len(self.layers))
        # By the kind of the inputs: which outputs need a gradient, and which inputs the layers overwrite, so
        # that F and R work on copies of these.
        self._needs_grad: dict[Hashable, tuple[bool, ...]] = {}
        self._overwritten: dict[Hashable, tuple[int, ...]] = {}
        self._found_for: tuple[tuple[bool, ...], ...] = ()  # what is trained, and the layers' modes
        self.first: FirstStep | None = None  # while nothing is known of the layers as they are
        self._seen: set[tuple[tuple[bool, ...], ...]] = set()  # as what they were looked at
        # Trainable, and no backward has given them one: torch makes the first a `.grad` as it is, so it may
        # have to be copied. None: not looked for yet in this step.
        self._without_grad: list[nn.Parameter] | None = None
        self._microbatches: dict[int, MicrobatchState] = {}  # of each, from F to the end of its backward
        self._weights: dict[int, Weights] = {}  # what I left of each micro-batch for W
        self._transfers = Transfers()  # of the mini-batch and the targets
        self._feed: Sequence[Tree] | Arriving = ()
        self._seed = lru_cache(16)(partial(torch.full, device=self.device))  # the gradient of a loss
        self._training = False
        self._losses: list[Tensor] = []  # of the micro-batches, each times its share
        self._shares: Sequence[float] = ()
        self._scaler: torch.amp.GradScaler | None = None
        self.look(None)
        self.reduction = None if reduction is None else reduction(self)
        self._last: tuple[Kind, int] | None = None  # the action that gives parameters their last gradients
        self._refuse_elsewhere = elsewhere
        # The graphs of the first step are looked through where other processes train something.
        self._is_new = self.reduction is not None or elsewhere is not None

    def follow(self, schedule: Schedule) -> None:
        """Sets the schedule of the next steps."""
        row = schedule.row(self.index)
        self._last = next((a.kind, a.microbatch) for a in reversed(row) if a.kind in (Kind.B, Kind.W))

    # A step begins and ends

    def begin(
        self,
        step: int,
        num_microbatches: int,
        *,
        training: bool,
        feed: Sequence[Tree] = (),
        targets: Sequence[Tree | None] = (),
        loss_fn: LossFn | None = None,
        shares: Sequence[float] = (),
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Prepares training step or pass of forwards number `step`.

        `feed` holds the micro-batches of the first stage; `targets`, `loss_fn`, `shares` (each
        micro-batch's share of the examples) and the `scaler` of gradients belong to the last. Without
        `loss_fn` the last stage keeps its outputs.
        """
        self._training = training
        if self.statistics.meters:
            self.statistics.begin()
        if isinstance(loss_fn, nn.Module) or not self._buffers.known_empty:
            self._buffers.begin(loss_fn)
        self._feed = deliver(feed, self.device, self._transfers, "the mini-batch", once=True) if feed else ()
        self._shares, self._scaler, self._losses = shares, scaler, []
        self.outputs = [None] * (num_microbatches if self.is_last else 0)
        self.look(loss_fn)
        if training and self._found_for not in self._seen:
            self.first = FirstStep(self.index, self.layers, self._places.start)
        arriving = deliver(targets, self.device, self._transfers, "the target") if targets else ()
        self._runner.begin(step, arriving, loss_fn)
        self._without_grad = None

    def look(self, loss_fn: LossFn | None) -> None:
        """Finds the parameters of the layers, and of a loss that is a module. If other parameters are trained
        than before, or a layer has changed its mode, what was found out about the layers is forgotten.

        `ValueError` for a model that was moved.
        """
        if self.is_last and loss_fn is not None:  # there is none where nothing is trained
            self._loss_module = loss_fn if isinstance(loss_fn, nn.Module) else None
        # `Module.parameters` takes five times as long.
        found: dict[nn.Parameter | None, None] = {}
        todo: list[nn.Module | None] = [self._loss_module, *reversed(self.layers)]
        seen: set[nn.Module | None] = {None}
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                found.update(dict.fromkeys(module._parameters.values()))  # type: ignore[union-attr]
                todo += reversed(module._modules.values())  # type: ignore[union-attr]
        found.pop(None, None)
        self.parameters = tuple(found)  # type: ignore[arg-type]
        if self.parameters and self.parameters[0].device != self.device:
            raise ValueError(
                f"the parameters of stage {self.index} have moved from {self.device} to "
                f"{self.parameters[0].device}; move the model before the pipeline is built, or pass devices="
            )
        now = (
            tuple([parameter.requires_grad for parameter in self.parameters]),
            tuple([layer.training for layer in self.layers]),
        )
        if now != self._found_for:
            self._found_for = now
            self._forget()

    def known(self) -> tuple[dict[Hashable, tuple[bool, ...]], dict[Hashable, tuple[int, ...]]]:
        """Which outputs need a gradient and which inputs are overwritten, by the kind of the inputs."""
        return dict(self._needs_grad), dict(self._overwritten)

    def know(self, found: tuple[dict[Hashable, tuple[bool, ...]], dict[Hashable, tuple[int, ...]]]) -> None:
        """Knows what was `known` before."""
        self._needs_grad, self._overwritten = found

    def refresh(self) -> None:
        """Forgets what was found out about the layers; the next step finds out."""
        self._forget()
        self._seen.clear()
        self._is_new = self.reduction is not None or self._refuse_elsewhere is not None

    def finish(self, *, complete: bool = True) -> None:
        """Ends a step; one that failed is not `complete`, and what it has found is dropped."""
        if self.statistics.meters:
            self.statistics.commit() if complete else self.statistics.forget()
        if not self._buffers.known_empty:
            self._buffers.end() if complete else self._buffers.forget()
        if not complete:
            self._losses, self.outputs = [], []
        elif self.first is not None:
            self._seen.add(self._found_for)
        self._is_new = self._is_new and not (self._training and complete)
        self._microbatches.clear()
        self._weights.clear()
        self._feed, self._scaler, self.first = (), None, None
        self._runner.release()

    # What is known of its layers

    @property
    def trainable(self) -> tuple[nn.Parameter, ...]:
        """The parameters that require a gradient."""
        return tuple([p for p in self.parameters if p.requires_grad])

    @property
    def receiving(self) -> tuple[nn.Parameter, ...]:
        """Parameters of `trainable` whose gradients are complete after this stage's last backward."""
        return tuple([p for p in self.trainable if p not in self._tied])

    @cached_property
    def output_name(self) -> str:
        """Description of the stage's output, for messages."""
        last = f"layer {self._places[-1]} ({type(self.layers[-1]).__name__})"
        return f"the output of {last}, the last of stage {self.index},"

    # The actions

    def forward(self, m: int, received: Message | None, graph: bool) -> Message | Tensor | None:
        """F: runs the layers, with a graph or, under re-materialization, without; returns what the next stage
        needs. The last stage gives the mean loss of the mini-batch, once that is known.

        `received` comes from the stage before; None on the first stage, which takes its own micro-batch.
        """
        if received is None:
            tensors, structure = flatten(self._feed[m], "the mini-batch")
            # .data: parts of one batch count changes together, though overwriting one changes no other.
            tensors = tuple([tensor.data for tensor in tensors])
            again = self._training and not graph and len(tensors) > 1  # those that are overwritten are copied
            aliases = overlapping(tensors) if again else ()
            received = Message(tensors, structure, (False,) * len(tensors), aliases)
            del tensors, structure
        state = self._microbatches[m] = MicrobatchState(received)
        del received
        if not self._training:
            return self._forward_only(state, m)
        kind = state.kind
        known = self._needs_grad.get(kind)
        copied: Sequence[int] = ()
        watched: list[tuple[Tensor, int]] | None = [] if state.aliases or self.first is not None else None
        if not graph:
            if (found := self._overwritten.get(kind)) is not None:
                copied = found
            else:  # the first of its kind: any of them may be overwritten, and then it is too late for a copy
                copied, watched = range(len(state.inputs)), []
            state.versions = tuple(map(_VERSION, state.inputs))
            if not self._buffers.known_empty:
                state.buffers = self._buffers.save()
        self._runner.entering = state.needs_grad
        first = self.first
        if first is not None:
            first.before_forward()
        has_grad = torch.is_grad_enabled()
        # Whether the outputs need a gradient only a graph tells, so the first forward of a kind builds one.
        enable_grad(graph or (known is None and not self.is_last))
        try:
            output = self._runner.run(
                m, state.enter(copied, again=not graph, watched=watched), recording=True
            )
            if watched is not None:
                overwritten = self._find_overwritten(state, watched)
                if not graph:
                    self._overwritten.setdefault(kind, overwritten)
            if self.is_last:
                loss = self._runner.loss(m, output)
                self._losses.append(loss.detach() * self._shares[m])
                if first is not None:
                    first.after_forward(m, (loss,), graph=graph)
                if graph:
                    state.keep_graph((loss,))
        finally:
            enable_grad(has_grad)
        if state.buffers is not None:
            self._buffers.look(state.buffers)
        if self.is_last:
            if len(self._losses) < len(self._shares):
                return None
            return torch.stack(self._losses).sum() if len(self._losses) > 1 else self._losses[0].reshape(())
        tensors, structure = flatten(output, self.output_name)
        del output
        if first is not None:
            first.after_forward(m, tensors, graph=graph)
            first.refuse_attributes(tensors, self.output_name)
        if not self._buffers.known_empty:
            tensors = self._buffers.apart(tensors)
        needs_grad = known
        if needs_grad is None:
            needs_grad = self._needs_grad[kind] = tuple([tensor.requires_grad for tensor in tensors])
        if len(needs_grad) != len(tensors):
            raise RuntimeError(
                f"{len(tensors)} tensors leave stage {self.index} for this micro-batch and {len(needs_grad)} "
                "did before, for inputs of the same kind; let its last layer give the same ones for all, as "
                "in a dict with all keys. Where the model has changed, call Pipeline.refresh() on every rank"
            )
        if graph:
            state.keep_graph(tensors, needs_grad, self.index)
        aliases = overlapping(tensors) if len(tensors) > 1 else ()
        tensors = tuple([t.detach() if t.requires_grad else t for t in tensors])
        return Message(tensors, structure, needs_grad, aliases)

    def _forward_only(self, state: MicrobatchState, m: int) -> Message | None:
        self._runner.entering = None
        watched = [(tensor, version(tensor)) for tensor in state.inputs] if state.aliases else []
        with torch.no_grad():
            output = self._runner.run(m, unflatten(state.inputs, state.structure), recording=True)
        self._find_overwritten(state, watched)
        del self._microbatches[m], state
        tensors, structure = flatten(output, self.output_name)
        tensors = self._buffers.apart(tensors)
        if self.is_last:
            self.outputs[m] = unflatten(tensors, structure)
            return None
        return Message(tensors, structure, (False,) * len(tensors), overlapping(tensors))

    def recompute(self, m: int) -> None:
        """R: the forward again on the kept inputs, same draws, now with a graph; its outputs are not kept."""
        state = self._microbatches[m]
        if state.versions != tuple(map(_VERSION, state.inputs)):
            raise RuntimeError(
                f"a layer of stage {self.index} has begun to change the stage's input in place, so it cannot "
                "be recomputed; call Pipeline.refresh() on every rank before the first step in which it "
                "does, or use the out-of-place form of the operation (inplace=False) in the first layer"
            )
        if self.first is not None:
            self.first.before_recomputation()
        saved, state.buffers = state.buffers, None
        buffers = _AS_THEY_ARE if saved is None else self._buffers.as_saved(saved)
        del saved
        has_grad = torch.is_grad_enabled()
        enable_grad(True)
        try:
            with buffers:
                output = self._runner.run(m, state.enter(self._overwritten[state.kind]), recording=False)
                if self.is_last:
                    tensors: tuple[Tensor, ...] = (self._runner.loss(m, output),)
                    state.keep_graph(tensors)
        finally:
            enable_grad(has_grad)
        if not self.is_last:
            tensors, _ = flatten(output, self.output_name)
            state.keep_graph(tensors, self._needs_grad[state.kind], self.index)
        if self.first is not None:
            self.first.after_recomputation(m, tensors)

    def backward(self, m: int, gradients: Gradients, kind: Kind = Kind.B) -> Gradients:
        """B: gradients of the outputs in, parameter gradients accumulated, gradients of the inputs out. Of I,
        by `kind`, what the weights need stays for W; where a graph cannot be split, I is all of B.

        The last stage takes none in; it starts from its loss. Inputs, graph and gradients are dropped at
        once.
        """
        if self._is_new:
            self._look_through(m)
        if self.reduction is not None:
            self.reduction.before(kind, m, last=self._last == (kind, m))
        if self._without_grad is None:  # only now, as sharding replaces gradients when a step begins
            self._without_grad = [p for p in self.parameters if p.requires_grad and p.grad is None]
        state = self._microbatches.pop(m)
        roots, seeds = self._roots(state, m, gradients)
        exits = state.exits or [None] * len(state.needs_grad)
        inputs = state.inputs  # alive until the backward is over, as the memory model has it
        del state, gradients
        split = Split(roots, ENTRY) if kind is Kind.I else None
        if split is not None and not split.whole:
            if roots:
                self._weights[m] = self._runner.in_backward(split.inputs, roots, seeds, exits)
        elif roots:
            self._runner.in_backward(run_engine, roots, seeds)
            if self._without_grad:
                self._without_grad = separate(self._without_grad, (*seeds, *exits))
        del inputs, split, roots, seeds
        if self.reduction is not None:
            self.reduction.after(kind, m, last=self._last == (kind, m))
        return tuple(exits)

    def backward_weights(self, m: int) -> None:
        """W: the gradients of the parameters, from what I left; then nothing of the micro-batch is left."""
        if self.reduction is not None:
            self.reduction.before(Kind.W, m, last=self._last == (Kind.W, m))
        weights = self._weights.pop(m, None)
        if weights is not None:
            self._runner.in_backward(weights.accumulate)
            self._without_grad = [p for p in self._without_grad or () if p.grad is None]
        if self.reduction is not None:
            self.reduction.after(Kind.W, m, last=self._last == (Kind.W, m))

    # Parts

    def _forget(self) -> None:
        self._needs_grad.clear()
        self._overwritten.clear()
        self._buffers.forget()

    def _look_through(self, m: int) -> None:
        """`ValueError` before a backward for parameters that get a gradient in it and are of no layer and of
        no loss that is a module: another process trains them, or nobody would sum it over replicas.
        """
        known = {*self.receiving, *self.trainable}
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
            if not isinstance(parameter, nn.Parameter) or parameter in known:
                continue
            if self._refuse_elsewhere is not None:
                self._refuse_elsewhere(parameter)
            if self.reduction is not None:
                raise ValueError(
                    f"stage {self.index} trains a parameter of shape {tuple(parameter.shape)} that none of "
                    "its layers has, so its gradients would not be summed over replicas; register it in a "
                    "layer, or pass loss_fn as the nn.Module that has it"
                )

    def _find_overwritten(self, state: MicrobatchState, watched: list[tuple[Tensor, int]]) -> tuple[int, ...]:
        """The positions of the inputs that the layers have changed, of those `watched`, which it clears."""
        found = tuple([i for i, (tensor, before) in enumerate(watched) if version(tensor) != before])
        watched.clear()
        if found and self.is_first and self.first is not None:
            self.first.refuse_overwritten()
        if not set(state.aliases).isdisjoint(found):
            raise RuntimeError(
                f"a layer of stage {self.index} changes an input of the stage in place that shares memory "
                "with another one, in which the change would not show behind a cut as it does without; give "
                "the layer before clone() one of the two, use the out-of-place form of the operation "
                "(inplace=False), or keep both layers in one stage"
            )
        return found

    def _roots(
        self, state: MicrobatchState, m: int, gradients: Gradients
    ) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
        """The edges that have a gradient, and these gradients."""
        if self.is_last:
            if not state.edges:
                raise RuntimeError(
                    "the loss depends on no parameter that requires a gradient; there is nothing to train"
                )
            metadata = state.edges[0].node._input_metadata[state.edges[0].output_nr]
            seed = self._seed(tuple(metadata.shape), self._shares[m], dtype=metadata.dtype)
            if self._scaler is not None:
                seed = self._scaler.scale(seed).to(metadata.dtype)
            return state.edges, (seed,)
        edges, found = [], []
        for edge, place in zip(state.edges, state.places, strict=True):
            if (gradient := gradients[place]) is not None:
                edges.append(edge)
                found.append(gradient)
        return tuple(edges), tuple(found)
