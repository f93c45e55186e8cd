"""The process of one arm (one stage of it): builds benchmarks from its own revision, times steps when asked.

    python -P experiments/guard/worker.py TREE RANK NUM_PROCESSES STORE ENGINE FILE

This file is always that of the working tree. Where ENGINE and FILE are empty, TREE is a revision of this
project: `pipeline` and `models` are its own, and need not know of any guard. Else TREE is somebody else's,
and what is timed comes from there: the engine ENGINE (`module:attribute`), timed with our models and after
our checks, and the functions of FILE, a Python file that is loaded as it lies in the working tree, in all
arms, so that both revisions are asked the same.

Requests and answers are lines of JSON on standard input and output:

    {"do": "names"}                                             -> {"names": {"rows": "sums of many rows"}}
    {"do": "build", "benchmark": "transformer"}                 -> {"result": 5.5, "what": "the first loss"}
    {"do": "sample", "benchmark": "transformer", "repeats": 3}  -> {"wall_s": 0.012, "cpu_s": 0.012}
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = Path(__file__).resolve().parents[2]
WARM_UP_STEPS = 3
SEED = 1811

Step = Callable[[], Any]


class RefusedError(ValueError):
    """What an engine says that it can't do."""


def main(*arguments: str) -> None:
    """Says that the arm is there, or why not, then answers requests by its methods until input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print goes where errors go, not between the answers
    arm = Arm(*arguments)
    answer(out, arm.start)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        answer(out, functools.partial(getattr(arm, request.pop("do")), **request))


def answer(out: Any, act: Callable[[], dict[str, Any]]) -> None:
    try:
        reply = act()
    except (Exception, SystemExit) as error:  # a benchmark that exits is named, too
        traceback.print_exc()
        reply = {"error": f"{type(error).__name__}: {error}"}
    out.write(json.dumps(reply).encode() + b"\n")
    out.flush()


class Arm:
    """The benchmarks that were built in this process; `names`, `build` and `sample` are the requests."""

    def __init__(
        self, tree: str, rank: str, num_processes: str, store: str, engine: str, file: str, head: str = ""
    ) -> None:
        self._tree, self._head = Path(tree).resolve(), Path(head or tree).resolve()
        self._rank, self._num_processes, self._store = int(rank), int(num_processes), store
        self._engine, self._file = engine, file
        self._steps: dict[str, tuple[Step, Step]] = {}

    def start(self) -> dict[str, Any]:
        """One thread, the same core in all arms, one `gpipe_bench`, a group of the arm's processes."""
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[self._rank % len(cores)]})
        if not self._file or self._engine:  # functions may do without, and have one thread by the environment
            import torch

            torch.set_num_threads(1)
        root = OURS if self._engine or self._file else self._tree
        package = types.ModuleType("gpipe_bench")  # and no other name: TREE may have `models/` of its own
        package.__path__ = [str(root / "gpipe_bench"), str(root)]
        sys.modules[package.__name__] = package
        if self._num_processes > 1:
            import torch.distributed

            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{self._store}", rank=self._rank, world_size=self._num_processes
            )
        return {}

    def names(self) -> dict[str, Any]:
        """The benchmarks of FILE, with the first line of what they say of themselves."""
        found = self._functions.items()
        return {"names": {name: (inspect.getdoc(build) or name).splitlines()[0] for name, build in found}}

    def build(self, benchmark: str) -> dict[str, Any]:
        """Builds it and warms up. What trains takes checked steps first: one that forgets micro-batches,
        recomputations or gradients is not timed.
        """
        try:
            is_function = benchmark in self._functions
            make = self._function if is_function else self._training
            result, step, prepare = make(benchmark)
        except RefusedError as refused:
            return {"refused": str(refused)}
        for _ in range(WARM_UP_STEPS):
            step()
        if self._file:
            check_origins(self._tree, self._head, Path(self._file))
        gc.collect()
        gc.freeze()  # what lives from here on, so that collecting between samples is quick
        self._steps[benchmark] = (step, prepare)
        return {"result": result, "what": "what it returns" if is_function else "the first loss"}

    def sample(self, benchmark: str, repeats: int) -> dict[str, Any]:
        """Mean seconds per step over `repeats` steps."""
        step, prepare = self._steps[benchmark]
        prepare()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for _ in range(repeats):
            step()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        return {"wall_s": wall_s / repeats, "cpu_s": cpu_s / repeats}

    @functools.cached_property
    def _functions(self) -> dict[str, Callable[[], Step]]:
        """The dictionary BENCHMARKS of FILE. Raises ValueError where there is none."""
        if not self._file:
            return {}
        found = getattr(loaded(Path(self._file)), "BENCHMARKS", None)
        if not isinstance(found, dict) or not found or not all(callable(each) for each in found.values()):
            raise ValueError(
                f"{self._file} declares no benchmarks; give it BENCHMARKS = {{'name': function}}, where the "
                "function builds what is timed and returns another one, which is called and timed"
            )
        return {str(name): build for name, build in found.items()}

    def _function(self, name: str) -> tuple[float | None, Step, Step]:
        step = self._functions[name]()
        if not callable(step):
            raise TypeError(
                f"{name} returned {type(step).__name__}; it must build what is timed and return a function, "
                "one call of which is timed"
            )

        def prepare() -> None:
            gc.collect()
            step()  # the first one after another arm's turn finds cold caches

        return number(step()), step, prepare

    def _training(self, name: str) -> tuple[float | None, Step, Step]:
        """A training step of ours, or of ENGINE."""
        import torch

        what = BENCHMARKS[name]
        torch.manual_seed(SEED)
        layers, *batch = what.subject(what.batch_size)
        group = torch.distributed.group.WORLD if what.num_processes > 1 else None
        make = self._their_engine if self._engine else self._our_pipeline
        loss, step, clear = make(name, what, layers, batch, group)

        def prepare() -> None:
            clear()
            gc.collect()
            step()
            if group is not None:
                torch.distributed.barrier(group)

        return number(loss), step, prepare

    def _our_pipeline(
        self, name: str, what: Any, layers: Any, batch: list[Any], group: Any
    ) -> tuple[Any, Step, Step]:
        """The loss of the first step, in which each layer must run forward as often as the benchmark says."""
        from gpipe_bench import models, pipeline

        for package in (models, pipeline):
            check_origin(package, self._tree)
        engine = pipeline.Pipeline(
            layers, num_stages=what.num_stages, num_microbatches=what.num_microbatches, remat=what.remat,
            group=group,
        )  # fmt: skip
        step = functools.partial(engine.step, *batch)
        parts = list(engine.children())
        counts = [0] * len(parts)

        def count(index: int, *_: Any) -> None:
            counts[index] += 1

        hooks = [
            part.register_forward_hook(functools.partial(count, index)) for index, part in enumerate(parts)
        ]
        loss = step()
        for hook in hooks:
            hook.remove()
        if set(counts) != {what.forwards}:
            raise RuntimeError(
                f"{name}: a step runs its layers {sorted(set(counts))} times forward, not {what.forwards} "
                f"times: M = {what.num_microbatches} and remat = {what.remat} are not what is measured"
            )
        return loss, step, functools.partial(engine.zero_grad, set_to_none=True)

    def _their_engine(
        self, name: str, what: Any, layers: Any, batch: list[Any], group: Any
    ) -> tuple[Any, Step, Step]:
        """The loss of a step after `verify`; ENGINE must be TREE's, or it would be equal in all arms."""
        import torch

        from gpipe_bench.experiments.engines.checks import verify
        from gpipe_bench.experiments.engines.setup import NoStepError, Setup, build, clear, resolve
        from gpipe_bench.pipeline.plan.partition import partition

        resolve(self._engine)
        check_origin(
            sys.modules[self._engine.partition(":")[0]], self._tree,
            "; name the folder that holds it, such as --path src",
        )  # fmt: skip
        layers = list(layers)
        setup = Setup(
            layers, partition([1.0] * len(layers), what.num_stages), what.num_microbatches, what.remat,
            torch.device("cpu"), group,
        )  # fmt: skip
        try:
            engine = build(self._engine, setup)
            verify(self._engine, engine, setup, *batch)
        except NoStepError:
            raise
        except ValueError as error:  # what an engine can't do, see docs/own-engine.md
            raise RefusedError(str(error)) from error
        step = functools.partial(engine.step, *batch)
        return step(), step, functools.partial(clear, setup.layers)


