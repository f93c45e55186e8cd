"""`size` of a published shape or one's own model: the cut and what fills each stage, or what would help."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from gpipe_bench.experiments.commands.output import print_line
from gpipe_bench.experiments.commands.sizing.schedule import describe_model, stage_table
from gpipe_bench.experiments.commands.sizing.schedule import text as schedule_text
from gpipe_bench.experiments.planning.models import Model, model_of
from gpipe_bench.experiments.table1.paper_models import GIB
from gpipe_bench.pipeline.memory.cut import StagePeaks
from gpipe_bench.pipeline.memory.stages.peaks import StageMemory
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import gpipe

MOST_LAYERS = 256
"""Of a model whose stages are searched for by their peaks; longer ones are cut by what their layers hold."""


@dataclass(frozen=True)
class Question:
    """A model, its stages, and what may be changed to make it fit."""

    model: Model
    num_stages: int
    num_microbatches: int
    precision: str
    optimizer: str
    compiled: bool = False

    def answer(self) -> Answer:
        """The cut whose fullest stage is smallest. Every micro-batch is recomputed."""
        profile = self.model.profile(self.num_microbatches, self.precision, compiled=self.compiled)
        peaks = StagePeaks(
            profile.layers, profile.loss, gpipe(self.num_stages, self.num_microbatches, "always"),
            self.optimizer, receive_ahead=1 if self.num_stages > 1 else 0,
        )  # fmt: skip
        cut = None
        if len(profile.layers) <= MOST_LAYERS:
            cut = peaks.partition(2**62)
        if cut is None:
            cut = partition(peaks.floor(), self.num_stages)
        return Answer(self, cut, tuple(peaks.memory(each.start, each.stop) for each in cut))


@dataclass(frozen=True)
class Answer:
    """The stages, and what each holds at its fullest."""

    question: Question
    cut: Partition
    stages: tuple[StageMemory, ...]

    @property
    def peak(self) -> int:
        return max(stage.peak for stage in self.stages)


def run(arguments: argparse.Namespace) -> None:
    """Prints where the model is cut. Raises ValueError, naming value and remedy, where it does not fit."""
    if arguments.num_filters is not None:
        raise ValueError(f"--num-filters {arguments.num_filters} is AmoebaNet's; leave it out")
    model = model_of(arguments.model, arguments.batch_size, arguments.num_layers)
    if arguments.num_stages > len(model.layers):
        raise ValueError(
            f"cannot cut {len(model.layers)} layers into {arguments.num_stages} stages: use at most "
            f"{len(model.layers)}"
        )
    counts = [m for m in range(1, model.batch_size + 1) if model.batch_size % m == 0]
    number = arguments.num_microbatches
    if number is not None and number not in counts:
        raise ValueError(
            f"--num-microbatches {number} does not divide the mini-batch of {model.batch_size}; use one of "
            f"{', '.join(map(str, counts))}"
        )
    optimizer = arguments.optimizer or "adam"
    if arguments.schedule is not None:
        _under_a_schedule(arguments, model, optimizer)
        return
    if arguments.remat is not None:
        raise ValueError(f"--remat {arguments.remat} goes with --schedule; without, everything is recomputed")
    found = Question(
        model, arguments.num_stages, number or counts[-1], arguments.precision, optimizer, arguments.compiled
    ).answer()
    cap = int(arguments.cap_gib * GIB)
    if found.peak > cap:
        raise ValueError(_nothing_fits(found, cap, given_count=number is not None))
    for count in () if number is not None else counts[:-1]:  # the fewest micro-batches that will do
        fewer = replace(found.question, num_microbatches=count).answer()
        if fewer.peak <= cap:
            found = fewer
            break
    if arguments.json:
        print_line(json.dumps(_facts(found)).encode())
    else:
        print(_text(found, arguments.cap_gib))


def _under_a_schedule(arguments: argparse.Namespace, model: Model, optimizer: str) -> None:
    if arguments.num_microbatches is None:
        raise ValueError("--schedule needs --num-microbatches M")
    profile = model.profile(arguments.num_microbatches, arguments.precision, split_backward=True)
    facts = describe_model(arguments, profile, optimizer) | {"num_parameters": model.num_parameters}
    if arguments.json:
        print_line(json.dumps({"model": model.name, **facts}).encode())
    else:
        print(schedule_text(arguments, facts))


def _nothing_fits(found: Answer, cap: int, *, given_count: bool) -> str:
    worst = max(range(len(found.stages)), key=lambda number: found.stages[number].peak)
    layers, asked = found.cut[worst], found.question
    helps = [*_remedies(asked, cap, given_count=given_count), f"--cap-gib {math.ceil(found.peak / GIB)}"]
    return (
        f"{asked.model.name} does not fit: the smallest peak is {found.peak / GIB:.2f} GiB, on stage {worst} "
        f"(layers {layers.start}-{layers.stop - 1}) at {found.stages[worst].when}, with {asked.num_stages} "
        f"stages and {asked.num_microbatches} micro-batches; the cap is {cap / GIB:g} GiB. What would do: "
        + ", or ".join(helps)
    )


def _remedies(asked: Question, cap: int, *, given_count: bool) -> Iterator[str]:
    """What fits when it alone is changed, as options of the command line."""
    if given_count and replace(asked, num_microbatches=asked.model.batch_size).answer().peak <= cap:
        yield f"--num-microbatches {asked.model.batch_size}"
    stages, layers = 2 * asked.num_stages, len(asked.model.layers)
    while stages <= layers:
        if replace(asked, num_stages=stages).answer().peak <= cap:
            yield f"--num-stages {stages}"
            break
        stages *= 2
    others = {"--precision": {"precision": "bfloat16"}, "--optimizer": {"optimizer": "sgd"}}
    for option, change in others.items():
        changed = Question(**{**vars(asked), **change})
        if changed != asked and changed.answer().peak <= cap:
            yield f"{option} {next(iter(change.values()))}"


def _facts(found: Answer) -> dict[str, object]:
    asked = found.question
    return {
        "model": asked.model.name,
        "num_parameters": asked.model.num_parameters,
        "num_microbatches": asked.num_microbatches,
        "batch_size": asked.model.batch_size,
        "optimizer": asked.optimizer,
        "layers_per_stage": [len(each) for each in found.cut],
        "stages": [asdict(each) for each in found.stages],
    }


def _text(found: Answer, cap_gib: float) -> str:
    asked = found.question
    title = (
        f"{asked.model.name}: {asked.model.num_parameters:,} parameters on {asked.num_stages} x "
        f"{cap_gib:g} GiB (modelled)\n{asked.precision}, {asked.optimizer}, mini-batch "
        f"{asked.model.batch_size} in {asked.num_microbatches} micro-batches, every one recomputed"
        + (", layers compiled" if asked.compiled else "")
        + (", cut by what the layers hold" if len(asked.model.layers) > MOST_LAYERS else "")
    )
    return stage_table(title, found.cut, found.stages)
