"""Models of transformers from tiny configurations, with a batch for each, for tests that have the library."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

EXAMPLES, LENGTH, VOCABULARY = 8, 6, 13


def library() -> ModuleType:
    """transformers, or the reason why a test is skipped."""
    from gpipe_bench.models.torchvision_shim import import_torchvision

    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install -e .[transformers]")
    import_torchvision()  # transformers imports it where it finds it
    import transformers

    return transformers


@dataclass(frozen=True)
class Family:
    """How a model is built, and what its forward takes."""

    build: Callable[[ModuleType, float, bool], nn.Module]  # library, dropout, tied embeddings
    inputs: tuple[str, ...]
    tied: bool = False

    def model(self, dropout: float = 0.0, *, tied: bool = False, seed: int = 0) -> nn.Module:
        """In float64, with parameters that depend on `seed` alone."""
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
    if not tied:  # whatever its configuration says, the library ties them
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
