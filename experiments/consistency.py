"""Consistent training: the same network, whatever the partition (v1, section 4.3.1).

Expected: held-out accuracy of AmoebaNet-D on digits of at least 97 % in every run; with 1, 2, 4 and 8 stages
within two standard deviations of five sequential runs, as in the paper; and, stronger, from the same seed
not one bit of any weight different. Beside it what does change results (micro-batches under batch
normalization) and what an asynchronous pipeline does. About ten minutes on two laptop cores:

    python -m experiments run consistency
    python -m experiments run consistency --profile full --device cuda --data /data/imagenet --text corpus.txt

Every case is one training. A training that is killed goes on from its last checkpoint.
"""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.consistency_cells import cells
from experiments.consistency_figures import figures
from experiments.consistency_recipe import (
    BILLION_WORDS,
    DAWNBENCH,
    DEEP,
    DIGITS,
    TOPICS,
    ImageRecipe,
    TextRecipe,
)
from experiments.consistency_tables import tables
from harness.environment import ROOT, code_state
from harness.experiment import Case, Experiment, Outcome, RunOptions
from harness.record import Quantity

if TYPE_CHECKING:
    from experiments.consistency_task import Task
    from experiments.consistency_training import Setting, Trained

MODELS = ("images", "text")
STAGES = (1, 2, 4, 8)
BASELINE_SEEDS = (0, 1, 2, 3, 4)
OWN_SEEDS = {1: 11, 2: 12, 4: 14, 8: 18}
"""The first seed of each number of stages; further ones are 100 apart."""

SHARED_SEED = OWN_SEEDS[1]
"""Of the runs that are compared weight by weight: that of the run with one stage."""

OWN_RUNS = 2
"""With one run each, one of seven would lie outside the band by chance alone; all are shown."""
DEEP_RATES = (0.01, 0.1)
SMALL_SAMPLE = 1797
"""Images taken of the user's own in the scaled-down profiles: as many as there are digits."""

SECONDS = {"images": 32.0, "text": 13.0}
"""Of a training, while another one runs beside it."""


@dataclass(frozen=True)
class Subject:
    """What is trained, in a form that travels to another process."""

    model: str
    recipe: ImageRecipe | TextRecipe
    data: str | None = None
    text: str | None = None
    parallel_text: str | None = None
    split_seed: int = 0
    limit: int | None = None


@functools.cache
def task_of(subject: Subject) -> Task:
    """Loads the data and makes the task. ValueError where the data can't be trained on."""
    if isinstance(subject.recipe, ImageRecipe):
        from experiments.consistency_images import ImageTask, digits, own_images

        recipe = subject.recipe
        if subject.data is None:
            return ImageTask(recipe, digits(recipe.image_size, subject.split_seed))
        return ImageTask(
            recipe,
            own_images(subject.data, recipe.image_size, recipe.augment, subject.split_seed, subject.limit),
        )
    from experiments.consistency_language import own_text_task, topics_task

    if subject.text is None:
        return topics_task(subject.recipe, subject.split_seed)
    return own_text_task(subject.recipe, subject.text, subject.parallel_text, subject.split_seed)


def subject_of(model: str, options: RunOptions) -> Subject:
    """The recipe of the profile on the user's data or the default."""
    if model == "images":
        image_recipe = DAWNBENCH if options.profile == "full" else DIGITS
        if options.profile == "smoke":
            image_recipe = replace(DIGITS, num_filters=8, image_size=9, num_epochs=1)
        if options.data is not None and options.profile != "full":
            image_recipe = replace(image_recipe, augment=True, required_accuracy=0.0)
        return Subject(
            model,
            image_recipe,
            data=options.data,
            split_seed=options.seed,
            limit=None if options.profile == "full" else SMALL_SAMPLE,
        )
    recipe = BILLION_WORDS if options.profile == "full" else TOPICS
    if options.profile == "smoke":
        recipe = replace(TOPICS, num_steps=8)
    return Subject(
        model, recipe, text=options.text, parallel_text=options.parallel_text, split_seed=options.seed
    )


# Cases


def cases(options: RunOptions) -> list[Case]:
    """Raises ValueError for data that is missing or can't be trained on, before anything is run."""
    _check_data(options)
    found = []
    for model in MODELS:
        found += _training_cases(model, options)
    for model in MODELS:
        found += _asynchronous_cases(model, smoke=options.profile == "smoke")
    for rate in DEEP_RATES[:1] if options.profile == "smoke" else DEEP_RATES:
        for deep_init in (False, True):
            for clip in (False, True):
                key = {"part": "trainability", "deep_init": deep_init, "logit_clip": clip, "rate": rate}
                found.append(Case(dict(key), 2.5))
    return found


