"""Processes forked from one that has imported torch, in place of fresh ones, each of which takes seconds for
that and more than it then computes; for the tests alone. What is forked, and what does it as a user does:

- the processes of `launch`, but where a test uses `spawning`: test_launch.py, tests/smoke.py, and the pages'
  `check-engine` (tests/documented.py)
- a script, and the ranks of torchrun (`Script`, `torchrun`): the pages' `python` and `torchrun`, likewise
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.context
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from unittest import mock

from gpipe_bench.pipeline.ranks import launch

ROOT = Path(__file__).resolve().parents[2]
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


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Meanwhile processes that are launched are forked."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.support.preloaded"])
    fork_server()
    with mock.patch.object(launch, "START_METHOD", "forkserver"):
        yield


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Meanwhile they start as they do for users."""
    with mock.patch.object(launch, "START_METHOD", "spawn"):
        yield


class Script:
    """A script in a process of its own, which leads a session: as `subprocess.Popen` starts it, but forked.
    What it starts in its turn is started as it does for users.
    """

    def __init__(
        self, path: Path, arguments: Sequence[str], folder: Path, said: Path, variables: Mapping[str, str]
    ) -> None:
        """In `folder`, with these variables and no others; what it prints goes to `said`.out and .err."""
        self._said = tuple(said.with_name(said.name + end) for end in (".out", ".err"))
        streams = tuple(map(str, self._said))
        self._process = fork_server().Process(  # type: ignore[attr-defined]
            target=_become, args=(str(path), list(arguments), str(folder), streams, dict(variables))
        )
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit status, or a signal's number below zero; None while it runs."""
        return self._process.exitcode

    returncode = property(poll)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Both streams, when it has ended."""
        self._process.join(timeout)
        assert self.poll() is not None, f"it runs for more than {timeout:.0f} s"
        out, err = (path.read_text() if path.exists() else "" for path in self._said)
        return out, err


def _become(
    path: str, arguments: list[str], folder: str, streams: Sequence[str], variables: Mapping[str, str]
) -> None:
    """In the fork, which then knows nothing of the process that asked for it."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [str(Path(path).parent), *variables.get("PYTHONPATH", "").split(os.pathsep)]
    for number, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def torchrun(path: Path, arguments: Sequence[str], size: int, folder: Path, **variables: str) -> list[str]:
    """What each of the processes prints that `torchrun --nproc-per-node SIZE` would start."""
    known = {**os.environ, **variables, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Script(path, arguments, folder, folder / f"rank {rank}", known | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(size))
    ]
    said = [rank.communicate(HANGING_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(err for _, err in said)
    return [out for out, _ in said]
