"""Looks at the user's own data before anything is trained on it, so that a wrong path is one line at once.

Nothing is decoded here and neither torch nor torchvision is loaded; what only decoding shows (a broken image)
is reported by the case that meets it.
"""

from __future__ import annotations

import os
from pathlib import Path

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
