"""A stage around its actions: what it is made of, and how a step begins and ends on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.stage.habits import Habits
from gpipe_bench.pipeline.stage.inputs import Arriving, deliver
from gpipe_bench.pipeline.stage.kept import Kept
from gpipe_bench.pipeline.stage.losses import Losses
from gpipe_bench.pipeline.stage.microbatch import Tree
from gpipe_bench.pipeline.stage.running.layers import LayerRunner, LossFn
from gpipe_bench.pipeline.stage.state.batchnorm import Gather, Statistics
from gpipe_bench.pipeline.stage.state.buffers import Buffers
from gpipe_bench.pipeline.stage.tied import Leaves
from gpipe_bench.pipeline.transfers import Transfers


class StageSteps:
    """Consecutive layers of the model on one device.

    `first_layer` is the index of `layers[0]` in the whole model; it keys the random streams, so that a layer
    draws the same wherever the cuts are. `gather` is passed to `batchnorm.Statistics`. `backend` is that of
    `torch.compile`, for layers that shall be compiled; `runner` is what calls them; `leaves` are of weights
    that other layers use, too. `first_microbatch` is the number of micro-batch 0 among those of all replicas,
    which keys the random streams, too.
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
        backend: str | None = None,
        runner: Callable[..., LayerRunner] = LayerRunner,
        leaves: Leaves | None = None,
        first_microbatch: int = 0,
    ) -> None:
        self.index, self.device, self.seed = index, device, seed
        self.is_first, self.is_last = index == 0, is_last
        self.layers = tuple(layers)
        self.first_layer = first_layer
        self.statistics = Statistics(self.layers, gather)
        self.outputs: list[Tree | None] = []  # of each micro-batch, on the last stage, when there is no loss
        self._buffers = Buffers(self.layers, first_layer, self.statistics.modules)
        self._runner = runner(
            self.layers, first_layer,
            device=device, seed=seed, statistics=self.statistics, backend=backend,
            leaves=leaves, first_microbatch=first_microbatch,
        )  # fmt: skip
        self._leaves = leaves
        self._habits = Habits(index, self.layers, device)
        # By the kind of the inputs; they stay the same two dictionaries.
        self._needs_grad, self._overwritten = self._habits.needs_grad, self._habits.overwritten
        self._without_grad: list[nn.Parameter] = []  # trainable, and no backward has given them one
        self._microbatches: list[Kept] = []
        self._transfers = Transfers()  # of the mini-batch and the targets
        self._feed: Sequence[Tree] | Arriving = ()
        self._losses = Losses()
        self._training = False
        self._without_graph: Callable[[], AbstractContextManager[None]] = torch.no_grad

    def begin(
        self,
        step: int,
        num_microbatches: int,
        *,
        training: bool,
        inference: bool = False,
        feed: Sequence[Tree] = (),
        targets: Sequence[Tree | None] = (),
        loss_fn: LossFn | None = None,
        shares: Sequence[float] = (),
        shared: Mapping[str, Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Prepares training step or forward pass number `step`.

        `feed` holds the micro-batches of the first stage; `targets`, `loss_fn`, `shares` (each
        micro-batch's share of the examples) and the `scaler` of gradients belong to the last. Without
        `loss_fn` the last stage keeps its outputs. `shared` are keyword arguments of the layers.
        """
        while len(self._microbatches) < num_microbatches:
            self._microbatches.append(Kept(self.index))
        self._training = training
        self._without_graph = torch.inference_mode if inference else torch.no_grad
        self.statistics.begin()
        self._buffers.begin(loss_fn)
        self._feed = deliver(feed, self.device, self._transfers, "the mini-batch", once=True)
        self._losses.begin(shares, scaler)
        self.outputs = [None] * (num_microbatches if self.is_last else 0)
        self.look(loss_fn)
        arriving = deliver(targets, self.device, self._transfers, "the target")
        self._runner.begin(step, arriving, loss_fn, shared)
        self.look_for_first_gradients()

    def look(self, loss_fn: LossFn | None) -> None:
        """Finds the parameters that there are now. Who exchanges gradients calls it before a step begins."""
        self._habits.look(loss_fn if self.is_last else None)

    def look_for_first_gradients(self) -> None:
        """Notes which of the layers' parameters have no gradient yet. Who exchanges the parameters in a step
        calls it again before the first backward.
        """
        self._without_grad = self._habits.without_grad()
        self._without_grad += [leaf for leaf in self._own_leaves() if leaf.grad is None]

    def refresh(self) -> None:
        """Forgets which outputs need a gradient, which inputs are overwritten and which buffers change; the
        next step finds out.
        """
        self._habits.forget()
        self._buffers.forget()

    @property
    def drew(self) -> int | None:
        """A layer of the model that drew in training mode when there was no loss."""
        return self._runner.drew

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those of the layers and, on the last stage, of a loss that is a module, each once, as last seen."""
        return self._habits.parameters

    @property
    def trainable(self) -> tuple[nn.Parameter, ...]:
        """Those that require a gradient."""
        return tuple([p for p in self._habits.parameters if p.requires_grad])

    @property
    def receiving(self) -> tuple[nn.Parameter, ...]:
        """What the gradients of `trainable` come in on in this step: for a weight that other layers use, too,
        the leaf of each layer.
        """
        leaves = self._own_leaves()
        if not leaves:
            return self.trainable
        assert self._leaves is not None
        return (*[p for p in self.trainable if not self._leaves.stands_for(p)], *leaves)

    def _own_leaves(self) -> list[nn.Parameter]:
        if self._leaves is None:
            return []
        return self._leaves.of_layers(range(self.first_layer, self.first_layer + len(self.layers)))

    @property
    def overwrites_input(self) -> bool:
        """Whether the layers overwrite the stage's input, as found in the steps so far that recompute.

        The forward and the recomputation of such a stage each work on a copy, so that one more input is alive
        while F runs, and from R to B where what was received stays alive too.
        """
        return any(self._overwritten.values())

    def finish(self) -> None:
        """Ends a step: the moving averages of batch normalization move once."""
        self.statistics.commit()
        self._buffers.end()
        self._release()

    def reset(self) -> None:
        """Drops everything the current step holds, after an error."""
        self.statistics.forget()
        self._buffers.forget()
        self._release()
        self._losses.forget()
        self.outputs = []

    def _release(self) -> None:
        for microbatch in self._microbatches:
            microbatch.drop()
        self._feed = ()
        self._losses.release()
        self._runner.release()

    def loss(self) -> Tensor | None:
        """The mean loss of the mini-batch, once the last stage has taken all micro-batches forward."""
        return self._losses.mean()
