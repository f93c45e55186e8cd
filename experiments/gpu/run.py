"""Takes the steps one after another, remembers those that are finished, and packs what they leave.

    .ci/gpu                  the next steps that are not finished, as many as fit into --budget-s
    .ci/gpu STEP ...         these, whatever was finished before
    .ci/gpu --list           what would be taken, how long it takes, what is skipped and why
    .ci/gpu --rehearse       the same steps, small and on the CPU: everything but the GPU

Results go into one archive in $OUT (default results/local/gpu). A later call goes on from the archives that
it finds there, in results/local/gpu, and where --earlier says; $OUT may be empty each time. Packages that are
missing are installed from carried wheels in .wheels, for this call alone. Needs the standard library alone
until a step is started.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpipe_bench.experiments.gpu import packages
from gpipe_bench.experiments.gpu.device import Gpu, ask_torch, gpus_of, why_none
from gpipe_bench.experiments.gpu.plan import MODELLED, Planned, plan
from gpipe_bench.experiments.gpu.results import Results, Taken
from gpipe_bench.experiments.gpu.steps import STEPS, Step, find
from gpipe_bench.harness.places import ROOT

DONE, NO_GPU, BAD_USAGE, STEP_FAILED, LACKING = 0, 1, 2, 3, 4
BUDGET_S = 540.0
TO_END_S = 15.0  # that a step gets to write down what it has, once it is told to end
REHEARSED = Gpu("no GPU: a rehearsal on the CPU", 2**40)

Execute = Callable[[Sequence[str], Path, Mapping[str, str], float], int | None]
"""Runs Python with arguments, everything it prints going to the file as well, in at most so many seconds.
Returns its exit status, or None if it had to be ended.
"""


@dataclass(frozen=True)
class Machine:
    """What is asked of the machine; tests put others in."""

    ask_torch: Callable[[Mapping[str, str]], dict[str, Any] | str] = ask_torch
    execute: Execute = field(default_factory=lambda: execute)
    now_s: Callable[[], float] = time.monotonic
    path: tuple[str, ...] | None = None  # where packages are looked for


def main(arguments: Sequence[str] | None = None, machine: Machine | None = None) -> int:
    """Exit status: 0 all that was asked for is done, 1 no GPU, 2 bad usage, 3 a step failed or was ended, 4 a
    package is missing.
    """
    machine = machine or Machine()
    parser = argparse.ArgumentParser(
        prog=".ci/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(step.name for step in STEPS))
    parser.add_argument("--list", action="store_true", help="only say what would be taken")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU and small, without a GPU")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S", help="default: %(default)g")
    parser.add_argument(
        "--earlier", type=Path, action="append", default=[], metavar="PATH",
        help="earlier results: an archive, or a folder with some",
    )  # fmt: skip
    parser.add_argument("--wheels", type=Path, default=packages.WHEELS, metavar="DIR", help="carried wheels")
    options = parser.parse_args(arguments)
    local = ROOT / "results" / "local" / "gpu"
    out = Path(os.environ.get("OUT") or local)
    try:
        named = [find(name) for name in options.steps]
    except ValueError as error:
        return _complain(str(error), BAD_USAGE)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        environment, lacking = _environment(machine, Path(folder) / "site", options.wheels)
        if lacking and not options.list:
            return _complain(lacking, LACKING)
        gpus = [REHEARSED]
        if not options.rehearse:
            answer = machine.ask_torch(environment)
            gpus = gpus_of(answer)
            if not gpus:
                return _complain(
                    f"{why_none(answer)}; .ci/gpu needs one (--rehearse takes the same steps small and on "
                    "the CPU)",
                    NO_GPU,
                )
        results = Results(Path(folder) / "work")
        results.read(dict.fromkeys([*options.earlier, local, out]))
        path = machine.path if machine.path is not None else (*_added(environment), *sys.path)
        planned = plan(gpus, _of_kind(results, options.rehearse), named or STEPS, path)
        if options.list:
            _show(planned, gpus, lacking)
            return DONE
        chosen = [each for each in planned if each.is_next or (named and not each.lacks)]
        walk = _Walk(machine, results, environment, gpus[0], options.rehearse, out, options.budget_s)
        status = walk.take(chosen, [each for each in planned if each.lacks])
        print(f"results: {walk.packed}", flush=True)
        left = [each.step.name for each in plan(gpus, _of_kind(results, options.rehearse), STEPS, path)
                if each.is_next]  # fmt: skip
        print(f"left: {', '.join(left)}" if left else "all steps have been taken", flush=True)
        return status


def _of_kind(results: Results, rehearsed: bool) -> dict[str, Taken]:
    """A rehearsal is not taken for the real thing, nor the other way round."""
    return {name: taken for name, taken in results.taken().items() if taken.rehearsed == rehearsed}


def _environment(machine: Machine, site: Path, wheels: Path) -> tuple[dict[str, str], str]:
    """The environment of the steps, and what is missing for all of them, with the remedy."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    wanted = packages.declared()
    missing = packages.absent(wanted, machine.path)
    carried = packages.wheels_for([*missing, *_for_steps()], wheels) if wheels.is_dir() else []
    if carried:
        failed = packages.install(carried, site)
        if failed:
            return environment, f"the wheels in {wheels} cannot be installed: {failed}"
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), before]))
        missing = packages.absent(missing, (str(site),))
    if missing:
        names = ", ".join(map(packages.name_of, missing))
        return environment, f"missing: {names}; {packages.how_to_carry(missing, wheels)}"
    return environment, ""


