"""Turns models of `transformers` into sequences of layers, by their module structure.

Each known class has a function that says as layers what the class's forward does between its modules; the
modules' own forwards are the library's. A subclass with another forward is refused. `transformers` is not
imported before a model of it is given.

Layers pass activations, followed by inputs that all layers need unchanged. Attention masks are passed as
given, (N, T), and each layer expands its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .parts import OwnLayers, Part, chosen

Value = Tensor | tuple[Tensor, ...]


def layers_of(model: nn.Module, inputs: Sequence[str] | None = None) -> OwnLayers:
    """Returns a model of `transformers` as the layers that a `Pipeline` takes.

    Args:
        model: a GPT-2, Llama, BERT, T5 or ViT (`KNOWN` has the classes). It is not changed. The layers share
            its modules, so training them trains the model.
        inputs: the arguments of the model's forward that a batch holds, in its order: a tensor for one, a
            tuple for several, or a dict by their names. Default: the required ones, such as `("input_ids",)`.

    Layers pass tensors and tuples of tensors. The last layer returns the `logits` of the library's output, or
    the last activations if the model has none. The loss is the pipeline's `loss_fn`.

    `ValueError` for a model of another class or an unknown input; the message lists the known ones.
    """
    family, base = _family(model)
    allowed = (*family.required, *family.optional)
    wanted = chosen(inputs, family.required, allowed, type(model).__name__)
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
    raise ValueError(
        f"layers_of does not know a {kind.__name__}; it knows {', '.join(KNOWN)} of transformers. Otherwise "
        "write the layers yourself, as modules that share the model's own; split cuts what torch.fx can "
        "follow, which few text models of transformers allow"
    )


# Values that pass between layers


def _named(batch: Value | Mapping[str, Tensor], inputs: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a batch by the names of the model's arguments."""
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
    """The library's functions that expand masks."""
    from transformers import masking_utils

    return masking_utils


class _Embedding(Part):
    """Tokens (N, T) and other named inputs -> activations (N, T, d), and the mask if given."""

    def __init__(self, model: nn.Module, modules: Mapping[str, str], inputs: Sequence[str]) -> None:
        super().__init__(model, modules)
        self.inputs = tuple(inputs)

    def forward(self, batch: Value) -> Value:
        given = _named(batch, self.inputs)
        mask = given.pop("attention_mask", None)
        return _joined(self.embed(given.pop("input_ids"), **given), () if mask is None else (mask,))

    def embed(self, input_ids: Tensor, **given: Tensor) -> Any:
        return self.embeddings(input_ids, **given)


class _Block(Part):
    """A block that takes and returns (x, [mask]). `mask(x, mask)` expands the mask (N, T)."""

    def __init__(self, model: nn.Module, modules: Mapping[str, str], mask: Callable[..., Any]) -> None:
        super().__init__(model, modules)
        self.mask = mask

    def forward(self, value: Value) -> Value:
        hidden, rest = _parted(value)
        return _joined(self.attend(hidden, self.mask(hidden, rest[0] if rest else None)), rest)

    def attend(self, hidden: Tensor, mask: Any) -> Any:
        return self.block(hidden, attention_mask=mask)


def _causal_mask(config: object) -> Callable[..., Any]:
    """The function that makes causal masks, which also hide tokens where the given mask is 0."""
    return partial(_causal, config, _masks().create_causal_mask)


def _causal(config: object, create: Callable[..., Any], hidden: Tensor, mask: Tensor | None) -> Any:
    return create(config, hidden, mask, None)


