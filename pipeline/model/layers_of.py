"""Models of `transformers` as sequences of layers, by their module structure.

What is known is a class, not a name that happens to match: a subclass with a forward of its own computes
something else, and so do hooks around what is taken apart. What a family's own forward does between its
modules is said here, once, as layers; the modules' forwards are the library's. Nothing imports `transformers`
before a model of it is given.

The layers pass activations, and behind them what all layers need as it came. Attention masks travel as they
were given, (N, T), and each layer widens its own: a mask of (N, 1, T, T) would be the largest message of a
pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .parts import OwnLayers, Part

Value = Tensor | tuple[Tensor, ...]


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
    family, base = _family(model)
    wanted = tuple(family.required if inputs is None else inputs)
    allowed = (*family.required, *family.optional)
    if isinstance(inputs, str) or len(set(wanted)) < len(wanted) or not set(wanted) <= set(allowed):
        raise ValueError(
            f"inputs is {inputs!r}; for a {type(model).__name__} give some of {', '.join(allowed)}, each once"
        )
    if missing := [name for name in family.required if name not in wanted]:
        raise ValueError(f"inputs lacks {missing[0]!r}, without which a {type(model).__name__} has no output")
    return OwnLayers(model, family.parts(model, base, wanted))


def _family(model: nn.Module) -> tuple[Family, str]:
    kind: Any = type(model)
    for known in kind.__mro__:
        if known.__module__.startswith("transformers.models.") and known.__name__ in KNOWN:
            if kind.forward is not known.forward or "forward" in vars(model):
                raise ValueError(
                    f"{kind.__name__} has a forward of its own, which is not that of {known.__name__}; "
                    "write the layers yourself, as modules that share the model's own"
                )
            return KNOWN[known.__name__]
    other = (
        "write the layers yourself, as modules that share the model's own; split cuts what torch.fx follows"
    )
    if kind.__module__.startswith("transformers."):
        other += ", which the forwards of most text models of transformers do not allow"
    raise ValueError(
        f"layers_of does not know a {kind.__name__}; it knows {', '.join(KNOWN)} of transformers. Otherwise "
        f"{other}"
    )


# What layers pass to each other


def _named(batch: Value | Mapping[str, Tensor], inputs: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a batch by the names of the model's arguments, which a dict has already."""
    if isinstance(batch, Mapping):
        if set(batch) != set(inputs):
            raise ValueError(
                f"the batch has {', '.join(map(repr, batch))} for the inputs {', '.join(inputs)}; give "
                "layers_of the names of what the model shall be given as inputs=, and leave out of the batch "
                "what is not among them: labels are the target of the step"
            )
        return {name: batch[name] for name in inputs}
    tensors = (batch,) if isinstance(batch, Tensor) else batch
    if len(tensors) != len(inputs):
        raise ValueError(
            f"the batch has {len(tensors)} tensors for the inputs {', '.join(inputs)}; give layers_of the "
            "names of what the batch holds, in its order, as inputs="
        )
    return dict(zip(inputs, tensors, strict=True))


def _parted(value: Value) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the activations, and the tensors passed on beside them."""
    return (value, ()) if isinstance(value, Tensor) else (value[0], value[1:])


def _joined(hidden: Tensor, rest: tuple[Tensor, ...]) -> Value:
    """The inverse of `_parted`."""
    return (hidden, *rest) if rest else hidden


def _masks() -> Any:
    """The library's functions that widen masks."""
    from transformers import masking_utils

    return masking_utils


