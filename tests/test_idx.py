"""idx files by path: MNIST's format, from tiny files made here."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from gpipe_bench.experiments.consistency.experiment import EXPERIMENT
from gpipe_bench.experiments.consistency.judging import load_protocol
from gpipe_bench.experiments.consistency.recipes import DIGITS, holds_idx, image_layout, subject_of
from gpipe_bench.experiments.consistency.tasks import ImageTask, own_images, read_idx
from gpipe_bench.experiments.consistency.training import Setting, train
from gpipe_bench.harness.experiment import RunOptions


def write(path: Path, array: numpy.ndarray) -> None:
    """The array as an idx file, packed if its name says so."""
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(numpy.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def data_set(folder: Path, *, suffix: str = "", train: int = 20, held_out: int = 8) -> Path:
    """Images of 12 x 12 pixels whose brightness is their class, of four."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", held_out)):
        classes = numpy.arange(count) % 4
        write(folder / f"{part}-labels-idx1-ubyte{suffix}", classes)
        images = numpy.broadcast_to(classes[:, None, None] * 60, (count, 12, 12))
        write(folder / f"{part}-images-idx3-ubyte{suffix}", images)
    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_in_their_own_split(suffix: str, tmp_path: Path) -> None:
    path = str(data_set(tmp_path / "idx", suffix=suffix))
    assert image_layout(path) == "idx"
    images = own_images(path, 9, True, 0, None)
    assert (len(images.train), len(images.held_out), images.num_classes) == (20, 8, 4)
    assert images.most_frequent == 0.25
    pixels, classes = images.batch([*images.train[:5], *images.held_out[:2]], torch.Generator())
    assert pixels.shape == (7, 3, 9, 9)
    assert classes.tolist() == [0, 1, 2, 3, 0, 0, 1]
    torch.testing.assert_close(pixels[:, 0, 4, 4], classes * 60 / 127.5 - 1)
    torch.testing.assert_close(pixels[:, 0], pixels[:, 2])
    fewer = own_images(path, 9, False, 0, 10)
    assert (len(fewer.train), len(fewer.held_out)) == (8, 2)
    assert set(fewer.train) < set(images.train)
    assert set(fewer.held_out) < set(images.held_out)


def test_the_protocols_runs_take_them(tmp_path: Path) -> None:
    """The same cases as on digits, and a training goes through."""
    path = str(data_set(tmp_path / "idx"))
    options = RunOptions(data=path)
    assert [case.key for case in EXPERIMENT.cases(options)] == [
        case.key for case in EXPERIMENT.cases(RunOptions())
    ]
    recipe = subject_of("images", options).recipe
    assert recipe == replace(DIGITS, required_accuracy=0.0, floor_accuracy=0.0)
    assert not recipe.augment, "there are digits among such sets, which must not be flipped"
    small = replace(recipe, num_filters=8, stem_filters=8, image_size=9, num_epochs=1, batch_size=10)
    task = ImageTask(small, own_images(path, 9, False, 0, None))
    assert task.required == task.floor == pytest.approx(0.35)
    seed = load_protocol().plans["images"].sequential[0]
    assert len(train(task, Setting(num_microbatches=2, seed=seed), tmp_path / "run").curve) == 1


def test_files_of_a_set_that_is_not_whole(tmp_path: Path) -> None:
    folder = data_set(tmp_path / "idx")
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte, packed or not, it must hold one; .* none"):
        image_layout(str(folder))
    data_set(folder, suffix=".gz")
    with pytest.raises(ValueError, match="holds train-images-idx3-ubyte, train-images-idx3-ubyte.gz"):
        image_layout(str(folder))
    assert not holds_idx(tmp_path)
    assert not holds_idx(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no idx file"),
        (b"\x00\x00\x08\x03" + b"\x00" * 8, "is no idx file"),
        (
            b"\x00\x00\x0d\x01\x00\x00\x00\x01\x07",
            "is no idx file of bytes with 1 axes; it begins with 00 00 0d",
        ),
        (b"\x00\x00\x08\x01\x00\x00\x00\x09\x07", "says that it holds 9 bytes and holds 1"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x01\x07\x08", "says that it holds 1 bytes and holds 2"),
    ],
)
def test_a_file_that_is_no_idx_file(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(path, 1)


def test_a_packed_file_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    whole = gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x01\x07")
    for broken in (whole[:-9], b"not packed", whole[:12] + b"\xff" + whole[13:]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"idx1-ubyte\.gz can't be read .* fetch it again"):
            read_idx(path, 1)


def test_images_and_labels_of_different_sets(tmp_path: Path) -> None:
    folder = data_set(tmp_path / "idx")
    write(folder / "train-labels-idx1-ubyte", numpy.zeros(19))
    with pytest.raises(ValueError, match=r"has 20 images and .* 19 labels"):
        own_images(str(folder), 9, False, 0, None)
    data_set(folder)
    write(folder / "t10k-images-idx3-ubyte", numpy.zeros((8, 10, 12)))
    with pytest.raises(ValueError, match="differ in size"):
        own_images(str(folder), 9, False, 0, None)
    data_set(folder, held_out=0)
    with pytest.raises(ValueError, match="has no images in it"):
        own_images(str(folder), 9, False, 0, None)
