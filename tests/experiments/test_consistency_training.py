"""Trainings of the consistency experiment: recipes by hand, equal weights, and what a kill leaves."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from forked import free_port
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributed, nn

from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.paper.consistency import experiment as consistency
from gpipe_bench.experiments.paper.consistency import training as consistency_training
from gpipe_bench.experiments.paper.consistency.asynchronous import train_asynchronously
from gpipe_bench.experiments.paper.consistency.experiment import EXPERIMENT
from gpipe_bench.experiments.paper.consistency.judging import load_protocol
from gpipe_bench.experiments.paper.consistency.recipes import (
    DAWNBENCH,
    DIGITS,
    TOPICS,
    image_layout,
    subject_of,
)
from gpipe_bench.experiments.paper.consistency.tasks import (
    Images,
    ImageTask,
    RMSPropTF,
    TextTask,
    TranslationTask,
    blocks_of,
    chosen,
    digits,
    even_parts,
    own_images,
    task_of,
    topics,
)
from gpipe_bench.experiments.paper.consistency.training import (
    Setting,
    Trained,
    WeightAverage,
    is_statistic,
    latest_checkpoint,
    train,
)
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.store import Store
from gpipe_bench.models.torchvision_shim import import_torchvision

TEXT = replace(
    TOPICS, num_steps=4, num_layers=2, d_model=16, ffn_dim=32, seq_len=12, batch_size=8, vocab_size=256
)
IMAGES = replace(DIGITS, num_filters=8, stem_filters=8, image_size=9, num_epochs=1, batch_size=50)


def text_task() -> TextTask:
    task = TextTask(TEXT, topics()[:60_000], 0, "the beginning of the topics")
    task.evaluate_every = 2
    return task


def image_task() -> ImageTask:
    """Four steps of the digits' first 200 images."""
    whole = digits(9, 0)
    train, held_out = whole.train[:200], whole.held_out[:50]
    targets = [whole.load(index, None)[1] for index in range(1797)]
    return ImageTask(IMAGES, Images(whole.load, train, held_out, targets, whole.num_classes))


def same_weights(ours: Trained, wanted: Trained, *, statistics: bool = True) -> bool:
    assert ours.weights.keys() == wanted.weights.keys()
    names = [name for name in wanted.weights if statistics or not is_statistic(name)]
    return all(torch.equal(ours.weights[name], wanted.weights[name]) for name in names)


# Recipes


def test_rmsprop_is_tensorflows() -> None:
    """Three steps of one weight by hand: averages start at one, epsilon is inside the root."""
    weight = nn.Parameter(torch.tensor([[2.0]], dtype=torch.float64))
    optimizer = RMSPropTF([weight], lr=0.5, decay=0.9, momentum=0.8, eps=1.0, weight_decay=0.1)
    value, square, velocity = 2.0, 1.0, 0.0
    for rate, gradient in ((0.5, 3.0), (0.25, -1.0), (0.25, 0.5)):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.tensor([[gradient]], dtype=torch.float64)
        optimizer.step()
        g = gradient + 0.1 * value
        square = 0.9 * square + 0.1 * g * g
        velocity = 0.8 * velocity + rate * g / math.sqrt(square + 1.0)
        value -= velocity
        assert weight.item() == pytest.approx(value, rel=1e-12)


def test_the_rate_warms_up_and_falls_as_a_staircase() -> None:
    recipe = replace(DAWNBENCH, warmup_epochs=0.5)
    assert recipe.learning_rate(0, 100) == 0
    assert recipe.learning_rate(25, 100) == pytest.approx(2.56 / 2)
    assert recipe.learning_rate(50, 100) == recipe.learning_rate(99, 100) == 2.56
    assert recipe.learning_rate(100, 100) == pytest.approx(2.56 * 0.88)
    assert recipe.learning_rate(3499, 100) == pytest.approx(2.56 * 0.88**34)
    assert recipe.learning_rate(100 * 200, 100) == pytest.approx(2.56e-4)
    rates = [TOPICS.rate(step) for step in range(100)]
    assert rates.index(max(rates)) == TOPICS.warmup_steps - 1
    assert rates[0] == pytest.approx(0.5 * 48**-0.5 * 20**-1.5)


