"""Shapes of published models: parameters to the digit, and the models of the libraries they come from."""

from __future__ import annotations

import pytest
import torch
from own_models import library
from torch import Tensor, nn

from gpipe_bench.models import MODELS, SHAPES, count_parameters

# GPT-2: the released models, also as "124M", "355M", "774M" and "1.5B". LLaMA: "6.7B", "13.0B", "65.2B" in
# its Table 2. Llama 2 and 3: "70B", "8B", "405B". U-Net: torchgpipe's "232.7M" to "15.82B", and its layers.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-65b": 65_285_660_672,
    "llama-2-70b": 68_976_648_192,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "unet-5-64": 232_687_328,
    "unet-6-72": 362_157_516,
    "unet-11-128": 2_213_834_176,
    "unet-24-128": 4_993_859_008,
    "unet-24-160": 7_802_903_600,
    "unet-48-160": 15_822_206_000,
}
LAYERS = {"5-64": 241, "6-72": 285, "11-128": 505, "24-128": 1077, "24-160": 1077, "48-160": 2133}


def on_meta(name: str) -> nn.Sequential:
    builder, options = SHAPES[name]
    with torch.device("meta"):
        return MODELS[builder](**options)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters(name: str) -> None:
    model = on_meta(name)
    assert count_parameters(model) == PARAMETERS[name]
    if name.startswith("unet"):
        assert len(model) == LAYERS[name.removeprefix("unet-")]


def give(ours: nn.Module, theirs: dict[str, Tensor], names: dict[str, str]) -> None:
    """Loads another library's weights: for each of our names the end of theirs, transposed behind a `T`."""
    state = {}
    for key in ours.state_dict():
        block, _, rest = key.partition(".")
        number = block.removeprefix("block_")
        name = names[rest if block != number else key].format(i=number)
        state[key] = theirs[name.removeprefix("T ")].mT if name.startswith("T ") else theirs[name]
    ours.load_state_dict(state)


def test_gpt2_computes_what_the_library_does() -> None:
    transformers = library()
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 6}
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    ).double().eval()  # fmt: skip
    ours = MODELS["gpt2"](num_layers=2, d_model=8, num_heads=2, vocab_size=11, seq_len=6).double().eval()
    block = "transformer.h.{i}."
    parts = {"norm_1": "ln_1", "qkv": "T attn.c_attn", "out": "T attn.c_proj", "norm_2": "ln_2"}
    parts |= {"inner": "T mlp.c_fc", "outer": "T mlp.c_proj"}
    names = {
        "embedding.tokens.weight": "transformer.wte.weight",
        "embedding.positions.weight": "transformer.wpe.weight",
        "output.norm.weight": "transformer.ln_f.weight",
        "output.norm.bias": "transformer.ln_f.bias",
        "output.logits.weight": "lm_head.weight",
    }
    for part, name in parts.items():
        bare = name.removeprefix("T ")
        names[f"{part}.weight"] = ("T " if name != bare else "") + f"{block}{bare}.weight"
        names[f"{part}.bias"] = f"{block}{bare}.bias"
    give(ours, theirs.state_dict(), names)
    tokens = torch.randint(11, (2, 6))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-12, atol=1e-14)


def test_llama_computes_what_the_library_does() -> None:
    transformers = library()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=12, num_attention_heads=4, vocab_size=11,
        num_key_value_heads=2, rms_norm_eps=1e-5,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    ours = MODELS["llama"](
        num_layers=2, d_model=16, ffn_dim=12, num_heads=4, num_kv_heads=2, vocab_size=11
    ).double().eval()  # fmt: skip
    parts = {
        "norm_1": "input_layernorm", "query": "self_attn.q_proj", "key": "self_attn.k_proj",
        "value": "self_attn.v_proj", "out": "self_attn.o_proj", "norm_2": "post_attention_layernorm",
        "gate": "mlp.gate_proj", "inner": "mlp.up_proj", "outer": "mlp.down_proj",
    }  # fmt: skip
    names = {f"{part}.weight": f"model.layers.{{i}}.{name}.weight" for part, name in parts.items()}
    names["embedding.weight"] = "model.embed_tokens.weight"
    names["output.norm.weight"] = "model.norm.weight"
    names["output.logits.weight"] = "lm_head.weight"
    give(ours, theirs.state_dict(), names)
    tokens = torch.randint(11, (2, 6))
    # The library makes its rotations in float32.
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-6, atol=1e-8)


def test_the_skips_of_a_unet_return_in_reverse_and_are_padded() -> None:
    """The same network, written as one."""
    torch.manual_seed(0)
    model = MODELS["unet"](num_convs=1, num_filters=4, depth=2, dropout=0.0).double()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    conv = {name.split("_")[0]: layer for name, layer in model.named_children() if name.endswith("_conv")}

    def level(name: str, value: Tensor) -> Tensor:
        return nn.functional.leaky_relu(nn.functional.instance_norm(conv[name].module(value)), 0.01)

    def up(name: str, value: Tensor, skip: Tensor) -> Tensor:
        wide = nn.functional.interpolate(value, scale_factor=2)
        wide = nn.functional.pad(wide, [0, skip.shape[3] - wide.shape[3], 0, skip.shape[2] - wide.shape[2]])
        return level(name, torch.cat([wide, skip], dim=1))

    first = level("down0", x)
    second = level("down1", nn.functional.max_pool2d(first, 2))
    bottom = level("bottom", nn.functional.max_pool2d(second, 2))
    wanted = model.segment(up("up0", up("up1", bottom, second), first))
    assert torch.equal(model(x), wanted)
