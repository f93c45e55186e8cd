"""A small experiment for the tests of runner and command line; needs no torch.

Environment variables control it, so that tests can watch it from other processes: FAKE_LOG is a file to which
each executed case is appended, FAKE_GATE a folder with the pair of named pipes at which the case `step=2`
waits, FAKE_MEETING a named pipe at which `step=1` and `step=3` wait for each other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Metric, Record
from gpipe_bench.harness.verdict import Result

TABLE = "table1-amoebanet"
COLUMNS = {1: "naive-1", 2: "pipeline-1", 3: "pipeline-2", 4: "pipeline-4", 5: "pipeline-8"}
PARAMETERS = {1: 81_785_166, 2: 318_277_617, 3: 540_986_433, 4: 1_054_083_969, 5: 1_843_386_873}


def cases(options: RunOptions) -> list[Case]:
    """Five steps, three in smoke."""
    steps = 3 if options.profile == "smoke" else 5
    return [
        Case({"step": step, "kind": "even" if step % 2 == 0 else "odd"}, estimate_s=2.0)
        for step in range(1, steps + 1)
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    """Writes to the log, waits at the gate, fails on demand, else returns a parameter count."""
    step = case.key["step"]
    assert isinstance(step, int)
    if log := os.environ.get("FAKE_LOG"):
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{step} {os.getpid()}\n".encode())
        os.close(fd)
    if (gate := os.environ.get("FAKE_GATE")) and step == 2:
        orphan = os.environ.get("FAKE_STEP_2") == "orphan"
        if orphan and (child := os.fork()) != 0:
            os.waitpid(child, 0)
        Path(gate, "arrived").write_text("here")  # blocks until somebody reads
        Path(gate, "leave").read_text()  # blocks until somebody writes
        if orphan:
            os._exit(0)
    if (meeting := os.environ.get("FAKE_MEETING")) and step in (1, 3):
        with open(meeting, "rb" if step == 1 else "wb"):  # each blocks until the other is there
            pass
    print("a library that prints to standard output")
    os.write(1, b"and one that writes to the descriptor\n")
    match os.environ.get(f"FAKE_STEP_{step}"):
        case "crash":
            raise RuntimeError("the wheel came off\nwith details")
        case "package":
            raise ModuleNotFoundError("No module named 'axle'")
        case "memory":
            raise MemoryError("no room for 3 GiB")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            raise SystemExit(7)
        case "unstorable":
            return Outcome(details={"object": object()})
        case "skip":
            return Outcome(status="skipped", reason="needs 8 devices")
        case "print":
            print("é")
    return Outcome(
        (Metric(name="parameters", value=PARAMETERS[step], unit="parameters", provenance="modelled"),),
        details={"step": step},
    )


def steps(log: Path) -> list[int]:
    """The executed cases, in order, from the file FAKE_LOG."""
    return [int(line.split()[0]) for line in log.read_text().splitlines()]


def cells(records: Sequence[Record]) -> list[Result]:
    """A result per record."""
    return [
        Result(
            table=TABLE,
            row="parameters",
            column=COLUMNS[int(record.case["step"] or 0)],
            metric=record.metric("parameters"),
            record=record,
        )
        for record in records
    ]


class Lines:
    """A figure without matplotlib: a line per record."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.text = "\n".join(record.label for record in records)

    def savefig(self, path: Path, /, *, dpi: int) -> None:
        path.write_text(self.text)


def figures(records: Sequence[Record]) -> list[Plot]:
    """A figure with a line per record."""
    return [Plot(name="fake", caption="All steps", alt="Lines", draw=lambda: Lines(records), suffix="txt")]


EXPERIMENT = Experiment(
    name="fake",
    title="Parameters of Table 1",
    source="v5 Table 1",
    describe="counts that are known",
    profiles={"smoke": "three steps", "short": "five steps", "full": "five steps"},
    cases=cases,
    run=run,
    cells=cells,
    options=("device", "engine", "seed"),
    figures=figures,
    paper_tables=(TABLE,),
)
