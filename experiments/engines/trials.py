"""Runs the cases of `cases.py` on an engine, in separate processes, and reports each error in a line.

An engine may raise, hang, or end its process; none of that may cost the results of other engines. Each
process (`pipeline.launch`) has a timer. A process that reports nothing for too long writes its traceback and
ends, with all processes that it started. This costs one group of cases: the next run in new processes.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException

from gpipe_bench.pipeline.ranks.launch import launch

from .cases import BASE, CASES, GROUPS, Case, first_steps, subject
from .checks import BROKEN, CANNOT, FAILED, OK, UNTRIED, Given, Said, drawn
from .setup import Engine, NoStepError, Setup, build, placement_of, resolve

T = TypeVar("T")

_DUMP_S = 0.5  # seconds for hanging processes to write their tracebacks
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""Parts of error messages about the end of another process."""
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+),? in (?P<name>\S+)', re.M)

Tell = Callable[[Any], None]
"""Writes a picklable report to a file that outlives the process, and restarts the process's timer."""


class Fault(NamedTuple):
    """Why an isolated run has no result. `refused`: the engine raised ValueError, since it can't do it."""

    reason: str  # one line
    traceback: str = ""
    refused: bool = False


class IsolatedError(RuntimeError):
    """An isolated run has no result. `told` has the reports of each process before."""

    def __init__(self, fault: Fault, told: list[list[Any]]) -> None:
        super().__init__(fault.reason)
        self.fault, self.told = fault, told


def run_isolated(
    function: Callable[..., Any], num_processes: int, *arguments: Any, timeout_s: float, device: str = "cpu"
) -> list[Any]:
    """Runs `function(tell, *arguments)` in each of `num_processes` processes; returns their results, by rank.

    Args:
        function: importable by name; its results and reports must be picklable
        num_processes: size of the default process group
        timeout_s: most seconds between two reports, and from the last one to the end
        device: "cpu", or "cuda" for one GPU per process

    Raises:
        IsolatedError: one line with the error, signal or exit status of the process that failed first, or
            with the place of every process when time ran out.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-bench-") as name:
        folder, results, ended = Path(name), [], None
        try:
            given = (folder, timeout_s, function, arguments)
            results = launch(_child, num_processes, *given, device=device)
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
    """The fault of the process that failed first; others only lost their connections to it."""
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
    """`line 12 of mine.py (step)`: the innermost place of a traceback outside torch, Python and this project;
    "" if there is none.
    """
    found = list(_FRAME.finditer(text))
    ours = str(Path(__file__).resolve().parents[2])
    own = tuple(f"{ours}/{name}" for name in ("experiments", "pipeline", "planner", "harness", "gpipe_bench"))
    passed_over = (*own, sys.prefix, sys.base_prefix, "<")
    for frame in found if latest_first else reversed(found):
        if not frame["file"].startswith(passed_over):
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
    """Runs in each process: returns the function's result, or writes its error into `folder`."""
    rank = dist.get_rank()
    os.setpgid(0, 0)
    (folder / f"leader{rank}").write_text(str(os.getpid()))
    os.dup2(2, 1)  # standard output is for results
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    where = open(folder / f"where{rank}", "w")  # noqa: SIM115  # lives as long as the process
    told = open(folder / f"told{rank}", "wb")  # noqa: SIM115  # likewise

    def wait_anew() -> None:  # traceback and signal come even while Python's lock is held
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
        dist.barrier()  # others may still read from here
    except BaseException as error:  # also SystemExit
        (folder / f"fault{rank}").write_bytes(pickle.dumps(fault_of(error)))
    sys.stderr.flush()
    threading.Thread(target=_leave, daemon=True).start()
    return found


def _leave() -> None:
    """Ends the process even if an engine has left threads."""
    threading.main_thread().join()
    os._exit(0)


# The cases of an engine

VARIATIONS = tuple((count, dtype) for dtype in (torch.float64, torch.float32) for count in (4, 6))
"""Numbers of micro-batches and precisions in which every case runs."""
PLACES = {"one process": 1, "two processes": 2}  # numbers of processes, by place


@dataclass(frozen=True)
class Row:
    """The result of one case in one or two processes."""

    place: str
    case: str
    verdict: str
    text: str
    expected: str = ""
    meaning: str = ""
    source: str = ""


def faults(rows: Sequence[Row]) -> list[Row]:
    """The faulty rows, errors before wrong values. An engine that can do nothing is faulty, too."""
    bad = [row for verdict in (BROKEN, FAILED) for row in rows if row.verdict == verdict]
    if not bad and not any(row.verdict == OK for row in rows):
        return [row for row in rows if row.verdict == CANNOT][:1]
    return bad