class _NormAndLogits(Part):
    """The last normalization of a decoder and, where the model has one, the output layer."""

    def __init__(self, model: nn.Module, norm: str) -> None:
        head = {"lm_head": "lm_head"} if "lm_head" in model._modules else {}
        super().__init__(model, {"norm": norm, **head})
        self.has_head = bool(head)

    def forward(self, value: Value) -> Any:
        hidden = self.norm(_parted(value)[0])
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
    def embed(self, input_ids: Tensor, **_: Tensor) -> Any:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        return self.drop(self.wte(input_ids) + self.wpe(positions))


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
    """Computes the rotary embeddings in each block: that is cheap, and they need not be passed on."""

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
# Encoder layers pass (x, [bias], [mask]): activations, the position bias that the first block makes for all,
# and the source's mask. Decoder layers pass (y, [bias], memory, masks); the memory is the encoder's result.
# The first layer embeds source and target, so that one table serves both; the embedded target and its mask
# skip the encoder as portals.

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
    """Block 0 takes (x, [mask]), the others (x, bias, [mask]); all return (x, bias, [mask])."""

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
    """The end of the encoder: (x, bias, [mask]) and the portals -> (y, memory, masks)."""

    def __init__(self, model: Any, past: tuple[str, ...]) -> None:
        super().__init__(model, {name: f"encoder.{name}" for name in ("final_layer_norm", "dropout")})
        self.pops = past

    def forward(self, value: tuple[Any, ...]) -> tuple[Tensor, ...]:
        (x, _, *mask), y, *mask_of_target = value
        return (y, self.dropout(self.final_layer_norm(x)), *mask, *mask_of_target)


class _T5DecoderBlock(Part):
    """Block 0 takes (y, memory, masks), the others (y, bias, memory, masks); all return the latter."""

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

    def forward(self, value: tuple[Tensor, ...]) -> Any:
        y = self.dropout(self.final_layer_norm(value[0]))
        return self.lm_head(y if self.scale is None else y * self.scale)


# ViT: `ViTForImageClassification` gives logits (N, labels), `ViTModel` activations (N, 1 + patches, d), with
# the pooled first one (N, d) as a tuple if it has a pooler


def _vit(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    vit = model.get_submodule(base.rstrip("."))
    head = "classifier" if base else "pooler" if vit.pooler is not None else None
    blocks = [f"{base}layers.{i}" for i in range(len(vit.layers))]
    return {
        f"{base}embeddings": _VitEmbedding(model, base),
        **{name: _VitBlock(model, {"block": name}) for name in blocks},
        f"{base}layernorm": _VitHead(model, base, head),
    }


class _VitEmbedding(Part):
    """Images (N, channels, height, width) -> activations (N, 1 + patches, d)."""

    def __init__(self, model: Any, base: str) -> None:
        super().__init__(model, {"embeddings": base + "embeddings"})

    def forward(self, batch: Value) -> Any:
        images = _named(batch, ("pixel_values",))["pixel_values"]
        return self.embeddings(images.to(self.embeddings.patch_embeddings.projection.weight.dtype))


class _VitBlock(Part):
    def forward(self, hidden: Tensor) -> Any:
        return self.block(hidden, None)


class _VitHead(Part):
    """The last normalization and what follows it: `kind`, a classifier, a pooler or nothing."""

    def __init__(self, model: Any, base: str, kind: str | None) -> None:
        super().__init__(model, {"layernorm": base + "layernorm", **({} if kind is None else {kind: kind})})
        self.kind = kind

    def forward(self, hidden: Tensor) -> Value:
        hidden = self.layernorm(hidden)
        if self.kind == "classifier":
            return self.classifier(hidden[:, 0, :])  # type: ignore[no-any-return]
        return (hidden, self.pooler(hidden)) if self.kind == "pooler" else hidden


class Family(NamedTuple):
    """The function that makes a family's layers, and the arguments of the models' forward."""

    parts: Callable[[Any, str, Sequence[str]], dict[str, Part]]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


_GPT2 = Family(_gpt2, ("input_ids",), ("attention_mask",))
_LLAMA = Family(_llama, ("input_ids",), ("attention_mask",))
_BERT = Family(_bert, ("input_ids",), ("attention_mask", "token_type_ids"))
_T5 = Family(_t5, ("input_ids", "decoder_input_ids"), _T5_MASKS)
_VIT = Family(_vit, ("pixel_values",))

# The family of each class, and the prefix of the model's body in its module names.
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
