"""Tests the GPU path of torch's CUDA build, no GPU: `nox -s cuda-without-gpu`.

Downloads and builds what is missing (`stand_in.py`), then takes the tests of this folder, and walks `.ci/gpu`
with tiny models on several machines: every step ends, or says on its line why it cannot run there. A call
that failed, or a step without such a line, makes the exit status 1. What each call printed is in the folder.

    nox -s cuda-without-gpu                                       all machines (--list)
    nox -s cuda-without-gpu -- pipelines --gpus 4 --gib 44.4      these steps at their real size on another

At its real size a step also fails if it uses more memory than its `memory_gib`.
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

from gpipe_bench.experiments.gpu import STEPS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DONE, FAILED, CANNOT_BUILD = 0, 1, 2
NOT_SHOWN = """\
Shown: Python, devices, the allocator's bytes, waits of the host, launches, which messages meet, time-outs.
Not shown: numbers (kernels compute nothing, tests compare shapes and dtypes), races, devices that wait for
each other (tests/support/fakes), kernels and workspaces of cuDNN and Triton, the speed of a device."""
H100_GIB = 79.1
NEEDS_GIB = {step.name: step.memory_gib for step in STEPS}
OWN = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda_without_gpu")
GPU = ("-m", "gpipe_bench.experiments.gpu", "--minutes", "600")


class Walk(NamedTuple):
    """A command for `gpus` devices of `gib` each, the steps it must report, and the peak allowed."""

    name: str
    gpus: int
    gib: float
    command: tuple[str, ...]
    steps: tuple[str, ...] = ()
    most_gib: float = float("inf")

    @property
    def title(self) -> str:
        return f"{self.name}, {self.gpus} x {self.gib:g} GiB"

    @classmethod
    def whole(cls, gpus: int, gib: float) -> Walk:
        """All steps with tiny models."""
        return cls("every step", gpus, gib, (*GPU, "--profile", "smoke"), tuple(NEEDS_GIB))

    @classmethod
    def of(cls, step: str, gpus: int, gib: float) -> Walk:
        """A step at its real size."""
        return cls(step, gpus, gib, (*GPU, step), (step,), NEEDS_GIB[step])


WALKS = (
    *(Walk("the runtime's own tests", gpus, H100_GIB, OWN) for gpus in (1, 4)),
    *(Walk.whole(1, gib) for gib in (24.0, 44.4, H100_GIB, 139.8)),
    Walk.whole(4, 24.0),
    Walk.whole(8, H100_GIB),
)
"""One-device walks are sorted by memory: a step that finished with less is not run again."""


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="nox -s cuda-without-gpu --", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(NEEDS_GIB)}; default: all")
    parser.add_argument(
        "--gpus", type=int, help="devices of another machine than those of --list; default: 1"
    )
    parser.add_argument("--gib", type=float, help=f"memory of each; default: {H100_GIB}")
    parser.add_argument("--only", default="", metavar="TEXT", help="walks whose title has it, such as '4 x'")
    parser.add_argument("--list", action="store_true", help="only say which walks there are")
    options = parser.parse_args()
    if unknown := set(options.steps) - set(NEEDS_GIB):
        parser.error(f"no step is called {sorted(unknown)[0]!r}; there are {', '.join(NEEDS_GIB)}")
    walks = list(WALKS)
    if options.steps or options.gpus or options.gib:
        machine = options.gpus or 1, options.gib or H100_GIB
        walks = [Walk.of(name, *machine) for name in options.steps or NEEDS_GIB]
    walks = [walk for walk in walks if options.only in walk.title]
    if options.list:
        print("\n".join(walk.title for walk in walks))
        return DONE
    if not walks:
        parser.error(f"no walk's title has {options.only!r}; --list shows them")
    try:
        folder = prepare(default_folder())
    except CannotBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_BUILD
    shutil.rmtree(folder / "out", ignore_errors=True)  # or the steps would go on from an earlier call
    failed = [walk for walk in walks if not take(walk, folder)]
    print(NOT_SHOWN)
    return FAILED if failed else DONE


def take(walk: Walk, folder: Path) -> bool:
    """Whether a walk did what it should; one that failed shows the end of what it printed."""
    printed = folder / "printed" / f"{walk.title.replace(' ', '-')}.txt"
    out = folder / "out" / f"{walk.name}-{walk.gpus}".replace(" ", "-")
    shutil.rmtree(out / "peaks", ignore_errors=True)
    for made in (printed.parent, out / "peaks"):
        made.mkdir(parents=True, exist_ok=True)
    environment = variables(folder, ROOT, gpus=walk.gpus, gib=walk.gib)
    environment["PYTHONPATH"] += f"{os.pathsep}{HERE}"
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1", "FAKE_KERNEL_US": "1"}
    environment |= {"PYTEST_ADDOPTS": "-p forms_only", "OUT": str(out), "FAKE_PEAKS": str(out / "peaks")}
    begun_s = time.monotonic()
    with printed.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, *walk.command, *(("--results", str(out)) if walk.steps else ())], cwd=ROOT,
            env=environment, check=False, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    taken_s = time.monotonic() - begun_s
    said = printed.read_text(encoding="utf-8", errors="replace").splitlines()
    peaks = [path.read_text().split() for path in (out / "peaks").iterdir()]
    most_gib = max((int(each[-1]) for each in peaks if each), default=0) / 2**30
    results = [line for name in walk.steps for line in lines_of(name, said)]
    unsaid = [name for name in walk.steps if not lines_of(name, said)]
    is_right = done.returncode == 0 and most_gib <= walk.most_gib and not unsaid
    of = "" if walk.most_gib == float("inf") else f" of {walk.most_gib:g}"
    how = "ok" if is_right else f"failed{': no result of ' * bool(unsaid)}{', '.join(unsaid)}"
    print(f"{walk.title}: {how}, {taken_s:.0f} s, {most_gib:.1f}{of} GiB; {printed}", flush=True)
    for line in said[-40:] if done.returncode else results:
        print(f"    {line}", flush=True)
    return is_right


def lines_of(step: str, said: list[str]) -> list[str]:
    """What `.ci/gpu` says of a step: why it is skipped, that it has ended before, or what it found."""
    before = [line for line in said if line.startswith((f"{step}: skipped: ", f"{step}: ended before"))]
    return before + [line for line in said if line.startswith(f"== {step}: ")][1:]  # behind what it gives


if __name__ == "__main__":
    sys.exit(main())
