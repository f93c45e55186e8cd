"""The engines that the experiments know: ours, torchgpipe's and torch.distributed.pipelining's.

All train the same modules. What an engine can't do is a ValueError when it is built or, if it depends on the
batch, when it steps. The private parts of torch in use are the same from torch 2.11 to 2.13.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.named import loop, vee
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.stage.trees import num_examples, tensors_of

from .setup import LossFn, Setup


class Ours:
    """This project's engine with the GPipe schedule; every kind of `remat`, in processes or in one."""

    schedule, share_memory = "gpipe", True

    def __init__(self, setup: Setup) -> None:
        self.pipeline = Pipeline(
            setup.layers, partition=setup.partition, num_microbatches=setup.num_microbatches,
            schedule=self.schedule, remat=setup.remat, group=setup.group, share_memory=self.share_memory,
        )  # fmt: skip

    def step(self, batch: Any, target: Any, loss_fn: LossFn) -> Tensor:
        return self.pipeline.step(batch, target, loss_fn)

    def evaluate(self, batch: Any, target: Any, loss_fn: LossFn) -> Tensor | None:
        self.pipeline.eval()
        output = self.pipeline(batch)
        self.pipeline.train()
        return None if output is None else loss_fn(output, target)

    def clip(self, max_norm: float) -> Tensor:
        return self.pipeline.clip_grad_norm_(max_norm)

    @property
    def timeline(self) -> Timeline:
        return self.pipeline.timeline


class Ours1F1B(Ours):
    """This project's engine with the 1F1B schedule, which keeps fewer micro-batches alive."""

    schedule = "1f1b"


class OursZBH1(Ours):
    """This project's engine with ZB-H1: zero bubble within the memory of 1F1B."""

    schedule = "zb-h1"


class OursInterleaved(Ours):
    """This project's engine with two stages in each process, in a loop."""

    schedule, placement = "interleaved", loop(2, 2)


class OursZBV(Ours):
    """This project's engine with ZB-V: zero bubble in a V."""

    schedule, placement = "zb-v", vee(2)


class OverNetwork(Ours):
    """This project's engine without shared memory between processes."""

    share_memory = False


class Torchgpipe:
    """torchgpipe: all stages in one process, a worker thread each. It recomputes as the setup says.

    It computes the loss of the whole mini-batch at once. Needs the optional extra `peers`.
    """

    def __init__(self, setup: Setup) -> None:
        reason = why_no_torchgpipe()
        if reason:
            raise ValueError(reason)
        from torchgpipe import GPipe

        if setup.group is not None:
            raise ValueError(
                "torchgpipe runs all stages in one process and cannot use a process group; "
                "compare it in one process"
            )
        self.model = GPipe(
            nn.Sequential(*setup.layers),
            balance=[len(span) for span in setup.partition],
            devices=[setup.device] * setup.num_stages,
            chunks=setup.num_microbatches,
            checkpoint=setup.remat,
        )
        self.count = setup.num_microbatches

    def step(self, batch: Any, target: Any, loss_fn: LossFn) -> Tensor:
        size = num_examples(batch)
        if size % self.count:
            raise ValueError(
                f"torchgpipe splits {size} examples with torch.chunk, which need not give M={self.count} "
                "micro-batches; choose a batch size that is a multiple of M"
            )
        loss = loss_fn(self.model(batch), target)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def why_no_torchgpipe() -> str:
    """Why torchgpipe can't run here; "" if it can."""
    if importlib.util.find_spec("torchgpipe") is None:
        return "torchgpipe is not installed: pip install -e .[peers]"
    return ""