def in_place(name: str, place: str, timeout_s: float, wanted: Collection[str] = ()) -> list[Row]:
    """Runs the `wanted` cases, by default all, in one or two processes; the first cases always run. Raises
    ValueError if `name` is no engine.
    """
    resolve(name)
    chosen = [
        group for group in GROUPS if group == BASE or not wanted or any(case.name in wanted for case in group)
    ]
    rows: list[Row] = []
    while chosen:
        fault = None
        try:
            told = run_isolated(trial, PLACES[place], name, place, chosen, timeout_s=timeout_s)
        except IsolatedError as error:
            told, fault = error.told, error.fault
        ended = [row for by_rank in zip(*told, strict=False) for row in _joined(by_rank)]
        rows += ended
        if fault is None:
            break
        at = min(map(len, told))  # the first group that is not finished everywhere
        rows.append(_row(place, chosen[min(at, len(chosen) - 1)][0], _raised(fault)))
        if not are_right(rows):
            break
        chosen = chosen[at + 1 :]
    return settled(rows)


def are_right(rows: Sequence[Row]) -> bool:
    """Whether the first cases, with which `rows` begins, passed."""
    return all(row.verdict == OK for row in rows[: len(BASE)])


def settled(rows: list[Row]) -> list[Row]:
    """The rows, and "not tried" for all further cases if the first ones failed."""
    if are_right(rows) or rows[0].verdict == CANNOT:
        return rows
    untried = UNTRIED, "the first steps are wrong"
    return rows + [_row(rows[0].place, case, untried) for case in CASES[len(BASE) :]]


def _row(place: str, case: Case, outcome: Said) -> Row:
    return Row(place, case.name, *outcome, case.expected, case.meaning, case.source)


def _raised(fault: Fault) -> Said:
    return CANNOT if fault.refused else BROKEN, fault.reason.removeprefix("ValueError: ")


def _joined(by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """For each case, if texts differ, the first row that is not OK, with its rank; else the last stage's."""
    joined = []
    for rows in zip(*by_rank, strict=False):  # an engine without `step` has fewer rows
        bad = [rank for rank, row in enumerate(rows) if row.verdict != OK]
        if bad and len({row.text for row in rows}) > 1:
            first = rows[bad[0]]
            joined.append(replace(first, text=f"process {bad[0]}: {first.text}"))
        else:
            joined.append(rows[-1])  # the last stage knows the loss
    return joined


def trial(tell: Tell, name: str, place: str, chosen: Sequence[tuple[Case, ...]]) -> list[list[Row]]:
    """Runs in each process: reports the rows of each group of cases, and returns all of them."""
    told: list[list[Row]] = []
    for group in chosen:
        told.append(examine(name, group, place))
        tell(told[-1])
        if group == BASE and not all(_of_all(are_right(told[-1]))):  # all stop together, or one would hang
            break
    return told


def _of_all(found: T) -> list[T]:
    every = [found] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(every) > 1:
        dist.all_gather_object(every, found)
    return every


def built(name: str, setup: Setup) -> Engine | str:
    """The engine, or why a process can't build it; then no process uses it."""
    engine, reason = None, ""
    try:
        engine = build(name, setup)
    except ValueError as error:
        reason = fault_of(error).reason.removeprefix("ValueError: ")
    refusal = next(filter(None, _of_all(reason)), "")
    return refusal if engine is None or refusal else engine


def examine(name: str, group: tuple[Case, ...], place: str, *, raises: bool = False) -> list[Row]:
    """The worst row of each case of a group over all variations, in this process. With several
    processes an engine's error is raised, as others may wait for this one; with `raises` in one process, too.
    """
    worst: dict[str, Row] = {}
    for count, dtype in VARIATIONS:
        if group[0].num_microbatches is not None and count != VARIATIONS[0][0]:
            continue
        rows = _examine(name, group, place, count, dtype, raises)
        if len(rows) == 1 and rows[0].verdict != OK and len(group) > 1:
            return rows
        for row in rows:
            if row.verdict != OK and (count, dtype) != VARIATIONS[0]:
                text = f"with M = {count} in {str(dtype).removeprefix('torch.')}: {row.text}"
                row = replace(row, text=text)
            both = (worst.get(row.case, row), row)
            worst[row.case] = min(both, key=lambda each: _SEVERITY.index(each.verdict))
    return [*worst.values()]


_SEVERITY = (BROKEN, FAILED, UNTRIED, OK, CANNOT)
"""Verdicts from the worst on. A refusal comes last: it must not hide how another variation ended."""


def _examine(
    name: str, group: tuple[Case, ...], place: str, count: int, dtype: torch.dtype, raises: bool
) -> list[Row]:
    case, alone = group[0], PLACES[place] == 1
    setup, size = subject(case, () if alone else placement_of(name) or (0, 1), count, dtype)
    plain = copy.deepcopy(setup.layers)
    try:
        engine = built(name, setup)
        if isinstance(engine, str):
            return [_row(place, case, (CANNOT, engine))]
        given = Given(engine, setup, plain, *drawn(size, 0, dtype), compares=case.middle != "noise")
        found = first_steps(given) if group == BASE else [case.ask(given)]
    except NoStepError as error:
        return [_row(place, case, (FAILED, str(error)))]
    except Exception as error:
        if raises or not alone:
            raise
        return [_row(place, case, _raised(fault_of(error)))]
    return [_row(place, *each) for each in zip(group, found, strict=True)]
