"""The engines that the experiments know: ours and those it is measured against.

All get the same `Setup`, work on the very same modules and differ in nothing but the engine. What an engine
can't do is a ValueError when it is built or, where it depends on the batch, when it steps. Where an engine
recomputes in its own way, its docstring says so.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor, nn

from gpipe_bench.experiments.engines.setup import LossFn, Setup
from gpipe_bench.experiments.engines.torch_runtime import CLASSES, TorchRuntime
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.stage.trees import num_examples


class Ours:
    """This project's engine with the GPipe schedule; every kind of `remat`, in processes or in one.

    `share_memory=False` sends everything over the network also between neighbours on one host.
    """

    def __init__(self, setup: Setup, *, schedule: str = "gpipe", share_memory: bool = True) -> None:
        self.pipeline = Pipeline(
            setup.layers,
            partition=setup.partition,
            num_microbatches=setup.num_microbatches,
            schedule=schedule,
            remat=setup.remat,
            group=setup.group,
            share_memory=share_memory,
        )

    def step(self, batch: Any, target: Any, loss_fn: LossFn) -> Tensor:
        return self.pipeline.step(batch, target, loss_fn)

    @property
    def timeline(self) -> Timeline:
        return self.pipeline.timeline


class Ours1F1B(Ours):
    """This project's engine with the 1F1B schedule, which keeps fewer micro-batches alive."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, schedule="1f1b")


class _TorchPipelining:
    """torch.distributed.pipelining, one process per stage.

    It recomputes whole stages with `torch.utils.checkpoint` (`use_reentrant=False`), inside the backward and
    in every micro-batch: "except_last" is the same as "always". The mini-batch must divide into M equal parts
    and the model return one tensor.
    """

    schedule = ""

    def __init__(self, setup: Setup) -> None:
        what = f"Schedule{CLASSES[self.schedule]}"
        if setup.group is None:
            raise ValueError(
                f"{what} runs one process per stage and there is no process group; "
                "in one process compare with torchgpipe, or start a process per stage"
            )
        if self.schedule == "1f1b" and setup.num_microbatches < setup.num_stages:
            raise ValueError(
                f"{what} needs at least as many micro-batches as stages, not "
                f"M={setup.num_microbatches} with K={setup.num_stages}; raise M or use torch-gpipe"
            )
        self.what, self.count = what, setup.num_microbatches
        self.loss_fn: LossFn | None = None
        stages = [setup.stage_layers(stage) for stage in range(setup.num_stages)]
        # The loss function is known at the first step only.
        self.runtime = TorchRuntime(
            self.schedule, stages, self.count, self._loss, setup.group, setup.device,
            recompute=setup.remat != "never",
        )  # fmt: skip

    def _loss(self, output: Any, target: Any) -> Tensor:
        assert self.loss_fn is not None, "step() has set it"
        return self.loss_fn(output, target)

    def step(self, batch: Any, target: Any, loss_fn: LossFn) -> Tensor | None:
        if (size := num_examples(batch)) % self.count:
            raise ValueError(
                f"{self.what} averages over micro-batches of equal size; {size} examples do not divide "
                f"into M={self.count}; choose a batch size that is a multiple of M"
            )
        self.loss_fn = loss_fn
        return self.runtime.step(batch, target)


class TorchGPipe(_TorchPipelining):
    """torch.distributed.pipelining.ScheduleGPipe; see `_TorchPipelining` for how it recomputes."""

    schedule = "gpipe"


class Torch1F1B(_TorchPipelining):
    """torch.distributed.pipelining.Schedule1F1B, which runs a backward as soon as it can; needs M >= K."""

    schedule = "1f1b"


class Torchgpipe:
    """torchgpipe: all stages in one process, a worker thread each. Recomputes as the setup says.

    It takes the loss of the whole mini-batch at once. Needs the optional extra `peers`.
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
    """The reason why torchgpipe can't run here, "" if it can."""
    if importlib.util.find_spec("torchgpipe") is None:
        return "torchgpipe is not installed: pip install -e .[peers]"
    return ""