class _TorchPipelining:
    """torch.distributed.pipelining, with the schedule that a subclass names.

    It recomputes whole stages with `torch.utils.checkpoint` (`use_reentrant=False`), inside the backward and
    in every micro-batch: "except_last" equals "always". M must divide the mini-batch, and the model must
    return one tensor. With a `placement` it has two stages in each process.
    """

    schedule = ""
    placement: tuple[int, ...] = ()

    def __init__(self, setup: Setup) -> None:
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        what, group = f"Schedule{self.schedule}", setup.group
        self.count, num_stages = setup.num_microbatches, setup.num_stages
        if group is None:
            raise ValueError(
                f"{what} runs one process per stage and there is no process group; "
                "in one process compare with torchgpipe, or start a process per stage"
            )
        if self.schedule == "1F1B" and self.count < num_stages:
            raise ValueError(
                f"{what} needs at least as many micro-batches as stages, not "
                f"M={self.count} with K={num_stages}; raise M or use torch-gpipe"
            )
        if setup.placement != self.placement:
            raise ValueError(
                f"{what} has two stages in each process, which only check-engine gives an engine"
            )
        rank = group.rank()
        self.has_first, self.has_last = 0 in setup.local_stages, num_stages - 1 in setup.local_stages
        mine = []
        for index in setup.local_stages:
            layers = _Stage(setup.stage_layers(index), setup.remat != "never")
            mine.append(pipelining.PipelineStage(layers, index, num_stages, setup.device, group=group))
            _greet_others_only(mine[-1], rank)
        make: Any = schedules.get_schedule_class(self.schedule)
        self._loss_fn: LossFn | None = None  # set by each step
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some are experimental
                given = mine if self.placement else mine[0]
                self.running = make(given, self.count, loss_fn=self._loss)
        except (AssertionError, RuntimeError) as error:
            raise ValueError(f"torch does not take this schedule: {error}") from error
        # By default torch keeps and concatenates all outputs.
        known = inspect.signature(self.running.step).parameters
        self._options = {"return_outputs": False} if "return_outputs" in known else {}

    def _loss(self, output: Any, target: Any) -> Tensor:
        assert self._loss_fn is not None, "step() has set it"
        return self._loss_fn(output, target)

    def step(self, batch: Any, target: Any, loss_fn: LossFn) -> Tensor | None:
        if (size := num_examples(batch)) % self.count:
            raise ValueError(
                f"Schedule{self.schedule} averages over micro-batches of equal size; {size} examples do not "
                f"divide into M={self.count}; choose a batch size that is a multiple of M"
            )
        return self._run(self.running.step, batch, target, loss_fn, **self._options)

    def evaluate(self, batch: Any, target: Any, loss_fn: LossFn) -> Tensor | None:
        return self._run(self.running.eval, batch, target, loss_fn)

    def _run(
        self, call: Callable[..., Any], batch: Any, target: Any, loss_fn: LossFn, **options: bool
    ) -> Tensor | None:
        self._loss_fn = loss_fn
        losses: list[Tensor] = []
        last = {"target": target, "losses": losses} if self.has_last else {}
        call(*(tensors_of(batch) if self.has_first else ()), **last, **options)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None


class TorchGPipe(_TorchPipelining):
    """torch.distributed.pipelining.ScheduleGPipe; see `_TorchPipelining` for how it recomputes."""

    schedule = "GPipe"


class Torch1F1B(_TorchPipelining):
    """torch.distributed.pipelining.Schedule1F1B, which runs a backward as soon as it can; needs M >= K."""

    schedule = "1F1B"


class TorchInterleaved(_TorchPipelining):
    """torch.distributed.pipelining.ScheduleInterleaved1F1B, two stages a process, for `check-engine`."""

    schedule, placement = "Interleaved1F1B", loop(2, 2)


class TorchZBV(_TorchPipelining):
    """torch.distributed.pipelining.ScheduleZBVZeroBubble, in a V with split backwards, for `check-engine`."""

    schedule, placement = "ZBVZeroBubble", vee(2)


class _Stage(nn.Module):
    """The layers of a stage as one module; a tuple between stages arrives as several arguments."""

    def __init__(self, layers: Sequence[nn.Module], recompute: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.recompute = recompute

    def forward(self, *values: Tensor) -> Any:
        if self.recompute:
            return checkpoint(self._run, *values, use_reentrant=False)
        return self._run(*values)

    def _run(self, *values: Tensor) -> Any:
        return self.layers(values[0] if len(values) == 1 else values)


def _greet_others_only(stage: Any, rank: int) -> None:
    """torch 2.11 first sends a message to both neighbours' ranks, also to this rank itself, as in a V; gloo
    has no connection from a process to itself, and the others would wait.
    """
    greetings = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda: [each for each in greetings() if each.group_peer != rank]
