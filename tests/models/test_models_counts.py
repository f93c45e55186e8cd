"""Parameter counts to the digit: they pin genotypes, widths, biases and ties, not pools."""

import itertools

import pytest
import torch

from gpipe_bench.models import MODELS, count_parameters, layer_parameters

# (L, D) at 224 pixels: parameters with each of the columns; None where nobody has counted them.
COLUMNS = (
    ("tf", True, 1001), ("tf", False, 1000), ("tf", False, 1001), ("torchgpipe", False, 1000),
    ("torchgpipe", False, 1001),
)  # fmt: skip
AMOEBANET_D = {
    (2, 128): (8_272_617, 7_658_808, 7_660_857, None, None),
    (4, 512): (157_024_249, None, 156_255_817, None, None),
    (6, 128): (13_184_745, None, None, 12_709_992, None),
    (6, 512): (176_776_697, 176_000_072, 176_008_265, 178_248_168, 178_256_361),
    (12, 512): (328_286_713, None, None, 329_758_184, None),
    (18, 208): (81_785_166, 81_137_437, 81_140_766, 81_505_540, 81_508_869),
    (18, 416): (318_277_617, None, None, None, None),
    (18, 544): (540_986_433, None, None, None, None),
    (36, 544): (1_054_083_969, None, None, None, None),
    (72, 512): (1_843_386_873, None, None, None, None),
}


def build(name: str, **options):
    with torch.device("meta"):
        return MODELS[name](**options)


@pytest.mark.parametrize(("size", "counts"), AMOEBANET_D.items(), ids=str)
def test_amoebanet_d_has_every_published_and_derived_count(size, counts):
    for (preset, aux_head, num_classes), expected in zip(COLUMNS, counts, strict=True):
        if expected is None:
            continue
        options = {"num_layers": size[0], "num_filters": size[1], "preset": preset, "image_size": 224}
        model = build("amoebanet-d", **options, num_classes=num_classes, aux_head=aux_head)
        assert count_parameters(model) == expected, (preset, aux_head, num_classes)


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
        1_856, 74_304, 343_168, 676_096, 839_936, *[905_472] * 4, *STACK_2_AND_3_OF_D256, 4_097_000,
    ],
}  # fmt: skip


@pytest.mark.parametrize("preset", ["tf", "torchgpipe"])
def test_amoebanet_d_18_256_layer_by_layer(preset):
    options = {"num_layers": 18, "num_filters": 256, "preset": preset, "num_classes": 1000, "aux_head": False}
    counts = layer_parameters(build("amoebanet-d", **options))
    assert counts == PER_LAYER[preset]
    if preset == "tf":  # 67.6 % of the parameters are in the last six cells
        assert round(sum(counts[-7:-1]) / sum(counts), 3) == 0.676


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
    assert count_parameters(model) == expected
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
