"""Runs somebody else's code in processes of its own, and says in one line what became of it.

An engine under test may raise, wait for ever, or take its process with it; none of that shall cost the
results of others, or the time until a collective operation gives up. The processes are those of
`pipeline.launch`, each with a clock of its own: one that tells nothing for too long writes where it is, and
ends. They are ended with all that they have started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException

from gpipe_bench.pipeline.ranks.launch import launch

_DUMP_S = 0.5  # until a process that hangs has written where, and so have those that wait for it
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""Parts of error messages that report the end of another process."""
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+),? in (?P<name>\S+)', re.M)

Tell = Callable[[Any], None]
"""Keeps something picklable, also for the case that the process ends, and starts its patience anew."""


class Fault(NamedTuple):
    """Why an isolated run has no result. `refused`: by a ValueError, which is what an engine can't do."""

    reason: str  # one line
    traceback: str = ""
    refused: bool = False


class IsolatedError(RuntimeError):
    """An isolated run that has no result. `told` is what each process has told before."""

    def __init__(self, fault: Fault, told: list[list[Any]]) -> None:
        super().__init__(fault.reason)
        self.fault, self.told = fault, told


def run_isolated(
    function: Callable[..., Any], num_processes: int, *arguments: Any, timeout_s: float
) -> list[Any]:
    """`function(tell, *arguments)` in each of `num_processes` processes; their results, by rank.

    Args:
        function: importable by name; its results and what it tells must be picklable
        num_processes: that form the default process group
        timeout_s: between two things that they tell, and until they end

    Raises IsolatedError with one line: the error of the process that is to blame, its signal or status, or
    where the processes were when time was over.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-bench-") as name:
        folder, results, ended = Path(name), [], None
        try:
            given = (folder, timeout_s, function, arguments)
            results = launch(_child, num_processes, *given, device="cpu")
        except ProcessException as error:
            ended = error
        finally:
            for leader in folder.glob("leader*"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(int(leader.read_text()), signal.SIGKILL)
        if fault := _fault(folder, num_processes, timeout_s, ended):
            raise IsolatedError(fault, [_told(folder / f"told{rank}") for rank in range(num_processes)])
        return results


def _fault(folder: Path, count: int, timeout_s: float, ended: ProcessException | None) -> Fault | None:
    """The fault of the process that is to blame: the first to notice need not be it."""
    faults: list[Fault] = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("fault*"))]
    own = [fault for fault in faults if not any(word in fault.reason for word in _LOST)]
    if own or not isinstance(ended, ProcessExitedException):
        return next(iter(own or faults), None)
    who = [f"process {rank}" if count > 1 else "its process" for rank in range(count)]
    if ended.signal_name != "SIGALRM":
        name, status = ended.signal_name, ended.exit_code
        how = f"was ended by {name}" if name else f"ended with status {status}"
        return Fault(f"{who[ended.error_index]} {how}")
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("where*"))]
    places = [(each, place_of(text, latest_first=True)) for each, text in zip(who, texts, strict=False)]
    known = "; ".join(f"{each} was in {place}" for each, place in places if place)
    return Fault(f"no answer within {timeout_s:g} s" + (f": {known}" if known else ""))


def _told(path: Path) -> list[Any]:
    found = []
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError), path.open("rb") as file:
        while True:
            found.append(pickle.load(file))
    return found


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


def _child(
    folder: Path, timeout_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> object:
    """What the function returns; what it raises is written down instead."""
    rank = dist.get_rank()
    os.setpgid(0, 0)
    (folder / f"leader{rank}").write_text(str(os.getpid()))
    os.dup2(2, 1)  # standard output is for results
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    where = open(folder / f"where{rank}", "w")  # noqa: SIM115  # lives as long as the process
    told = open(folder / f"told{rank}", "wb")  # noqa: SIM115  # likewise

    def wait_anew() -> None:  # the dump and the signal reach a process that holds Python's lock, too
        faulthandler.dump_traceback_later(timeout_s, file=where)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _DUMP_S)

    def tell(news: Any) -> None:
        pickle.dump(news, told)
        told.flush()
        wait_anew()

    wait_anew()
    found = None
    try:
        found = function(tell, *arguments)
        dist.barrier()  # or the others would lose a connection that they still read from
    except BaseException as error:  # also an engine that exits
        (folder / f"fault{rank}").write_bytes(pickle.dumps(fault_of(error)))
    sys.stderr.flush()
    threading.Thread(target=_leave, daemon=True).start()
    return found


def _leave() -> None:
    """Threads that an engine left behind shall not hold its process up."""
    threading.main_thread().join()
    os._exit(0)
