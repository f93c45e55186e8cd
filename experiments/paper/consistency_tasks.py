"""The two trainings: AmoebaNet-D on images and a Transformer on text, each with its data, loss and optimizer.

A task does not change; everything random in it depends on a seed and a step, so a training can resume at any
step. The default data come with Python and scikit-learn; nothing is downloaded.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_bench.models import MODELS
from gpipe_bench.models.tasks import class_loss
from gpipe_bench.models.torchvision_shim import import_torchvision

from .consistency_protocol import ImageRecipe, Subject, TextRecipe

Batch = tuple[Tensor, Tensor]


@cache
def task_of(subject: Subject) -> Task:
    """Loads the data and makes the task. Raises ValueError if the user's data are too few for the recipe."""
    recipe, seed, path = subject.recipe, subject.split_seed, subject.data
    if not isinstance(recipe, ImageRecipe):
        return TextTask(recipe, topics(), seed)
    if path is None:
        return ImageTask(recipe, digits(recipe.image_size, seed))
    return ImageTask(recipe, own_images(path, recipe.image_size, recipe.augment, seed, subject.limit))


def derived(*numbers: int) -> torch.Generator:
    """A generator for one purpose, named by numbers such as (seed, epoch)."""
    value = 0
    for number in numbers:
        value = (value * 1_000_003 + number + 0x9E37) % (2**63)
    return torch.Generator().manual_seed(value)


