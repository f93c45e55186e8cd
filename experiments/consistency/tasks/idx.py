"""Data sets in idx files, the format of MNIST, Fashion-MNIST and their kin: Debian's `dataset-fashion-mnist`.

Found by name and read without torchvision: four files, images and labels of a training and of a held-out
part, packed by gzip or not.
"""

from __future__ import annotations

import gzip
import math
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]

_NAME = re.compile(r"(?P<part>train|t10k|test)-(?P<what>images|labels)[-.]idx(?P<axes>[13])-ubyte(\.gz)?$")
_AXES = {"images": 3, "labels": 1}
_UNSIGNED_BYTES = 8
_MOST_BYTES = 1 << 31  # of one file; ten times the largest of the kind


@dataclass(frozen=True)
class IdxFiles:
    """Paths of the four files."""

    train_images: Path
    train_labels: Path
    held_out_images: Path
    held_out_labels: Path


def holds_idx(folder: Path) -> bool:
    """Whether files of the folder are named like idx files."""
    return folder.is_dir() and any(_NAME.search(path.name) for path in folder.iterdir())


def idx_files(folder: Path) -> IdxFiles:
    """The files of a folder. Raises ValueError where one of the four is missing or stands there twice."""
    found: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.search(path.name)
        if match and int(match["axes"]) == _AXES[match["what"]]:
            part = "train" if match["part"] == "train" else "held out"
            found.setdefault((part, match["what"]), []).append(path)
    chosen = {}
    for part, name in (("train", "train"), ("held out", "t10k")):
        for what, axes in _AXES.items():
            paths = found.get((part, what), [])
            if len(paths) != 1:
                names = ", ".join(path.name for path in paths) or "none"
                raise ValueError(
                    f"--data {folder}: of the files {name}-{what}-idx{axes}-ubyte, packed or not, it must "
                    f"hold one; it holds {names}"
                )
            chosen[part, what] = paths[0]
    return IdxFiles(
        chosen["train", "images"], chosen["train", "labels"],
        chosen["held out", "images"], chosen["held out", "labels"],
    )  # fmt: skip


def read_part(images: Path, labels: Path) -> tuple[Array, Array]:
    """Images (N, height, width) and classes (N,) of one part, bytes.

    Raises ValueError where a file is no idx file of bytes, is cut off, or the two don't belong together.
    """
    pixels, classes = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(classes):
        raise ValueError(
            f"{images} has {len(pixels)} images and {labels} {len(classes)} labels; they are not of one set"
        )
    if not pixels.size:
        raise ValueError(f"{images} has no images in it")
    return pixels, classes


def read_idx(path: Path, axes: int) -> Array:
    """An array of bytes with that many axes. Raises ValueError where the file is not one."""
    import numpy

    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MOST_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} can't be read ({error}); fetch it again") from error
    header = 4 + 4 * axes
    if len(content) < header or content[:4] != bytes((0, 0, _UNSIGNED_BYTES, axes)):
        raise ValueError(
            f"{path} is no idx file of bytes with {axes} axes; it begins with {content[:4].hex(' ')}"
        )
    shape = struct.unpack(f">{axes}I", content[4:header])
    size = math.prod(shape)
    if len(content) - header != size:
        raise ValueError(
            f"{path} says that it holds {' x '.join(map(str, shape))} bytes and holds "
            f"{len(content) - header}; fetch it again"
        )
    return numpy.frombuffer(content, dtype=numpy.uint8, offset=header).reshape(shape)
