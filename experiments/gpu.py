"""What runs on a machine with a GPU, one step after another: `.ci/gpu`, see docs/gpu.md.

    .ci/gpu                  the steps that have not ended yet, as many as fit into --minutes
    .ci/gpu STEP ...         these, whatever ended before
    .ci/gpu --list           what each step needs, and what this machine lacks

Everything goes to $OUT (default results/local/gpu): NAME.txt is what a step printed, records/ has the
records, and records.zip is the same as one file. A run that was interrupted goes on from its records.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The standard library alone: what else is missing here is the first thing to find out.
from gpipe_bench.harness.places import ROOT

DONE, NO_GPU, BAD_USAGE, STEP_FAILED, LACKING = 0, 1, 2, 3, 4
MODELLED = "minutes and memory are modelled, not measured; none of these steps has run on a GPU yet"


class Step(NamedTuple):
    """One thing to run."""

    name: str  # on the command line, and of the file with what it prints
    minutes: float  # that it takes at most on an H100, by operations and steps at 0.2 of the peak
    memory_gib: float  # of the GPU, by the memory model
    command: tuple[str, ...]  # arguments of Python; `{records}` is the folder of the records
    gives: str  # what one knows afterwards
    packages: tuple[str, ...] = ()  # that must be there besides what the project needs

    @property
    def takes(self) -> str:
        """In words."""
        return f"at most {self.minutes:g} min and {self.memory_gib:g} GiB of a GPU (modelled)"


def _run(name: str, minutes: float, memory_gib: float, what: str, gives: str) -> Step:
    """A step that runs cases: `what` is the experiment and the cases' keys."""
    experiment, *only = what.split()
    options = ["--profile", "full", "--device", "cuda", "--results", "{records}"]
    chosen = [word for case in only for word in ("--only", case)]
    command = ("-m", "experiments", "run", experiment, *options, *chosen)
    return Step(name, minutes, memory_gib, command, gives)