def test_weight_decay_reaches_convolution_and_dense_weights_alone() -> None:
    task = image_task()
    model = task.build()
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, others = task.optimizer(model.named_parameters()).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (DIGITS.weight_decay, 0.0) == (1e-3, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2, 4}
    assert {p.dim() for p in others["params"]} == {1}
    norms = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert norms <= {names[p] for p in others["params"]}
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_averages_follow_with_a_ramp_and_are_only_lent() -> None:
    module = nn.BatchNorm1d(1)
    average = WeightAverage(module, 0.9999)
    module.weight.data.fill_(5.0)
    average.update(1)
    assert average.average["weight"].item() == pytest.approx(1 + 4 * (1 - 2 / 11))
    with average.applied():
        assert module.weight.item() == pytest.approx(1 + 4 * (1 - 2 / 11))
    assert module.weight.item() == 5.0
    assert "num_batches_tracked" not in average.average


# Data


@given(number=st.integers(1, 500), size=st.integers(1, 600))
def test_parts_cover_everything_once_and_evenly(number: int, size: int) -> None:
    parts = even_parts(number, size)
    assert [i for part in parts for i in range(number)[part]] == list(range(number))
    sizes = [len(range(number)[part]) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_an_epoch_takes_every_example_once_in_an_order_of_its_own() -> None:
    first = torch.cat([chosen(step, 3, 40, 8) for step in range(5)])
    second = torch.cat([chosen(step, 3, 40, 8) for step in range(5, 10)])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(40))
    assert first.tolist() != second.tolist()


def test_no_held_out_example_is_trained_on() -> None:
    for seed in (0, 1):
        images = digits(9, seed)
        assert not set(images.train) & set(images.held_out)
        assert len(images.train) + len(images.held_out) == 1797
    assert digits(9, 0).held_out != digits(9, 1).held_out
    pixels, _ = digits(8, 0).batch(range(100), None)
    assert (pixels.min(), pixels.max()) == (-1, 1)


def test_no_held_out_paragraph_was_in_training() -> None:
    """The default text repeats whole paragraphs; each counts once."""
    paragraphs = [p for block in blocks_of(topics()) for p in block.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))
    repeated = [p.strip() for p in topics().split("\n\n") if p.strip()]
    assert len(set(repeated)) < len(repeated)


def test_the_tokenizer_knows_only_the_training_text() -> None:
    """Every block has a letter of its own; those of the held-out blocks are unknown to the pieces."""
    letters = [chr(0x4E00 + i) for i in range(20)]
    words = "the quick brown fox jumps over the lazy dog and runs away from it again "
    text = "\n\n".join(f"{letter} {words * 30}{i}" for i, letter in enumerate(letters))
    task = TextTask(replace(TEXT, vocab_size=100), text, 0, "the text")
    unknown = [letter for letter in letters if task.pieces.unk_id() in task.pieces.encode(letter)]
    assert len(unknown) == 2
    assert not (task.train_tokens == task.pieces.unk_id()).any()


def test_the_targets_are_the_next_tokens() -> None:
    inputs, target = text_task().batch(0, 0)
    assert inputs.shape == target.shape == (8, 12)
    assert torch.equal(inputs[:, 1:], target[:, :-1])


