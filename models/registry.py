"""All models by name, with an example batch and a loss for each.

`MODELS[name](**options)` builds a model; `example_batch` and `loss_fn` take the same options. An unknown name
or option is a `ValueError` that lists the known ones.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.models import checks
from gpipe_bench.models.amoebanet.network import PRESETS, amoebanet
from gpipe_bench.models.attnres import attention_residuals
from gpipe_bench.models.gpt2 import gpt2
from gpipe_bench.models.llama import llama
from gpipe_bench.models.resnet import resnet101
from gpipe_bench.models.tasks import (
    class_loss,
    image_batch,
    language_batch,
    pixel_batch,
    pixel_loss,
    token_loss,
    translation_batch,
)
from gpipe_bench.models.transformer.lm import transformer_lm
from gpipe_bench.models.transformer.seq2seq import transformer_seq2seq
from gpipe_bench.models.unet import unet


@dataclass(frozen=True, slots=True)
class Builder:
    """A builder function with given first arguments; it refuses unknown options."""

    function: Callable[..., nn.Sequential]
    given: tuple[Any, ...] = ()

    def __call__(self, **options: Any) -> nn.Sequential:
        self.options(options)
        return self.function(*self.given, **options)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options with their defaults, overridden by `given`; an unknown one is a `ValueError`."""
        parameters = list(inspect.signature(self.function).parameters.values())[len(self.given) :]
        defaults = {parameter.name: parameter.default for parameter in parameters}
        for name in given:
            checks.one_of(f"option of {self.function.__name__}", name, defaults)
        return defaults | dict(given)


MODELS: dict[str, Callable[..., nn.Sequential]] = {
    "amoebanet-a": Builder(amoebanet, ("a",)),
    "amoebanet-b": Builder(amoebanet, ("b",)),
    "amoebanet-c": Builder(amoebanet, ("c",)),
    "amoebanet-d": Builder(amoebanet, ("d",)),
    "transformer-lm": Builder(transformer_lm),
    "transformer-seq2seq": Builder(transformer_seq2seq),
    "resnet101": Builder(resnet101),
    "gpt2": Builder(gpt2),
    "llama": Builder(llama),
    "unet": Builder(unet),
    "attnres": Builder(attention_residuals),
}

_BATCHES: dict[str, Callable[..., Any]] = {
    "amoebanet-a": image_batch,
    "amoebanet-b": image_batch,
    "amoebanet-c": image_batch,
    "amoebanet-d": image_batch,
    "transformer-lm": language_batch,
    "transformer-seq2seq": translation_batch,
    "resnet101": image_batch,
    "gpt2": language_batch,
    "llama": language_batch,
    "unet": pixel_batch,
    "attnres": language_batch,
}


def example_batch(
    name: str,
    batch_size: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> tuple[Any, Tensor]:
    """A made-up batch (inputs, target) for `MODELS[name](**model_kwargs)`.

    Args:
        name: a key of `MODELS`.
        batch_size: N, examples.
        device: where to put the tensors; on `"meta"` they have no content.
        generator: source of the draws, on the same device; None is torch's default.

    Shapes: images (N, 3, S, S) and classes (N,), or for the U-Net a mask (N, 1, S, S); tokens (N, T) and next
    tokens (N, T); for translation inputs are the tuple (source, target input). Raises ValueError for an
    unknown name or option, or N < 1.
    """
    options = _options(name, model_kwargs)
    checks.positive_int("batch_size", batch_size)
    batch: tuple[Any, Tensor] = _BATCHES[name](batch_size, options, torch.device(device), generator)
    return batch


def loss_fn(name: str, **model_kwargs: Any) -> Callable[[Any, Tensor], Tensor]:
    """The loss of `MODELS[name](**model_kwargs)`: (output, target) -> scalar, the mean over the examples.

    AmoebaNet's loss includes auxiliary logits (weight 0.4) and smooths labels as its preset does: 0.1 for
    `tf`, 0 for `torchgpipe`. Raises ValueError for an unknown name or option.
    """
    options = _options(name, model_kwargs)
    if _BATCHES[name] in (language_batch, translation_batch):
        return token_loss
    if name == "unet":
        return pixel_loss
    smoothing = PRESETS[options["preset"]].label_smoothing if "preset" in options else 0.0
    return partial(class_loss, label_smoothing=smoothing)


def _options(name: str, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    builder = MODELS[checks.one_of("model", name, MODELS)]
    assert isinstance(builder, Builder)
    options = builder.options(model_kwargs)
    if "preset" in options:
        preset = PRESETS[checks.one_of("preset", options["preset"], PRESETS)]
        if options["num_classes"] is None:
            options["num_classes"] = preset.num_classes
    return options
