"""T5: `T5ForConditionalGeneration` gives logits (N, T, V).

In the encoder (x, [bias], y, masks) is passed on: the activations, the position bias that the first block
makes for all of them, and the embedded target; in the decoder (y, [bias], memory, masks), where the memory is
the encoder's result. Source and target are embedded by the first layer, so that one table serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpipe_bench.pipeline.model.hugging_face.passing import named
from gpipe_bench.pipeline.model.part import Part

REQUIRED = ("input_ids", "decoder_input_ids")
OPTIONAL = ("attention_mask", "decoder_attention_mask")

Tensors = tuple[Tensor, ...]


def parts(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    masks = tuple(name for name in OPTIONAL if name in inputs)
    layers: dict[str, Part] = {"shared": Embedding(model, inputs)}
    for i in range(len(model.encoder.block)):
        layers[f"encoder.block.{i}"] = EncoderBlock(model, i, masks)
    layers["encoder.final_layer_norm"] = Turn(model)
    for i in range(len(model.decoder.block)):
        layers[f"decoder.block.{i}"] = DecoderBlock(model, i, masks)
    layers["decoder.final_layer_norm"] = Head(model)
    return layers


class Embedding(Part):
    """Source (N, S) and target (N, T) tokens -> (x, y, masks)."""

    def __init__(self, model: Any, inputs: Sequence[str]) -> None:
        stacks = ("encoder", "decoder")
        names = ("embed_tokens", "dropout")
        super().__init__(model, {f"{s}_{name}": f"{s}.{name}" for s in stacks for name in names})
        self.inputs = tuple(inputs)

    def forward(self, batch: Tensors) -> Tensors:
        given = named(batch, self.inputs)
        x = self.encoder_dropout(self.encoder_embed_tokens(given["input_ids"]))
        y = self.decoder_dropout(self.decoder_embed_tokens(given["decoder_input_ids"]))
        return (x, y, *(given[name] for name in OPTIONAL if name in given))


class EncoderBlock(Part):
    """Number 0 takes (x, y, masks), the others (x, bias, y, masks); all give the latter."""

    def __init__(self, model: Any, index: int, masks: tuple[str, ...]) -> None:
        from transformers.masking_utils import create_bidirectional_mask

        super().__init__(model, {"block": f"encoder.block.{index}"})
        self.index, self.masks = index, masks
        self.config, self.mask = model.encoder.config, create_bidirectional_mask

    def forward(self, value: Tensors) -> Tensors:
        x, *rest = value
        bias = None if self.index == 0 else rest.pop(0)
        given = dict(zip(self.masks, rest[1:], strict=True))
        mask = self.mask(self.config, x, given.get("attention_mask"))
        x, bias, _ = self.block(x, mask, bias)
        return (x, bias, *rest)


class Turn(Part):
    """The end of the encoder: (x, bias, y, masks) -> (y, memory, masks)."""

    def __init__(self, model: Any) -> None:
        names = ("final_layer_norm", "dropout")
        super().__init__(model, {name: f"encoder.{name}" for name in names})

    def forward(self, value: Tensors) -> Tensors:
        x, _, y, *masks = value
        return (y, self.dropout(self.final_layer_norm(x)), *masks)


class DecoderBlock(Part):
    """Number 0 takes (y, memory, masks), the others (y, bias, memory, masks); all give the latter."""

    def __init__(self, model: Any, index: int, masks: tuple[str, ...]) -> None:
        from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

        super().__init__(model, {"block": f"decoder.block.{index}"})
        self.index, self.masks, self.config = index, masks, model.decoder.config
        self.mask, self.mask_of_memory = create_causal_mask, create_bidirectional_mask

    def forward(self, value: Tensors) -> Tensors:
        y, *rest = value
        bias = None if self.index == 0 else rest.pop(0)
        memory = rest[0]
        given = dict(zip(self.masks, rest[1:], strict=True))
        mask = self.mask(self.config, y, given.get("decoder_attention_mask"), None)
        of_memory = self.mask_of_memory(
            self.config, y, given.get("attention_mask"), encoder_hidden_states=memory
        )
        y, bias, _ = self.block(y, mask, bias, memory, of_memory)
        return (y, bias, *rest)


class Head(Part):
    """The end of the decoder and the output layer: (y, bias, memory, masks) -> logits (N, T, V)."""

    def __init__(self, model: Any) -> None:
        names = {name: f"decoder.{name}" for name in ("final_layer_norm", "dropout")}
        super().__init__(model, {**names, "lm_head": "lm_head"})
        self.scale = model.model_dim**-0.5 if model.config.scale_decoder_outputs else None

    def forward(self, value: Tensors) -> Tensor:
        y = self.dropout(self.final_layer_norm(value[0]))
        logits: Tensor = self.lm_head(y if self.scale is None else y * self.scale)
        return logits
