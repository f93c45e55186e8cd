"""Breaks one rank at a time and checks that all others end soon and say which rank it was.

    python tests/support/faults.py                        every fault of `fault_table`, several side by side
    python tests/support/faults.py --only "stop rank 0"   those whose line holds this text (may be repeated)
    python tests/support/faults.py --list                 what there is
    python tests/support/faults.py --json FILE                 what was found, a line each

A fault is met as soon as it is certain that training cannot go on: every other rank must end, as a process,
within `timeout_s` + 5 s of it, with a failure status and an error that names the rank, and the action where
that rank raised an exception in one. Exit status 1 if any does not, 2 for bad usage. What is only late is
planted again, alone and at most twice: beside other work a rank may have had no core to end on.

Ranks are forked from this process, which has imported torch already, and end as an interpreter ends, so that
what hangs only then is noticed too. A stopped rank is killed when the others are done.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

# Each rank is one of several processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# torch looks up the name behind every connection; a lost request is not to take longer than the timeout.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch._dynamo  # noqa: F401  what the first optimizer imports, or every rank would
from fault_rank import RAISED, take_part
from fault_table import END, Fault, GridFault, every

from gpipe_bench.pipeline import ActionError

ALLOWANCE_S = 5.0  # beyond the timeout
HANGING_S = 60.0  # beyond the timeout: a world that has not ended then is ended
_PORTS = count(20000 + os.getpid() % 8000)


@dataclass(frozen=True)
class Outcome:
    """`wrong` says what is wrong with how the other ranks ended; nothing, if all is well."""

    fault: Fault
    longest_s: float  # from the fault to the end of the last of the other ranks
    late: bool
    errors: tuple[str, ...]  # of the other ranks
    wrong: str
    attempt: int = 1

    def __str__(self) -> str:
        said = f"WRONG {self.wrong}" if self.wrong else self.errors[0]
        return f"{self.longest_s:5.1f} s {'LATE' if self.late else '    '} {self.fault}: {said}"


class World:
    """The processes of one fault."""

    def __init__(self, fault: Fault, timeout_s: float) -> None:
        self.fault, self._timeout_s = fault, timeout_s
        # A TemporaryDirectory would be removed by the first rank that ends, too.
        self._folder = Path(tempfile.mkdtemp(prefix="fault-"))
        self._looked, self._waited_s = time.monotonic(), 0.0
        port = _free_port()
        self._running = {self._fork(rank, port): rank for rank in range(fault.num_ranks)}
        self._ended: dict[int, tuple[float, int]] = {}  # when and with which status, by rank

    def _fork(self, rank: int, port: int) -> int:
        sys.stdout.flush()
        process = os.fork()
        if process:
            return process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self.fault.num_ranks),
        )  # fmt: skip
        with (self._folder / f"output {rank}").open("wb", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        try:
            take_part(self.fault, self._folder, self._timeout_s)
        except Exception as error:
            traceback.print_exc()
            named = [error.rank, str(error.action or "")] if isinstance(error, ActionError) else [None, ""]
            record = {"error": f"{type(error).__name__}: {error}", "named": named}
            (self._folder / f"error {rank}").write_text(json.dumps(record))
            sys.exit(1)
        sys.exit(0)

    def look(self) -> Outcome | None:
        """The outcome, if the others have ended or too much time has passed."""
        for process, rank in tuple(self._running.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                self._ended[rank] = (time.monotonic(), os.waitstatus_to_exitcode(status))
                del self._running[process]
        others = [rank for rank in range(self.fault.num_ranks) if rank != self.fault.rank]
        # Time in which this process was stopped does not count: the ranks may have been stopped, too.
        now = time.monotonic()
        self._waited_s, self._looked = self._waited_s + min(now - self._looked, 1.0), now
        hangs = self._waited_s > self._timeout_s + HANGING_S
        if not hangs and not all(rank in self._ended for rank in others):
            return None
        self.end()
        outcome = self._judged(others)
        shutil.rmtree(self._folder)
        return outcome

    def end(self) -> None:
        """Kills what is left and takes its status, so that nothing stays."""
        for process in self._running:
            os.kill(process, signal.SIGKILL)
        for process in self._running:
            os.waitpid(process, 0)
        self._running.clear()

    def _judged(self, others: Sequence[int]) -> Outcome:
        fault, wrong, errors = self.fault, [], []
        time_of_fault = self._folder / "fault"
        begin = float(time_of_fault.read_text()) if time_of_fault.exists() else None
        if begin is None:
            wrong.append("the fault did not happen: " + self._output(fault.rank))
        for rank in others:
            when, status = self._ended.get(rank, (None, None))
            error = self._folder / f"error {rank}"
            record = json.loads(error.read_text()) if error.exists() else {"error": "", "named": [None, ""]}
            errors.append(record["error"].replace(f"{self._folder}/", ""))
            if when is None:
                wrong.append(f"rank {rank} did not end: " + self._output(rank))
            elif fault.place == END:  # nobody needs it any more
                if status != 0:
                    wrong.append(f"rank {rank} ended with status {status}: " + self._output(rank))
            elif status == 0:
                wrong.append(f"rank {rank} ended with status 0")
            elif not record["error"]:
                wrong.append(f"rank {rank} ended with status {status}: " + self._output(rank))
            elif begin is not None:
                wrong += [f"rank {rank} {complaint}" for complaint in _complaints(fault, record)]
        ends = [when for when, _ in self._ended.values()]
        longest_s = max((end - begin for end in ends), default=0.0) if begin is not None else 0.0
        late = longest_s > self._timeout_s + ALLOWANCE_S
        return Outcome(fault, round(longest_s, 2), late, tuple(errors), "; ".join(wrong))

    def _output(self, rank: int) -> str:
        return (self._folder / f"output {rank}").read_text()[-2000:].strip()


def _complaints(fault: Fault, record: dict) -> Iterator[str]:
    """What is missing in the error of another rank."""
    (rank, action), text = record["named"], record["error"]
    if isinstance(fault, GridFault) and f"{fault.coordinates}, " not in text:
        yield f"does not say where: {text!r}"
    if fault.is_action and fault.kind in ("raise", "memory"):
        if (rank, action) != (fault.rank, fault.place) or RAISED not in text:
            yield f"says {text!r}"
    elif fault.kind == "stop" and fault.num_ranks > 2 and "did not answer: timed out after" in text:
        return  # nobody knows who was stopped: the first that waits in vain names whom it waited for
    elif not re.search(rf"\brank {fault.rank}\b", text) or rank not in (fault.rank, None):
        yield f"blames another: {text!r}"


def _free_port() -> int:
    """Below those that the system gives to outgoing connections, and never twice."""
    while True:
        port = next(_PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run(chosen: Sequence[Fault], timeout_s: float, jobs: int) -> Iterator[Outcome]:
    """The outcomes, as they come; `jobs` worlds at a time."""
    gc.freeze()  # a rank that ends need not look through what it was forked with
    waiting, worlds, parent = list(reversed(chosen)), [], os.getpid()
    try:
        while waiting or worlds:
            if waiting and len(worlds) < jobs:
                worlds.append(World(waiting.pop(), timeout_s))
            for world in tuple(worlds):
                outcome = world.look()
                if outcome is not None:
                    worlds.remove(world)
                    yield outcome
            time.sleep(0.02)
    finally:
        if os.getpid() == parent:  # a rank that ends passes here too
            for world in worlds:
                world.end()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks that no rank outlives or misses another's end.")
    parser.add_argument("--only", action="append", metavar="TEXT", help="faults whose line holds TEXT")
    parser.add_argument("--list", action="store_true", help="show the faults and plant none")
    parser.add_argument(
        "--seed", type=int, default=0, help="of micro-batches, steps and schedules (default 0)"
    )
    parser.add_argument("--timeout", type=float, default=4.0, metavar="S", help="the pipelines' (default 4)")
    parser.add_argument("--jobs", type=int, default=8, help="worlds side by side (default 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write JSON lines")
    options = parser.parse_args(arguments)
    chosen = [f for f in every(options.seed) if not options.only or any(t in str(f) for t in options.only)]
    if not chosen:
        parser.error("no fault has such a line; --list shows them")
    if options.list:
        print("\n".join(map(str, chosen)))
        return 0
    # Stopped ranks must not outlive this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    found: dict[Fault, Outcome] = {}
    for attempt in range(1, 4):
        again = [fault for fault in chosen if fault not in found or found[fault].late]
        for outcome in run(again, options.timeout, options.jobs if attempt == 1 else 1):
            found[outcome.fault] = replace(outcome, attempt=attempt)
            print(outcome, flush=True)
    outcomes = [found[fault] for fault in chosen]
    missed = sum(outcome.late or bool(outcome.wrong) for outcome in outcomes)
    print(
        f"{len(outcomes) - missed} of {len(outcomes)} faults ended every other rank within "
        f"{options.timeout:g} + {ALLOWANCE_S:g} s and were blamed on the right one; the slowest took "
        f"{max(outcome.longest_s for outcome in outcomes):.1f} s"
    )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
