"""Models of `transformers` as sequences of layers, by their module structure.

What is known is a class, not a name that happens to match: a subclass with a forward of its own computes
something else, and so do hooks around what is taken apart.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from gpipe_bench.pipeline.model.parts import OwnLayers

# The file of each class, and where in it the body of the model is.
KNOWN = {
    "GPT2LMHeadModel": ("gpt2", "transformer."),
    "GPT2Model": ("gpt2", ""),
    "LlamaForCausalLM": ("llama", "model."),
    "LlamaModel": ("llama", ""),
    "BertForMaskedLM": ("bert", "bert."),
    "BertForSequenceClassification": ("bert", "bert."),
    "BertModel": ("bert", ""),
    "T5ForConditionalGeneration": ("t5", ""),
    "ViTForImageClassification": ("vit", "vit."),
    "ViTModel": ("vit", ""),
}


def layers_of(model: nn.Module, inputs: Sequence[str] | None = None) -> OwnLayers:
    """A model of `transformers` as the layers that a `Pipeline` takes.

    Args:
        model: a GPT-2, Llama, BERT, T5 or ViT (`KNOWN` has the classes). It is not changed, and shares its
            modules with the layers: what is trained is the model.
        inputs: which arguments of the model's forward a batch holds, in its order: a tensor for one, a tuple
            for several, or a dict by their names. Default: those without which there is no output, such as
            `("input_ids",)`.

    The layers pass tensors and tuples of tensors; the last one gives what the library's output calls
    `logits`, or the last activations where there is no such thing. The loss is the pipeline's `loss_fn`.

    `ValueError` for a model of another class, with the classes that there are, or an input that is not known.
    """
    file, base = _family(model)
    family = importlib.import_module(f"gpipe_bench.pipeline.model.hugging_face.{file}")
    wanted = tuple(family.REQUIRED if inputs is None else inputs)
    allowed = (*family.REQUIRED, *family.OPTIONAL)
    if isinstance(inputs, str) or len(set(wanted)) < len(wanted) or not set(wanted) <= set(allowed):
        raise ValueError(
            f"inputs is {inputs!r}; for a {type(model).__name__} give some of {', '.join(allowed)}, each once"
        )
    if missing := [name for name in family.REQUIRED if name not in wanted]:
        raise ValueError(f"inputs lacks {missing[0]!r}, without which a {type(model).__name__} has no output")
    return OwnLayers(model, family.parts(model, base, wanted))


def _family(model: nn.Module) -> tuple[str, str]:
    kind: Any = type(model)
    for known in kind.__mro__:
        if known.__module__.startswith("transformers.models.") and known.__name__ in KNOWN:
            if kind.forward is not known.forward or "forward" in vars(model):
                raise ValueError(
                    f"{kind.__name__} has a forward of its own, which is not that of {known.__name__}; "
                    "use split, or write the layers yourself"
                )
            return KNOWN[known.__name__]
    raise ValueError(
        f"layers_of does not know a {kind.__name__}; it knows {', '.join(KNOWN)} of transformers. For other "
        "models use split, or write the layers yourself"
    )