def _training_cases(model: str, options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    recipe = subject_of(model, options).recipe
    count = recipe.num_microbatches
    seconds = SECONDS[model] / (10 if smoke else 1)

    def case(part: str, num_stages: int, num_microbatches: int, seed: int, **more: Any) -> Case:
        key = {
            "part": part, "model": model, "engine": more.pop("engine", "pipeline"), "num_stages": num_stages,
            "num_microbatches": num_microbatches, "seed": seed, "processes": more.pop("processes", 1),
        }  # fmt: skip
        return Case(key, seconds)

    found = [case("baseline", 1, count, seed) for seed in (BASELINE_SEEDS[:2] if smoke else BASELINE_SEEDS)]
    found += [
        case("own seeds", num_stages, count, OWN_SEEDS[num_stages] + 100 * run)
        for num_stages in (STAGES[:2] if smoke else STAGES)
        for run in range(1 if smoke else OWN_RUNS)
    ]
    found += [
        case("same seed", num_stages, count, SHARED_SEED)
        for num_stages in (STAGES[1:2] if smoke else STAGES[1:])
    ]
    if model == "images" or not smoke:
        found.append(case("same seed", 2, count, SHARED_SEED, processes=2))
    if not smoke:
        found.append(case("micro-batches", 1, 2 * count, SHARED_SEED))
    found.append(case("micro-batches", 1, 1, SHARED_SEED))
    found.append(case("micro-batches", 1, 1, SHARED_SEED, engine="sequential"))
    return found


def _asynchronous_cases(model: str, *, smoke: bool) -> list[Case]:
    if smoke and model == "images":
        return []
    key = {"part": "asynchronous", "model": model, "num_stages": STAGES[-1], "seed": SHARED_SEED}
    return [
        Case({**key, "stash": stash, "rate": rate}, SECONDS[model])
        for rate in ((1.0,) if smoke else (1.0, 1 / STAGES[-1]))
        for stash in (True, False)
    ]


def _check_data(options: RunOptions) -> None:
    if options.parallel_text is not None and options.text is None:
        raise ValueError(
            f"--parallel-text {options.parallel_text}: give the source, which it translates, with --text"
        )
    if options.data is not None:
        from experiments.consistency_paths import image_layout

        image_layout(options.data)
    if options.text is not None:
        task_of(subject_of("text", options))


# Running


def run(case: Case, options: RunOptions) -> Outcome:
    import torch

    torch.set_num_threads(1)
    key: dict[str, Any] = case.key
    if key["part"] == "trainability":
        return _run_deep(key, options)
    missing = _missing(key["model"], options)
    if missing:
        return Outcome(status="skipped", reason=missing)
    if key["part"] == "asynchronous":
        return _run_asynchronous(key, options)
    return _run_training(key, options)


def _missing(model: str, options: RunOptions) -> str:
    if options.profile != "full":
        return ""
    if model == "images" and options.data is None:
        return "needs --data PATH: the recipe at the paper's size is for ImageNet or another folder of images"
    if model == "text" and options.text is None:
        return "needs --text PATH: a model of the paper's size needs a large text"
    return ""


def _run_training(key: dict[str, Any], options: RunOptions) -> Outcome:
    from experiments.consistency_training import Setting

    subject = subject_of(key["model"], options)
    setting = Setting(key["engine"], key["num_stages"], key["num_microbatches"], key["seed"], options.device)
    trained = _trained(subject, setting, key["processes"], options, options.fresh)
    task = task_of(subject)
    quantities = [
        _score_quantity(task, trained.score),
        _measured("training loss", trained.curve[-1][1], "nats"),
    ]
    if key["part"] in ("same seed", "micro-batches"):
        count = subject.recipe.num_microbatches
        reference = _trained(subject, Setting("pipeline", 1, count, SHARED_SEED, options.device), 1, options)
        quantities += _differences(trained, reference)
        quantities.append(_score_quantity(task, reference.score, "reference "))
    return Outcome(tuple(quantities), {**_details(task, subject), **_curve(trained)})


def _trained(
    subject: Subject, setting: Setting, processes: int, options: RunOptions, fresh: bool = False
) -> Trained:
    """Trains, goes on, or reads what this very code has already finished."""
    import torch

    from experiments.consistency_training import folder_name, train

    name = folder_name(
        subject=subject, setting=setting, processes=processes,
        code=code_state(ROOT)["code_sha256"], torch=torch.__version__,
    )  # fmt: skip
    folder = (options.scratch or Path(_temporary().name)) / name
    if fresh:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    if processes == 1:
        return train(task_of(subject), setting, folder)
    if options.device == "cuda" and torch.cuda.device_count() < processes:
        setting = replace(setting, device="cpu")
    from pipeline.launch import launch

    parts = launch(train_rank, processes, subject, setting, folder)
    weights = {name: tensor for part in parts for name, tensor in part.weights.items()}
    last: Trained = parts[-1]
    return replace(last, weights=weights)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="consistency-")


def train_rank(subject: Subject, setting: Setting, folder: Path) -> Trained:
    """One process of several: its stage of the model."""
    from torch import distributed

    from experiments.consistency_training import train

    if setting.device == "cuda":
        setting = replace(setting, device=f"cuda:{distributed.get_rank()}")
    return train(task_of(subject), setting, folder, group=distributed.group.WORLD)