def test_a_translation_is_trained_through_the_same_code(tmp_path: Path) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    source = "\n".join(f"{a} {b} {c}" for a in words for b in words for c in words[:3])
    target = "\n".join(" ".join(reversed(line.split())) for line in source.splitlines())
    recipe = replace(TEXT, vocab_size=40, num_layers=4, num_steps=40, learning_rate=1.0)
    task = TranslationTask(recipe, source, target, 0, "the files")
    task.evaluate_every = recipe.num_steps
    trained = train(task, Setting(num_stages=4, num_microbatches=2), tmp_path / "four")
    assert trained.score < task.unigram
    assert same_weights(trained, train(task, Setting(num_microbatches=2), tmp_path / "one"))
    # The mean over the examples of micro-batches is that of the mini-batch, filled-up positions or not.
    (_, inputs), wanted = task.batch(0, 0)
    logits = torch.randn(*inputs.shape, 40)
    halves = [task.loss(logits[i : i + 4], wanted[i : i + 4]) for i in (0, 4)]
    assert torch.stack(halves).mean().item() == pytest.approx(task.loss(logits, wanted).item(), rel=1e-5)


def test_own_images_of_any_layout(tmp_path: Path) -> None:
    from PIL import Image

    def fill(folder: Path, count: int) -> None:
        folder.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (20, 14), (40 * i, 0, 90)).save(folder / f"{i}.png")

    for name in ("a", "b"):
        fill(tmp_path / "flat" / name, 6)
        fill(tmp_path / "parts" / "train" / name, 4)
        fill(tmp_path / "parts" / "val" / name, 2)
    flat = own_images(str(tmp_path / "flat"), 9, True, 0, None)
    assert (len(flat.train), len(flat.held_out), flat.num_classes) == (10, 2, 2)
    parts = own_images(str(tmp_path / "parts"), 9, True, 0, None)
    assert (len(parts.train), len(parts.held_out)) == (8, 4)
    generator = torch.Generator().manual_seed(0)
    images, classes = parts.batch(parts.train, generator)
    assert images.shape == (8, 3, 9, 9)
    assert images.abs().max() <= 1
    assert classes.tolist() == [0] * 4 + [1] * 4
    again, _ = parts.batch(parts.train, torch.Generator().manual_seed(0))
    assert torch.equal(images, again)
    still, _ = parts.batch(parts.held_out, None)
    assert not torch.equal(images[:1], still[:1])
    (tmp_path / "flat" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="can't be read as an image;"):
        own_images(str(tmp_path / "flat"), 9, False, 0, None).batch(range(12), None)


def test_augmented_colours_are_brighter_or_darker_and_more_or_less_of_a_colour(tmp_path: Path) -> None:
    """Which leaves the brightness that was shifted as it is: by at most 32 of 255, colours by a tenth."""
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (20, 14), (153, 102, 127)).save(tmp_path / name / "0.png")
        Image.new("RGB", (20, 14), (153, 102, 127)).save(tmp_path / name / "1.png")
    images = own_images(str(tmp_path), 9, True, 0, None)
    parts, before = torch.tensor([0.299, 0.587, 0.114]), torch.tensor([153, 102, 127]) / 255
    shifts, colours = [], []
    for seed in range(60):
        pixels, _ = images.batch(range(1), torch.Generator().manual_seed(seed))
        after = (pixels[0, :, 4, 4] + 1) / 2
        shifts.append(float((after * parts).sum() - (before * parts).sum()))
        found = (after - (after * parts).sum()) / (before - (before * parts).sum())
        colours.append((float(found[0]), float(found[2])))
    assert -32 / 255 <= min(shifts) < -0.1
    assert 0.1 < max(shifts) <= 32 / 255
    assert all(0.899 < min(each) <= max(each) < 1.101 and each[0] != each[1] for each in colours)
    assert max(map(max, colours)) - min(map(min, colours)) > 0.15


