"""Parameter counts to the digit: they pin genotypes, widths, biases and ties, not pools."""

import itertools

import pytest
import torch
from covering import pairwise

from gpipe_bench.models import MODELS, count_parameters, layer_parameters

# In closed form, in the paper's symbols, from the layers' definitions and not from the code that builds them.


def transformer_lm_parameters(
    num_layers: int, *, d_model: int = 2048, ffn_dim: int = 8192, vocab_size: int = 32_000
) -> int:
    """Transformer-L: L (4 d^2 + 4 d + 2 d f + f + d + 4 d) + 2 V d + V.

    Per layer four attention matrices with biases, two feed-forward matrices with biases and two
    normalizations; outside an embedding, an untied softmax matrix and its bias.
    """
    d, f, V = d_model, ffn_dim, vocab_size
    return num_layers * (4 * d * d + 4 * d + 2 * d * f + f + d + 4 * d) + 2 * V * d + V


def transformer_seq2seq_parameters(
    num_layers: int,
    ffn_dim: int,
    num_heads: int,
    *,
    d_model: int = 1024,
    head_dim: int = 64,
    vocab_size: int = 64_000,
    num_tables: int = 2,
) -> int:
    """T(L, H, A) with attention channels a = head_dim * A: L (encoder + decoder layer) + t V d + V.

    An encoder layer has 4 d a + 3 a + d + 2 d H + H + d + 4 d, a decoder layer 4 d a + 3 a + d + 2 d more
    for the attention over the encoder's result; t is `num_tables`.
    """
    d, H, V, a = d_model, ffn_dim, vocab_size, num_heads * head_dim
    cross = 4 * d * a + 3 * a + d + 2 * d
    encoder = 4 * d * a + 3 * a + d + 2 * d * H + H + d + 4 * d
    return num_layers * (2 * encoder + cross) + num_tables * V * d + V


def amoebanet_d_layers(num_layers: int, num_filters: int, num_classes: int, preset: str = "tf") -> list[int]:
    """AmoebaNet-D (L, D) without auxiliary head, layer by layer: stem, two stem cells, cells, classifier.

    A cell of width F with a input and b previous channels has (a + b) F + 5.75 F^2 + 17 F (normal) or
    (a + b) F + 3.4375 F^2 + 12.5 F (reduction). D has to be divisible by 16, else the quarters are
    rounded.
    """
    D = num_filters
    if num_layers < 1 or D < 16 or D % 16:
        raise ValueError(
            f"AmoebaNet-D ({num_layers}, {D}) has no closed form here: it needs at least one layer and a "
            "multiple of 16 filters; count a built model instead"
        )

    def normal(width: int, a: int, b: int) -> int:
        return (a + b) * width + 23 * width * width // 4 + 17 * width

    def reduction(width: int, a: int, b: int) -> int:
        return (a + b) * width + 55 * width * width // 16 + 25 * width // 2

    if preset == "tf":
        stem, F = 32, D // 4
        # The first cell takes the stem's 32 channels for its previous input as they are: no 1x1 with
        # normalization there, but one after the strided maximum, and its 3x3 bottleneck starts from 32
        # channels instead of F.
        first = reduction(F, stem, 0) - 2 * F + (32 - F) * F // 4 + (34 * F if F != 32 else 0)
    elif preset == "torchgpipe":
        stem, F = D // 4, D // 2
        first = reduction(F, stem, stem)
    else:
        raise ValueError(f"unknown preset {preset!r}: choose 'tf' or 'torchgpipe'")
    counts = [27 * stem + 2 * stem, first, reduction(2 * F, 3 * F, stem)]
    F, a, b = D, 6 * F, 3 * F
    for i in range(num_layers):
        if i in (int(1 / 3 * num_layers), int(2 / 3 * num_layers)):
            F *= 2
            counts.append(reduction(F, a, b))
            a, b = 3 * F, a
        counts.append(normal(F, a, b))
        a, b = 4 * F, a
    return [*counts, a * num_classes + num_classes]


# (L, D): tf with auxiliary head 1001, tf 1000, tf 1001, torchgpipe 1000, torchgpipe 1001 classes; all at
# 224 pixels.
AMOEBANET_D = {
    (18, 208): (81_785_166, 81_137_437, 81_140_766, 81_505_540, 81_508_869),
    (18, 416): (318_277_617, 317_541_696, 317_548_353, 319_024_120, 319_030_777),
    (18, 544): (540_986_433, 540_196_240, 540_204_945, 542_734_840, 542_743_545),
    (36, 544): (1_054_083_969, 1_053_293_776, 1_053_302_481, 1_055_832_376, 1_055_841_081),
    (72, 512): (1_843_386_873, 1_842_610_248, 1_842_618_441, 1_844_858_344, 1_844_866_537),
    (18, 256): (122_579_097, 121_911_016, 121_915_113, 122_470_120, 122_474_217),
    (18, 128): (32_169_193, 31_555_384, 31_557_433, 31_694_440, 31_696_489),
    (12, 512): (328_286_713, 327_510_088, None, 329_758_184, None),
    (6, 128): (13_184_745, 12_570_936, None, 12_709_992, None),
    (6, 256): (46_763_161, 46_095_080, 46_099_177, 46_654_184, None),
    (6, 512): (176_776_697, 176_000_072, 176_008_265, 178_248_168, 178_256_361),
    (18, 512): (479_796_729, 479_020_104, 479_028_297, 481_268_200, 481_276_393),
    (4, 512): (157_024_249, 156_247_624, 156_255_817, None, None),
    (2, 128): (8_272_617, 7_658_808, 7_660_857, None, None),
    (2, 256): (27_149_465, 26_481_384, 26_485_481, None, None),
}
COLUMNS = (
    ("tf", True, 1001),
    ("tf", False, 1000),
    ("tf", False, 1001),
    ("torchgpipe", False, 1000),
    ("torchgpipe", False, 1001),
)
BUILT = {(18, 208), (6, 512), (2, 128)}


