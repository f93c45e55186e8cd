"""T5: `T5ForConditionalGeneration` gives logits (N, T, V).

In the encoder (x, [bias], [mask]) is passed on: the activations, the position bias that the first block makes
for all of them, and the source's mask; in the decoder (y, [bias], memory, masks), where the memory is the
encoder's result. Source and target are embedded by the first layer, so that one table serves both; the
embedded target and its mask go to the decoder as portals, past the encoder.

The memory is passed from block to block of the decoder. As a portal from the encoder's end it would be sent
as often, once to each stage of the decoder, and so would its gradient, which the blocks then no longer add up
in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpipe_bench.pipeline.model.hugging_face.passing import Value, named, parted
from gpipe_bench.pipeline.model.parts import Part

REQUIRED = ("input_ids", "decoder_input_ids")
OPTIONAL = ("attention_mask", "decoder_attention_mask")

Tensors = tuple[Tensor, ...]


def parts(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    masks = tuple(name for name in OPTIONAL if name in inputs)
    layers: dict[str, Part] = {"shared": Embedding(model, inputs)}
    for i in range(len(model.encoder.block)):
        layers[f"encoder.block.{i}"] = EncoderBlock(model, i)
    layers["encoder.final_layer_norm"] = Turn(model, masks)
    for i in range(len(model.decoder.block)):
        layers[f"decoder.block.{i}"] = DecoderBlock(model, i, masks)
    layers["decoder.final_layer_norm"] = Head(model)
    return layers


class Embedding(Part):
    """Source (N, S) and target (N, T) tokens -> (x, [mask]), and y and its mask as portals."""

    def __init__(self, model: Any, inputs: Sequence[str]) -> None:
        stacks = ("encoder", "decoder")
        names = ("embed_tokens", "dropout")
        super().__init__(model, {f"{s}_{name}": f"{s}.{name}" for s in stacks for name in names})
        self.inputs = tuple(inputs)
        self.stashes = _portals(self.inputs)

    def forward(self, batch: Tensors) -> Any:
        given = named(batch, self.inputs)
        x = self.encoder_dropout(self.encoder_embed_tokens(given["input_ids"]))
        y = self.decoder_dropout(self.decoder_embed_tokens(given["decoder_input_ids"]))
        source = (x, given["attention_mask"]) if "attention_mask" in given else x
        return (source, y, *[given[name] for name in self.stashes[1:]])


def _portals(inputs: Sequence[str]) -> tuple[str, ...]:
    """What goes past the encoder."""
    masks = [name for name in ("decoder_attention_mask",) if name in inputs]
    return ("decoder_inputs", *masks)


class EncoderBlock(Part):
    """Number 0 takes (x, [mask]), the others (x, bias, [mask]); all give the latter."""

    def __init__(self, model: Any, index: int) -> None:
        from transformers.masking_utils import create_bidirectional_mask

        super().__init__(model, {"block": f"encoder.block.{index}"})
        self.index = index
        self.config, self.mask = model.encoder.config, create_bidirectional_mask

    def forward(self, value: Value) -> Tensors:
        x, given = parted(value)
        rest = list(given)
        bias = None if self.index == 0 else rest.pop(0)
        mask = self.mask(self.config, x, rest[0] if rest else None)
        x, bias, _ = self.block(x, mask, bias)
        return (x, bias, *rest)


class Turn(Part):
    """The end of the encoder: (x, bias, [mask]), and what went past it -> (y, memory, masks)."""

    def __init__(self, model: Any, masks: tuple[str, ...]) -> None:
        names = ("final_layer_norm", "dropout")
        super().__init__(model, {name: f"encoder.{name}" for name in names})
        self.pops = _portals(masks)

    def forward(self, value: tuple[Any, ...]) -> Tensors:
        (x, _, *mask), y, *mask_of_target = value
        return (y, self.dropout(self.final_layer_norm(x)), *mask, *mask_of_target)


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