class _Embedding(Part):
    """Tokens (N, T), and what goes with them by its name -> activations (N, T, d), and the mask if there is
    one.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, str], inputs: Sequence[str]) -> None:
        super().__init__(model, modules)
        self.inputs = tuple(inputs)

    def forward(self, batch: Value) -> Value:
        given = _named(batch, self.inputs)
        mask = given.pop("attention_mask", None)
        return _joined(self.embed(given.pop("input_ids"), **given), () if mask is None else (mask,))

    def embed(self, input_ids: Tensor, **given: Tensor) -> Tensor:
        embedded: Tensor = self.embeddings(input_ids, **given)
        return embedded


class _Block(Part):
    """A block of a stack that passes (x, [mask]) on. `mask`, given x and the mask (N, T), widens it."""

    def __init__(self, model: nn.Module, modules: Mapping[str, str], mask: Callable[..., Any]) -> None:
        super().__init__(model, modules)
        self.mask = mask

    def forward(self, value: Value) -> Value:
        hidden, rest = _parted(value)
        return _joined(self.attend(hidden, self.mask(hidden, rest[0] if rest else None)), rest)

    def attend(self, hidden: Tensor, mask: Any) -> Any:
        return self.block(hidden, attention_mask=mask)


def _causal_mask(config: object) -> Callable[..., Any]:
    """Of attention that ignores later tokens, and tokens for which the mask has 0."""
    return partial(_causal, config, _masks().create_causal_mask)


def _causal(config: object, create: Callable[..., Any], hidden: Tensor, mask: Tensor | None) -> Any:
    return create(config, hidden, mask, None)


class _NormAndLogits(Part):
    """The last normalization of a decoder and, where the model has one, the output layer."""

    def __init__(self, model: nn.Module, norm: str) -> None:
        head = {"lm_head": "lm_head"} if "lm_head" in model._modules else {}
        super().__init__(model, {"norm": norm, **head})
        self.has_head = bool(head)

    def forward(self, value: Value) -> Tensor:
        hidden: Tensor = self.norm(_parted(value)[0])
        return self.lm_head(hidden) if self.has_head else hidden


# GPT-2: `GPT2LMHeadModel` gives logits (N, T, V), `GPT2Model` activations (N, T, d)


def _gpt2(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    decoder = model.get_submodule(base.rstrip("."))
    if decoder.config.add_cross_attention:
        raise ValueError("this GPT-2 has cross-attention, for which nothing arrives; build it without")
    blocks, mask = [f"{base}h.{i}" for i in range(len(decoder.h))], _causal_mask(decoder.config)
    return {
        f"{base}wte": _Gpt2Embedding(model, {each: base + each for each in ("wte", "wpe", "drop")}, inputs),
        **{name: _Block(model, {"block": name}, mask) for name in blocks},
        f"{base}ln_f": _NormAndLogits(model, base + "ln_f"),
    }


class _Gpt2Embedding(_Embedding):
    def embed(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        embedded: Tensor = self.drop(self.wte(input_ids) + self.wpe(positions))
        return embedded


# Llama: `LlamaForCausalLM` gives logits (N, T, V), `LlamaModel` activations (N, T, d)


def _llama(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    decoder = model.get_submodule(base.rstrip("."))
    blocks = [f"{base}layers.{i}" for i in range(len(decoder.layers))]
    rotations, mask = {"rotary_emb": base + "rotary_emb"}, _causal_mask(decoder.config)
    return {
        f"{base}embed_tokens": _Embedding(model, {"embeddings": base + "embed_tokens"}, inputs),
        **{name: _LlamaBlock(model, {"block": name, **rotations}, mask) for name in blocks},
        f"{base}norm": _NormAndLogits(model, base + "norm"),
    }


class _LlamaBlock(_Block):
    """Computes its rotary embeddings itself: this takes little time, and they need not travel."""

    def attend(self, hidden: Tensor, mask: Any) -> Any:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotations = self.rotary_emb(hidden, position_ids=positions)
        return self.block(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotations)


# BERT: `BertForMaskedLM` gives logits (N, T, V), `BertForSequenceClassification` logits (N, labels), and
# `BertModel` activations (N, T, d), with the pooled first one (N, d) as a tuple if it has a pooler


def _bert(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    bert = model.get_submodule(base.rstrip("."))
    if bert.config.is_decoder:
        raise ValueError("this BERT is a decoder; layers_of knows it as an encoder, with is_decoder=False")
    blocks = [f"{base}encoder.layer.{i}" for i in range(len(bert.encoder.layer))]
    mask = partial(_masks().create_bidirectional_mask, bert.config)
    head: dict[str, str] = {name: name for name in ("cls", "dropout", "classifier") if name in model._modules}
    if bert.pooler is not None:
        head["pooler"] = base + "pooler"
    return {
        f"{base}embeddings": _Embedding(model, {"embeddings": base + "embeddings"}, inputs),
        **{name: _Block(model, {"block": name}, mask) for name in blocks},
        f"{base}output": _BertHead(model, head),
    }


class _BertHead(Part):
    """The part of a BERT model that follows the last block."""

    def __init__(self, model: Any, modules: dict[str, str]) -> None:
        super().__init__(model, modules)
        self.kind = next((kind for kind in ("cls", "classifier", "pooler") if kind in modules), None)

    def forward(self, value: Value) -> Value:
        hidden, _ = _parted(value)
        if self.kind == "cls":
            hidden = self.cls(hidden)
        elif self.kind == "classifier":
            hidden = self.classifier(self.dropout(self.pooler(hidden)))
        return (hidden, self.pooler(hidden)) if self.kind == "pooler" else hidden


# T5: `T5ForConditionalGeneration` gives logits (N, T, V)
#
# In the encoder (x, [bias], [mask]) is passed on: the activations, the position bias that the first block
# makes for all of them, and the source's mask; in the decoder (y, [bias], memory, masks), where the memory is
# the encoder's result. Source and target are embedded by the first layer, so that one table serves both; the
# embedded target and its mask go to the decoder as portals, past the encoder.

_T5_MASKS = ("attention_mask", "decoder_attention_mask")


def _t5(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    masks = tuple(name for name in _T5_MASKS if name in inputs)
    past = ("decoder_inputs", *[name for name in masks if name.startswith("decoder")])
    layers: dict[str, Part] = {"shared": _T5Embedding(model, inputs, past)}
    for i in range(len(model.encoder.block)):
        layers[f"encoder.block.{i}"] = _T5EncoderBlock(model, i)
    layers["encoder.final_layer_norm"] = _T5Turn(model, past)
    for i in range(len(model.decoder.block)):
        layers[f"decoder.block.{i}"] = _T5DecoderBlock(model, i, masks)
    layers["decoder.final_layer_norm"] = _T5Head(model)
    return layers


class _T5Embedding(Part):
    """Source (N, S) and target (N, T) tokens -> (x, [mask]), and y and its mask as portals."""

    def __init__(self, model: Any, inputs: Sequence[str], past: tuple[str, ...]) -> None:
        stacks = ("encoder", "decoder")
        names = ("embed_tokens", "dropout")
        super().__init__(model, {f"{s}_{name}": f"{s}.{name}" for s in stacks for name in names})
        self.inputs, self.stashes = tuple(inputs), past

    def forward(self, batch: Value) -> Any:
        given = _named(batch, self.inputs)
        x = self.encoder_dropout(self.encoder_embed_tokens(given["input_ids"]))
        y = self.decoder_dropout(self.decoder_embed_tokens(given["decoder_input_ids"]))
        source = (x, given["attention_mask"]) if "attention_mask" in given else x
        return (source, y, *[given[name] for name in self.stashes[1:]])


class _T5EncoderBlock(Part):
    """Number 0 takes (x, [mask]), the others (x, bias, [mask]); all give the latter."""

    def __init__(self, model: Any, index: int) -> None:
        super().__init__(model, {"block": f"encoder.block.{index}"})
        self.index = index
        self.mask = partial(_masks().create_bidirectional_mask, model.encoder.config)

    def forward(self, value: Value) -> tuple[Tensor, ...]:
        x, given = _parted(value)
        rest = list(given)
        bias = None if self.index == 0 else rest.pop(0)
        x, bias, _ = self.block(x, self.mask(x, rest[0] if rest else None), bias)
        return (x, bias, *rest)


class _T5Turn(Part):
    """The end of the encoder: (x, bias, [mask]), and what went past it -> (y, memory, masks)."""

    def __init__(self, model: Any, past: tuple[str, ...]) -> None:
        super().__init__(model, {name: f"encoder.{name}" for name in ("final_layer_norm", "dropout")})
        self.pops = past

    def forward(self, value: tuple[Any, ...]) -> tuple[Tensor, ...]:
        (x, _, *mask), y, *mask_of_target = value
        return (y, self.dropout(self.final_layer_norm(x)), *mask, *mask_of_target)


class _T5DecoderBlock(Part):
    """Number 0 takes (y, memory, masks), the others (y, bias, memory, masks); all give the latter."""

    def __init__(self, model: Any, index: int, masks: tuple[str, ...]) -> None:
        super().__init__(model, {"block": f"decoder.block.{index}"})
        self.index, self.masks = index, masks
        config = model.decoder.config
        self.mask = _causal_mask(config)
        self.mask_of_memory = partial(_masks().create_bidirectional_mask, config)

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y, *rest = value
        bias = None if self.index == 0 else rest.pop(0)
        memory = rest[0]
        given = dict(zip(self.masks, rest[1:], strict=True))
        mask = self.mask(y, given.get("decoder_attention_mask"))
        of_memory = self.mask_of_memory(y, given.get("attention_mask"), encoder_hidden_states=memory)
        y, bias, _ = self.block(y, mask, bias, memory, of_memory)
        return (y, bias, *rest)


class _T5Head(Part):
    """The end of the decoder and the output layer: (y, bias, memory, masks) -> logits (N, T, V)."""

    def __init__(self, model: Any) -> None:
        names = {name: f"decoder.{name}" for name in ("final_layer_norm", "dropout")}
        super().__init__(model, {**names, "lm_head": "lm_head"})
        self.scale = model.model_dim**-0.5 if model.config.scale_decoder_outputs else None

    def forward(self, value: tuple[Tensor, ...]) -> Tensor:
        y = self.dropout(self.final_layer_norm(value[0]))
        logits: Tensor = self.lm_head(y if self.scale is None else y * self.scale)
        return logits


# ViT: `ViTForImageClassification` gives logits (N, labels), `ViTModel` activations (N, 1 + patches, d), with
# the pooled first one (N, d) as a tuple if it has a pooler


def _vit(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    vit = model.get_submodule(base.rstrip("."))
    head = "classifier" if base else "pooler" if vit.pooler is not None else None
    return {
        f"{base}embeddings": _VitEmbedding(model, base),
        **{
            f"{base}layers.{i}": _VitBlock(model, {"block": f"{base}layers.{i}"})
            for i in range(len(vit.layers))
        },
        f"{base}layernorm": _VitHead(model, base, head),
    }


class _VitEmbedding(Part):
    """Images (N, channels, height, width) -> activations (N, 1 + patches, d)."""

    def __init__(self, model: Any, base: str) -> None:
        super().__init__(model, {"embeddings": base + "embeddings"})

    def forward(self, batch: Value) -> Tensor:
        images = _named(batch, ("pixel_values",))["pixel_values"]
        embedded: Tensor = self.embeddings(
            images.to(self.embeddings.patch_embeddings.projection.weight.dtype)
        )
        return embedded


class _VitBlock(Part):
    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.block(hidden, None)
        return result


class _VitHead(Part):
    """The last normalization and what follows it: `kind`, a classifier, a pooler or nothing."""

    def __init__(self, model: Any, base: str, kind: str | None) -> None:
        super().__init__(model, {"layernorm": base + "layernorm", **({} if kind is None else {kind: kind})})
        self.kind = kind

    def forward(self, hidden: Tensor) -> Value:
        hidden = self.layernorm(hidden)
        if self.kind == "classifier":
            logits: Tensor = self.classifier(hidden[:, 0, :])
            return logits
        return (hidden, self.pooler(hidden)) if self.kind == "pooler" else hidden


class Family(NamedTuple):
    """How models of a family are taken apart, and the arguments of their forward."""

    parts: Callable[[Any, str, Sequence[str]], dict[str, Part]]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


_GPT2 = Family(_gpt2, ("input_ids",), ("attention_mask",))
_LLAMA = Family(_llama, ("input_ids",), ("attention_mask",))
_BERT = Family(_bert, ("input_ids",), ("attention_mask", "token_type_ids"))
_T5 = Family(_t5, ("input_ids", "decoder_input_ids"), _T5_MASKS)
_VIT = Family(_vit, ("pixel_values",))

# The family of each class, and where in it the body of the model is.
KNOWN = {
    "GPT2LMHeadModel": (_GPT2, "transformer."),
    "GPT2Model": (_GPT2, ""),
    "LlamaForCausalLM": (_LLAMA, "model."),
    "LlamaModel": (_LLAMA, ""),
    "BertForMaskedLM": (_BERT, "bert."),
    "BertForSequenceClassification": (_BERT, "bert."),
    "BertModel": (_BERT, ""),
    "T5ForConditionalGeneration": (_T5, ""),
    "ViTForImageClassification": (_VIT, "vit."),
    "ViTModel": (_VIT, ""),
}
