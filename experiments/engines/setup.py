"""Engines under test: what an experiment asks of one, and how to name one's own.

An experiment hands the same `Setup` to every factory, and what comes back takes training steps: so a table
made with ours can be made with any other, `--engine module:attribute` (docs/own-engine.md). This loads no
torch: the command line checks names with it.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpipe_bench.pipeline.plan.named import suggestion
from gpipe_bench.planner.candidate import REMATS

from ..registry import ENGINES

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch import distributed as dist

LossFn = Callable[[Any, Any], "Tensor"]


@dataclass(frozen=True)
class Setup:
    """Everything that an engine is built from; equal for all engines that are compared with each other.

    Args:
        layers: the whole model's, each mapping a tensor or a tuple of tensors to the same; those of this
            process's stages live on `device` already, and their parameters' dtype is the precision
        partition: the layer indices of each stage
        num_microbatches: M
        remat: which micro-batches are recomputed before their backward: "never", "except_last" or "always"
        device: of this process
        group: of one process per stage, its rank; without one this process runs all stages
        placement: the rank of each stage, where a rank has several

    Raises:
        ValueError: the fields do not fit together.
    """

    layers: Sequence[nn.Module]
    partition: tuple[range, ...]
    num_microbatches: int
    remat: str
    device: torch.device
    group: dist.ProcessGroup | None = None
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        covered = [index for span in self.partition for index in span]
        if covered != list(range(len(self.layers))) or not all(self.partition):
            raise ValueError(
                f"partition {self.partition} does not cut {len(self.layers)} layers into stages; "
                "give consecutive ranges, none empty, that cover all"
            )
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches is {self.num_microbatches}; it must be at least 1")
        if self.remat not in REMATS:
            raise ValueError(f"unknown remat {self.remat!r}; use one of {', '.join(REMATS)}")
        num_processes = max(self.placement, default=self.num_stages - 1) + 1
        if self.group is not None and self.group.size() != num_processes:
            raise ValueError(
                f"the group has {self.group.size()} processes but the partition {self.num_stages} stages; "
                "start one process per stage"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages, K."""
        return len(self.partition)

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages of this process."""
        stages = range(self.num_stages)
        if self.group is None:
            return tuple(stages)
        return tuple(s for s in stages if (self.placement or stages)[s] == self.group.rank())

    def stage_layers(self, stage: int) -> tuple[nn.Module, ...]:
        """The layers of one stage, in order."""
        return tuple(self.layers[index] for index in self.partition[stage])

    @property
    def local_layers(self) -> tuple[nn.Module, ...]:
        """The layers of this process's stages, in order."""
        return tuple(layer for stage in self.local_stages for layer in self.stage_layers(stage))


class Engine(Protocol):
    """A running engine.

    It may have an attribute `timeline`, the `gpipe_bench.pipeline.Timeline` of this process's latest step,
    and two methods that `check-engine` asks, called in every process: `evaluate(batch, target, loss_fn)` goes
    forward alone and returns the mean loss, or None where it is not known; `clip(max_norm)` scales all
    gradients of all processes so that their norm is at most that, and may return the norm before.

    A factory with an attribute `placement` is checked over two processes with several stages in each: the
    process of each stage, such as (0, 1, 1, 0).
    """

    def step(self, batch: Any, target: Any, loss_fn: LossFn) -> Tensor | None:
        """One mini-batch without an optimizer: M micro-batches forward and backward, recomputed as the setup
        says. Adds the gradients of the mean loss over the mini-batch to `.grad` of this process's parameters.

        `batch` and `target` are given whole, dimension 0 being the examples, in every process.
        `loss_fn(output, target)` is the mean over a micro-batch. Returns the mini-batch's mean loss, or None
        where it is not known.
        """
        ...


def clear(layers: Iterable[nn.Module]) -> None:
    """Removes all gradients: a step adds to those that are there."""
    for layer in layers:
        layer.zero_grad(set_to_none=True)


EngineFactory = Callable[[Setup], Engine]
"""Builds an engine; a class whose `__init__` takes a setup is one. Raises ValueError for what it can't do."""


def resolve(name: str) -> EngineFactory:
    """The factory of a known engine or of the user's `module:attribute`, importable from here.

    What `pinned` appended to a name is ignored. ValueError says what is wrong with the name and what to do.
    """
    module, attribute = _parts(name)
    try:
        factory = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"engine {name!r}: no module {error.name!r} in {Path.cwd()} or among the installed ones; "
                "start from the folder that holds it, or add that to PYTHONPATH"
            ) from error
        raise ValueError(
            f"engine {name!r}: importing {module} needs {error.name!r}, which is missing; install it"
        ) from error
    except Exception as error:
        raise ValueError(
            f"engine {name!r}: importing {module} failed with {type(error).__name__}: {error}; "
            f"`python -c 'import {module}'` shows where"
        ) from error
    for part in attribute.split("."):
        if not hasattr(factory, part):
            known = [each for each in vars(factory) if not each.startswith("_")]
            raise ValueError(
                f"engine {name!r}: {module} has no attribute {attribute!r}{suggestion(part, known)}; "
                "name a class or function that takes a Setup"
            )
        factory = getattr(factory, part)
    if not callable(factory):
        raise ValueError(
            f"engine {name!r}: {attribute} is of type {type(factory).__name__} and can't be called; "
            "name a class or function that takes a Setup and returns an engine"
        )
    return factory


class NoStepError(TypeError):
    """A factory returned something that is no engine. Unlike a missing ability, no reason to leave it out."""


def build(name: str, setup: Setup) -> Engine:
    """A running engine. ValueError where the name leads nowhere, and for what the engine can't do;
    NoStepError where it is none.
    """
    engine = resolve(name)(setup)
    if not callable(getattr(engine, "step", None)):
        raise NoStepError(
            f"engine {name.partition('@')[0]!r} returned {type(engine).__name__}, which has no method "
            "step(batch, target, loss_fn); return an object that has one"
        )
    return engine


def placement_of(name: str) -> tuple[int, ...]:
    """The process of each stage that an engine is made for; empty where it has one stage in each."""
    place: tuple[int, ...] = getattr(resolve(name), "placement", None) or ()
    return place if len(place) > max(place, default=0) + 1 else ()


def pinned(name: str) -> str:
    """`mine:Engine@3f2a91bc`: the user's engine with a digest of its file, so that an edited one is another.
    A known name stays as it is. ValueError as of `resolve`.
    """
    resolve(name)
    if name in ENGINES:
        return name
    module, attribute = _parts(name)
    source = getattr(sys.modules[module], "__file__", None)
    if source is None:
        return f"{module}:{attribute}"
    digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:8]
    return f"{module}:{attribute}@{digest}"


def _parts(name: str) -> tuple[str, str]:
    """Module and attribute. Makes the working directory importable."""
    target = ENGINES.get(name, name)
    module, colon, attribute = target.partition("@")[0].partition(":")
    if not colon:
        raise ValueError(
            f"unknown engine {name!r}{suggestion(name, ENGINES)}; known: {', '.join(ENGINES)}, "
            "or your own as module:attribute"
        )
    if not all(word.isidentifier() for word in f"{module}.{attribute}".split(".")):
        raise ValueError(
            f"engine {name!r} is not module:attribute; write mine:MyEngine for MyEngine in mine.py"
        )
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))
    return module, attribute
