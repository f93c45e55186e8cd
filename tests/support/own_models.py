"""Models that are not sequences, as users write them (`CASES`) and of transformers with tiny configurations
(`FAMILIES`, for tests that have the library), with a batch for each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXAMPLES, LENGTH, VOCABULARY = 8, 6, 13


def library() -> ModuleType:
    """The module transformers; skips the test without it."""
    from gpipe_bench.models.torchvision_shim import import_torchvision

    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install -e .[transformers]")
    import_torchvision()  # transformers imports it if it is installed
    import transformers

    return transformers


@dataclass(frozen=True)
class Family:
    """A function that builds a model, and the inputs of its forward."""

    build: Callable[[ModuleType, float, bool], nn.Module]  # library, dropout, tied embeddings
    inputs: tuple[str, ...]
    tied: bool = False

    def model(self, dropout: float = 0.0, *, tied: bool = False, seed: int = 0) -> nn.Module:
        """A model in float64, with parameters that only depend on `seed`."""
        transformers = library()
        torch.manual_seed(seed)
        return self.build(transformers, dropout, tied).double().train()

    def batch(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        tensors = []
        for name in self.inputs:
            if name == "pixel_values":
                tensors.append(torch.randn(EXAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64))
            elif name.endswith("mask"):
                lengths = torch.randint(2, LENGTH + 1, (EXAMPLES, 1), generator=generator)
                tensors.append((torch.arange(LENGTH) < lengths).long())
            elif name == "token_type_ids":
                tensors.append(torch.randint(2, (EXAMPLES, LENGTH), generator=generator))
            else:
                tensors.append(torch.randint(VOCABULARY, (EXAMPLES, LENGTH), generator=generator))
        return tuple(tensors)


def _gpt2(transformers: Any, dropout: float, tied: bool) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=3, n_head=2, tie_word_embeddings=tied,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama(transformers: Any, dropout: float, tied: bool) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=12, tie_word_embeddings=tied, attention_dropout=dropout,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _bert(transformers: Any, dropout: float, tied: bool) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=8, tie_word_embeddings=tied,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _vit(transformers: Any, dropout: float, tied: bool) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=12, image_size=8,
        patch_size=4, num_labels=5, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def _t5(transformers: Any, dropout: float, tied: bool) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, dropout_rate=dropout,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    if not tied:  # the library ties them in any case
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


FAMILIES = {
    "gpt2": Family(_gpt2, ("input_ids", "attention_mask"), tied=True),
    "llama": Family(_llama, ("input_ids", "attention_mask")),
    "bert": Family(_bert, ("input_ids", "attention_mask", "token_type_ids"), tied=True),
    "vit": Family(_vit, ("pixel_values",)),
    "t5": Family(
        _t5, ("input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask"), tied=True
    ),
}


# As users write them


class Branches(nn.Module):
    """A residual block with two branches, batch normalization and a parameter of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.right = nn.Conv2d(channels, channels, 1)
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.left(x) + self.scale * self.right(x)) + x


class Residual(nn.Module):
    """A residual net with branches, functional dropout, a buffer, and sizes that later code uses."""

    def __init__(self, channels: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout = dropout
        self.stem = nn.Conv2d(2, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Branches(channels) for _ in range(4))
        self.norm = nn.BatchNorm2d(channels)
        self.register_buffer("mean", torch.full((1, 2, 1, 1), 0.1))
        self.head = nn.Linear(channels, 3)

    def forward(self, images: Tensor) -> Tensor:
        count, _, height, width = images.shape
        x = self.stem(images - self.mean)
        for block in self.blocks:
            x = block(x)
        x = F.dropout(self.norm(x), self.dropout, self.training)
        return self.head(x.sum((2, 3)).view(count, -1) / (height * width))


class UNet(nn.Module):
    """A U-Net: down twice and up again, with a skip on each level."""

    def __init__(self, channels: int = 3, dropout: float = 0.2) -> None:
        super().__init__()
        c = channels
        self.down = nn.ModuleList([nn.Conv2d(2, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, padding=1)])
        self.bottom = nn.Sequential(nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.Tanh(), nn.Dropout(dropout))
        self.up = nn.ModuleList([nn.Conv2d(4 * c, c, 3, padding=1), nn.Conv2d(2 * c, c, 3, padding=1)])
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv in self.down:
            x = torch.tanh(conv(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.bottom(x)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = torch.tanh(conv(torch.cat([x, skips.pop()], dim=1)))
        return self.out(x)


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.mix = nn.MultiheadAttention(width, 2, batch_first=True)
        self.deep = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out, weights = self.mix(x, x, x)
        return self.deep((weights.mean(1).unsqueeze(-1) * out).sum(1))


class TwoTowers(nn.Module):
    """Two inputs, each with its own layers; their embeddings are tied."""

    def __init__(self, width: int = 6, dropout: float = 0.2) -> None:
        super().__init__()
        self.query, self.document = Tower(width), Tower(width)
        self.drop = nn.Dropout(dropout)
        self.score = nn.Bilinear(width, width, 2)

    def forward(self, query: Tensor, document: Tensor, temperature: float = 0.5) -> Tensor:
        return self.score(self.drop(self.query(query)), self.drop(self.document(document))) / temperature


@dataclass(frozen=True)
class Case:
    build: Callable[..., nn.Module]
    at: tuple[str, ...]
    loss: Callable[[Tensor, Tensor], Tensor]

    def model(self, dropout: float = 0.2, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        return self.build(dropout=dropout).to(dtype)

    def data(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
        generator = torch.Generator().manual_seed(1)
        if self.build is TwoTowers:
            ids = torch.randint(11, (2, 8, 5), generator=generator)
            return (ids[0], ids[1]), torch.randint(2, (8,), generator=generator)
        images = torch.randn(8, 2, 8, 8, generator=generator, dtype=dtype)
        if self.build is UNet:
            return images, torch.randn(8, 1, 8, 8, generator=generator, dtype=dtype)
        return images, torch.randint(3, (8,), generator=generator)


CASES = {
    "residual": Case(Residual, ("blocks.1", "blocks.2.right", "norm"), F.cross_entropy),
    "u-net": Case(UNet, ("down.1", "bottom", "up.1"), F.mse_loss),
    "two towers": Case(TwoTowers, ("query.deep", "document", "score"), F.cross_entropy),
}
