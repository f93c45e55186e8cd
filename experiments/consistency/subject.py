"""What a consistency run trains, chosen from profile and options: a recipe, and the user's data or ours.

A description instead of the task itself, because it travels to the processes of a run, each of which loads
its data alone, and because the cases are listed from it without torch. The user's own data are looked at
before anything is trained on them, so that a wrong path is one line at once. Nothing is decoded for that:
what only decoding shows (a broken image) is reported by the case that meets it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from gpipe_bench.experiments.consistency.recipe import (
    BILLION_WORDS,
    DAWNBENCH,
    DIGITS,
    TOPICS,
    ImageRecipe,
    TextRecipe,
)
from gpipe_bench.harness.experiment import RunOptions

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


IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
CIFAR10 = "cifar-10-batches-py"
PARTS = (("train", "val"), ("train", "test"))
"""Folders of training and held-out images, as ImageNet and others are laid out."""


def image_layout(path: str) -> str:
    """`"cifar10"`, `"train/val"`, `"train/test"` or `"classes"` (one folder per class, still to be split).

    Raises ValueError for a path that is none of these, or with fewer than two classes.
    """
    root = _folder(path)
    if (root / CIFAR10).is_dir():
        missing = [name for name in ("data_batch_1", "test_batch", "batches.meta")
                   if not (root / CIFAR10 / name).is_file()]  # fmt: skip
        if missing:
            raise ValueError(
                f"--data {path}: {CIFAR10} lacks {', '.join(missing)}; unpack the whole CIFAR-10 "
                f"archive there"
            )
        return "cifar10"
    for train, held_out in PARTS:
        if (root / train).is_dir() and (root / held_out).is_dir():
            classes = _classes(root / train, path)
            others = _classes(root / held_out, path)
            if classes != others:
                different = sorted(set(classes) ^ set(others))
                raise ValueError(
                    f"--data {path}: {train} and {held_out} have different classes ({different[0]} is in one "
                    "of them only); both need the same folders"
                )
            return f"{train}/{held_out}"
    _classes(root, path)
    return "classes"


def _folder(path: str) -> Path:
    root = Path(path)
    if not root.exists():
        raise ValueError(f"--data {path}: there is no such folder; give one with a folder per class")
    if not root.is_dir():
        raise ValueError(f"--data {path}: this is a file; give a folder that holds a folder per class")
    return root


def _classes(folder: Path, path: str) -> list[str]:
    """Names of the class folders; at least two, each with an image."""
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if len(classes) < 2:
        found = f"one class ({classes[0]})" if classes else "no class"
        raise ValueError(
            f"--data {path}: {folder} holds {found}; give a folder with at least two folders of images, one "
            "per class"
        )
    for name in classes:
        if not _has_image(folder / name):
            raise ValueError(
                f"--data {path}: {folder / name} holds no image; allowed are {', '.join(IMAGE_SUFFIXES)}"
            )
    return classes


def _has_image(folder: Path) -> bool:
    return any(name.lower().endswith(IMAGE_SUFFIXES) for _, _, names in os.walk(folder) for name in names)


def read_text(path: str, option: str = "--text") -> str:
    """The content of a text file in UTF-8. Raises ValueError where there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: byte {error.start} is not UTF-8; convert the file") from error
    except OSError as error:
        raise ValueError(
            f"{option} {path}: {error.strerror or error}; give a text file that can be read"
        ) from error
    if not text.strip():
        raise ValueError(f"{option} {path}: the file has no text in it")
    return text
