"""Engines under test: the protocol that an engine implements, and how to name a user's engine.

An experiment gives the same `Setup` to every factory and lets the engines that it returns run training steps;
so a table of ours can be made with any engine, `--engine module:attribute` (docs/own-engine.md). This module
loads no torch: the command line checks names with it.
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
    """What an engine is built from; equal for all engines that are compared.

    Args:
        layers: all layers of the model; each maps a tensor or a tuple of tensors to the same. Those of this
            process's stages are on `device`; their parameters' dtype is the precision
        partition: the layer indices of each stage
        num_microbatches: M
        remat: which micro-batches are recomputed before their backward: "never", "except_last" or "always"
        device: this process's device
        group: one process per stage; None: this process runs all stages
        placement: the rank of each stage, if ranks have several

    Raises:
        ValueError: the fields contradict each other.
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
    and two methods that `check-engine` calls in every process: `evaluate(batch, target, loss_fn)` runs
    forwards only and returns the mean loss, or None if unknown; `clip(max_norm)` scales the gradients of all
    processes so that their joint norm is at most `max_norm`, and may return the norm before.

    If the factory has an attribute `placement`, the process of each stage, such as (0, 1, 1, 0), it is
    checked over two processes with several stages each.
    """

    def step(self, batch: Any, target: Any, loss_fn: LossFn) -> Tensor | None:
        """Runs one mini-batch without an optimizer: M micro-batches forward and backward, recomputed as the
        setup says. Adds gradients of the mini-batch's mean loss to `.grad` of this process's parameters.

        Every process gets the whole `batch` and `target`, examples in dimension 0. `loss_fn(output, target)`
        is the mean over a micro-batch. Returns the mini-batch's mean loss, or None if this process does not
        know it.
        """
        ...


def clear(layers: Iterable[nn.Module]) -> None:
    """Sets all gradients to None: a step adds to gradients that are there."""
    for layer in layers:
        layer.zero_grad(set_to_none=True)


EngineFactory = Callable[[Setup], Engine]
"""Builds an engine, such as a class constructed from a setup. ValueError for what it can't do."""


def resolve(name: str) -> EngineFactory:
    """The factory of a known engine, or of the user's importable `module:attribute`.

    A digest from `pinned` is ignored. ValueError says what is wrong with the name and what to do.
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
    """A factory returned something that is no engine: an error, not a refusal."""


def build(name: str, setup: Setup) -> Engine:
    """Builds a running engine. ValueError for an unknown name and for what the engine can't do; NoStepError
    if it is no engine.
    """
    engine = resolve(name)(setup)
    if not callable(getattr(engine, "step", None)):
        raise NoStepError(
            f"engine {name.partition('@')[0]!r} returned {type(engine).__name__}, which has no method "
            "step(batch, target, loss_fn); return an object that has one"
        )
    return engine


def placement_of(name: str) -> tuple[int, ...]:
    """The `placement` of an engine's factory; empty if each process has one stage."""
    place: tuple[int, ...] = getattr(resolve(name), "placement", None) or ()
    return place if len(place) > max(place, default=0) + 1 else ()


def pinned(name: str) -> str:
    """`mine:Engine@3f2a91bc`: a user's engine with its file's digest, so that an edited engine is a new one.
    A known name is unchanged. ValueError like `resolve`.
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
    """Module and attribute of a name. Makes the working directory importable."""
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
