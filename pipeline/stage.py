"""One stage: what it does with a micro-batch, and exactly what it keeps in between.

`torch.utils.checkpoint` ties the recomputation to the arrival of the gradient, because it runs inside the
backward. Here the graph is a value that the stage holds: `recompute` builds it whenever the schedule says so,
`backward` consumes it. Between actions a stage holds, per micro-batch, either its boundary inputs
(re-materialization) or its graph, and the graph is held by its outgoing edges rather than by the output
tensors, so that an output lives on only if a layer saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeline.batchnorm import Statistics
from pipeline.microbatch import Message, Structure, Tree, flatten, tensors_of, unflatten
from pipeline.rng import Generators, layer_key, may_draw, mix

LossFn = Callable[..., Tensor]  # (output, target) -> mean loss over the examples of a micro-batch
Gradients = tuple[Tensor | None, ...]  # one per tensor of a message


class _Entry(torch.autograd.Function):
    """Where a boundary input enters the graph and its gradient leaves it.

    A leaf's gradient is copied unless it is laid out like the leaf, which the piece of a concatenation's
    gradient is not; here the gradient goes out as it is.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exits: list[Tensor | None], position: int) -> Tensor:
        ctx.exits, ctx.position = exits, position
        return (
            tensor.detach()
        )  # unlike a view of the same shape it keeps the strides of dimensions of length 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.exits[ctx.position] = gradient
        return None, None, None


class _MicroBatch:
    """What a stage holds of one micro-batch between two of its actions."""

    __slots__ = ("edges", "exits", "gradients", "inputs", "needs_grad", "places", "structure", "versions")

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        self.inputs: tuple[Tensor, ...] = ()  # the boundary inputs; leaves where they need a gradient
        self.structure: Structure = None
        self.needs_grad: tuple[bool, ...] = ()
        self.versions: tuple[int, ...] = ()  # of the inputs, to notice a layer that overwrites what R needs
        self.edges: tuple[GradientEdge, ...] = ()  # where the gradients of the outputs enter the graph
        self.exits: list[Tensor | None] = []  # gradients of the inputs, once the backward has run
        self.places: tuple[int, ...] = ()  # which tensors of the outgoing message the edges belong to
        self.gradients: tuple[Tensor, ...] = ()  # of the edges, kept from I to W


