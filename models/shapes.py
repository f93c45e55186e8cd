"""Well-known models by name: the builder in `MODELS`, and its options.

    builder, options = SHAPES["llama-70b"]
    with torch.device("meta"):
        model = MODELS[builder](**options)

On the meta device they take no memory, whatever their size. Sources: GPT-2, Radford et al. 2019, Table 2,
with the parameters of the released models (the paper's own numbers are known to be wrong); LLaMA, arXiv
2302.13971, Table 2; Llama 2, 2307.09288, Table 1; Llama 3, 2407.21783, Table 3; U-Net, torchgpipe's
benchmarks (unet-memory and unet-speed, version 0.0.7).
"""

from typing import Any

Shape = tuple[str, dict[str, Any]]


def _gpt2(num_layers: int, d_model: int, num_heads: int) -> Shape:
    return "gpt2", {"num_layers": num_layers, "d_model": d_model, "num_heads": num_heads}


def _llama(num_layers: int, d_model: int, ffn_dim: int, num_heads: int, **options: Any) -> Shape:
    widths = {"d_model": d_model, "ffn_dim": ffn_dim, "num_heads": num_heads}
    return "llama", {"num_layers": num_layers, **widths, **options}


def _unet(num_convs: int, num_filters: int) -> Shape:
    return "unet", {"num_convs": num_convs, "num_filters": num_filters}


_LLAMA_2: dict[str, Any] = {"seq_len": 4096}
_LLAMA_3: dict[str, Any] = {
    "num_kv_heads": 8, "vocab_size": 128_256, "seq_len": 8192, "rope_theta": 500_000.0,
}  # fmt: skip

SHAPES: dict[str, Shape] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-7b": _llama(32, 4096, 11_008, 32),
    "llama-13b": _llama(40, 5120, 13_824, 40),
    "llama-65b": _llama(80, 8192, 22_016, 64),
    "llama-2-70b": _llama(80, 8192, 28_672, 64, num_kv_heads=8, **_LLAMA_2),
    "llama-8b": _llama(32, 4096, 14_336, 32, **_LLAMA_3),
    "llama-70b": _llama(80, 8192, 28_672, 64, **_LLAMA_3),
    "llama-405b": _llama(126, 16_384, 53_248, 128, **_LLAMA_3),
    "unet-5-64": _unet(5, 64),
    "unet-6-72": _unet(6, 72),
    "unet-11-128": _unet(11, 128),
    "unet-24-128": _unet(24, 128),
    "unet-24-160": _unet(24, 160),
    "unet-48-160": _unet(48, 160),
}