def build(name: str, **options):
    with torch.device("meta"):
        return MODELS[name](**options)


@pytest.mark.parametrize(("size", "counts"), AMOEBANET_D.items(), ids=str)
def test_amoebanet_d_has_every_published_and_derived_count(size, counts):
    """By the closed form, which is compared with built models layer by layer below; some are built here."""
    for column, expected in zip(COLUMNS, counts, strict=True):
        if expected is None:
            continue
        preset, aux_head, num_classes = column
        if not aux_head:
            assert sum(amoebanet_d_layers(*size, num_classes, preset)) == expected
        if size in BUILT or (aux_head and size[0] < 18):
            options = {"num_layers": size[0], "num_filters": size[1], "preset": preset, "image_size": 224}
            model = build("amoebanet-d", **options, num_classes=num_classes, aux_head=aux_head)
            assert count_parameters(model) == expected, column


@pytest.mark.parametrize(
    ("name", "num_filters", "aux_head", "image_size", "expected"),
    [
        ("amoebanet-b", 512, False, 224, 557_286_057),
        ("amoebanet-b", 512, True, 480, 559_072_194),
        ("amoebanet-b", 190, False, 224, 79_011_717),
        ("amoebanet-a", 190, False, 331, 86_721_838),
        ("amoebanet-a", 204, False, 331, 99_628_547),
        ("amoebanet-a", 448, False, 331, 468_158_353),
        ("amoebanet-c", 228, False, 331, 155_277_228),
    ],
)
def test_amoebanet_a_b_and_c(name, num_filters, aux_head, image_size, expected):
    model = build(name, num_layers=18, num_filters=num_filters, aux_head=aux_head, image_size=image_size)
    assert count_parameters(model) == expected


STACK_2_AND_3_OF_D256 = [
    1_956_096, 2_826_752, 3_351_040, *[3_613_184] * 4,
    7_811_584, 11_289_600, 13_386_752, *[14_435_328] * 4,
]  # fmt: skip
PER_LAYER = {
    "tf": [928, 18_464, 86_592, 528_640, 741_632, *[905_472] * 4, *STACK_2_AND_3_OF_D256, 4_097_000],
    "torchgpipe": [
        1_856,
        74_304,
        343_168,
        676_096,
        839_936,
        *[905_472] * 4,
        *STACK_2_AND_3_OF_D256,
        4_097_000,
    ],
}


@pytest.mark.parametrize("preset", ["tf", "torchgpipe"])
def test_amoebanet_d_18_256_layer_by_layer(preset):
    options = {"num_layers": 18, "num_filters": 256, "preset": preset, "num_classes": 1000, "aux_head": False}
    counts = layer_parameters(build("amoebanet-d", **options))
    assert counts == PER_LAYER[preset]
    if preset == "tf":  # 67.6 % of the parameters are in the last six cells
        assert round(sum(counts[-7:-1]) / sum(counts), 3) == 0.676


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "preset"), pairwise(range(1, 9), (16, 208), ("tf", "torchgpipe"))
)
def test_the_closed_form_of_amoebanet_d_is_the_built_model(num_layers, num_filters, preset):
    options = {"num_layers": num_layers, "num_filters": num_filters, "preset": preset, "num_classes": 10}
    model = build("amoebanet-d", aux_head=False, **options)
    assert layer_parameters(model) == amoebanet_d_layers(num_layers, num_filters, 10, preset)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (3, 282_178_816),
        (13, 785_761_536),
        (24, 1_339_702_528),
        (48, 2_548_301_056),
        (103, 5_318_006_016),
        (415, 21_029_786_880),
        (1663, 83_876_910_336),
    ],
)
def test_transformer_lm(num_layers, expected):
    model = build("transformer-lm", num_layers=num_layers)
    assert count_parameters(model) == expected == transformer_lm_parameters(num_layers)
    assert layer_parameters(model) == [65_536_000, *[50_358_272] * num_layers, 65_568_000]


@pytest.mark.parametrize(
    ("size", "num_tables", "expected"),
    [
        ((6, 8192, 16), 2, 408_205_824),
        ((24, 8192, 16), 3, 1_304_951_296),
        ((12, 16384, 32), 3, 1_304_766_976),
        ((32, 16384, 32), 2, 3_086_055_936),
        ((32, 16384, 32), 3, 3_151_591_936),
        ((64, 16384, 32), 2, 6_040_975_872),
        ((64, 16384, 32), 3, 6_106_511_872),
    ],
    ids=str,
)
def test_transformer_seq2seq(size, num_tables, expected):
    num_layers, ffn_dim, num_heads = size
    options = {"num_layers": num_layers, "ffn_dim": ffn_dim, "num_heads": num_heads, "num_tables": num_tables}
    model = build("transformer-seq2seq", **options)
    assert count_parameters(model) == expected
    assert transformer_seq2seq_parameters(*size, num_tables=num_tables) == expected


def test_resnet101():
    model = build("resnet101")
    assert count_parameters(model) == 44_549_160
    assert len(model) == 370
    kinds = [type(layer).__name__ for layer in model]
    inner = [type(layer.module).__name__ if hasattr(layer, "module") else "" for layer in model]
    both = list(itertools.chain(kinds, inner))
    assert [both.count(kind) for kind in ("Conv2d", "BatchNorm2d", "ReLU")] == [100, 100, 100]
    assert [both.count(kind) for kind in ("Stash", "Residual")] == [33, 33]
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 104
