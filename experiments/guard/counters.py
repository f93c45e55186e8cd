"""The exact numbers of the guard's first tier: what schedules cost and what one engine step really does.

Some come from the schedule, others are counted while the engine takes a step of a small model. None needs a
clock, so they are equal on every machine, and any change is somebody's. Such a number may not get better
unnoticed: an unexplained win is as often something that was forgotten as something that was gained.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.experiments.guard.own import BENCHMARKS, SEED
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.schedule import Action, Schedule, most_alive_of
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.stage.stage import Gradients
from gpipe_bench.pipeline.stage.trees import Message
from gpipe_bench.pipeline.transport import InProcess

MICROBATCH_SIZE = 2

MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    # The explicit attention, because torch counts the operations of its fused kernels differently by version.
    "transformer-lm": {
        "num_layers": 6, "vocab_size": 64, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "seq_len": 8,
        "attention": "explicit",
    },
    "amoebanet-d": {
        "num_layers": 3, "num_filters": 16, "image_size": 32, "num_classes": 10, "aux_head": False,
    },
}  # fmt: skip


class Case(NamedTuple):
    """A step whose numbers are kept."""

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
    """All that is committed: the numbers of every case, and the names of the benchmarks that are timed."""
    return {"benchmarks": sorted(BENCHMARKS), "counters": {str(case): counters(case) for case in CASES}}


def counters(case: Case) -> dict[str, Any]:
    """The numbers of one case."""
    schedule = SCHEDULES[case.schedule](case.num_stages, case.num_microbatches, case.remat)
    return {**of_schedule(schedule), **of_step(case, schedule)}


def of_schedule(schedule: Schedule) -> dict[str, Any]:
    """Counters that follow from the schedule alone, with equal stages and F : R : B = 1 : 1 : 2."""
    timeline = replay(schedule, SLOTS)
    stages = range(schedule.num_stages)
    return {
        "makespan in slots": int(timeline.makespan_s),
        "bubble": str(Fraction(timeline.idle_s) / Fraction(schedule.num_stages * timeline.makespan_s)),
        "graphs alive, per stage": _each(most_alive_of(schedule.row(stage)) for stage in stages),
        "micro-batches in flight, per stage": _each(map(schedule.in_flight, stages)),
    }


class Counting(InProcess):
    """Counts what crosses from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.messages, self.bytes = Counter[str](), Counter[str]()

    def send(self, edge: Edge, microbatch: int, message: Message) -> None:
        self._count("forward", message.tensors)
        super().send(edge, microbatch, message)

    def send_back(self, edge: Edge, microbatch: int, gradients: Gradients) -> None:
        self._count("backward", gradients)
        super().send_back(edge, microbatch, gradients)

    def _count(self, direction: str, tensors: tuple[torch.Tensor | None, ...]) -> None:
        self.messages[direction] += 1
        self.bytes[direction] += sum(t.nbytes for t in tensors if t is not None)


def of_step(case: Case, schedule: Schedule) -> dict[str, Any]:
    """Counters of one training step of the engine, taken while the step runs."""
    taken: Counter[str] = Counter()

    @contextmanager
    def observe(action: Action) -> Iterator[None]:
        taken[action.kind.value] += 1
        yield

    options = MODEL_OPTIONS[case.model]
    torch.manual_seed(SEED)
    model = MODELS[case.model](**options)
    batch, target = example_batch(case.model, case.num_microbatches * MICROBATCH_SIZE, **options)
    transport = Counting()
    pipeline = Pipeline(
        model, num_stages=case.num_stages, num_microbatches=case.num_microbatches, schedule=schedule,
        transport=transport,
    )  # fmt: skip
    with FlopCounterMode(display=False) as flops:
        pipeline.step(batch, target, loss_fn(case.model, **options), observe=observe)
    return {
        "actions": "".join(f"{kind}{count} " for kind, count in sorted(taken.items())).strip(),
        "messages forward": transport.messages["forward"],
        "messages backward": transport.messages["backward"],
        "bytes forward": transport.bytes["forward"],
        "bytes backward": transport.bytes["backward"],
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
    """One line for everything in which the content found differs from the file's; none where it is equal. No
    case and no benchmark that is timed vanishes unnoticed.
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
    """The file's text: one metric per line, so that a review shows what changed."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def load(path: Path) -> dict[str, Any]:
    """The file's content. Raises ValueError, naming file and remedy, where there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}; write it anew with --update") from error