# What comes first is worth most if nothing follows: such a machine is mostly lent for minutes.
STEPS = (
    Step("tests", 8, 8, ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-q"),
         "the tests marked gpu: gradients, bits, masks, waits, NCCL, memory and timelines",
         ("pytest", "hypothesis", "pytest-benchmark")),
    _run("table1-amoebanet", 5, 8, "table1 part=device half=amoebanet",
         "Table 1's AmoebaNet columns: every distinct stage under the paper's 8 GiB"),
    _run("table1-transformer", 5, 16, "table1 part=device half=transformer",
         "Table 1's Transformer columns: every distinct stage under the paper's 16 GiB"),
    _run("table4-resnet101", 4, 8, "table4 model=resnet101", "where the time of ResNet-101 goes"),
    _run("table4-amoebanet", 6, 32, "table4 model=amoebanet", "where the time of AmoebaNet-D (4, 512) goes"),
    _run("table2-transformer", 9, 54, "table2 model=transformer batch=fitted",
         "Table 2's Transformer-48, its mini-batch fitted to the memory of a stage"),
    _run("table2-amoebanet", 9, 10, "table2 model=amoebanet batch=fitted",
         "Table 2's AmoebaNet-D (18, 256), its mini-batch fitted to the memory of a stage"),
    _run("table3-amoebanet", 3, 2, "table3 part=steps model=amoebanet",
         "Table 3's AmoebaNet-D (18, 128): actions for the replay over slow links"),
    _run("table3-transformer", 4, 25, "table3 part=steps model=transformer",
         "Table 3's Transformer-24: actions for the replay over slow links"),
    _run("table2-transformer-fixed", 9, 71, "table2 model=transformer batch=fixed",
         "Table 2's Transformer-48 at one mini-batch; K=2, M=1 may find no room"),
    _run("table2-amoebanet-fixed", 9, 36, "table2 model=amoebanet batch=fixed",
         "Table 2's AmoebaNet-D (18, 256) at one mini-batch"),
    _run("figure3-resnet101", 5, 26, "figure3 model=resnet101", "v1's Figure 3, ResNet-101"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 nothing failed, 1 no GPU, 2 bad usage, 3 a step failed, 4 a package is missing."""
    parser = argparse.ArgumentParser(
        prog=".ci/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(step.name for step in STEPS)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=names)
    parser.add_argument("--list", action="store_true", help="only say what each step needs")
    parser.add_argument(
        "--minutes", type=float, default=9.0, metavar="M",
        help="begin no step, but for the first, that takes more than is left of them; default: %(default)g",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if unknown := set(options.steps) - {step.name for step in STEPS}:
        parser.error(f"no step is called {sorted(unknown)[0]!r}; there are {names}")
    out = Path(os.environ.get("OUT") or ROOT / "results" / "local" / "gpu").absolute()
    if missing := absent(declared()):
        print(f"error: missing: {how_to_install(missing)}", file=sys.stderr)
        return LACKING
    torch = ask_torch()
    if isinstance(torch, str) or not torch["gpus"]:
        print(f"error: {why_no_gpu(torch)}; .ci/gpu needs one", file=sys.stderr)
        return NO_GPU
    if options.list:
        print(f"{len(torch['gpus'])} x {torch['gpus'][0]}; {MODELLED}")
        for step in STEPS:
            why = lacks(step, torch)
            print(f"{step.name:<24}  {step.takes}{f'; skipped: {why}' * bool(why)}\n{'':<24}  {step.gives}")
        return DONE
    (out / "records").mkdir(parents=True, exist_ok=True)
    again = bool(options.steps)
    chosen = [step for step in STEPS if step.name in options.steps or not again]
    status = _take(chosen, torch, out, again=again, minutes=options.minutes)
    if any((out / "records").glob("*.jsonl")):
        export = ("export", "--results", out / "records", "--output", out / "records.zip")
        packed = subprocess.run([sys.executable, "-m", "experiments", *export], cwd=ROOT, check=False)
        status = STEP_FAILED if packed.returncode else status
    return status


def _take(steps: Iterable[Step], torch: dict[str, Any], out: Path, *, again: bool, minutes: float) -> int:
    """All that fit into the minutes, the first in any case; the exit status of the call."""
    start_s, status, begun = time.monotonic(), DONE, False
    for step in steps:
        left = minutes - (time.monotonic() - start_s) / 60
        printed = out / f"{step.name}.txt"
        if why := lacks(step, torch):
            print(f"{step.name}: skipped: {why}", flush=True)
        elif printed.exists() and not again:
            print(f"{step.name}: ended before, see {printed}", flush=True)
        elif begun and left < step.minutes:
            print(f"{step.name}: left for the next call, which goes on here", flush=True)
            break
        else:
            begun = True
            print(f"== {step.name}: {step.gives}", flush=True)
            if ended := _one(step, printed):
                print(f"== {step.name}: exit status {ended}", flush=True)
                status = STEP_FAILED
    return status


def _one(step: Step, printed: Path) -> int:
    """The exit status of a step; what it prints appears here and, once it ended by itself, in the file."""
    command = [sys.executable, *(word.format(records=printed.parent / "records") for word in step.command)]
    variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    part = printed.with_suffix(".part")
    with (
        part.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        ) as process,
    ):  # fmt: skip
        for line in process.stdout or ():
            print(line, end="", flush=True)
            print(line, end="", flush=True, file=file)
    if 0 <= process.returncode < 128:  # no signal ended it
        part.replace(printed)
    return process.returncode


# What a machine has and lacks, which `doctor` says too


def lacks(step: Step, torch: dict[str, Any] | str) -> str:
    """What a step needs and this machine has not, in words, with the remedy."""
    if isinstance(torch, str) or not torch["gpus"]:
        return "needs a GPU"
    if torch["gib"] < step.memory_gib:
        return f"needs {step.memory_gib:g} GiB (modelled)"
    missing = absent(step.packages)
    return f"needs {how_to_install(missing)}" if missing else ""


_ASK_TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found],
    "gib": min((gpu.total_memory / 2**30 for gpu in found), default=0.0),
    "distributed": torch.distributed.is_available(),
    "threads": torch.get_num_threads(),
}))
"""


def ask_torch() -> dict[str, Any] | str:
    """What torch says about itself and the GPUs, or why it can't be asked.

    In a process of its own: a build that does not fit the machine dies without a message.
    """
    asked = [sys.executable, "-c", _ASK_TORCH]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode < 0:
        return f"importing it ends with signal {-done.returncode}"
    if done.returncode > 0:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def why_no_gpu(torch: dict[str, Any] | str) -> str:
    """One line for a machine without a GPU that torch could use."""
    if isinstance(torch, str):
        return f"torch cannot be asked for GPUs: {torch}"
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built for CPUs only"
    return f"torch {torch['version']} ({build}) sees no GPU here"


def declared() -> list[str]:
    """What the project declares to need, such as "msgspec>=0.19"."""
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return list(project["dependencies"])
    except OSError:  # installed without its sources
        lines = importlib.metadata.requires("gpipe-bench") or []
        return [line for line in lines if "extra ==" not in line]


def absent(requirements: Iterable[str]) -> list[str]:
    """Those of which no version is installed, or one that is too old."""

    def numbers(version: str) -> list[int]:
        found = [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
        return found + [0] * (4 - len(found))  # 1.0 is no older than 1.0.0

    missing = []
    for requirement in requirements:
        name, least = re.match(r"([\w.-]+)(?:.*>=\s*([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
        try:
            if numbers(importlib.metadata.version(name)) >= numbers(least or ""):
                continue
        except importlib.metadata.PackageNotFoundError:
            pass
        missing.append(requirement)
    return missing


def how_to_install(requirements: Sequence[str]) -> str:
    """Names of packages, and what to type."""
    names = ", ".join(re.split(r"[^\w.-]", each)[0] for each in requirements)
    return f"{names}: python -m pip install {' '.join(map(repr, requirements))}"


if __name__ == "__main__":
    sys.exit(main())
