"""Images to train on: scikit-learn's digits, or the user's own through torchvision.

The digits come with scikit-learn, so nothing is downloaded. ImageNet, CIFAR-10 and any folder of classes are
read by path, lazily, one mini-batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_bench.experiments.consistency.tasks.idx import idx_files, read_part
from gpipe_bench.experiments.consistency.tasks.recipe import CIFAR10, ImageRecipe, image_layout
from gpipe_bench.experiments.consistency.tasks.task import Batch, chosen, derived, even_parts
from gpipe_bench.experiments.consistency.updates import RMSPropTF
from gpipe_bench.models import MODELS
from gpipe_bench.models.tasks import class_loss
from gpipe_bench.models.torchvision_shim import import_torchvision

HELD_OUT_SHARE = 0.2
Loader = Callable[[int, torch.Generator | None], tuple[Tensor, int]]


class Images:
    """Training and held-out examples. `load(index, generator)` gives an image (3, S, S) in [-1, 1] and its
    class; a generator means training, and draws the augmentation."""

    def __init__(
        self,
        load: Loader,
        train: Sequence[int],
        held_out: Sequence[int],
        classes: Sequence[int],
        num_classes: int,
    ):
        self.load, self.train, self.held_out, self.num_classes = load, train, held_out, num_classes
        counts = torch.bincount(torch.tensor(list(classes)), minlength=num_classes)
        self.most_frequent = float(counts.max() / counts.sum())  # share of the commonest class, held out

    def batch(self, indices: Iterable[int], generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Images (N, 3, S, S) and classes (N,)."""
        images, classes = zip(*(self.load(i, generator) for i in indices), strict=True)
        return torch.stack(images), torch.tensor(classes)


def split(number: int, seed: int, limit: int | None = None) -> tuple[list[int], list[int]]:
    """Indices for training and held out, by the seed; at most `limit` in all."""
    order = torch.randperm(number, generator=derived(seed, 2)).tolist()[:limit]
    held_out = max(1, round(len(order) * HELD_OUT_SHARE))
    return order[held_out:], order[:held_out]


