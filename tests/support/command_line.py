"""Runs commands with the fake experiment registered; for several test files.

`call` runs a command in this process, without a new interpreter; `start` in a new process, for tests of
signals, closed or full streams, terminals, encodings, and imports that must not happen.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.experiments.registry import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
# Background jobs of a shell, and so their children, ignore interrupts. The grace period is long because
# orderly exits are slow on a busy machine.
START = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import gpipe_bench.experiments.registry
gpipe_bench.experiments.registry.EXPERIMENTS["fake"] = "fake_experiment"
import gpipe_bench.harness.processes
gpipe_bench.harness.processes.GRACE_S = 600.0
from gpipe_bench.experiments.commands.cli import main
sys.exit(main())
"""
NO_TORCH = (
    "import sys\nfor name in ('torch', 'pandas', 'matplotlib', 'scipy'): sys.modules[name] = None\n" + START
)


# Runs several commands, separated by "then"; returns the status of the first that fails.
SEVERAL = START.replace(
    "sys.exit(main())",
    """
commands = [[]]
for word in sys.argv[1:]:
    commands.append([]) if word == "then" else commands[-1].append(word)
sys.exit(next(filter(None, map(main, commands)), 0))
""",
)


def surroundings(**variables):
    """The environment of a command: this process's, without variables that change the output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    return {**environment, **variables}


def start(*arguments, code=START, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **variables):
    """A process that runs one command."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=surroundings(**variables),
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
    )  # fmt: skip


def finish(process):
    """Exit status, standard output and standard error of a process."""
    out, err = process.communicate(timeout=300)
    return process.returncode, (out or b"").decode(), (err or b"").decode()


def call(*arguments, **variables):
    """Exit status, standard output and standard error of one command, run in this process."""
    with ExitStack() as stack:
        out, err = (stack.enter_context(redirected(stream)) for stream in ("stdout", "stderr"))
        stack.enter_context(mock.patch.dict(os.environ, surroundings(**variables), clear=True))
        stack.enter_context(mock.patch.dict(EXPERIMENTS, fake="fake_experiment"))
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as error:
            status = error.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        return status, *((os.pread(file, os.fstat(file).st_size, 0)).decode() for file in (out, err))


@contextmanager
def redirected(name):
    """Redirects a standard stream and its descriptor to a temporary file; yields the file's descriptor."""
    stream, number = getattr(sys, name), {"stdout": 1, "stderr": 2}[name]
    stream.flush()
    kept = os.dup(number)
    with tempfile.TemporaryFile() as file, open(number, "w", encoding="utf-8", closefd=False) as own:
        os.dup2(file.fileno(), number)
        setattr(sys, name, own)
        try:
            yield file.fileno()
        finally:
            own.flush()
            setattr(sys, name, stream)
            os.dup2(kept, number)
            os.close(kept)


def run_fake(results, *arguments, **variables):
    return call("run", "fake", "--device", "cpu", "--results", results, *arguments, **variables)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


class Gate:
    """Two named pipes: the case `step=2` reports that it has begun, and waits until it may end."""

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
        (self.folder / "leave").write_text("go")  # opens because the case is reading

    def close(self):
        os.close(self.arrived)
