"""What runs on a machine with GPUs, the most telling command first: `.ci/gpu`, see docs/gpu.md.

    .ci/gpu                  what has not ended yet, for --minutes
    .ci/gpu NAME ...         these, whatever ended before
    .ci/gpu --list           what each needs, and what this machine lacks
    .ci/gpu --profile smoke  the same commands with tiny models, to see in minutes that they run here

All but the tests are `run`, which keeps every case the moment it is done. Records and what has ended lie in
results/local/gpu; only records.jsonl is put into $OUT, which may be emptied before each call.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

# The standard library alone: what else is missing here is the first thing to find out.
from gpipe_bench.harness import ROOT
from gpipe_bench.harness.processes import program, run

if TYPE_CHECKING:
    from gpipe_bench.harness.record import Record

DONE, NO_GPU, BAD_USAGE, FAILED, LACKING = 0, 1, 2, 3, 4
ESTIMATED = "minutes are estimated, memory is what torch's allocator takes; nothing has run on a GPU yet"
TEST_PACKAGES = ("pytest", "hypothesis", "pytest-benchmark")
STATE = ROOT / "results" / "local" / "gpu"
ENDS_S = 60.0  # that an interrupted command has to end


class Step(NamedTuple):
    """One command."""

    name: str
    minutes: float  # that its longest case takes at most on an H100: with less left it is not begun
    memory_gib: float  # of each GPU
    arguments: str  # of `run`, or of pytest
    gives: str  # what one knows afterwards
    gpus: int = 1


STEPS = (
    Step("tests", 4, 8, "pytest -m gpu -p no:cacheprovider -q",
         "the tests marked gpu: gradients, bits, masks, waits, NCCL, memory and timelines"),
    Step("pipelines", 9, 75, "table2 --only 'part=replay error'",
         "Table 2 for real: every K up to the number of GPUs, beside the same steps laid out", gpus=2),
    Step("baseline", 1, 16, "table1 --only part=device --only column=naive-1 --only column=pipeline-1",
         "Table 1's models with and without GPipe under 8 and 16 GiB, of which its factors are made"),
    Step("table2-transformer", 9, 75, "table2 --only model=transformer --only batch=fitted",
         "Table 2's Transformer-48 laid out, its mini-batch fitted to the memory of a stage"),
    Step("table1", 2, 16, "table1 --only part=device", "every distinct stage of Table 1's other columns"),
    Step("table4-resnet101", 4, 8, "table4 --only model=resnet101", "where the time of ResNet-101 goes"),
    Step("table2-amoebanet", 9, 10, "table2 --only model=amoebanet --only batch=fitted",
         "the same of AmoebaNet-D (18, 256)"),
    Step("table4-amoebanet", 6, 36, "table4 --only model=amoebanet", "where that of AmoebaNet-D goes"),
    Step("table3", 4, 28, "table3 --only part=steps", "Table 3: actions for the replay over slow links"),
    Step("table2-fixed", 9, 75, "table2 --only batch=fixed", "Table 2 laid out at one mini-batch"),
    Step("figure3-resnet101", 5, 18, "figure3 --only model=resnet101", "v1's Figure 3, ResNet-101"),
    Step("engines", 2, 16, "engines", "the engine's own cost, beside torch's and torchgpipe"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 nothing failed, 1 no GPU, 2 bad usage, 3 a command failed, 4 a package is missing."""
    parser = argparse.ArgumentParser(
        prog=".ci/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(step.name for step in STEPS)
    parser.add_argument("steps", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--list", action="store_true", help="only say what each needs")
    parser.add_argument("--minutes", type=float, default=8.5, help="then it ends; default: %(default)g")
    parser.add_argument("--profile", choices=("smoke", "full"), default="full", help="of each `run`")
    parser.add_argument("--results", type=Path, default=STATE, help="for the state; default: %(default)s")
    options = parser.parse_args(arguments)
    if unknown := set(options.steps) - {step.name for step in STEPS}:
        parser.error(f"no step is called {sorted(unknown)[0]!r}; there are {names}")
    if missing := absent(declared()):
        print(f"error: missing: {how_to_install(missing)}", file=sys.stderr)
        return LACKING
    torch = ask_torch()
    if isinstance(torch, str) or not torch["gpus"]:
        why = f"can't be asked: {torch}" if isinstance(torch, str) else f"{torch['version']} sees no GPU here"
        print(f"error: torch {why}; .ci/gpu needs one", file=sys.stderr)
        return NO_GPU
    if options.list:
        print(f"{len(torch['gpus'])} x {torch['gpus'][0]}; {ESTIMATED}")
        for step in STEPS:
            takes = f"{step.gpus} GPUs, {step.minutes:g} min a case, {step.memory_gib:g} GiB of a GPU"
            why = lacks(step, torch)
            print(f"{step.name:<20}{takes}{f'; skipped: {why}' * bool(why)}\n{'':<20}{step.gives}")
        return DONE
    state = options.results.absolute()
    steps = [step for step in STEPS if step.name in options.steps or not options.steps]
    if options.profile == "smoke":
        print("tiny models: what they give says that the commands run here, and nothing of the paper")
        state, steps = state / "smoke", [step._replace(minutes=1.0) for step in steps]
    records, out = state / "records", Path(os.environ.get("OUT") or state).absolute()
    records.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * options.minutes
    status = _take(steps, torch, state, options.profile, again=bool(options.steps), end_s=end_s)
    if found := sorted(records.glob("*.jsonl")):
        (out / "records.jsonl").write_bytes(b"".join(path.read_bytes() for path in found))
    return status


def _take(
    steps: Iterable[Step], torch: dict[str, Any], state: Path, profile: str, *, again: bool, end_s: float
) -> int:
    """Runs the steps that there is time for, and always the first; returns the exit status."""
    status, begun, list_of_ended = DONE, False, state / "ended.txt"
    ended = [] if again or not list_of_ended.exists() else list_of_ended.read_text().split()
    for step in steps:
        if why := lacks(step, torch):
            print(f"{step.name}: skipped: {why}", flush=True)
        elif step.name in ended:
            print(f"{step.name}: ended before", flush=True)
        elif begun and time.monotonic() + 60 * step.minutes > end_s:
            print(f"{step.name}: left for the next call", flush=True)
        else:
            begun = True
            print(f"== {step.name}: {step.gives}", flush=True)
            is_run = not step.arguments.startswith("pytest")
            code = _one(command(step, state / "records", profile), end_s, quiet=is_run)
            if code is None:
                print(f"== {step.name}: the time is over; the next call goes on", flush=True)
                break
            words = shlex.split(step.arguments)
            found = of_step(words, state / "records") if is_run else ["all pass"] * (code == 0)
            for line in (*found, *[f"exit status {code}"] * (code != 0)):
                print(f"== {step.name}: {line}", flush=True)
            status = FAILED if code else status
            # A step that a signal ended is due again, and so are tests that failed.
            if code == 0 or (code > 0 and is_run):
                with list_of_ended.open("a") as file:
                    file.write(f"{step.name}\n")
    return status


def command(step: Step, records: Path, profile: str = "full") -> list[str]:
    """The command line of a step."""
    words = shlex.split(step.arguments)
    if words[0] == "pytest":
        return [sys.executable, "-m", *words]
    words += ["--profile", profile, "--device", "cuda", "--json", "--results", str(records)]
    return [sys.executable, "-m", "experiments", "run", *words]


def _one(words: Sequence[str], end_s: float, *, quiet: bool = False) -> int | None:
    """The exit status, None if the time was over. `quiet`: its standard output is on record."""
    variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    env, stdout = os.environ | variables, subprocess.DEVNULL if quiet else None
    with program(words, cwd=ROOT, env=env, stdout=stdout) as process:
        try:
            return process.wait(max(1.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_S)
            return None


def lacks(step: Step, torch: dict[str, Any]) -> str:
    """A requirement of the step that this machine, which has a GPU, does not meet, with the remedy."""
    if len(torch["gpus"]) < step.gpus:
        return f"needs {step.gpus} GPUs"
    if torch["gib"] < step.memory_gib:
        return f"needs {step.memory_gib:g} GiB (estimated)"
    missing = absent(TEST_PACKAGES) if step.arguments.startswith("pytest") else []
    return f"needs {how_to_install(missing)}" if missing else ""


# What a step found, in words: a pure function of its records


def of_step(arguments: Sequence[str], records: Path) -> list[str]:
    """A line for each number of ours beside the paper's, and for what did not run, of the records that `run`
    with these arguments leaves in a folder.
    """
    from gpipe_bench.harness.experiment import only_of
    from gpipe_bench.harness.store import Store, latest

    name, *options = arguments
    only = only_of(word for word in options if word != "--only")
    found = [
        record
        for record in latest(Store(records).load(name).records).values()
        if all(str(record.case.get(key)) in wanted for key, wanted in only.items())
    ]
    return list(sentences(found)) if found else ["no case has ended"]


def sentences(records: Sequence[Record]) -> Iterator[str]:
    """What the records of one step say."""
    for record in records:
        if record.status != "done":
            yield f"{record.label}: {record.status.replace('_', ' ')}: {record.reason.splitlines()[0]}"
    done = [record for record in records if record.status == "done"]
    yield from _fits([each for each in done if each.case.get("part") == "device"])
    yield from _beside([each for each in done if each.case.get("part") != "device"])


def _fits(records: Sequence[Record]) -> Iterator[str]:
    from gpipe_bench.models.paper import GIB, HALVES

    for (half, precision), group in groupby(records, key=lambda r: (r.case["half"], r.case["precision"])):
        said = []
        for record in group:
            fits, how = ("fits", "measured") if record.details["fits"] else ("does not fit", "modelled")
            gib = (getattr(record.metric(f"{how} peak"), "value", None) or 0) / GIB
            said.append(f"{record.case['column']} {fits} ({gib:.2f} GiB {how})")
        cap = HALVES[str(half)].cap_gib
        yield f"{half} in {precision} under {cap:g} GiB: {', '.join(said)}; the paper: all of these fit"


def _beside(records: Sequence[Record]) -> Iterator[str]:
    """How the numbers stand to the paper's, what found no room, and whether the machine changed."""
    if not records:
        return
    from gpipe_bench.experiments.registry import load
    from gpipe_bench.harness.compare import compare
    from gpipe_bench.harness.rounds import state_of

    for record in records:
        if why := state_of(record)[1]:
            yield f"{record.label}: {why}"
        for name, facts in record.details.get("cells", {}).items():
            if facts.get("out_of_memory"):
                yield f"{record.label}: {name} did not run: {facts['out_of_memory']}"
    yield f"{len(records)} {'case is' if len(records) == 1 else 'cases are'} done"
    cells = compare(load(records[0].experiment).cells(records), whole=())
    here = [each for each in cells if each.question == "here"]
    if off := [abs(each.ours / each.paper - 1) for each in here if each.ours is not None and each.paper]:
        half = f"half of them within {100 * median(off):.0f} % of it"
        yield f"{len(off)} numbers stand beside the paper's, {half}"


# Packages and GPUs that this machine has and lacks; `list --machine` uses it, too

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
    """torch's facts about itself and the GPUs, or why it can't be asked: in a process of its own, since a
    build that does not fit the machine dies without a message.
    """
    try:
        done = run([sys.executable, "-c", _ASK_TORCH], 120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode < 0:
        return f"importing it ends with signal {-done.returncode}"
    if done.returncode > 0:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def declared() -> list[str]:
    """Packages that the project and its experiments declare to need, such as "msgspec>=0.19"."""
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return [*project["dependencies"], *project["optional-dependencies"]["experiments"]]
    except OSError:  # installed without its sources
        lines = [line.partition(";") for line in importlib.metadata.requires("gpipe-bench") or []]
        return [what.strip() for what, _, when in lines if "extra" not in when or "experiments" in when]


def absent(requirements: Iterable[str]) -> list[str]:
    """The requirements of which no version is installed, or one that is too old."""

    def numbers(version: str) -> list[int]:
        found = [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
        return found + [0] * (4 - len(found))  # 1.0 is no older than 1.0.0

    missing = []
    for requirement in requirements:
        name, least = re.match(r"([\w.-]+)(?:.*>=\s*([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if numbers(importlib.metadata.version(name)) >= numbers(least or ""):
                continue
        missing.append(requirement)
    return missing


def how_to_install(requirements: Sequence[str]) -> str:
    """Names of packages, and what to type."""
    names = ", ".join(re.split(r"[^\w.-]", each)[0] for each in requirements)
    return f"{names}: python -m pip install {' '.join(map(repr, requirements))}"


if __name__ == "__main__":
    sys.exit(main())
