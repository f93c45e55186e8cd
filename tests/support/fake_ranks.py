"""An experiment whose second case launches a process that never ends by itself, for the tests of signals.

The process starts another one (a grandchild of the run), writes both process ids to the named pipe
FAKE_ARRIVED, and waits in an operation that no Python handler interrupts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Metric


def cases(options: RunOptions) -> list[Case]:
    return [Case({"step": step}, estimate_s=1.0) for step in (1, 2, 3)]


def run(case: Case, options: RunOptions) -> Outcome:
    if case.key["step"] == 2:
        from gpipe_bench.experiments.paper.steps import run_processes

        run_processes(wait_for_ever, 1)
    return Outcome((Metric(name="one", value=1, unit="ratio", provenance="modelled"),))


def wait_for_ever() -> None:
    """Runs in the launched process."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True)
    child = subprocess.Popen([sys.executable, "-c", "import signal\nwhile True: signal.pause()"])
    Path(os.environ["FAKE_ARRIVED"]).write_text(f"{os.getpid()} {child.pid}\n")
    store.wait(["what nobody sets"], timedelta(hours=1))


EXPERIMENT = Experiment(
    name="fake",
    title="Processes that wait",
    source="beyond the paper",
    describe="nothing",
    profiles={"smoke": "three steps", "short": "three steps", "full": "three steps"},
    cases=cases,
    run=run,
    cells=lambda records: [],
    tables=lambda records: "the comparison",
)