def check_origin(module: Any, tree: Path, remedy: str = "") -> None:
    """RuntimeError unless a module is this tree's: an installed one would be equal in all arms."""
    found = getattr(module, "__file__", None)
    if found is None or not Path(found).resolve().is_relative_to(tree.resolve()):
        raise RuntimeError(
            f"{module.__name__} comes from {found}, not from {tree}: nothing to compare{remedy}"
        )


def check_origins(tree: Path, head: Path, file: Path) -> None:
    """RuntimeError for a module of the repository that does not come from this arm's tree: it would be the
    same in all arms, and the guard would time one code three times.
    """
    for name, module in list(sys.modules.items()):
        found = getattr(module, "__file__", None)
        if not found or name.startswith("gpipe_bench") or Path(found).resolve() == file.resolve():
            continue
        path = Path(found).resolve()
        is_installed = {"site-packages", "dist-packages"} & {*path.parts}
        if path.is_relative_to(tree) and not is_installed:
            continue
        top = name.partition(".")[0]
        theirs = ["", "*/"] if is_installed and "." not in name else []
        has_it = any(
            next(tree.glob(f"{folder}{top}{ending}"), None)
            for folder in theirs
            for ending in ("/__init__.py", ".py")
        )
        if has_it or (path.is_relative_to(head) and not is_installed):
            raise RuntimeError(
                f"module {name} comes from {path}, not from {tree}, so nothing would be compared; name the "
                "folder that holds it in the repository, such as --path src, and leave sys.path alone"
            )


