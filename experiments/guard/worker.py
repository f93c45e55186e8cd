"""The process of one arm (one stage of it): builds benchmarks from its own revision, times steps when asked.

    python -P experiments/guard/worker.py TREE RANK NUM_PROCESSES STORE SLOW_DOWN

This file is always that of the working tree; `pipeline` and `models` are those of TREE, whose code need not
know of any guard. Requests and answers are lines of JSON on standard input and output:

    {"do": "build", "benchmark": "transformer"}                 -> {"loss": 5.5, "forwards": 16}
    {"do": "sample", "benchmark": "transformer", "repeats": 3}  -> {"wall_s": 0.012, "cpu_s": 0.012}

SLOW_DOWN, 0.1 for ten percent, is for experiments on the guard itself: the engine then stays busy for that
share of every step's own time.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 3


def main(tree: str, rank: str, num_processes: str, store: str, slow_down: str) -> None:
    """Answers until standard input ends."""

    def begin() -> Arm:
        start(Path(tree), int(rank), int(num_processes), store, float(slow_down))
        return Arm()

    serve(begin)


def serve(begin: Callable[[], Any]) -> None:
    """Says that what `begin` makes is there, or why not, then answers requests by its methods."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print goes where errors go, not between the answers
    made = []
    answer(out, lambda: made.append(begin()) or {})  # type: ignore[func-returns-value]
    if not made:
        return
    (arm,) = made
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        answer(out, lambda request=request: getattr(arm, request.pop("do"))(**request))  # type: ignore[misc]


def answer(out: Any, act: Callable[[], dict[str, Any]]) -> None:
    try:
        reply = act()
    except Exception as error:
        traceback.print_exc()
        reply = {"error": f"{type(error).__name__}: {error}"}
    out.write(json.dumps(reply).encode() + b"\n")
    out.flush()


def pin(rank: int) -> None:
    """One core: the same one in all arms."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def start(tree: Path, rank: int, num_processes: int, store: str, slow_down: float) -> None:
    """One thread, one core, the packages of `tree` and no others, a group of the arm's processes."""
    pin(rank)
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(tree))
    if not (tree / "gpipe_bench").is_dir():  # a revision that has the packages at its root only
        alias = types.ModuleType("gpipe_bench")
        alias.__path__ = [str(tree)]
        sys.modules[alias.__name__] = alias
    from gpipe_bench import models, pipeline

    for package in (models, pipeline):
        found = Path(str(package.__file__)).resolve()
        if not found.is_relative_to(tree.resolve()):
            raise RuntimeError(f"{package.__name__} comes from {found}, not from {tree}: nothing to compare")
    if num_processes > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes
        )
    if slow_down:
        delay_engine(slow_down)


def delay_engine(share: float) -> None:
    """Keeps the engine busy after its actions for that share of the time they took."""
    from gpipe_bench.pipeline import engine

    run = engine.run

    def slow(*arguments: Any, **options: Any) -> None:
        begin_s = time.perf_counter()
        run(*arguments, **options)
        now_s = time.perf_counter()
        end_s = now_s + share * (now_s - begin_s)
        while time.perf_counter() < end_s:
            pass

    engine.run = slow


def benchmarks() -> Any:
    """The working tree's `guard_benchmarks`, though `experiments` may be another revision's."""
    path = Path(__file__).with_name("benchmarks.py")
    spec = importlib.util.spec_from_file_location("guard_benchmarks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Arm:
    """The benchmarks that were built in this process; each public method is a request."""

    def __init__(self) -> None:
        self._module = benchmarks()
        self._steps: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {}

    def build(self, benchmark: str) -> dict[str, Any]:
        """Builds and warms up; checks that steps split the batch and recompute as the benchmark says."""
        import torch

        from gpipe_bench.pipeline import Pipeline

        what = self._module.BENCHMARKS[benchmark]
        torch.manual_seed(self._module.SEED)
        layers, inputs, target, loss_fn = what.subject(what.batch_size)
        group = torch.distributed.group.WORLD if what.num_processes > 1 else None
        pipeline = Pipeline(
            layers,
            num_stages=what.num_stages,
            num_microbatches=what.num_microbatches,
            remat=what.remat,
            group=group,
        )

        def step() -> Any:
            return pipeline.step(inputs, target, loss_fn)

        def prepare() -> None:
            pipeline.zero_grad(set_to_none=True)
            gc.collect()
            step()  # the first one after another arm's turn finds cold caches
            if group is not None:
                torch.distributed.barrier(group)

        forwards, loss = count_forwards(list(pipeline.children()), step)
        if forwards != {what.forwards}:
            raise RuntimeError(
                f"{benchmark}: a step runs its layers {sorted(forwards)} times forward, not {what.forwards} "
                f"times: M = {what.num_microbatches} and remat = {what.remat} are not what is measured"
            )
        for _ in range(WARM_UP_STEPS):
            step()
        gc.collect()
        gc.freeze()  # what lives from here on, so that collecting between samples is quick
        self._steps[benchmark] = (step, prepare)
        return {"loss": float(loss), "forwards": what.forwards}

    def sample(self, benchmark: str, repeats: int) -> dict[str, Any]:
        """Mean seconds per step over `repeats` steps."""
        step, prepare = self._steps[benchmark]
        prepare()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for _ in range(repeats):
            step()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        return {"wall_s": wall_s / repeats, "cpu_s": cpu_s / repeats}


def count_forwards(layers: list[Any], step: Callable[[], Any]) -> tuple[set[int], Any]:
    """How often each layer ran forward in a step, as a set, and what the step returned."""
    counts = [0] * len(layers)

    def hook(index: int) -> Callable[..., None]:
        def count(*_: Any) -> None:
            counts[index] += 1

        return count

    handles = [layer.register_forward_hook(hook(index)) for index, layer in enumerate(layers)]
    result = step()
    for handle in handles:
        handle.remove()
    return set(counts), result


if __name__ == "__main__":
    main(*sys.argv[1:])
