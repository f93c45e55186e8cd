"""The process of one arm where another repository is guarded: its engine, or plain functions of its own.

    python -P experiments/guard/other_worker.py TREE RANK NUM_PROCESSES STORE SLOW_DOWN ENGINE FILE

Requests and answers are those of `worker.py`, which is for this project's own revisions. What is timed comes
from TREE; what it is timed with, the models and the checks, is ours and the same in all arms. ENGINE is
`module:attribute`, FILE a Python file of benchmarks; either may be empty. A file is loaded as it lies in the
working tree, in all arms, so that both revisions are asked the same.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WARM_UP_STEPS = 3


def main(
    tree: str, rank: str, num_processes: str, store: str, slow_down: str, engine: str, file: str
) -> None:
    """Answers until standard input ends."""
    own_package()
    from gpipe_bench.experiments.guard.worker import serve

    where = Path(tree).resolve()

    def begin() -> Arm:
        start(int(rank), int(num_processes), store)
        return Arm(where, int(num_processes), engine, file)

    serve(begin)


def own_package() -> None:
    """Makes ours importable by its one name and nothing else of it: TREE may have `models/` too."""
    package = types.ModuleType("gpipe_bench")
    package.__path__ = [str(ROOT)]
    sys.modules[package.__name__] = package


def start(rank: int, num_processes: int, store: str) -> None:
    """One thread, one core, a group of the arm's processes."""
    from gpipe_bench.experiments.guard.worker import pin

    pin(rank)
    import torch

    torch.set_num_threads(1)
    if num_processes > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes
        )


class Arm:
    """What was built in this process; `names`, `build` and `sample` are the requests."""

    def __init__(self, tree: Path, num_processes: int, engine: str, file: str) -> None:
        self._tree, self._num_processes = tree, num_processes
        self._engine, self._file = engine, file
        self._steps: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {}
        self._functions: dict[str, Callable[[], Any]] | None = None

    def names(self) -> dict[str, Any]:
        """The benchmarks of FILE, with the first line of what they say of themselves."""
        found = {
            name: (inspect.getdoc(build) or name).splitlines()[0] for name, build in self._of_file().items()
        }
        return {"names": found}

    def build(self, benchmark: str) -> dict[str, Any]:
        """Builds it and warms up. An engine takes checked steps first: one that forgets micro-batches,
        recomputations or gradients is not timed.
        """
        try:
            if benchmark in self._of_file():
                reply, step, prepare = self._function(benchmark)
            else:
                reply, step, prepare = self._with_engine(benchmark)
        except RefusedError as refused:
            return {"refused": str(refused)}
        for _ in range(WARM_UP_STEPS):
            step()
        gc.collect()
        gc.freeze()  # what lives from here on, so that collecting between samples is quick
        self._steps[benchmark] = (step, prepare)
        return reply

    def sample(self, benchmark: str, repeats: int) -> dict[str, Any]:
        """Mean seconds per step over `repeats` steps."""
        step, prepare = self._steps[benchmark]
        prepare()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for _ in range(repeats):
            step()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        return {"wall_s": wall_s / repeats, "cpu_s": cpu_s / repeats}

    def _of_file(self) -> dict[str, Callable[[], Any]]:
        if self._functions is None:
            self._functions = functions_of(Path(self._file)) if self._file else {}
        return self._functions

    def _function(self, name: str) -> tuple[dict[str, Any], Callable[[], Any], Callable[[], None]]:
        step = self._of_file()[name]()
        if not callable(step):
            raise TypeError(
                f"{name} returned {type(step).__name__}; it must build what is timed and return a function, "
                "one call of which is timed"
            )
        first = step()

        def prepare() -> None:
            gc.collect()
            step()  # the first one after another arm's turn finds cold caches

        return {"loss": _number(first)}, step, prepare

    def _with_engine(self, name: str) -> tuple[dict[str, Any], Callable[[], Any], Callable[[], None]]:
        import torch

        from gpipe_bench.experiments.engines.checks import verify
        from gpipe_bench.experiments.engines.setup import NoStepError, Setup, build, clear
        from gpipe_bench.experiments.guard.benchmarks import BENCHMARKS, SEED
        from gpipe_bench.pipeline.plan.partition import partition

        what = BENCHMARKS[name]
        self._check_origin()
        torch.manual_seed(SEED)
        layers, inputs, target, loss_fn = what.subject(what.batch_size)
        layers = list(layers)
        group = torch.distributed.group.WORLD if what.num_processes > 1 else None
        setup = Setup(
            layers, partition([1.0] * len(layers), what.num_stages), what.num_microbatches, what.remat,
            torch.device("cpu"), group,
        )  # fmt: skip
        try:
            engine = build(self._engine, setup)
        except NoStepError:
            raise
        except ValueError as error:  # what an engine can't do, see docs/own-engine.md
            raise RefusedError(str(error)) from error
        verify(self._engine, engine, setup, inputs, target, loss_fn)

        def step() -> Any:
            return engine.step(inputs, target, loss_fn)

        def prepare() -> None:
            clear(setup.layers)
            gc.collect()
            step()
            if group is not None:
                torch.distributed.barrier(group)

        return {"loss": _number(step())}, step, prepare

    def _check_origin(self) -> None:
        """RuntimeError unless the engine is this revision's: an installed one would be equal in all arms."""
        from gpipe_bench.experiments.engines.setup import resolve

        resolve(self._engine)
        module = self._engine.partition(":")[0]
        found = getattr(sys.modules[module], "__file__", None)
        if found is None or not Path(found).resolve().is_relative_to(self._tree):
            raise RuntimeError(
                f"{module} comes from {found}, not from {self._tree}: nothing to compare; name the folder "
                "that holds it, such as --path src"
            )


class RefusedError(ValueError):
    """What an engine says that it can't do."""


def functions_of(file: Path) -> dict[str, Callable[[], Any]]:
    """The dictionary BENCHMARKS of a file. Raises ValueError where there is none."""
    spec = importlib.util.spec_from_file_location("guarded_benchmarks", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, "BENCHMARKS", None)
    if not isinstance(found, dict) or not found or not all(callable(each) for each in found.values()):
        raise ValueError(
            f"{file} declares no benchmarks; give it BENCHMARKS = {{'name': function}}, where the function "
            "builds what is timed and returns another one, which is called and timed"
        )
    return {str(name): build for name, build in found.items()}


def _number(value: Any) -> float | None:
    """A loss, where what a step returns is one."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


if __name__ == "__main__":
    main(*sys.argv[1:])