@functools.cache
def loaded(file: Path) -> types.ModuleType:
    """The module of a Python file, apart from any package. Raises ValueError where it is none."""
    spec = importlib.util.spec_from_file_location(f"guarded_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def number(value: Any) -> float | None:
    """A loss, where what a step returns is one."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


# What is timed of a pipeline: training steps, with micro-batches and recomputation. Nothing is imported but
# the standard library, torch and, from the revision under test, the public `pipeline.Pipeline` and `models`.


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `subject(batch_size)` makes layers, inputs, target and loss function.

    `forwards` is how often a step runs each layer forward, recomputations included; the worker counts it.
    """

    describe: str
    subject: Callable[[int], tuple[Any, Any, Any, Any]]
    num_stages: int
    num_microbatches: int
    microbatch_size: int
    forwards: int
    remat: str = "always"
    num_processes: int = 1  # 1: all stages in one process; else one process per stage

    @property
    def batch_size(self) -> int:
        return self.num_microbatches * self.microbatch_size


def _transformer(batch_size: int) -> tuple[Any, Any, Any, Any]:
    from gpipe_bench.models import MODELS, example_batch, loss_fn

    options: dict[str, Any] = {
        "num_layers": 4, "vocab_size": 256, "d_model": 64, "ffn_dim": 256, "num_heads": 4, "seq_len": 32,
    }  # fmt: skip
    layers = MODELS["transformer-lm"](**options)
    inputs, target = example_batch("transformer-lm", batch_size, **options)
    return layers, inputs, target, loss_fn("transformer-lm", **options)


def _tiny_layers(batch_size: int) -> tuple[Any, Any, Any, Any]:
    import torch
    from torch import nn

    width = 16
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    batch, target = torch.randn(2, batch_size, width)
    return layers, batch, target, nn.functional.mse_loss


BENCHMARKS: dict[str, Benchmark] = {
    "transformer": Benchmark(
        "a small Transformer, 2 stages in one process: mostly kernels", _transformer, 2, 4, 2, 8
    ),
    "tiny-layers": Benchmark(
        "linear layers of 16 units, 4 stages in one process: mostly the engine itself",
        _tiny_layers, 4, 8, 1, 15, remat="except_last",
    ),
    "two-processes": Benchmark(
        "a small Transformer, 2 stages in 2 processes: transport and waiting too",
        _transformer, 2, 4, 2, 8, num_processes=2,
    ),
}  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
