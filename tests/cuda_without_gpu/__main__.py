"""The GPU path over torch's CUDA build without a GPU: `nox -s cuda-without-gpu`.

Downloads and builds what is missing (`build.py`), then walks what a machine with GPUs walks, with several
numbers of devices and sizes of memory: the tests marked `gpu`, the tests of this folder, and every step of
`.ci/gpu` at its real size. A walk that failed makes the exit status 1; what it printed is in the folder.
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

from build import CannotBuildError, default_folder, prepare, variables

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DONE, FAILED, CANNOT_BUILD = 0, 1, 2
NOT_SHOWN = """\
Shown: Python, devices, the allocator's bytes, waits of the host, launches, which messages meet, time-outs.
Not shown: numbers (kernels compute nothing, tests compare shapes and dtypes), races, kernels and workspaces
of cuDNN and Triton, the speed of a device."""
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
STEPS = ("-m", "gpipe_bench.experiments.gpu", "--minutes", "600")


class Walk(NamedTuple):
    """A command over so many devices of so much memory."""

    name: str
    gpus: int
    gib: float
    command: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.name}, {self.gpus} x {self.gib:g} GiB"


WALKS = (
    *(Walk("tests of this runtime", gpus, 79.1, (*PYTEST, "tests/cuda_without_gpu")) for gpus in (1, 4)),
    *(Walk("tests marked gpu", gpus, 79.1, (*PYTEST, "-m", "gpu", "tests")) for gpus in (1, 4, 8)),
    *(
        Walk("steps of .ci-gpu", gpus, gib, STEPS)
        for gpus, gib in ((1, 79.1), (1, 44.4), (1, 24), (4, 79.1), (8, 79.1))
    ),
)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="nox -s cuda-without-gpu --", description=__doc__.split("\n\n")[1])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="TEXT", help="walks whose title has it, such as '4 x'")
    parser.add_argument("--list", action="store_true", help="only say which walks there are")
    options = parser.parse_args()
    walks = [walk for walk in WALKS if options.only in walk.title]
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
    failed = [walk for walk in walks if take(walk, folder)]
    print(NOT_SHOWN)
    return FAILED if failed else DONE


def take(walk: Walk, folder: Path) -> int:
    """The exit status of a walk; one that failed shows the end of what it printed."""
    name = walk.title.replace(" ", "-")
    printed = folder / "printed" / f"{name}.txt"
    printed.parent.mkdir(exist_ok=True)
    out = folder / "out" / name
    shutil.rmtree(out, ignore_errors=True)  # or the steps would go on from an earlier walk
    environment = variables(folder, ROOT, gpus=walk.gpus, gib=walk.gib)
    environment["PYTHONPATH"] += f"{os.pathsep}{HERE}"
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1", "FAKE_KERNEL_US": "1"}
    environment |= {"PYTEST_ADDOPTS": "-p forms_only", "OUT": str(out)}
    begun_s = time.monotonic()
    with printed.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, *walk.command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    said = printed.read_text(encoding="utf-8", errors="replace").splitlines()
    taken_s = time.monotonic() - begun_s
    print(f"{walk.title}: {'failed' if done.returncode else 'ok'}, {taken_s:.0f} s; {printed}", flush=True)
    for line in said[-40:] if done.returncode else ():
        print(f"    {line}", flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
