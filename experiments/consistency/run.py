"""How one case of the consistency experiment becomes an outcome: trained, and set against its reference.

Apart from the list of cases, which is read without running anything: all that is heavy is imported in here,
and only when a case is run, in a process that may be a spawned one.
"""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.consistency.protocol import load_protocol
from gpipe_bench.experiments.consistency.tasks.recipe import DEEP, ImageRecipe, Subject, subject_of
from gpipe_bench.harness.experiment import Case, Outcome, RunOptions
from gpipe_bench.harness.places import ROOT
from gpipe_bench.harness.records.environment import source_digest
from gpipe_bench.harness.records.record import Quantity

if TYPE_CHECKING:
    from gpipe_bench.experiments.consistency.disk import Trained
    from gpipe_bench.experiments.consistency.tasks.task import Task
    from gpipe_bench.experiments.consistency.training import Setting


TRAINED_BY = (
    "models", "pipeline", "experiments/consistency/disk.py", "experiments/consistency/tasks",
    "experiments/consistency/training.py", "experiments/consistency/updates.py",
)  # fmt: skip
"""The sources that a training depends on: an edit of any other lets an unfinished one go on."""


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
    from gpipe_bench.experiments.consistency.training import Setting

    subject = subject_of(key["model"], options)
    setting = Setting(
        key["engine"], key["num_stages"], key["num_microbatches"], key["seed"], options.device,
        key["initial_seed"],
    )  # fmt: skip
    trained = _trained(subject, setting, key["processes"], options, options.fresh)
    task = task_of(subject)
    quantities = [
        _score_quantity(task, trained.score),
        _measured("training loss", trained.curve[-1][1], "nats"),
    ]
    if key["part"] in ("same seed", "micro-batches"):
        first = replace(
            setting, engine="pipeline", num_stages=1, num_microbatches=subject.recipe.num_microbatches
        )
        reference = _trained(subject, first, 1, options)
        quantities += _differences(trained, reference)
        quantities.append(_score_quantity(task, reference.score, "reference "))
    return Outcome(tuple(quantities), {**_details(task, subject), **_curve(trained)})


def _trained(
    subject: Subject, setting: Setting, processes: int, options: RunOptions, fresh: bool = False
) -> Trained:
    """Trains, goes on, or reads what the same sources have already finished."""
    import torch

    from gpipe_bench.experiments.consistency.disk import folder_name
    from gpipe_bench.experiments.consistency.training import train

    name = folder_name(
        subject=subject, setting=setting, processes=processes,
        code=source_digest(ROOT, TRAINED_BY), torch=torch.__version__,
    )  # fmt: skip
    folder = (options.scratch or Path(_temporary().name)) / name
    if fresh:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    if processes == 1:
        return train(task_of(subject), setting, folder)
    from gpipe_bench.pipeline import devices
    from gpipe_bench.pipeline.ranks.launch import launch

    if options.device == "cuda" and devices.count("cuda") < processes:
        setting = replace(setting, device="cpu")  # what is asked is whether processes change anything

    parts = launch(train_rank, processes, subject, setting, folder, device=setting.device)
    weights = {name: tensor for part in parts for name, tensor in part.weights.items()}
    last: Trained = parts[-1]
    return replace(last, weights=weights)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="consistency-")


@functools.cache
def task_of(subject: Subject) -> Task:
    """Loads the data and makes the task. ValueError where the data can't be trained on."""
    if isinstance(subject.recipe, ImageRecipe):
        from gpipe_bench.experiments.consistency.tasks.images import ImageTask, digits, own_images

        recipe = subject.recipe
        if subject.data is None:
            return ImageTask(recipe, digits(recipe.image_size, subject.split_seed))
        return ImageTask(
            recipe,
            own_images(subject.data, recipe.image_size, recipe.augment, subject.split_seed, subject.limit),
        )
    from gpipe_bench.experiments.consistency.tasks.language import own_text_task, topics_task

    if subject.text is None:
        return topics_task(subject.recipe, subject.split_seed)
    return own_text_task(subject.recipe, subject.text, subject.parallel_text, subject.split_seed)


def train_rank(subject: Subject, setting: Setting, folder: Path) -> Trained:
    """One process of several: its stage of the model."""
    from torch import distributed

    from gpipe_bench.experiments.consistency.training import train

    if setting.device == "cuda":
        setting = replace(setting, device=f"cuda:{distributed.get_rank()}")
    return train(task_of(subject), setting, folder, group=distributed.group.WORLD)


def _run_asynchronous(key: dict[str, Any], options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.consistency.asynchronous import train_asynchronously

    subject = subject_of(key["model"], options)
    task = task_of(subject)
    found = train_asynchronously(
        task, key["num_stages"], key["seed"],
        stash=key["stash"], rate=key["rate"], initial_seed=key["initial_seed"],
    )  # fmt: skip
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
    from gpipe_bench.experiments.consistency.deep import LOGIT_CLIP, train_deep

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
    from gpipe_bench.experiments.consistency.disk import is_statistic

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
        "floor": task.floor,
        "protocol_sha256": load_protocol().sha256,
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
