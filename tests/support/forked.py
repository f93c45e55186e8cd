"""Forks test processes from one that has imported torch, which saves seconds in each. Forked are, unless
named as starting as they do for users:

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
    """After `after_s` this process writes the stacks of all its threads and, a little later, ends, and with
    it the test, sooner than `faulthandler_timeout`.
    """
    faulthandler.dump_traceback_later(after_s)
    signal.setitimer(signal.ITIMER_REAL, after_s + 30)  # its end ends the others


def fork_server(method: str = "forkserver") -> multiprocessing.context.BaseContext:
    """The context of forked processes, whatever `method`; starts their server."""
    with contextlib.chdir(ROOT):  # the server finds preloaded modules from there
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Within it, launched processes are forked."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.support.preloaded"])
    fork_server()
    with mock.patch.object(launch, "START_METHOD", "forkserver"):
        yield


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Within it, launched processes are spawned, as for users."""
    with mock.patch.object(launch, "START_METHOD", "spawn"):
        yield


class Script:
    """A script in a forked process with its own session, otherwise as with `subprocess.Popen`. Processes that
    it starts are started as for users.
    """

    def __init__(
        self, path: Path, arguments: Sequence[str], folder: Path, said: Path, variables: Mapping[str, str]
    ) -> None:
        """Runs in `folder`, with only these variables; output goes to `said`.out and .err."""
        self._said = tuple(said.with_name(said.name + end) for end in (".out", ".err"))
        streams = tuple(map(str, self._said))
        self._process = fork_server().Process(  # type: ignore[attr-defined]
            target=_become, args=(str(path), list(arguments), str(folder), streams, dict(variables))
        )
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit status, or minus a signal's number; None while it runs."""
        return self._process.exitcode

    returncode = property(poll)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Waits for its end; returns both streams."""
        self._process.join(timeout)
        assert self.poll() is not None, f"it runs for more than {timeout:.0f} s"
        out, err = (path.read_text() if path.exists() else "" for path in self._said)
        return out, err


def _become(
    path: str, arguments: list[str], folder: str, streams: Sequence[str], variables: Mapping[str, str]
) -> None:
    """Runs in the fork: drops its parent's state, then runs the script."""
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
    """A free port of this host."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def torchrun(path: Path, arguments: Sequence[str], size: int, folder: Path, **variables: str) -> list[str]:
    """The output of each process that `torchrun --nproc-per-node SIZE` would start."""
    known = {**os.environ, **variables, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Script(path, arguments, folder, folder / f"rank {rank}", known | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(size))
    ]
    said = [rank.communicate(HANGING_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(err for _, err in said)
    return [out for out, _ in said]
