"""Commands as another process sees them, with the fake experiment registered; for several test files."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Background jobs of a shell ignore interrupts, and so would their children.
START = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import gpipe_bench.experiments.registry
gpipe_bench.experiments.registry.EXPERIMENTS["fake"] = "fake_experiment"
from gpipe_bench.experiments.commands.cli import main
sys.exit(main())
"""
NO_TORCH = (
    "import sys\nfor name in ('torch', 'pandas', 'matplotlib', 'scipy'): sys.modules[name] = None\n" + START
)


def surroundings(**variables):
    """The environment of a command: this one's, without what would change the output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**environment, **variables}


def start(*arguments, code=START, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **variables):
    """A process that runs one command."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=surroundings(**variables),
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
    )  # fmt: skip


def call(*arguments, **variables):
    """Exit status, standard output and standard error of one command."""
    process = start(*arguments, **variables)
    out, err = process.communicate(timeout=60)
    return process.returncode, (out or b"").decode(), (err or b"").decode()


def run_fake(results, *arguments, **variables):
    return call("run", "fake", "--device", "cpu", "--results", results, *arguments, **variables)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


class Gate:
    """Two named pipes: the case `step=2` says that it arrived and waits until it may leave."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        for name in ("arrived", "leave"):
            os.mkfifo(folder / name)
        self.arrived = os.open(folder / "arrived", os.O_RDWR)  # both ends, so that opening never blocks

    def wait(self):
        ready, _, _ = select.select([self.arrived], [], [], 60)
        assert ready, "the case did not start within a minute"
        os.read(self.arrived, 100)

    def release(self):
        (self.folder / "leave").write_text("go")  # opens only because the case is waiting for it

    def close(self):
        os.close(self.arrived)