class Stage:
    """Consecutive layers of the model on one device.

    `first_layer` is the index of `layers[0]` in the whole model; it keys the random streams, so that a layer
    draws the same wherever the cuts are. `replica_group` is passed to `batchnorm.Statistics`.
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
        replica_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.index, self.device, self.seed = index, device, seed
        self.is_first, self.is_last = index == 0, is_last
        self.layers = tuple(layers)
        self.first_layer = first_layer
        self.statistics = Statistics(self.layers, replica_group)
        self.losses: list[Tensor] = []  # weighted loss of each micro-batch, on the last stage
        self.outputs: list[Tree | None] = []  # of each micro-batch, on the last stage, when there is no loss
        self._generators = Generators(device)
        self._draws = tuple(may_draw(layer) for layer in self.layers)
        self._calls: tuple[
            tuple[nn.Module, int | None], ...
        ] = ()  # layer and its stream's key, None: draws nothing
        self._loss_key = 0
        self._parameters = tuple(dict.fromkeys(p for layer in self.layers for p in layer.parameters()))
        self._trainable: tuple[bool, ...] = ()
        self._needs_grad: dict[tuple[bool, ...], tuple[bool, ...]] = {}  # of outputs, by that of the inputs
        self._microbatches: list[_MicroBatch] = []
        self._feed: Sequence[Tree] = ()
        self._targets: Sequence[Tree | None] = ()
        self._loss_fn: LossFn | None = None
        self._shares: tuple[float, ...] = ()
        self._seeds: dict[tuple[float, torch.dtype], Tensor] = {}
        self._autocast = False
        self._training = False

    # One step

    def begin(
        self,
        step: int,
        num_microbatches: int,
        *,
        training: bool,
        feed: Sequence[Tree] = (),
        targets: Sequence[Tree | None] = (),
        loss_fn: LossFn | None = None,
        shares: tuple[float, ...] = (),
    ) -> None:
        """Prepares training step or forward pass number `step`.

        `feed` holds the micro-batches of the first stage; `targets`, `loss_fn` and `shares` (each
        micro-batch's share of the examples) belong to the last. Without `loss_fn` the last stage keeps its
        outputs.
        """
        while len(self._microbatches) < num_microbatches:
            self._microbatches.append(_MicroBatch())
        self._training = training
        self.statistics.begin()
        self._feed, self._targets, self._loss_fn, self._shares = feed, targets, loss_fn, shares
        self.losses, self.outputs = [], [None] * (num_microbatches if self.is_last else 0)
        self._calls = tuple(
            (layer, layer_key(self.seed, step, self.first_layer + i) if draws else None)
            for i, (layer, draws) in enumerate(zip(self.layers, self._draws, strict=True))
        )
        self._loss_key = layer_key(self.seed, step, self.first_layer + len(self.layers))
        self._check_parameters()
        trainable = tuple([parameter.requires_grad for parameter in self._parameters])
        if trainable != self._trainable:
            self._trainable = trainable
            self._needs_grad.clear()
        self._autocast = torch.is_autocast_enabled(self.device.type) or torch.is_autocast_enabled("cpu")

    def _check_parameters(self) -> None:
        """Notices a model that was moved or whose parameters were replaced."""
        first = next((p for layer in self.layers for p in layer.parameters()), None)
        if first is None:
            return
        if first.device != self.device:
            raise ValueError(
                f"the parameters of stage {self.index} have moved from {self.device} to {first.device}; "
                "move the model "
                f"before the pipeline is built, or pass devices="
            )
        if first is not self._parameters[0]:
            self._parameters = tuple(dict.fromkeys(p for layer in self.layers for p in layer.parameters()))

    def refresh(self) -> None:
        """Forgets which outputs need a gradient; the next step finds out."""
        self._needs_grad.clear()

    def finish(self) -> None:
        """Ends a step: the moving averages of batch normalization move once."""
        self.statistics.commit()
        self._release()

    def reset(self) -> None:
        """Drops everything the current step holds, after an error."""
        self.statistics.forget()
        self._release()
        self.losses, self.outputs = [], []

    def _release(self) -> None:
        for microbatch in self._microbatches:
            microbatch.drop()
        self._feed, self._targets, self._loss_fn = (), (), None

    # Actions

    def forward(self, m: int, received: Message | None, graph: bool) -> Message | None:
        """F: runs the layers, with a graph or, under re-materialization, without; returns what the next stage
        needs.

        `received` comes from the stage before; None on the first stage, which takes its own micro-batch.
        """
        state = self._microbatches[m]
        self._take_inputs(state, m, received)
        del received
        if not self._training:
            return self._forward_only(state, m)
        known = self._needs_grad.get(state.needs_grad)
        if not graph:
            state.versions = tuple([tensor._version for tensor in state.inputs])
        # Whether the outputs need a gradient only a graph tells, so the first forward of a kind builds one.
        with torch.set_grad_enabled(graph or (known is None and not self.is_last)):
            output = self._run_layers(m, unflatten(self._enter(state), state.structure), recording=True)
            if self.is_last:
                loss = self._loss(m, output)
                self.losses.append(loss.detach() * self._shares[m])
                if graph:
                    self._keep_graph(state, (loss,))
                return None
        tensors, structure = flatten(output, self._describe_output())
        needs_grad = known if known is not None else tuple([tensor.requires_grad for tensor in tensors])
        self._needs_grad[state.needs_grad] = needs_grad
        if graph:
            self._keep_graph(state, tensors, needs_grad)
        return Message(tuple([t.detach() if t.requires_grad else t for t in tensors]), structure, needs_grad)

    def _forward_only(self, state: _MicroBatch, m: int) -> Message | None:
        with torch.no_grad():
            output = self._run_layers(m, unflatten(state.inputs, state.structure), recording=True)
        state.drop()
        if self.is_last:
            self.outputs[m] = output
            return None
        tensors, structure = flatten(output, self._describe_output())
        return Message(tensors, structure, (False,) * len(tensors))

    def recompute(self, m: int) -> None:
        """R: the forward again on the kept inputs, same draws, now with a graph; its outputs are not kept."""
        state = self._microbatches[m]
        if state.versions != tuple([tensor._version for tensor in state.inputs]):
            raise RuntimeError(
                f"a layer of stage {self.index} changed the stage's input in place, so it cannot be "
                "recomputed; use the "
                "out-of-place form of the operation (inplace=False) in the stage's first layer, or "
                "remat='never'"
            )
        with torch.enable_grad():
            output = self._run_layers(m, unflatten(self._enter(state), state.structure), recording=False)
            if self.is_last:
                self._keep_graph(state, (self._loss(m, output),))
                return
        tensors, _ = flatten(output, self._describe_output())
        self._keep_graph(state, tensors, self._needs_grad[state.needs_grad])

    def backward(self, m: int, gradients: Gradients) -> Gradients:
        """B: gradients of the outputs in, parameter gradients accumulated, gradients of the inputs out.

        The last stage takes none in; it starts from its loss. Inputs, graph and gradients are dropped at
        once.
        """
        state = self._microbatches[m]
        roots, seeds = self._roots(state, m, gradients)
        del gradients
        exits = state.exits or [None] * len(state.needs_grad)
        inputs = state.inputs  # alive until the backward is over, as the memory model has it
        state.drop()
        if roots:
            self._run_backward(roots, seeds, keep_graph=False)
        del inputs
        return tuple(exits)

    def backward_inputs(self, m: int, gradients: Gradients) -> Gradients:
        """I: the gradients of the inputs alone; the graph and the gradients of the outputs stay for W.

        The two halves walk the graph one after the other, so W passes through the activations' gradients a
        second time.
        """
        state = self._microbatches[m]
        state.edges, state.gradients = self._roots(state, m, gradients)
        leaves = tuple([t for t in state.inputs if t.requires_grad])
        if leaves and state.edges:
            self._run_backward(state.edges, state.gradients, keep_graph=True, inputs=leaves)
        return tuple(state.exits or [None] * len(state.needs_grad))

    def backward_weights(self, m: int) -> None:
        """W: the gradients of the parameters, from what I left; then everything of the micro-batch is
        dropped.
        """
        state = self._microbatches[m]
        weights = tuple([p for p in self._parameters if p.requires_grad])
        edges, gradients = state.edges, state.gradients
        state.drop()
        if weights and edges:
            self._run_backward(edges, gradients, keep_graph=False, inputs=weights)

    # Parts of the actions

    def _take_inputs(self, state: _MicroBatch, m: int, received: Message | None) -> None:
        if received is None:
            tensors, state.structure = flatten(self._feed[m], "the mini-batch")
            # .data: parts of one batch share a version counter, but overwriting one does not change the
            # others.
            state.inputs = tuple([t.data.to(self.device, non_blocking=True) for t in tensors])
            state.needs_grad = (False,) * len(tensors)
        else:
            state.inputs, state.structure, state.needs_grad = received

    def _enter(self, state: _MicroBatch) -> tuple[Tensor, ...]:
        """The inputs as the beginning of a new graph; without a graph, as they are."""
        if not (torch.is_grad_enabled() and any(state.needs_grad)):
            return state.inputs
        exits: list[Tensor | None] = [None] * len(state.needs_grad)
        leaves: list[Tensor] = []
        entered: list[Tensor] = []
        for position, (tensor, needed) in enumerate(zip(state.inputs, state.needs_grad, strict=True)):
            leaf = tensor.detach().requires_grad_() if needed else tensor
            leaves.append(leaf)
            entered.append(_Entry.apply(leaf, exits, position) if needed else leaf)
        state.exits, state.inputs = exits, tuple(leaves)
        return tuple(entered)

    def _run_layers(self, m: int, value: Tree, *, recording: bool) -> Tree:
        """The layers in order, each with its own random stream; the user's generators are given back
        untouched.
        """
        generators = self._generators
        states: list[Tensor] | None = None
        forget_casts = self._autocast and not torch.is_grad_enabled()
        if forget_casts:  # autocast caches weights cast without a graph, and a graph must not meet them
            torch.clear_autocast_cache()
        if self.statistics:
            self.statistics.redirect(recording=recording)
        try:
            for layer, key in self._calls:
                if key is not None:
                    if states is None:
                        states = generators.save()
                    generators.seed(mix(key ^ m))
                value = layer(value)
        finally:
            if states is not None:
                generators.restore(states)
            if self.statistics:
                self.statistics.release()
            if forget_casts:
                torch.clear_autocast_cache()
        return value

    def _loss(self, m: int, output: Tree) -> Tensor:
        """The mean loss of the micro-batch: one more layer, with a random stream of its own."""
        assert self._loss_fn is not None
        target = self._targets[m]
        if target is not None and any(t.device != self.device for t in tensors_of(target, "the target")):
            moved = tuple(t.to(self.device, non_blocking=True) for t in tensors_of(target))
            target = moved[0] if isinstance(target, Tensor) else moved
        states = self._generators.save()
        try:
            self._generators.seed(mix(self._loss_key ^ m))
            loss = self._loss_fn(output, target)
        finally:
            self._generators.restore(states)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise ValueError(
                f"loss_fn returned {got}; it must return the mean over the examples, a single number"
            )
        return loss

    def _keep_graph(
        self, state: _MicroBatch, outputs: Sequence[Tensor], announced: tuple[bool, ...] | None = None
    ) -> None:
        """Keeps where the gradients enter the graph, and of the inputs only the leaves that take gradients
        out.
        """
        if announced is not None and any(
            t.requires_grad and not a for t, a in zip(outputs, announced, strict=True)
        ):
            raise RuntimeError(
                f"an output of stage {self.index} needs a gradient now, but did not when the stages agreed "
                "on what travels; "
                f"call Pipeline.refresh() after changing which parameters are trained"
            )
        state.places = tuple([i for i, tensor in enumerate(outputs) if tensor.requires_grad])
        state.edges = tuple([get_gradient_edge(outputs[i]) for i in state.places])
        if not all(state.needs_grad):
            state.inputs = tuple([t for t in state.inputs if t.requires_grad])

    def _roots(
        self, state: _MicroBatch, m: int, gradients: Gradients
    ) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
        """The edges that have a gradient, and these gradients."""
        if self.is_last:
            if not state.edges:
                raise RuntimeError(
                    "the loss depends on no parameter that requires a gradient; there is nothing to train"
                )
            return state.edges, (self._loss_gradient(m, state.edges[0]),)
        pairs = [
            (edge, gradient)
            for edge, place in zip(state.edges, state.places, strict=True)
            if (gradient := gradients[place]) is not None
        ]
        return tuple([edge for edge, _ in pairs]), tuple([gradient for _, gradient in pairs])

    def _loss_gradient(self, m: int, edge: GradientEdge) -> Tensor:
        """The micro-batch's share of the examples: the weight of its loss enters here and nowhere else, so
        that no pass over the gradients follows.
        """
        metadata = edge.node._input_metadata[edge.output_nr]
        key = (self._shares[m], metadata.dtype)
        gradient = self._seeds.get(key)
        if gradient is None or gradient.shape != tuple(metadata.shape):
            gradient = torch.full(tuple(metadata.shape), key[0], dtype=metadata.dtype, device=metadata.device)
            self._seeds[key] = gradient
        return gradient

    def _run_backward(
        self,
        edges: tuple[GradientEdge, ...],
        gradients: tuple[Tensor, ...],
        *,
        keep_graph: bool,
        inputs: tuple[Tensor, ...] = (),
    ) -> None:
        # What torch.autograd.backward calls in the end; its own checks of gradient edges cost 30 us a time.
        run = Variable._execution_engine.run_backward
        arguments = (edges, gradients, keep_graph, False, inputs)
        if self.statistics:  # a layer may checkpoint parts of itself, which then run once more in here
            self.statistics.redirect(recording=False)
        try:
            if not self._autocast:
                run(*arguments, allow_unreachable=True, accumulate_grad=True)
                return
            # As after a plain forward: the context that chose the precisions is over when the backward
            # begins.
            with torch.autocast(self.device.type, enabled=False), torch.autocast("cpu", enabled=False):
                run(*arguments, allow_unreachable=True, accumulate_grad=True)
        finally:
            if self.statistics:
                self.statistics.release()

    def _describe_output(self) -> str:
        last = self.first_layer + len(self.layers) - 1
        return (
            f"the output of layer {last} ({type(self.layers[-1]).__name__}), the last of stage {self.index},"
        )