def chosen(step: int, seed: int, num_examples: int, batch_size: int) -> Tensor:
    """Indices of a mini-batch's examples; every epoch has its own order, and leaves out its incomplete last
    mini-batch.
    """
    epoch, place = divmod(step, num_examples // batch_size)
    order = torch.randperm(num_examples, generator=derived(seed, epoch, 1))
    return order[place * batch_size : (place + 1) * batch_size]


def even_parts(number: int, size: int) -> Sequence[slice]:
    """Slices that divide `number` things evenly into parts of about `size`."""
    parts = max(1, round(number / size))
    return [slice(number * i // parts, number * (i + 1) // parts) for i in range(parts)]


# Images


class ImageTask:
    """AmoebaNet-D on images, as its recipe says.

    Like the text task: `count` sums over a held-out batch, and `score` turns the sums into the value named
    `metric`. Trainings have learned if their mean reaches `required` and none misses `floor`. `build` draws
    from torch's default generator; `optimizer` takes named parameters of the model or a stage. Without
    `average_decay` the weights themselves are evaluated.
    """

    metric, unit, higher_is_better = "held-out accuracy", "ratio", True

    def __init__(self, recipe: ImageRecipe, images: Images) -> None:
        self.recipe, self.images = recipe, images
        self.batch_size = recipe.batch_size
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
        self.requirement = f"at least {100 * self.required:.4g} % of the held-out images right"

    def build(self) -> nn.Sequential:
        return MODELS["amoebanet-d"](**self.options)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return class_loss(output, target, self.recipe.label_smoothing)

    def optimizer(self, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """The optimizer; weight decay is for convolution and dense weights: those with several dimensions."""
        parameters, recipe = [parameter for _, parameter in named], self.recipe
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return RMSPropTF(
            [group for group in groups if group["params"]],
            lr=0.0, decay=recipe.rms_decay, momentum=recipe.momentum, eps=recipe.epsilon,
        )  # fmt: skip

    def learning_rate(self, step: int) -> float:
        return self.recipe.learning_rate(step, self.steps_per_epoch)

    def batch(self, step: int, seed: int) -> Batch:
        indices = chosen(step, seed, len(self.images.train), self.batch_size).tolist()
        return self.images.batch(
            (self.images.train[i] for i in indices), derived(seed, step, 4).initial_seed()
        )

    def held_out(self) -> Iterable[Batch]:
        for part in even_parts(len(self.images.held_out), 4 * self.batch_size):
            yield self.images.batch(self.images.held_out[part], None)

    def count(self, output: Any, target: Tensor) -> tuple[float, float]:
        return float((output.argmax(dim=1) == target).sum()), float(len(target))

    def score(self, total: float, number: float) -> float:
        return total / number


class RMSPropTF(torch.optim.Optimizer):
    """TensorFlow's RMSProp, which the recipe needs.

    torch's RMSProp adds epsilon outside the root and starts its averages at zero; the recipe's epsilon of 1
    only makes sense inside the root, with averages that start at one.

    `square` follows g^2; `velocity = momentum * velocity + lr * g / sqrt(square + eps)` is subtracted.

    Args:
        lr: may change between steps; the velocity has steps already multiplied by it.
        decay: of the average of squares, which starts at 1.
        weight_decay: L2, added to the gradient; set it per parameter group.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, decay: float, momentum: float, eps: float, **more: float
    ) -> None:
        how = {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps, "weight_decay": 0.0}
        super().__init__(params, how | more)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient are unchanged."""
        if closure is not None:
            raise ValueError("RMSPropTF takes no closure; compute the gradients before step()")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not (state := self.state[weight]):
                    state["square"], state["velocity"] = torch.ones_like(weight), torch.zeros_like(weight)
                gradient = weight.grad.add(weight, alpha=group["weight_decay"])
                square, velocity = (
                    state["square"].mul_(group["decay"]),
                    state["velocity"].mul_(group["momentum"]),
                )
                square.addcmul_(gradient, gradient, value=1.0 - group["decay"])
                velocity.addcdiv_(gradient, square.add(group["eps"]).sqrt_(), value=group["lr"])
                weight.sub_(velocity)


Loader = Callable[[int, bool], tuple[Tensor, int]]
HELD_OUT_IMAGES = 0.2


class Images:
    """Training and held-out examples. `load(index, is_training)` returns an image (3, S, S) in [-1, 1] and
    its class; in training it may draw from torch's default generator. `targets` are all classes.
    """

    def __init__(
        self, load: Loader, train: Sequence[int], held_out: Sequence[int], targets: Sequence[int],
        num_classes: int,
    ) -> None:  # fmt: skip
        self.load, self.train, self.held_out, self.num_classes = load, train, held_out, num_classes
        counts = torch.bincount(torch.tensor([targets[i] for i in held_out]), minlength=num_classes)
        self.most_frequent = float(counts.max() / counts.sum())  # share of the commonest held-out class

    def batch(self, indices: Iterable[int], seed: int | None) -> tuple[Tensor, Tensor]:
        """Images (N, 3, S, S) and classes (N,); in training `seed` is that of augmentation."""
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            images, classes = zip(*(self.load(i, seed is not None) for i in indices), strict=True)
        return torch.stack(images), torch.tensor(classes)


def split(number: int, seed: int, limit: int | None = None) -> tuple[list[int], list[int]]:
    """Training and held-out indices, by the seed; at most `limit` in all."""
    order = torch.randperm(number, generator=derived(seed, 2)).tolist()[:limit]
    held_out = max(1, round(len(order) * HELD_OUT_IMAGES))
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
    return Images(lambda i, _: (images[i], classes[i]), *split(len(classes), split_seed), classes, 10)


def own_images(path: str, image_size: int, augment: bool, split_seed: int, limit: int | None) -> Images:
    """Images in a folder per class at `path`, decoded when needed. `limit` caps the number of examples."""
    import_torchvision()
    from torchvision.datasets import ImageFolder

    folder, transforms = ImageFolder(path), _transforms(image_size, augment=augment)

    def load(index: int, is_training: bool) -> tuple[Tensor, int]:
        source, target = folder.samples[index]
        try:
            return transforms[is_training](folder.loader(source)), target
        except OSError as error:
            raise ValueError(f"{source} can't be read as an image; remove or replace it") from error

    train, held_out = split(len(folder), split_seed, limit)
    return Images(load, train, held_out, folder.targets, len(folder.classes))


def _transforms(size: int, *, augment: bool) -> Mapping[bool, Callable[[Any], Tensor]]:
    """In training a random box, flip and colours; in evaluation the central 87.5 % of both sides."""
    from torchvision import transforms as T

    end = [T.ToTensor(), T.Normalize(3 * [0.5], 3 * [0.5])]
    box = [T.RandomResizedCrop(size, scale=(0.1, 1.0)), T.RandomHorizontalFlip()]
    whole = [T.Resize(round(size / 0.875)), T.CenterCrop(size)]
    plain = T.Compose([*whole, *end])
    return {False: plain, True: T.Compose([*box, T.ColorJitter(0.125, 0, 0.1), *end]) if augment else plain}


# Text. Tokenizer, unigram model and training examples use the training part only.

HELD_OUT_TEXT = 0.1
BLOCK_CHARACTERS = 2000
"""Length of held-out blocks, long enough to give predictions a context of their own."""


class TextTask:
    """Transformer-L on text: each token from the ones before it."""

    metric, unit, higher_is_better = "held-out perplexity", "perplexity", False
    average_decay: float | None = None

    def __init__(self, recipe: TextRecipe, text: str, split_seed: int) -> None:
        self.recipe = recipe
        self.batch_size, self.num_steps = recipe.batch_size, recipe.num_steps
        self.evaluate_every = max(1, math.ceil(recipe.num_steps / 5))
        self.options = {
            "num_layers": recipe.num_layers, "vocab_size": recipe.vocab_size, "d_model": recipe.d_model,
            "ffn_dim": recipe.ffn_dim, "num_heads": recipe.num_heads, "seq_len": recipe.seq_len,
            "dropout": recipe.dropout,
        }  # fmt: skip
        train, held_out = split_blocks(blocks_of(text), split_seed)
        self.pieces = tokenizer((line for b in train for line in b.split("\n")), recipe.vocab_size)
        self.train_tokens = torch.tensor(self.pieces.encode("\n\n".join(train)))
        held_out_tokens = torch.tensor(self.pieces.encode("\n\n".join(held_out)))
        count = (len(held_out_tokens) - 1) // recipe.seq_len
        inputs = held_out_tokens[: count * recipe.seq_len].view(count, -1)
        targets = held_out_tokens[1 : count * recipe.seq_len + 1].view(count, -1)
        self.held_out_examples = inputs, targets
        # The model must be better than one that knows each token's frequency in training, with one added to
        # every count.
        frequencies = torch.bincount(self.train_tokens, minlength=recipe.vocab_size).double() + 1
        surprise = -(frequencies / frequencies.sum()).log()
        self.unigram = math.exp(float(surprise[targets].mean()))
        self.required = self.floor = recipe.required_ratio * self.unigram
        self.requirement = (
            f"a held-out perplexity of at most {100 * recipe.required_ratio:g} % of the unigram model's "
            f"{self.unigram:.4g}"
        )

    def build(self) -> nn.Sequential:
        return MODELS["transformer-lm"](**self.options)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        recipe = self.recipe
        return torch.optim.Adam(
            [p for _, p in named], lr=0.0, betas=(recipe.beta1, recipe.beta2), eps=recipe.epsilon
        )

    def learning_rate(self, step: int) -> float:
        return self.recipe.rate(step)

    def batch(self, step: int, seed: int) -> Batch:
        length = self.recipe.seq_len
        starts = torch.randint(
            len(self.train_tokens) - length, (self.batch_size, 1), generator=derived(seed, step, 6)
        )
        tokens = self.train_tokens[starts + torch.arange(length + 1)]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def held_out(self) -> Iterable[Batch]:
        for part in even_parts(len(self.held_out_examples[0]), 2 * self.batch_size):
            inputs, targets = self.held_out_examples
            yield inputs[part], targets[part]

    def count(self, output: Any, target: Tensor) -> tuple[float, float]:
        loss = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
        return float(loss), float(target.numel())

    def score(self, total: float, number: float) -> float:
        return math.exp(min(total / number, 700.0))  # keeps a diverged model's finite


Task = ImageTask | TextTask
"""A model, its data and its recipe."""


def topics() -> str:
    """The text behind Python's `help()`, without repeated paragraphs."""
    from pydoc_data.topics import topics as found

    return "\n\n".join(found[name] for name in sorted(found))


def blocks_of(text: str) -> list[str]:
    """Consecutive paragraphs, without repetitions, in blocks of about `BLOCK_CHARACTERS`."""
    blocks: list[list[str]] = [[]]
    for paragraph in filter(None, dict.fromkeys(part.strip() for part in re.split(r"\n\s*\n", text))):
        if sum(map(len, blocks[-1])) >= BLOCK_CHARACTERS:
            blocks.append([])
        blocks[-1].append(paragraph)
    return ["\n\n".join(block) for block in blocks if block]


def split_blocks(blocks: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Training and held-out blocks, both in the text's order."""
    order = torch.randperm(len(blocks), generator=derived(seed, 5)).tolist()
    count = max(1, round(len(blocks) * HELD_OUT_TEXT))
    train, held_out = ([blocks[i] for i in sorted(part)] for part in (order[count:], order[:count]))
    return train, held_out


def tokenizer(lines: Iterable[str], vocab_size: int) -> Any:
    """A sentencepiece model (byte pairs) of `vocab_size` pieces."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]),
        model_writer=model, vocab_size=vocab_size, model_type="bpe", character_coverage=1.0,
        max_sentence_length=1 << 20, num_threads=1, minloglevel=3,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
