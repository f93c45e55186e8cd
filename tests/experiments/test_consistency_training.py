"""Trainings of the consistency experiment: recipes by hand, equal weights, and what a kill leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.experiments.paper.consistency.recipes import (
    DAWNBENCH,
    DIGITS,
    TOPICS,
)
from gpipe_bench.experiments.paper.consistency.tasks import (
    Images,
    ImageTask,
    RMSPropTF,
    TextTask,
    digits,
    own_images,
    topics,
)
from gpipe_bench.experiments.paper.consistency.training import (
    Setting,
    Trained,
    is_statistic,
    train,
    train_asynchronously,
)

TEXT = replace(
    TOPICS, num_steps=4, num_layers=2, d_model=16, ffn_dim=32, seq_len=12, batch_size=8, vocab_size=256
)
IMAGES = replace(DIGITS, num_filters=8, stem_filters=8, image_size=9, num_epochs=1, batch_size=50)


def text_task() -> TextTask:
    task = TextTask(TEXT, topics()[:60_000], 0)
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


# Data


def test_no_held_out_example_is_trained_on() -> None:
    for seed in (0, 1):
        images = digits(9, seed)
        assert not set(images.train) & set(images.held_out)
        assert len(images.train) + len(images.held_out) == 1797
    assert digits(9, 0).held_out != digits(9, 1).held_out
    pixels, _ = digits(8, 0).batch(range(100), None)
    assert (pixels.min(), pixels.max()) == (-1, 1)


def test_the_tokenizer_knows_only_the_training_text() -> None:
    """Every block has a letter of its own; those of the held-out blocks are unknown to the pieces."""
    letters = [chr(0x4E00 + i) for i in range(20)]
    words = "the quick brown fox jumps over the lazy dog and runs away from it again "
    text = "\n\n".join(f"{letter} {words * 30}{i}" for i, letter in enumerate(letters))
    task = TextTask(replace(TEXT, vocab_size=100), text, 0)
    unknown = [letter for letter in letters if task.pieces.unk_id() in task.pieces.encode(letter)]
    assert len(unknown) == 2
    assert not (task.train_tokens == task.pieces.unk_id()).any()


def test_images_of_ones_own(tmp_path: Path) -> None:
    from PIL import Image

    def fill(folder: Path, count: int) -> None:
        folder.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (20, 14), (40 * i, 0, 90)).save(folder / f"{i}.png")

    for name in ("a", "b"):
        fill(tmp_path / "flat" / name, 6)
    flat = own_images(str(tmp_path / "flat"), 9, True, 0, None)
    assert (len(flat.train), len(flat.held_out), flat.num_classes) == (10, 2, 2)
    images, classes = flat.batch(range(12), 0)
    assert images.shape == (12, 3, 9, 9)
    assert images.abs().max() <= 1
    assert classes.tolist() == [0] * 6 + [1] * 6
    again, _ = flat.batch(range(12), 0)
    assert torch.equal(images, again)
    still, _ = flat.batch(range(12), None)
    assert all(not torch.equal(one, other) for one, other in zip(images[1:4], still[1:4], strict=True))
    (tmp_path / "flat" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="can't be read as an image;"):
        own_images(str(tmp_path / "flat"), 9, False, 0, None).batch(range(12), None)


# Weights


@pytest.mark.parametrize(("make", "num_stages"), [(text_task, 2), (image_task, 8)])
def test_the_number_of_stages_changes_no_bit(make: Any, num_stages: int) -> None:
    one = train(make(), Setting(num_stages=1, num_microbatches=3))
    many = train(make(), Setting(num_stages=num_stages, num_microbatches=3))
    assert len(many.layers_per_stage) == num_stages
    assert same_weights(many, one)
    assert many.curve == one.curve


@pytest.mark.parametrize("make", [text_task, image_task])
def test_one_micro_batch_is_the_plain_model(make: Any) -> None:
    plain = train(make(), Setting("sequential"))
    pipeline = train(make(), Setting(num_stages=4))
    other = train(make(), Setting(num_microbatches=2))
    assert same_weights(pipeline, plain, statistics=False)
    assert plain.digest == pipeline.digest != other.digest


class _Still(TextTask):
    """Ends with the weights it began with."""

    def learning_rate(self, step: int) -> float:
        return 0.0


def test_paired_runs_begin_with_the_same_weights_and_see_other_data() -> None:
    task = _Still(TEXT, topics()[:60_000], 0)
    seeds = {"one": (5, 7), "paired": (6, 7), "other": (5, 8)}
    ends = {
        name: train(task, Setting(seed=seed, initial_seed=initial)) for name, (seed, initial) in seeds.items()
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


@pytest.mark.parametrize(("make", "stash"), [(text_task, True), (image_task, False)])
def test_one_asynchronous_stage_is_the_sequential_training(make: Any, stash: bool) -> None:
    found = train_asynchronously(make(), 1, 0, stash=stash)
    plain = train(make(), Setting("sequential"))
    assert all(torch.equal(found.weights[name], plain.weights[name]) for name in plain.weights)
    assert (found.staleness, found.versions, found.curve) == ((0,), (1,), plain.curve)
