"""Exact counters and timed steps of this project, for the guard, which compares two revisions' speed.

Counters are equal on every machine; only code changes them. An improvement fails the guard, too: an
unexplained gain may be work that the engine no longer does.

The guard's processes load this file like any file of benchmarks (docs/guard.md) to time the revision under
test, so functions import the project, and the module does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gpipe_bench.pipeline.plan.edges import Edge
    from gpipe_bench.pipeline.plan.schedule import Action, Schedule
    from gpipe_bench.pipeline.stage.stage import Gradients
    from gpipe_bench.pipeline.stage.trees import Message

SEED = 1811

Step = Callable[[], Any]


def build_transformer() -> Step:
    """a small Transformer, 2 stages in one process: mostly kernels"""
    return _training(*_transformer(8), num_stages=2, num_microbatches=4, forwards=8)


def build_tiny_layers() -> Step:
    """linear layers of 16 units, 4 stages in one process: mostly the engine itself"""
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    batch = [*torch.randn(2, 8, 16), nn.functional.mse_loss]
    return _training(layers, batch, num_stages=4, num_microbatches=8, forwards=15, remat="except_last")


def build_two_processes() -> Step:
    """a small Transformer, 2 stages in 2 processes: transport and waiting too"""
    folder = tempfile.mkdtemp()
    other = subprocess.Popen(  # it ends with this process, which closes its input
        [sys.executable, "-P", __file__, folder], stdin=subprocess.PIPE, stdout=sys.stderr, bufsize=0
    )
    assert other.stdin is not None
    other_input = other.stdin
    other_input.write(b"step\n")  # the first step, in which `_training` counts forwards
    step = _one_of_two(folder, 0)

    def both() -> Any:
        other_input.write(b"step\n")
        return step()

    return both


BENCHMARKS = {
    "transformer": build_transformer,
    "tiny-layers": build_tiny_layers,
    "two-processes": build_two_processes,
}


def _transformer(batch_size: int) -> tuple[Any, list[Any]]:
    import torch

    from gpipe_bench.models import MODELS, example_batch, loss_fn

    torch.manual_seed(SEED)
    options: dict[str, Any] = {
        "num_layers": 4, "vocab_size": 256, "d_model": 64, "ffn_dim": 256, "num_heads": 4, "seq_len": 32,
    }  # fmt: skip
    layers = MODELS["transformer-lm"](**options)
    batch = example_batch("transformer-lm", batch_size, **options)
    return layers, [*batch, loss_fn("transformer-lm", **options)]


def _one_of_two(folder: str, rank: int) -> Step:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    given = _transformer(8)
    return _training(*given, num_stages=2, num_microbatches=4, forwards=8, group=dist.group.WORLD)


def _training(layers: Any, batch: list[Any], *, forwards: int, remat: str = "always", **options: Any) -> Step:
    """Returns a function that runs a training step. In a first step each layer must run `forwards` times,
    recomputations included: an engine that omits micro-batches or recomputations is not timed.
    """
    from gpipe_bench.pipeline import Pipeline

    engine = Pipeline(layers, remat=remat, **options)
    parts = list(engine.children())
    counts = [0] * len(parts)

    def count(index: int, *_: Any) -> None:
        counts[index] += 1

    def step() -> Any:
        engine.zero_grad(set_to_none=True)
        return engine.step(*batch)

    hooks = [part.register_forward_hook(partial(count, index)) for index, part in enumerate(parts)]
    step()
    for hook in hooks:
        hook.remove()
    if set(counts) != {forwards}:
        raise RuntimeError(
            f"a step runs its layers {sorted(set(counts))} times forward, not {forwards} times: "
            f"with {options} and remat = {remat!r} it does not do the work that is to be timed"
        )
    return step


def _second_process(folder: str) -> None:
    """Runs a step for each line of its input, on another core than the first process if possible."""
    if hasattr(os, "sched_setaffinity"):
        first = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0) - first, default=min(first))})
    sys.stdin.readline()
    step = _one_of_two(folder, 1)
    for _ in sys.stdin:
        step()


# Exact counters

MICROBATCH_SIZE = 2

MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    # Explicit attention, because torch counts operations of fused kernels differently by version.
    "transformer-lm": {
        "num_layers": 6, "vocab_size": 64, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "seq_len": 8,
        "attention": "explicit",
    },
    "amoebanet-d": {
        "num_layers": 3, "num_filters": 16, "image_size": 32, "num_classes": 10, "aux_head": False,
    },
}  # fmt: skip


class Case(NamedTuple):
    """A training step whose counters results/guard/counters.json keeps."""

    model: str
    schedule: str
    num_stages: int
    num_microbatches: int
    remat: str

    def __str__(self) -> str:
        return f"{self.model} {self.schedule} K={self.num_stages} M={self.num_microbatches} {self.remat}"


CASES = (
    Case("transformer-lm", "gpipe", 1, 4, "always"),
    Case("transformer-lm", "naive", 4, 1, "never"),
    Case("transformer-lm", "gpipe", 4, 8, "never"),
    Case("transformer-lm", "gpipe", 4, 8, "except_last"),
    Case("transformer-lm", "gpipe", 4, 8, "always"),
    Case("transformer-lm", "gpipe", 8, 32, "always"),
    Case("transformer-lm", "1f1b", 4, 8, "never"),
    Case("transformer-lm", "1f1b", 4, 8, "always"),
    Case("amoebanet-d", "gpipe", 4, 4, "always"),
)


def content() -> dict[str, Any]:
    """The content of results/guard/counters.json: counters of every case, names of timed benchmarks."""
    return {"benchmarks": sorted(BENCHMARKS), "counters": {str(case): counters(case) for case in CASES}}


def counters(case: Case) -> dict[str, Any]:
    """The counters of one case."""
    from gpipe_bench.pipeline.plan.named import SCHEDULES

    schedule = SCHEDULES[case.schedule](case.num_stages, case.num_microbatches, case.remat)
    return {**of_schedule(schedule), **of_step(case, schedule)}


def of_schedule(schedule: Schedule) -> dict[str, Any]:
    """Counters that follow from the schedule alone, with equal stages: F and R take a slot, B two."""
    from gpipe_bench.pipeline.plan.schedule import most_alive_of
    from gpipe_bench.pipeline.plan.simulate import SLOTS, replay

    timeline = replay(schedule, SLOTS)
    stages = range(schedule.num_stages)
    return {
        "makespan in slots": int(timeline.makespan_s),
        "bubble": str(Fraction(timeline.idle_s) / Fraction(schedule.num_stages * timeline.makespan_s)),
        "graphs alive, per stage": _each(most_alive_of(schedule.row(stage)) for stage in stages),
        "micro-batches in flight, per stage": _each(map(schedule.in_flight, stages)),
    }


def of_step(case: Case, schedule: Schedule) -> dict[str, Any]:
    """Counters of one training step of the engine, taken as it runs."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from gpipe_bench.models import MODELS, example_batch, loss_fn
    from gpipe_bench.pipeline import Pipeline
    from gpipe_bench.pipeline.transport import InProcess

    actions = Counter[str]()
    crossed = dict.fromkeys(("messages forward", "messages backward", "bytes forward", "bytes backward"), 0)

    def count(direction: str, tensors: Iterable[Any]) -> None:
        crossed[f"messages {direction}"] += 1
        crossed[f"bytes {direction}"] += sum(t.nbytes for t in tensors if t is not None)

    class Counting(InProcess):
        """Counts messages between stages."""

        def send(self, edge: Edge, microbatch: int, message: Message) -> None:
            count("forward", message.tensors)
            super().send(edge, microbatch, message)

        def send_back(self, edge: Edge, microbatch: int, gradients: Gradients) -> None:
            count("backward", gradients)
            super().send_back(edge, microbatch, gradients)

    @contextmanager
    def observe(action: Action) -> Iterator[None]:
        actions[action.kind.value] += 1
        yield

    options = MODEL_OPTIONS[case.model]
    torch.manual_seed(SEED)
    model = MODELS[case.model](**options)
    batch, target = example_batch(case.model, case.num_microbatches * MICROBATCH_SIZE, **options)
    pipeline = Pipeline(
        model, num_stages=case.num_stages, num_microbatches=case.num_microbatches, schedule=schedule,
        transport=Counting(),
    )  # fmt: skip
    with FlopCounterMode(display=False) as flops:
        pipeline.step(batch, target, loss_fn(case.model, **options), observe=observe)
    return {
        "actions": " ".join(f"{kind}{count}" for kind, count in sorted(actions.items())),
        **crossed,
        "flops": flops.get_total_flops(),
        "parameters, per stage": _each(
            sum(p.numel() for layer in span for p in model[layer].parameters()) for span in pipeline.partition
        ),
        "layers, per stage": _each(map(len, pipeline.partition)),
    }


def _each(numbers: Iterable[int]) -> str:
    """One number per stage, on one line of the file."""
    return " ".join(map(str, numbers))


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A line for each counter that differs from the file's; missing and new cases or benchmarks are
    differences.
    """

    def lines(content: Mapping[str, Any]) -> dict[str, str]:
        numbers = {
            f"{case}: {name}": json.dumps(value, ensure_ascii=False)
            for case, of_case in content.get("counters", {}).items()
            for name, value in of_case.items()
        }
        return numbers | {f"benchmark {name}": "timed" for name in content.get("benchmarks", ())}

    before, now = lines(expected), lines(found)
    return [
        f"{name} {before.get(name, 'nothing')} -> {now.get(name, 'nothing')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def encode(content: Mapping[str, Any]) -> str:
    """The file's text: one counter per line, so that reviews show what changed."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def load(path: Path) -> dict[str, Any]:
    """The file's content. Raises ValueError, with file and remedy, if it can't be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}; write it anew with --update") from error


if __name__ == "__main__":
    _second_process(*sys.argv[1:])