def cifar10_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Digits as an archive in CIFAR-10's format, with the checksums torchvision expects of the real one."""
    import_torchvision()
    from sklearn.datasets import load_digits
    from torchvision.datasets import CIFAR10

    root = folder / CIFAR10.base_folder
    root.mkdir(parents=True)
    images, targets = load_digits(return_X_y=True)
    pixels = images.reshape(-1, 8, 8).repeat(4, 1).repeat(4, 2)  # 32 x 32, 0 to 16
    planes = numpy.stack([pixels * 15, 255 - pixels * 15, pixels * 0], axis=1).astype(numpy.uint8)

    def write(name: str, content: dict[str, Any]) -> str:
        data = pickle.dumps(content)
        (root / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    def batch(first: int) -> dict[str, Any]:
        chosen = slice(first, first + 40)
        return {"data": planes[chosen].reshape(40, -1), "labels": targets[chosen].tolist()}

    names = [f"data_batch_{i}" for i in range(1, 6)]
    parts = [[name, write(name, batch(40 * i))] for i, name in enumerate(names)]
    monkeypatch.setattr(CIFAR10, "train_list", parts)
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", write("test_batch", batch(200))]])
    meta = write("batches.meta", {"label_names": [str(i) for i in range(10)]})
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": meta})
    return folder


def test_cifar10_is_read_in_its_own_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    path = str(cifar10_archive(tmp_path, monkeypatch))
    images = own_images(path, 28, False, 0, None)
    assert (len(images.train), len(images.held_out), images.num_classes) == (200, 40, 10)
    targets = load_digits().target
    found, classes = images.batch([*images.train[:50], *images.held_out], None)
    assert classes.tolist() == [*targets[:50], *targets[200:240]]
    # The central 28 of 32 pixels, so not resized: red is the digit, green its negative, blue nothing.
    digit = torch.tensor(load_digits().images[:50]).repeat_interleave(4, 1).repeat_interleave(4, 2)
    red = (digit[:, 2:30, 2:30] * 15 / 127.5 - 1).float()
    torch.testing.assert_close(found[:50, 0], red)
    torch.testing.assert_close(found[:50, 1], -red)
    assert (found[:, 2] == -1).all()
    fewer = own_images(path, 28, True, 0, 100)
    assert (len(fewer.train), len(fewer.held_out)) == (80, 20)
    assert set(fewer.train) <= set(images.train)
    assert set(fewer.held_out) <= set(images.held_out)
    ImageTask(replace(IMAGES, image_size=9, batch_size=20, augment=True), fewer).batch(0, 0)


def test_a_changed_cifar10_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a pickle, which could run anything; the checksum is looked at first."""
    path = cifar10_archive(tmp_path, monkeypatch)
    trap = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (trap,)

    (path / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="of cifar-10-batches-py is not the published"):
        own_images(str(path), 28, False, 0, None)
    assert not trap.exists()


# Weights


@pytest.mark.parametrize(("make", "num_stages"), [(text_task, 2), (image_task, 8)])
def test_the_number_of_stages_changes_no_bit(make: Any, num_stages: int, tmp_path: Path) -> None:
    one = train(make(), Setting(num_stages=1, num_microbatches=3), tmp_path / "one")
    many = train(make(), Setting(num_stages=num_stages, num_microbatches=3), tmp_path / "many")
    assert len(many.layers_per_stage) == num_stages
    assert same_weights(many, one)
    assert many.curve == one.curve


@pytest.mark.parametrize("make", [text_task, image_task])
def test_one_micro_batch_is_the_plain_model(make: Any, tmp_path: Path) -> None:
    plain = train(make(), Setting("sequential"), tmp_path / "plain")
    pipeline = train(make(), Setting(num_stages=4), tmp_path / "pipeline")
    other = train(make(), Setting(num_microbatches=2), tmp_path / "other")
    assert same_weights(pipeline, plain, statistics=False)
    assert plain.digest == pipeline.digest != other.digest


class _Still(TextTask):
    """Ends with the weights it began with."""

    def learning_rate(self, step: int) -> float:
        return 0.0


def test_paired_runs_begin_with_the_same_weights_and_see_other_data(tmp_path: Path) -> None:
    task = _Still(TEXT, topics()[:60_000], 0, "the beginning of the topics")
    seeds = {"one": (5, 7), "paired": (6, 7), "other": (5, 8)}
    ends = {
        name: train(task, Setting(seed=seed, initial_seed=initial), tmp_path / name)
        for name, (seed, initial) in seeds.items()
    }
    assert same_weights(ends["one"], ends["paired"])
    assert not same_weights(ends["one"], ends["other"])
    assert ends["one"].curve[-1][1] != ends["paired"].curve[-1][1], "other mini-batches, another loss"
    stale = train_asynchronously(task, 2, 6, stash=True, initial_seed=7)
    assert all(torch.equal(stale.weights[name], ends["one"].weights[name]) for name in stale.weights)


# Asynchronous training


class Scale(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Product:
    """y = a b x with the loss y^2 / 2: everything can be followed by hand."""

    metric, unit, higher_is_better = "loss", "number", False
    batch_size, num_steps, evaluate_every, num_microbatches = 1, 6, 6, 1
    average_decay = None
    required, requirement = 0.0, ""

    def build(self) -> nn.Sequential:
        return nn.Sequential(Scale(0.9), Scale(1.1))

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return output.square().mean() / 2

    def optimizer(self, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.0)

    def learning_rate(self, step: int) -> float:
        return 0.1

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([1.0 + step / 10], dtype=torch.float64), torch.zeros(1)

    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        return [self.batch(0, 0)]

    def count(self, output: Any, target: Tensor) -> tuple[float, float]:
        return float(output.sum()), 1.0

    def score(self, total: float, number: float) -> float:
        return total / number


@pytest.mark.parametrize("stash", [True, False])
def test_two_asynchronous_stages_by_hand(stash: bool) -> None:
    """Stage 0 (a) runs one forward ahead. Of its gradient, d loss / d a = x b (a b x), b and the product are
    those of the forward at stage 1; with stashing or without, `a` does not enter its own gradient again, but
    it does enter the one that a third stage would get."""
    found = train_asynchronously(Product(), 2, 0, stash=stash)
    a, b = 0.9, 1.1
    hidden = {0: a * 1.0, 1: a * 1.1}  # forwards of stage 0, one ahead
    for step in range(6):
        x = 1.0 + step / 10
        y = b * hidden[step]
        to_a, to_b = x * b * y, hidden[step] * y
        b -= 0.1 * to_b
        a -= 0.1 * to_a
        if step + 2 < 6:  # the forward after this backward sees the new a
            hidden[step + 2] = a * (1.0 + (step + 2) / 10)
    assert found.weights["0.weight"].item() == pytest.approx(a, rel=1e-12)
    assert found.weights["1.weight"].item() == pytest.approx(b, rel=1e-12)
    assert found.staleness == (1, 0)
    assert found.versions == ((2, 1) if stash else (1, 1))


def test_stashing_matters_where_a_stage_is_used_in_its_own_gradient() -> None:
    """Two layers on the first stage: without stashing the gradient of the first meets the new second."""

    class Three(Product):
        def build(self) -> nn.Sequential:
            return nn.Sequential(Scale(0.9), Scale(1.1), Scale(0.8))

    with_stash = train_asynchronously(Three(), 2, 0, stash=True)
    without = train_asynchronously(Three(), 2, 0, stash=False)
    assert [with_stash.staleness, without.staleness] == [(1, 0)] * 2
    assert with_stash.weights["0.weight"].item() != without.weights["0.weight"].item()


@pytest.mark.parametrize(("make", "stash"), [(text_task, True), (image_task, False)])
def test_one_asynchronous_stage_is_the_sequential_training(make: Any, stash: bool, tmp_path: Path) -> None:
    found = train_asynchronously(make(), 1, 0, stash=stash)
    plain = train(make(), Setting("sequential"), tmp_path)
    assert all(torch.equal(found.weights[name], plain.weights[name]) for name in plain.weights)
    assert (found.staleness, found.versions, found.curve) == ((0,), (1,), plain.curve)


def test_the_rate_is_multiplied(tmp_path: Path) -> None:
    task = text_task()
    found = train_asynchronously(task, 1, 0, stash=True, rate=0.125)
    whole = task.learning_rate
    task.learning_rate = lambda step: whole(step) / 8  # type: ignore[method-assign]
    plain = train(task, Setting("sequential"), tmp_path)
    assert all(torch.equal(found.weights[name], plain.weights[name]) for name in plain.weights)


def test_running_statistics_move_on_while_mini_batches_are_in_flight() -> None:
    found = train_asynchronously(image_task(), 2, 0, stash=False)
    assert all(tensor.isfinite().all() for tensor in found.weights.values())
    assert found.weights["stem.bn.num_batches_tracked"] == image_task().num_steps


def test_every_stage_keeps_as_many_versions_as_it_is_stale() -> None:
    task = TextTask(replace(TEXT, num_steps=12), topics()[:60_000], 0, "text")
    found = train_asynchronously(task, 4, 0, stash=True)
    assert found.staleness == (3, 2, 1, 0)
    assert found.versions == (4, 3, 2, 1)


# Killed and started again

SELECTED = ("--profile", "smoke", "--only", "part=same seed", "--only", "model=text")
TINY_TEXT = replace(
    consistency.subject_of("text", RunOptions(profile="smoke", device="cpu")),
    recipe=replace(TEXT, num_steps=8, num_microbatches=4, batch_size=64, seq_len=24),  # few evaluations
)


def exit_status(target: Callable[..., None], *arguments: Any) -> int | None:
    """Of a function in a process of its own, which is forked from one that has imported torch."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def killed(event: str) -> Callable[[str, int], None]:
    """Kills this process and all that it leads where an event happens, such as "saving:4"."""

    def watch(happened: str, steps: int) -> None:
        if f"{happened}:{steps}" == event:
            os.killpg(0, signal.SIGKILL)

    return watch


def run_killed(event: str, arguments: list[str]) -> None:
    """The command line, until the event, with a tiny model and no figures."""
    os.setsid()
    torch.set_num_threads(1)
    consistency.subject_of = lambda model, options: TINY_TEXT
    consistency.EXPERIMENT = replace(consistency.EXPERIMENT, figures=None)
    real = consistency_training.train
    consistency_training.train = lambda *a, **k: real(*a, **k, watch=killed(event))
    sys.exit(cli.main(arguments))


def without_times(record: Record) -> dict[str, Any]:
    found = {name: getattr(record, name) for name in ("case", "status", "metrics", "details", "options")}
    return json.loads(json.dumps(found, default=repr, sort_keys=True))


def test_only_the_sources_that_a_training_uses_begin_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it finds what it left depends on them, and on no others."""
    others = ["harness/one.py", "planner/one.py", "experiments/paper/consistency/tables.py"]
    used = [each if each.endswith(".py") else f"{each}/one.py" for each in consistency_training.TRAINED_BY]
    for name in (*others, *used):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("ONE = 1\n")
    monkeypatch.setattr(consistency_training, "ROOT", tmp_path)
    monkeypatch.setattr(consistency_training, "train", lambda task, setting, folder: folder)
    monkeypatch.setattr(consistency_training, "task_of", lambda subject: None)
    options = RunOptions(scratch=tmp_path / "unfinished")

    def folder() -> Any:
        return consistency_training.trained(TINY_TEXT, Setting("pipeline", 1, 2, 0), 1, options)

    first = folder()
    for name in others:
        (tmp_path / name).write_text("ONE = 2\n")
    assert folder() == first
    found = {first}
    for name in used:
        (tmp_path / name).write_text("ONE = 2\n")
        found.add(folder())
    assert len(found) == 1 + len(used)
    assert all((Path(__file__).parents[2] / name).exists() for name in consistency_training.TRAINED_BY)


def test_a_killed_run_ends_with_the_same_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL in the middle of writing a checkpoint, then after the last step; the third start ends."""
    command = ["run", "consistency", *SELECTED, "--results", str(tmp_path), "--device", "cpu", "--jobs", "1"]
    for event in ("saving:4", "finished:8"):
        assert exit_status(run_killed, event, command) == -signal.SIGKILL
        assert not Store(tmp_path).load("consistency").records
    assert exit_status(run_killed, "never:0", command) == 0
    (record,) = Store(tmp_path).load("consistency").records
    monkeypatch.setattr(consistency, "subject_of", lambda model, options: TINY_TEXT)
    options = RunOptions(profile="smoke", device="cpu", scratch=tmp_path / "undisturbed")
    case = next(c for c in consistency.cases(options) if c.key == record.case)
    undisturbed = consistency.run(case, options)
    fields = {"case": record.case, "status": "done", "options": record.options}
    wanted = {**fields, "metrics": undisturbed.metrics, "details": undisturbed.details}
    assert without_times(record) == json.loads(json.dumps(wanted, default=repr, sort_keys=True))


def two_ranks(folder: Path, port: int, event: str) -> None:
    """Two processes that train as one; at the event rank 0 ends both and what started them at once."""
    os.setsid()
    children = []
    for rank in (0, 1):
        if (child := os.fork()) == 0:
            one_rank(rank, folder, port, event)
            os._exit(0)
        children.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))


