"""Runs a command that stops at a chosen moment, for tests of signals: `python moments.py VERB ...`.

MOMENT names the moment: a call of `module:attribute`, or a module's import. The first process to get there,
the command or one that it started, writes its process id into the named pipe MOMENT_ARRIVED and waits for a
signal, or with MOMENT_LEAVE, another pipe, until something is written there. MOMENT_TIMES calls pass before.
Spawned processes import this file again, and so keep the same watch. If this process was forked from one that
had imported torch, it forks.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import importlib.abc
import os
import signal
import sys
from pathlib import Path
from typing import Any

MODULE, _, ATTRIBUTE = os.environ["MOMENT"].partition(":")
COMMAND = os.getpid() if __name__ == "__main__" else 0
passed = 0


def arrive() -> None:
    """Reports the moment and waits."""
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
    """Notices the module's import, which other finders carry out."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == MODULE:
            arrive()


def wrap() -> None:
    """Replaces the attribute by a function that first reports the moment."""
    owner: Any = importlib.import_module(MODULE)
    *path, name = ATTRIBUTE.split(".")
    for each in path:
        owner = getattr(owner, each)
    wrapped = getattr(owner, name)

    @functools.wraps(wrapped)
    def wrapper(*arguments: Any, **more: Any) -> Any:
        arrive()
        return wrapped(*arguments, **more)

    setattr(owner, name, wrapper)


if ATTRIBUTE:
    wrap()
elif MODULE not in sys.modules:  # else this was forked from a process that had imported it
    sys.meta_path.insert(0, Watch())


if __name__ == "__main__":
    if "torch" in sys.modules and MODULE != "torch":
        from gpipe_bench.pipeline.ranks import launch

        launch.START_METHOD = "fork"
        faulthandler.cancel_dump_traceback_later()  # forks lack its thread and would wait for it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    from gpipe_bench.experiments.__main__ import command
    from gpipe_bench.harness import processes as stopping

    if MODULE != "gpipe_bench.experiments.beyond.engines":  # whose import is a moment, too
        from gpipe_bench.experiments.beyond.trainings import WORKLOADS

        tiny = {"num_layers": 6, "vocab_size": 8, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "seq_len": 8}
        WORKLOADS["transformer"] = WORKLOADS["transformer"]._replace(
            options=tiny
        )  # as this is not about time
    stopping.GRACE_S = 600.0  # on a busy machine, too, the way out is to be the good one
    command()