def _run_asynchronous(key: dict[str, Any], options: RunOptions) -> Outcome:
    from experiments.consistency_async import train_asynchronously

    subject = subject_of(key["model"], options)
    task = task_of(subject)
    found = train_asynchronously(task, key["num_stages"], key["seed"], stash=key["stash"], rate=key["rate"])
    one = sum(p.numel() * p.element_size() for p in task.build().parameters())
    return Outcome(
        (
            _score_quantity(task, found.score),
            _measured("largest staleness", max(found.staleness), "updates"),
            _measured("most versions on a stage", max(found.versions), "versions"),
            _measured("weights kept", sum(found.weight_bytes), "bytes"),
            _measured("weights of the model", one, "bytes"),
        ),
        {
            **_details(task, subject),
            "curve": [list(_finite_point(point)) for point in found.curve],
            "staleness": list(found.staleness),
            "versions": list(found.versions),
        },
    )


def _run_deep(key: dict[str, Any], options: RunOptions) -> Outcome:
    from experiments.consistency_deep import LOGIT_CLIP, train_deep

    recipe = replace(DEEP, learning_rate=key["rate"])
    if options.profile == "smoke":
        recipe = replace(recipe, num_layers=12, num_steps=5)
    found = train_deep(key["deep_init"], LOGIT_CLIP if key["logit_clip"] else None, 0, recipe, options.seed)
    return Outcome(
        (
            _measured("first gradient norm", found.first_norm, "number"),
            _measured("largest gradient norm", found.largest_norm, "number"),
            _measured("median gradient norm", found.median_norm, "number"),
            _measured("non-finite steps", found.non_finite, "steps"),
            _measured("held-out perplexity", found.perplexity, "perplexity"),
        ),
        {
            "norms": list(found.norms), "losses": list(found.losses), "layer_norms": list(found.layer_norms),
            "unigram_perplexity": found.unigram, "recipe": asdict(recipe), "clip": LOGIT_CLIP,
        },
    )  # fmt: skip


def _differences(trained: Trained, reference: Trained) -> list[Quantity]:
    """Of the weights, and of everything that is kept, running statistics included."""
    from experiments.consistency_training import is_statistic

    largest = squares = total = 0.0
    different = number = 0
    for name, wanted in reference.weights.items():
        gap = (trained.weights[name].double() - wanted.double()).abs()
        if not gap.isfinite().all():
            raise ValueError(f"{name} is not finite; the training has diverged")
        different += int((gap > 0).sum())
        number += gap.numel()
        if is_statistic(name):
            continue
        largest = max(largest, float(gap.max()))
        squares += float(gap.square().sum())
        total += float(wanted.double().square().sum())
    return [
        _measured("largest weight difference", largest, "number"),
        _measured("relative weight difference", (squares / total) ** 0.5, "ratio"),
        _measured("numbers that differ", different, "parameters"),
        _measured("numbers compared", number, "parameters"),
    ]


def _score_quantity(task: Task, score: float, prefix: str = "") -> Quantity:
    finite = math.isfinite(score)
    return Quantity(
        name=prefix + task.metric, value=score if finite else None, unit=task.unit, provenance="measured",
        higher_is_better=task.higher_is_better, note="" if finite else "not finite: the training diverged",
    )  # fmt: skip


def _measured(name: str, value: float, unit: str) -> Quantity:
    return Quantity(name=name, value=value, unit=unit, provenance="measured")


def _details(task: Task, subject: Subject) -> dict[str, Any]:
    return {
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "requirement": task.requirement,
        "required": task.required,
        "unigram_perplexity": getattr(task, "unigram", None),
        "batch_size": task.batch_size,
        "steps": task.num_steps,
        "recipe": asdict(subject.recipe),
    }


def _curve(trained: Trained) -> dict[str, Any]:
    return {
        "curve": [list(_finite_point(point)) for point in trained.curve],
        "layers_per_stage": list(trained.layers_per_stage),
        "weights_sha256": trained.digest,
    }


def _finite_point(point: tuple[int, float, float]) -> tuple[float | None, ...]:
    """A diverged training's numbers are left out of the curve, not written as what JSON has no word for."""
    return tuple(number if math.isfinite(number) else None for number in point)


EXPERIMENT = Experiment(
    name="consistency",
    title="Consistent training: the same network, whatever the partition",
    source="arXiv v1, section 4.3.1",
    describe=(
        "AmoebaNet-D on images and a Transformer on text, trained with 1, 2, 4 and 8 stages: final quality "
        "against sequential runs, weights bit by bit, the effect of micro-batches, and an asynchronous "
        "pipeline for contrast."
    ),
    profiles={
        "smoke": "a few steps of each, too few to learn",
        "short": "digits and Python's help texts, or a sample of your own data by --data and --text",
        "full": "the paper's recipe at its size on images by --data and text by --text; for GPUs",
    },
    cases=cases,
    run=run,
    cells=cells,
    tables=tables,
    figures=figures,
    options=("device", "seed", "data", "text", "parallel_text"),
    untimed=True,
)
