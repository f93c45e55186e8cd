"""Processes forked from one that has imported torch, in place of fresh ones, each of which takes seconds for
that and more than it then computes; for the tests and for the smoke profiles.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.context
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from torch.distributed.launcher.api import LaunchConfig

from gpipe_bench.experiments.engines import isolated
from gpipe_bench.pipeline.ranks import launch

ROOT = Path(__file__).resolve().parent.parent
HANGING_S = 600.0  # several times as long as the cases of any file take all together


def end_if_it_hangs(after_s: float = HANGING_S) -> None:
    """After so long this process says where it hangs, with the stacks of all its threads, and so do those
    that wait for it; a little later they end, and with them the test, sooner than `faulthandler_timeout`.
    """
    faulthandler.dump_traceback_later(after_s)
    signal.setitimer(signal.ITIMER_REAL, after_s + 30)  # the first to end takes the others with it


def fork_server(method: str = "forkserver") -> multiprocessing.context.BaseContext:
    """The context of forked processes, whichever method was asked for; their server runs by then."""
    with contextlib.chdir(ROOT):  # wherever this is called: what is preloaded is found from there
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def _config(**options: object) -> LaunchConfig:
    fork_server()
    return LaunchConfig(**{**options, "start_method": "forkserver"})


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Meanwhile processes that are launched, or that keep an engine apart, are forked."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.preloaded"])
    apart = SimpleNamespace(get_context=fork_server, parent_process=multiprocessing.parent_process)
    with (
        mock.patch.object(launch, "LaunchConfig", _config),
        mock.patch.object(isolated, "multiprocessing", apart),
    ):
        yield


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Meanwhile they start as they do for users."""
    with (
        mock.patch.object(launch, "LaunchConfig", LaunchConfig),
        mock.patch.object(isolated, "multiprocessing", multiprocessing),
    ):
        yield