def one_rank(rank: int, folder: Path, port: int, event: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    try:
        distributed.init_process_group("gloo")
        group, watch = distributed.group.WORLD, killed(event if rank == 0 else "never:0")
        trained = train(task_of(TINY_TEXT), Setting("pipeline", 2, 4, 11), folder, group=group, watch=watch)
        assert len(trained.curve) == 4
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def test_two_killed_processes_end_with_the_weights_of_one(tmp_path: Path) -> None:
    """SIGKILL to both and to what started them, while one has and one may not have written its checkpoint."""

    def start(event: str) -> int | None:
        return exit_status(two_ranks, tmp_path / "two", free_port(), event)

    assert start("saving:4") == -signal.SIGKILL
    assert latest_checkpoint(tmp_path / "two") == tmp_path / "two" / "step-00000002"
    assert start("step:6") == -signal.SIGKILL
    assert latest_checkpoint(tmp_path / "two") == tmp_path / "two" / "step-00000004"
    assert start("never:0") == 0
    two = [torch.load(tmp_path / "two" / f"final-{rank}.pt", weights_only=True) for rank in (0, 1)]
    setting = Setting("pipeline", 1, 4, 11)
    one = train(task_of(TINY_TEXT), setting, tmp_path / "one")
    weights = {**two[0]["weights"], **two[1]["weights"]}
    assert weights.keys() == one.weights.keys()
    assert all(torch.equal(weights[name], one.weights[name]) for name in weights)


class _KilledError(Exception):
    pass


@pytest.mark.parametrize(
    ("make", "event", "engine"),
    [
        (text_task, "step", "pipeline"),
        (image_task, "saved", "pipeline"),
        (text_task, "saving", "sequential"),
    ],
)
def test_a_training_goes_on_from_its_checkpoint(make: Any, event: str, engine: str, tmp_path: Path) -> None:
    """Wherever it stops: before, while and after a checkpoint is written."""
    task = make()
    task.evaluate_every = 1
    setting = Setting(engine, 2, 2) if engine == "pipeline" else Setting(engine)
    wanted = train(task, setting, tmp_path / "undisturbed")
    seen: list[int] = []

    def watch(happened: str, steps: int) -> None:
        if happened == "step":
            seen.append(steps)
        if (happened, steps) == (event, 2):
            raise _KilledError

    with pytest.raises(_KilledError):
        train(task, setting, tmp_path / "killed", watch=watch)
    assert latest_checkpoint(tmp_path / "killed") is not None
    assert seen == [1, 2]
    seen.clear()
    found = train(
        task, setting, tmp_path / "killed", watch=lambda h, s: seen.append(s) if h == "step" else None
    )
    assert seen[0] == (3 if event == "saved" else 2), "goes on and does not begin again"
    assert same_weights(found, wanted)
    assert found.curve == wanted.curve
    assert latest_checkpoint(tmp_path / "killed") is None


# Files in the format of MNIST


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
