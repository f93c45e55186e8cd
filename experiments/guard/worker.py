"""The process of one arm: builds the benchmarks of a file with its own revision's code, and times them.

    python -P experiments/guard/worker.py PIPE TREE HEAD FILE

FILE declares a dictionary BENCHMARKS of functions. All arms load it from the working tree HEAD, so that both
revisions run the same benchmarks; what it imports from the repository must come from TREE. This file imports
only the standard library: the process belongs to the measured code.

Requests and answers are JSON messages through PIPE, the number of an open descriptor:

    {"do": "names"}                                             -> {"names": ["rows"]}
    {"do": "build", "benchmark": "rows"}                        -> {"result": 5.5, "compiled": []}
    {"do": "sample", "benchmark": "rows", "repeats": 3}         -> {"wall_s": 0.012, "cpu_s": 0.012}
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.machinery
import importlib.util
import json
import os
import sys
import sysconfig
import time
import traceback
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 3
WARM_UP_S = 0.5  # seconds after which long steps are warm
LACKING = (ImportError, AttributeError, NameError, TypeError)
"""Errors of a revision without code that newer benchmarks use."""

Step = Callable[[], Any]


def main(pipe: str, tree: str, head: str, file: str) -> None:
    """Reports that the arm is ready, then answers requests by its methods until the pipe closes."""
    connection = Connection(int(pipe))
    arm = Arm(Path(tree).resolve(), Path(head).resolve(), Path(file).resolve())
    with contextlib.suppress(Exception, SystemExit):  # `build` loads the file again, and says why it can't
        arm.names()
    if hasattr(os, "sched_setaffinity"):  # one core for all arms; the environment sets one thread
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    reply: dict[str, Any] = {}
    with contextlib.suppress(EOFError):
        while True:
            connection.send_bytes(json.dumps(reply).encode())
            request = json.loads(connection.recv_bytes())
            do = request.pop("do")
            try:
                reply = getattr(arm, do)(**request)
            except (Exception, SystemExit) as error:  # SystemExit: from a benchmark
                traceback.print_exc()
                lacks = do == "build" and isinstance(error, LACKING)
                reply = {"error": f"{type(error).__name__}: {error}", "lacks": lacks}


class Arm:
    """The benchmarks built in this process; its methods `names`, `build` and `sample` answer requests."""

    def __init__(self, tree: Path, head: Path, file: Path) -> None:
        self._tree, self._head, self._file = tree, head, file
        self._steps: dict[str, Step] = {}

    def names(self) -> dict[str, Any]:
        """The names of the benchmarks."""
        return {"names": list(self._functions)}

    def build(self, benchmark: str) -> dict[str, Any]:
        """Builds the benchmark and warms up."""
        step = self._functions[benchmark]()
        if not callable(step):
            raise ValueError(
                f"{benchmark} returned {type(step).__name__}; it must build what is timed and return a "
                "function, one call of which is timed"
            )
        begun_s, result = time.perf_counter(), number(step())
        for _ in range(WARM_UP_STEPS):
            if time.perf_counter() - begun_s < WARM_UP_S:
                step()
        check_origins(self._tree, self._head, self._file)
        gc.collect()
        gc.freeze()  # so that later collections are quick
        self._steps[benchmark] = step
        return {"result": result, "compiled": compiled_in(self._tree)}

    def sample(self, benchmark: str, repeats: int) -> dict[str, Any]:
        """Mean seconds per step over `repeats` steps."""
        step = self._steps[benchmark]
        gc.collect()
        if repeats > 1:
            step()  # the first of short steps finds cold caches
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for _ in range(repeats):
            step()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        return {"wall_s": wall_s / repeats, "cpu_s": cpu_s / repeats}

    @functools.cached_property
    def _functions(self) -> dict[str, Callable[[], Step]]:
        """The file's dictionary BENCHMARKS. Raises ValueError if there is none."""
        found = getattr(loaded(self._file), "BENCHMARKS", None)
        if not isinstance(found, dict) or not found or not all(callable(each) for each in found.values()):
            raise ValueError(
                f"{self._file} declares no benchmarks; give it BENCHMARKS = {{'name': function}}, where the "
                "function builds what is timed and returns another one, which is called and timed"
            )
        return {str(name): build for name, build in found.items()}


def check_origins(tree: Path, head: Path, file: Path) -> None:
    """RuntimeError if a module of the repository does not come from this arm's tree: the guard would time the
    same code in all arms.

    A module is the repository's if it lies in the working tree, or is named like a top-level package or
    module of this tree, or of one of its folders: an installed copy, or another clone's.
    """
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    for name, module in list(sys.modules.items()):
        path, top = Path(getattr(module, "__file__", None) or ".").resolve(), name.partition(".")[0]
        if not path.is_file() or path in (file, Path(__file__).resolve()):  # torch.ops says "_ops.py"
            continue
        is_installed = bool({"site-packages", "dist-packages"} & {*path.parts})
        if path.is_relative_to(tree) and not is_installed:
            continue
        is_heads = path.is_relative_to(head) and not is_installed
        is_standard = path.is_relative_to(standard) and not is_installed
        held = (f"{top}.py", f"src/{top}.py", f"{top}/__init__.py", f"*/{top}/__init__.py")
        if is_heads or (not is_standard and any(next(tree.glob(each), None) for each in held)):
            raise RuntimeError(
                f"module {name} comes from {path}, not from {tree}, so nothing would be compared; name the "
                "folder that holds it in the repository, such as --path src, and leave sys.path alone"
            )


def compiled_in(tree: Path) -> list[str]:
    """Imported compiled modules of this tree, which git does not contain."""
    endings = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    files = ((name, getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items()))
    return [
        name
        for name, file in files
        if file.endswith(endings) and Path(file).resolve().is_relative_to(tree) and "-packages" not in file
    ]


@functools.cache
def loaded(file: Path) -> types.ModuleType:
    """Loads a Python file as a module outside any package. Raises ValueError for another file."""
    spec = importlib.util.spec_from_file_location(f"guarded_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def number(value: Any) -> float | None:
    """A step's result, such as a loss, if it is a number; else None."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


if __name__ == "__main__":
    main(*sys.argv[1:])