def _for_steps() -> list[str]:
    return packages.absent(sorted({package for step in STEPS for package in step.packages}))


def _added(environment: Mapping[str, str]) -> list[str]:
    return environment.get("PYTHONPATH", "").split(os.pathsep)


@dataclass
class _Walk:
    machine: Machine
    results: Results
    environment: Mapping[str, str]
    gpu: Gpu
    rehearse: bool
    out: Path
    budget_s: float
    packed: Path | None = None

    def take(self, chosen: Sequence[Planned], lacking: Sequence[Planned]) -> int:
        """All that fit into the budget, the first in any case."""
        end_s = self.machine.now_s() + self.budget_s
        status = DONE
        for each in lacking:
            print(f"{each.step.name}: {each.describe()}", flush=True)
            if each.taken is None:
                self._add(each.step, "skipped", 0.0, None, each.lacks)
        self.packed = self.results.pack(self.out)
        for number, each in enumerate(chosen):
            left_s = end_s - self.machine.now_s()
            low, high = (60 * minutes for minutes in each.step.minutes)
            enough_s = 0.0 if self.rehearse else low if each.step.goes_on else high
            if number and left_s < enough_s + TO_END_S:
                print(f"{each.step.name}: left for the next call, {left_s:.0f} s are too few", flush=True)
                break
            if self._one(each.step, max(left_s, 1.0)) != "done":
                status = STEP_FAILED
            self.packed = self.results.pack(self.out)
        return status

    def _one(self, step: Step, limit_s: float) -> str:
        words = step.rehearsal if self.rehearse else step.command
        command = [word.format(results=self.results.records) for word in words]
        print(f"== {step.name}: {step.gives}", flush=True)
        start_s = self.machine.now_s()
        found = self.machine.execute(command, self.results.log(step.name), self.environment, limit_s)
        seconds = self.machine.now_s() - start_s
        if found == 0:
            status, why = "done", ""
        elif found is None:
            status = "cut" if step.goes_on else "failed"
            why = f"ended after {seconds:.0f} s, when the time was up"
            why += "; finished cases are kept" if step.goes_on else ""
        else:
            status, why = "failed", f"exit status {found}"
        self._add(step, status, seconds, found, why)
        print(f"== {step.name}: {status} in {seconds:.0f} s{f' ({why})' * bool(why)}", flush=True)
        return status

    def _add(self, step: Step, status: Any, seconds: float, exit_status: int | None, why: str) -> None:
        finished_at = datetime.now(UTC).isoformat(timespec="microseconds")
        self.results.add(
            Taken(step.name, status, seconds, exit_status, str(self.gpu), finished_at, why, self.rehearse)
        )


def _show(planned: Sequence[Planned], gpus: Sequence[Gpu], lacking: str) -> None:
    print(f"{len(gpus)} x {gpus[0]}; {MODELLED}")
    if lacking:
        print(lacking)
    width = max(len(each.step.name) for each in planned)
    for each in planned:
        print(f"{each.step.name:<{width}}  {each.describe()}\n{'':<{width}}  {each.step.gives}")


def _complain(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def execute(command: Sequence[str], log: Path, environment: Mapping[str, str], limit_s: float) -> int | None:
    """Runs Python in the checkout; what it prints appears here and in the file. Told to end by SIGTERM when
    the time is up, and killed with all that it started if that does not help.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        with log.open("rb") as shown:
            end_s, ended = time.monotonic() + limit_s, False
            while (status := process.poll()) is None:
                _pass_on(shown)
                if time.monotonic() > end_s:
                    os.killpg(process.pid, signal.SIGKILL if ended else signal.SIGTERM)
                    end_s, ended = time.monotonic() + TO_END_S, True
                time.sleep(0.05)
            _pass_on(shown)
    return None if ended else status


def _pass_on(shown: Any) -> None:
    sys.stdout.buffer.write(shown.read())
    sys.stdout.flush()
