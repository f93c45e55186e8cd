"""One stage: what it does with a micro-batch, and exactly what it keeps in between.

`torch.utils.checkpoint` ties the recomputation to the arrival of the gradient, because it runs inside the
backward. Here the graph is a value that the stage holds: `recompute` builds it whenever the schedule says so,
`backward` consumes it. Between actions a stage holds, per micro-batch, either its boundary inputs
(re-materialization) or its graph (`kept`); how the layers are called is the same in all actions (`layers`).
What a stage is made of, and what happens before and after the actions of a step, is in `steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gpipe_bench.pipeline.stage.aliases import overlapping, separate, version
from gpipe_bench.pipeline.stage.habits import other_outputs, overwrites_alias, overwrites_now
from gpipe_bench.pipeline.stage.halves.waiting import run_engine
from gpipe_bench.pipeline.stage.kept import Kept
from gpipe_bench.pipeline.stage.microbatch import Message, flatten, unflatten
from gpipe_bench.pipeline.stage.steps import StageSteps

Gradients = tuple[Tensor | None, ...]  # one per tensor of a message
_AS_THEY_ARE = nullcontext()


class Stage(StageSteps):
    """Consecutive layers of the model on one device, and the actions of a schedule on them."""

    def forward(self, m: int, received: Message | None, graph: bool) -> Message | None:
        """F: runs the layers, with a graph or, under re-materialization, without; returns what the next stage
        needs.

        `received` comes from the stage before; None on the first stage, which takes its own micro-batch.
        """
        state = self._microbatches[m]
        if received is None:
            state.take_own(self._feed[m], again=self._training and not graph)
        else:
            state.take(received)
        del received
        if not self._training:
            return self._forward_only(state, m)
        kind = state.kind
        known = self._needs_grad.get(kind)
        copied: Sequence[int] = ()
        watched: list[tuple[Tensor, int]] | None = [] if state.aliases else None
        if not graph:
            if (found := self._overwritten.get(kind)) is not None:
                copied = found
            else:  # the first of its kind: any of them may be overwritten, and then it is too late for a copy
                copied, watched = range(len(state.inputs)), []
            state.versions = tuple([tensor._version for tensor in state.inputs])
            state.buffers = self._buffers.save()
        self._runner.entering = state.needs_grad
        # Whether the outputs need a gradient only a graph tells, so the first forward of a kind builds one.
        with torch.set_grad_enabled(graph or (known is None and not self.is_last)):
            output = self._runner.run(
                m,
                unflatten(state.enter(copied, again=not graph, watched=watched), state.structure),
                recording=True,
            )
            if watched is not None:
                overwritten = self._find_overwritten(state, watched)
                if not graph:
                    self._overwritten.setdefault(kind, overwritten)
            if self.is_last:
                loss = self._runner.loss(m, output)
                self._losses.add(m, loss)
                if graph:
                    state.keep_graph((loss,))
                if state.buffers is not None:
                    self._buffers.look(state.buffers)
                return None
        if state.buffers is not None:
            self._buffers.look(state.buffers)
        tensors, structure = flatten(output, self._runner.describe_output(self.index))
        tensors = self._buffers.apart(tensors)
        needs_grad = known if known is not None else tuple([tensor.requires_grad for tensor in tensors])
        if len(needs_grad) != len(tensors):
            raise other_outputs(self.index, len(tensors), len(needs_grad))
        self._needs_grad[kind] = needs_grad
        if graph:
            state.keep_graph(tensors, needs_grad)
        aliases = overlapping(tensors)
        tensors = tuple([t.detach() if t.requires_grad else t for t in tensors])
        return Message(tensors, structure, needs_grad, aliases)

    def _forward_only(self, state: Kept, m: int) -> Message | None:
        self._runner.entering = None
        watched = [(tensor, version(tensor)) for tensor in state.inputs] if state.aliases else []
        with self._without_graph():
            output = self._runner.run(m, unflatten(state.inputs, state.structure), recording=True)
        self._find_overwritten(state, watched)
        state.drop()
        tensors, structure = flatten(output, self._runner.describe_output(self.index))
        tensors = self._buffers.apart(tensors)
        if self.is_last:
            self.outputs[m] = unflatten(tensors, structure)
            return None
        return Message(tensors, structure, (False,) * len(tensors), overlapping(tensors))

    def recompute(self, m: int) -> None:
        """R: the forward again on the kept inputs, same draws, now with a graph; its outputs are not kept."""
        state = self._microbatches[m]
        if state.versions != tuple([tensor._version for tensor in state.inputs]):
            raise overwrites_now(self.index)
        buffers: AbstractContextManager[None] = (
            _AS_THEY_ARE if state.buffers is None else self._buffers.as_saved(state.buffers)
        )
        state.buffers = None
        with buffers, torch.enable_grad():
            copied = self._overwritten[state.kind]
            output = self._runner.run(m, unflatten(state.enter(copied), state.structure), recording=False)
            if self.is_last:
                state.keep_graph((self._runner.loss(m, output),))
                return
        tensors, _ = flatten(output, self._runner.describe_output(self.index))
        state.keep_graph(tensors, self._needs_grad[state.kind])

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
            self._runner.in_backward(run_engine, roots, seeds)
            if self._without_grad:
                self._without_grad = separate(self._without_grad, (*seeds, *exits))
        del inputs
        return tuple(exits)

    def backward_inputs(self, m: int, gradients: Gradients) -> Gradients:
        """I: gradients of the outputs in, gradients of the inputs out; what the weights need stays for W.

        Inputs and graph are dropped at once. Where a graph cannot be split, this is all of B.
        """
        state = self._microbatches[m]
        roots, seeds = self._roots(state, m, gradients)
        split = state.split(roots)
        if split.whole:
            return Stage.backward(self, m, gradients)
        del gradients
        exits = state.exits or [None] * len(state.needs_grad)
        inputs = state.inputs
        state.drop()
        if roots:
            state.weights = self._runner.in_backward(split.inputs, roots, seeds, exits)
        del inputs
        return tuple(exits)

    def backward_weights(self, m: int) -> None:
        """W: the gradients of the parameters, from what I left; then nothing of the micro-batch is left."""
        state = self._microbatches[m]
        weights = state.weights
        state.drop()
        if weights is not None:
            self._runner.in_backward(weights.accumulate)
            self._without_grad = [p for p in self._without_grad if p.grad is None]

    # Parts of the actions

    def _find_overwritten(self, state: Kept, watched: list[tuple[Tensor, int]]) -> tuple[int, ...]:
        """The positions of the inputs that the layers have changed, of those `watched`, which it clears."""
        found = tuple([i for i, (tensor, before) in enumerate(watched) if version(tensor) != before])
        watched.clear()
        if not set(state.aliases).isdisjoint(found):
            raise overwrites_alias(self.index)
        return found

    def _roots(
        self, state: Kept, m: int, gradients: Gradients
    ) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
        """The edges that have a gradient, and these gradients."""
        if self.is_last:
            if not state.edges:
                raise RuntimeError(
                    "the loss depends on no parameter that requires a gradient; there is nothing to train"
                )
            return state.edges, (self._losses.gradient(m, state.edges[0]),)
        return state.roots(gradients)
