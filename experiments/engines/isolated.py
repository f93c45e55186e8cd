"""Runs somebody else's code in processes of its own, and says in one line what became of it.

An engine under test may raise, wait for ever, or take its process with it; none of that shall cost the
results of others, or the time until a collective operation gives up. The processes form a default process
group (gloo), start in a process group of the system, and are ended with all that they have started.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from gpipe_bench.harness.signals import started, starting

START_S = 180.0
"""Seconds until all processes must have loaded what they need; a busy machine takes long for that."""
_OTHERS_S = 1.0  # until the others have said why they end: the first to notice need not be the one to blame
_DUMP_S = 0.3  # until a process that hangs has written where
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""Parts of error messages that report the end of another process."""
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+),? in (?P<name>\S+)', re.M)

Tell = Callable[[Any], None]
"""Sends something picklable to the process that waits, and starts its patience anew."""


class Fault(NamedTuple):
    """Why an isolated run has no result. `refused`: by a ValueError, which is what an engine can't do."""

    reason: str  # one line
    traceback: str = ""
    refused: bool = False


class IsolatedError(RuntimeError):
    """An isolated run that has no result."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


def run_isolated(
    function: Callable[..., Any],
    num_processes: int,
    *arguments: Any,
    timeout_s: float,
    on_news: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """`function(tell, *arguments)` in each of `num_processes` processes; their results, by rank.

    Args:
        function: importable by name; its results and what it tells must be picklable
        num_processes: that form the default process group
        timeout_s: between two things that they tell, and until they end
        on_news: called with the rank and with what it told

    Raises IsolatedError with one line: the error of the process that is to blame, its signal or status, or
    where the processes were when time was over.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: list[connection.Connection] = []
    with tempfile.TemporaryDirectory(prefix="gpipe-bench-") as folder:
        try:
            for rank in range(num_processes):
                ours, theirs = context.Pipe(duplex=False)
                given = (theirs, Path(folder), rank, num_processes, timeout_s, function, arguments)
                process = context.Process(target=_child, args=given)
                with starting():
                    process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _results(processes, pipes, Path(folder), timeout_s, on_news)
        finally:
            for process in processes:
                _end(process)
            for pipe in pipes:
                pipe.close()


def _results(
    processes: Sequence[Any],
    pipes: Sequence[connection.Connection],
    folder: Path,
    timeout_s: float,
    on_news: Callable[[int, Any], None] | None,
) -> list[Any]:
    """Reads what the processes tell until all are done or one is to blame."""
    whose: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    who = [f"process {rank}" if len(processes) > 1 else "its process" for rank in range(len(processes))]
    ready: set[int] = set()
    found: dict[int, Any] = {}
    faults: list[Fault] = []
    patience_s = START_S
    while whose:
        arrived: list[Any] = connection.wait(list(whose), patience_s)
        if not arrived and not faults:
            if len(ready) < len(processes):
                raise IsolatedError(Fault(f"its processes did not start within {START_S:g} s"))
            places = [(who[rank], _where(processes[rank], folder, rank)) for rank in sorted(whose.values())]
            known = "; ".join(f"{each} was in {place}" for each, place in places if place)
            raise IsolatedError(Fault(f"no answer within {timeout_s:g} s" + (f": {known}" if known else "")))
        if not arrived:
            break
        for pipe in arrived:
            rank = whose[pipe]
            try:
                kind, content = pipe.recv()
            except (EOFError, OSError):
                kind, content = "fault", Fault(f"{who[rank]} {_end_of(processes[rank])}")
            if kind == "ready":
                ready.add(rank)
            elif kind == "news":
                if on_news is not None:
                    on_news(rank, content)
            else:
                del whose[pipe]
                if kind == "done":
                    found[rank] = content
                else:
                    faults.append(content)
        patience_s = _OTHERS_S if faults else timeout_s if len(ready) == len(processes) else START_S
    if faults:
        own = [fault for fault in faults if not any(word in fault.reason for word in _LOST)]
        raise IsolatedError((own or faults)[0])
    return [found[rank] for rank in range(len(processes))]


def _where(process: Any, folder: Path, rank: int) -> str:
    """The place in the code at which a process hangs."""
    try:
        os.kill(process.pid, signal.SIGUSR1)
    except ProcessLookupError:
        return ""
    time.sleep(_DUMP_S)
    return place_of((folder / f"where{rank}").read_text(errors="replace"), latest_first=True)


def place_of(text: str, *, latest_first: bool = False) -> str:
    """`line 12 of mine.py (step)`: the innermost place of a traceback that is neither torch's, Python's nor
    this project's; "" where there is none.
    """
    found = list(_FRAME.finditer(text))
    ours = str(Path(__file__).resolve().parents[2])
    own = tuple(f"{ours}/{name}" for name in ("experiments", "pipeline", "planner", "harness", "gpipe_bench"))
    foreign = (*own, sys.prefix, sys.base_prefix, "<")
    for frame in found if latest_first else reversed(found):
        if not frame["file"].startswith(foreign):
            return f"line {frame['line']} of {Path(frame['file']).name} ({frame['name']})"
    return ""


def fault_of(error: BaseException) -> Fault:
    """An exception in one line: `RuntimeError: boom, in line 12 of mine.py (step)`."""
    text = "".join(traceback.format_exception(error))
    said = next((line for line in str(error).splitlines() if line.strip()), "")
    place = place_of(text)
    reason = f"{type(error).__name__}{f': {said}' if said else ''}{f', in {place}' if place else ''}"
    return Fault(reason, text, isinstance(error, ValueError))


def _end_of(process: Any) -> str:
    process.join(_OTHERS_S)
    status = process.exitcode
    if status is None:
        return "closed its connection"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _end(process: Any) -> None:
    """Ends a process and all processes that it has started."""
    for end in (lambda: os.killpg(process.pid, signal.SIGKILL), process.kill):
        try:
            end()
        except (ProcessLookupError, PermissionError):
            continue
    process.join()


def _child(
    pipe: connection.Connection,
    folder: Path,
    rank: int,
    num_processes: int,
    timeout_s: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.setpgid(0, 0)
    os.dup2(2, 1)  # standard output is for results
    started()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    where = open(folder / f"where{rank}", "w")  # noqa: SIM115  # lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=where, all_threads=False)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        import torch  # noqa: F401
        from torch import distributed as dist

        from gpipe_bench.pipeline.ranks.launch import prepare_process

        prepare_process(rank)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=num_processes,
            timeout=timedelta(seconds=10 * timeout_s + START_S),
        )  # fmt: skip
        pipe.send(("ready", None))
        pipe.send(("done", function(lambda news: pipe.send(("news", news)), *arguments)))
        dist.barrier()  # or the others would lose a connection that they still read from
    except BaseException as error:  # also an engine that exits
        pipe.send(("fault", fault_of(error)))
    pipe.close()
    sys.stderr.flush()
    os._exit(0)  # threads that an engine left behind shall not hold it up


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
