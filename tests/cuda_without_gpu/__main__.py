"""The GPU path over torch's CUDA build without a GPU: `nox -s cuda-without-gpu`.

Downloads and builds what is missing (`stand_in.py`), then walks what machines with GPUs walk, with several
numbers of devices and sizes of memory: the tests of this folder, and every step of `.ci/gpu` at its real
size. A walk that failed, or took more memory than the step says, makes the exit status 1; a step that says
why it cannot run there is skipped. What each printed is in the folder.

    nox -s cuda-without-gpu                                       all machines (--list)
    nox -s cuda-without-gpu -- pipelines --gpus 4 --gib 44.4      these steps on another
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from stand_in import CannotBuildError, default_folder, prepare, variables

from gpipe_bench.experiments.gpu import STEPS, Step

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DONE, FAILED, CANNOT_BUILD = 0, 1, 2
NOT_SHOWN = """\
Shown: Python, devices, the allocator's bytes, waits of the host, launches, which messages meet, time-outs.
Not shown: numbers (kernels compute nothing, tests compare shapes and dtypes), races, devices that wait for
each other (tests/support/fakes), kernels and workspaces of cuDNN and Triton, the speed of a device."""
H100_GIB = 79.1
BY_NAME = {step.name: step for step in STEPS}
MACHINES: dict[tuple[int, float], tuple[str, ...]] = {
    (1, H100_GIB): tuple(BY_NAME), (1, 44.4): tuple(BY_NAME), (1, 24.0): tuple(BY_NAME),
    (2, H100_GIB): ("engines",), (4, H100_GIB): ("tests",), (8, H100_GIB): ("tests", "pipelines"),
}  # fmt: skip
"""Devices and GiB of each, and the steps that differ there from those of others: pipelines over eight devices
are over two and four of them, too.
"""


class Walk(NamedTuple):
    """A command over so many devices of so much memory, of which it takes at most `most_gib`."""

    name: str
    gpus: int
    gib: float
    command: tuple[str, ...]
    most_gib: float = float("inf")

    @property
    def title(self) -> str:
        return f"{self.name}, {self.gpus} x {self.gib:g} GiB"

    @classmethod
    def of(cls, step: Step, gpus: int, gib: float) -> Walk:
        """A step of `.ci/gpu`, with results of its own: those of another machine would pass for done."""
        command = ("-m", "gpipe_bench.experiments.gpu", "--minutes", "600", step.name)
        return cls(step.name, gpus, gib, command, step.memory_gib)


OWN = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda_without_gpu")
WALKS = (
    *(Walk("the runtime's own tests", gpus, H100_GIB, OWN) for gpus in (1, 4)),
    *(Walk.of(BY_NAME[name], *machine) for machine, names in MACHINES.items() for name in names),
)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="nox -s cuda-without-gpu --", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(BY_NAME)}; default: all")
    parser.add_argument(
        "--gpus", type=int, help="devices of another machine than those of --list; default: 1"
    )
    parser.add_argument("--gib", type=float, help=f"memory of each; default: {H100_GIB}")
    parser.add_argument("--only", default="", metavar="TEXT", help="walks whose title has it, such as '4 x'")
    parser.add_argument("--list", action="store_true", help="only say which walks there are")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="default: %(default)s")
    options = parser.parse_args()
    if unknown := set(options.steps) - set(BY_NAME):
        parser.error(f"no step is called {sorted(unknown)[0]!r}; there are {', '.join(BY_NAME)}")
    walks = list(WALKS)
    if options.steps or options.gpus or options.gib:
        machine = options.gpus or 1, options.gib or H100_GIB
        walks = [Walk.of(BY_NAME[name], *machine) for name in options.steps or BY_NAME]
    walks = [walk for walk in walks if options.only in walk.title]
    if options.list:
        print("\n".join(walk.title for walk in walks))
        return DONE
    if not walks:
        parser.error(f"no walk's title has {options.only!r}; --list shows them")
    try:
        folder = prepare(options.folder.absolute())
    except CannotBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_BUILD
    failed = [walk for walk in walks if not take(walk, folder)]
    print(NOT_SHOWN)
    return FAILED if failed else DONE


def take(walk: Walk, folder: Path) -> bool:
    """Whether a walk did what it should; one that failed shows the end of what it printed."""
    name = walk.title.replace(" ", "-")
    printed = folder / "printed" / f"{name}.txt"
    out = folder / "out" / name
    shutil.rmtree(out, ignore_errors=True)  # or the steps would go on from an earlier walk
    for made in (printed.parent, out / "peaks"):
        made.mkdir(parents=True, exist_ok=True)
    environment = variables(folder, ROOT, gpus=walk.gpus, gib=walk.gib)
    environment["PYTHONPATH"] += f"{os.pathsep}{HERE}"
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1", "FAKE_KERNEL_US": "1"}
    environment |= {"PYTEST_ADDOPTS": "-p forms_only", "OUT": str(out), "FAKE_PEAKS": str(out / "peaks")}
    results = ("--results", str(out)) if "gpipe_bench.experiments.gpu" in walk.command else ()
    begun_s = time.monotonic()
    with printed.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, *walk.command, *results], cwd=ROOT, env=environment, check=False,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    taken_s = time.monotonic() - begun_s
    said = printed.read_text(encoding="utf-8", errors="replace").splitlines()
    peaks = [path.read_text().split() for path in (out / "peaks").iterdir()]
    most_gib = max((int(each[-1]) for each in peaks if each), default=0) / 2**30
    skipped = next((line for line in said if line.startswith(f"{walk.name}: skipped: ")), "")
    is_right = done.returncode == 0 and most_gib <= walk.most_gib
    found = skipped.partition(": ")[2] or f"{'ok' if is_right else 'failed'}, {taken_s:.0f} s"
    of = "" if walk.most_gib == float("inf") else f" of {walk.most_gib:g}"
    took = "" if skipped else f", {most_gib:.1f}{of} GiB; {printed}"
    print(f"{walk.title}: {found}{took}", flush=True)
    results = [line for line in said if line.startswith(f"== {walk.name}: ")][1:]  # behind what it gives
    for line in said[-40:] if done.returncode else results:
        print(f"    {line}", flush=True)
    return is_right


if __name__ == "__main__":
    sys.exit(main())