@cache
def digits(image_size: int, split_seed: int) -> Images:
    """1,797 handwritten digits of 8x8 pixels, scaled up."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(small, size=image_size, mode="bilinear", align_corners=False)
    images = images.expand(-1, 3, -1, -1).contiguous()
    classes = found.target.tolist()
    train, held_out = split(len(classes), split_seed)
    return Images(lambda i, _: (images[i], classes[i]), train, held_out, [classes[i] for i in held_out], 10)


def own_images(path: str, image_size: int, augment: bool, split_seed: int, limit: int | None) -> Images:
    """ImageNet's or CIFAR-10's layout, idx files, or a folder per class, at `path`.

    `limit` caps the number of examples, training and held out together. Raises ValueError where
    `image_layout` does, and for CIFAR-10 files that are not the published ones or idx files that are none.
    """
    layout, root = image_layout(path), Path(path)
    if layout == "idx":
        return _of_idx(root, image_size, split_seed, limit)
    import_torchvision()
    from torchvision import datasets

    if layout == "classes":
        whole = datasets.ImageFolder(str(root))
        targets = whole.targets
        train, held_out = split(len(targets), split_seed, limit)
        sources = [(whole, i) for i in range(len(targets))]
        num_classes = len(whole.classes)
    else:
        if layout == "cifar10":
            parts = _cifar10(path)
        else:
            parts = [datasets.ImageFolder(str(root / name)) for name in layout.split("/")]
        sizes = [len(part.targets) for part in parts]
        targets = [*parts[0].targets, *parts[1].targets]
        sources = [(part, i) for part in parts for i in range(len(part.targets))]
        train, held_out = _of_parts(sizes[0], sizes[1], split_seed, limit)
        num_classes = len(parts[0].classes)
    load = partial(_decoded, sources, image_size, augment)
    return Images(load, train, held_out, [targets[i] for i in held_out], num_classes)


def _of_parts(
    num_train: int, num_held_out: int, split_seed: int, limit: int | None
) -> tuple[list[int], list[int]]:
    """Indices for training and held out, of data that are split; held-out ones come behind."""
    train, held_out = list(range(num_train)), list(range(num_train, num_train + num_held_out))
    if limit is not None:
        train = split(num_train, split_seed)[0][: round(limit * (1 - HELD_OUT_SHARE))]
        order = torch.randperm(num_held_out, generator=derived(split_seed, 3)).tolist()
        held_out = [held_out[i] for i in order[: round(limit * HELD_OUT_SHARE)]]
    return train, held_out


def _of_idx(root: Path, image_size: int, split_seed: int, limit: int | None) -> Images:
    """Grey images, scaled to `image_size`, in all three channels."""
    files = idx_files(root)
    parts = [
        read_part(files.train_images, files.train_labels),
        read_part(files.held_out_images, files.held_out_labels),
    ]
    if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
        raise ValueError(
            f"--data {root}: training and held-out images differ in size; they are not of one set"
        )
    pixels = torch.cat([torch.tensor(images) for images, _ in parts])
    classes = [int(one) for _, labels in parts for one in labels]
    train, held_out = _of_parts(len(parts[0][0]), len(parts[1][0]), split_seed, limit)

    def load(index: int, generator: torch.Generator | None) -> tuple[Tensor, int]:
        image = pixels[index][None, None].float() / 127.5 - 1
        scaled = F.interpolate(image, size=image_size, mode="bilinear", align_corners=False, antialias=True)
        return scaled[0].expand(3, -1, -1), classes[index]

    return Images(load, train, held_out, [classes[i] for i in held_out], max(classes) + 1)


def _cifar10(path: str) -> list[Any]:
    """Training and held-out part. The files are pickles; torchvision opens only those with the published
    archive's checksums. Raises ValueError for others.
    """
    from torchvision import datasets

    try:
        return [datasets.CIFAR10(path, train=training, download=False) for training in (True, False)]
    except RuntimeError as error:
        raise ValueError(
            f"--data {path}: a file of {CIFAR10} is not the published one (its checksum differs); unpack the "
            "archive again"
        ) from error


def _decoded(
    sources: Sequence[tuple[Any, int]],
    size: int,
    augment: bool,
    index: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, int]:
    source, place = sources[index]
    try:
        image, target = source[place]
        image = image.convert("RGB")
    except OSError as error:
        name = source.samples[place][0] if hasattr(source, "samples") else f"example {place}"
        raise ValueError(f"{name} can't be read as an image; remove or replace it") from error
    if augment and generator is not None:
        return _augmented(image, size, generator), target
    return _central(image, size), target


def _central(image: Any, size: int) -> Tensor:
    """The central 87.5 % of both sides, scaled to `size`, in [-1, 1]."""
    from torchvision.transforms import functional as T

    width, height = image.size
    side = max(1, round(0.875 * min(width, height)))
    image = T.resize(T.center_crop(image, [side, side]), [size, size])
    tensor: Tensor = T.to_tensor(image)
    return tensor * 2 - 1


def _augmented(image: Any, size: int, generator: torch.Generator) -> Tensor:
    """A random box (10 to 100 % of the area, sides 3:4 to 4:3), flipped or not, its colours shifted."""
    from torchvision.transforms import functional as T

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    width, height = image.size
    for _ in range(100):
        area, ratio = uniform(0.1, 1.0) * width * height, uniform(3 / 4, 4 / 3)
        box_w, box_h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < box_w <= width and 0 < box_h <= height:
            break
    else:
        box_w, box_h = width, height
    left, top = round(uniform(0, width - box_w)), round(uniform(0, height - box_h))
    tensor = T.to_tensor(T.resized_crop(image, top, left, box_h, box_w, [size, size]))
    if uniform(0, 1) < 0.5:
        tensor = tensor.flip(-1)
    tensor = tensor + uniform(-32 / 255, 32 / 255)
    red, green, blue = tensor
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    blue = luma + (blue - luma) * uniform(0.9, 1.1)
    red = luma + (red - luma) * uniform(0.9, 1.1)
    green = (luma - 0.299 * red - 0.114 * blue) / 0.587
    return torch.stack([red, green, blue]).clamp(0, 1) * 2 - 1


class ImageTask:
    """AmoebaNet-D on images, by the recipe."""

    metric, unit, higher_is_better = "held-out accuracy", "ratio", True

    def __init__(self, recipe: ImageRecipe, images: Images) -> None:
        self.recipe, self.images = recipe, images
        self.batch_size = recipe.batch_size
        self.num_microbatches = recipe.num_microbatches
        self.average_decay: float | None = recipe.average_decay
        self.steps_per_epoch = len(images.train) // recipe.batch_size
        if not self.steps_per_epoch:
            raise ValueError(
                f"{len(images.train)} training images are less than one mini-batch of {recipe.batch_size}; "
                "give more images"
            )
        self.num_steps = self.steps_per_epoch * recipe.num_epochs
        self.evaluate_every = self.steps_per_epoch
        self.options = {
            "num_layers": recipe.num_layers, "num_filters": recipe.num_filters,
            "stem": recipe.stem, "stem_filters": recipe.stem_filters, "image_size": recipe.image_size,
            "num_classes": images.num_classes, "dropout": recipe.dropout, "aux_head": True,
        }  # fmt: skip
        self.required = recipe.required_accuracy or images.most_frequent + 0.1
        self.floor = recipe.floor_accuracy or self.required

    def build(self) -> nn.Sequential:
        return MODELS["amoebanet-d"](**self.options)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return class_loss(output, target, self.recipe.label_smoothing)

    def optimizer(self, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """Weight decay on convolution and dense weights alone: all that has more than one dimension."""
        weights: list[Tensor] = []
        others: list[Tensor] = []
        for _, parameter in named:
            (weights if parameter.dim() > 1 else others).append(parameter)
        groups = [
            {"params": weights, "weight_decay": self.recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return RMSPropTF(
            [group for group in groups if group["params"]],
            lr=0.0,
            decay=self.recipe.rms_decay,
            momentum=self.recipe.momentum,
            eps=self.recipe.epsilon,
        )

    def learning_rate(self, step: int) -> float:
        return self.recipe.learning_rate(step, self.steps_per_epoch)

    def batch(self, step: int, seed: int) -> Batch:
        indices = chosen(step, seed, len(self.images.train), self.batch_size).tolist()
        return self.images.batch((self.images.train[i] for i in indices), derived(seed, step, 4))

    def held_out(self) -> Iterable[Batch]:
        for part in even_parts(len(self.images.held_out), 4 * self.batch_size):
            yield self.images.batch((self.images.held_out[i] for i in part), None)

    def count(self, output: Any, target: Tensor) -> tuple[float, float]:
        return float((output.argmax(dim=1) == target).sum()), float(len(target))

    def score(self, total: float, number: float) -> float:
        return total / number

    @property
    def requirement(self) -> str:
        return f"at least {100 * self.required:.4g} % of the held-out images right"
