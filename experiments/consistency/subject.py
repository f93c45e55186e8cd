"""What a consistency run trains, chosen from profile and options: a recipe, and the user's data or ours.

A description instead of the task itself, because it travels to the processes of a run, each of which loads
its data alone, and because the cases are listed from it without torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpipe_bench.experiments.consistency.recipe import (
    BILLION_WORDS,
    DAWNBENCH,
    DIGITS,
    TOPICS,
    ImageRecipe,
    TextRecipe,
)
from gpipe_bench.harness.experiment import RunOptions

if TYPE_CHECKING:
    from gpipe_bench.experiments.consistency.task import Task

SMALL_SAMPLE = 1797
"""Images taken of the user's own in the scaled-down profiles: as many as there are digits."""


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
        from gpipe_bench.experiments.consistency.images import ImageTask, digits, own_images

        recipe = subject.recipe
        if subject.data is None:
            return ImageTask(recipe, digits(recipe.image_size, subject.split_seed))
        return ImageTask(
            recipe,
            own_images(subject.data, recipe.image_size, recipe.augment, subject.split_seed, subject.limit),
        )
    from gpipe_bench.experiments.consistency.language import own_text_task, topics_task

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
