"""A command that stops at a moment of one's choice, for the tests of signals: `python moments.py VERB ...`.

MOMENT names the place, `module:attribute`, or a module for the beginning of its import. Whoever gets there
first, the command or a process that it has started, writes its number into the named pipe MOMENT_ARRIVED and
waits for a signal; with MOMENT_LEAVE, another pipe, until somebody writes into that.
MOMENT_TIMES lets so many calls pass before.
Processes that are spawned import this file again, and so keep the same watch. Where this was itself forked
from one that had imported torch, it forks, but for the moment in which a child imports torch.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE, _, ATTRIBUTE = os.environ["MOMENT"].partition(":")
COMMAND = os.getpid() if __name__ == "__main__" else 0
passed = 0


def arrive() -> None:
    """Says so and waits."""
    global passed
    if "MOMENT_IN_A_CHILD" in os.environ and os.getpid() == COMMAND:
        return
    passed += 1
    if passed != 1 + int(os.environ.get("MOMENT_TIMES", "0")):  # once in each process
        return
    with open(os.environ["MOMENT_ARRIVED"], "w") as pipe:
        pipe.write(f"{os.getpid()}\n")
    if leave := os.environ.get("MOMENT_LEAVE"):
        Path(leave).read_text()
        return
    while True:
        signal.pause()


class Watch(importlib.abc.MetaPathFinder):
    """Finds the module as everybody does, and wraps what is looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        if not ATTRIBUTE:
            arrive()
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            wrap(module)

        loader.exec_module = exec_module
        return spec


def wrap(module: ModuleType) -> None:
    owner: Any = module
    *path, name = ATTRIBUTE.split(".")
    for each in path:
        owner = getattr(owner, each)
    wrapped = getattr(owner, name)

    @functools.wraps(wrapped)
    def wrapper(*arguments: Any, **more: Any) -> Any:
        arrive()
        return wrapped(*arguments, **more)

    setattr(owner, name, wrapper)


if MODULE in sys.modules:
    if ATTRIBUTE:  # else this was forked from a process that had imported it
        wrap(sys.modules[MODULE])
else:
    sys.meta_path.insert(0, Watch())


def forks() -> None:
    """From here on launches fork, and so do engines that are kept apart."""
    from gpipe_bench.experiments.engines import isolated
    from gpipe_bench.pipeline.ranks import launch

    launch.START_METHOD = "fork"
    context = multiprocessing.get_context("fork")
    isolated.multiprocessing = types.SimpleNamespace(
        get_context=lambda method: context, parent_process=multiprocessing.parent_process
    )


if __name__ == "__main__":
    if "torch" in sys.modules and MODULE != "torch":
        forks()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    from gpipe_bench.experiments.__main__ import command
    from gpipe_bench.harness import signals as stopping

    if MODULE != "gpipe_bench.experiments.beyond.engines":  # whose import is a moment, too
        from gpipe_bench.experiments.beyond.trainings import WORKLOADS

        tiny = {"num_layers": 6, "vocab_size": 8, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "seq_len": 8}
        WORKLOADS["transformer"] = WORKLOADS["transformer"]._replace(
            options=tiny
        )  # as this is not about time
    stopping.GRACE_S = 600.0  # on a busy machine, too, the way out is to be the good one
    command()
