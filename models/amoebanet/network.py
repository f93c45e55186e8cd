"""AmoebaNet (L, D) as a sequence of layers, in the two published forms.

Preset `tf` is the TensorFlow reference that GPipe trained; preset `torchgpipe` is the port for which speeds
and memory are published. They differ in stem, widths, padding, classifier and initialisation, not in cells
(`PRESETS`). Sources: tensorflow/tpu `models/official/amoeba_net`; kakaobrain/torchgpipe `benchmarks/models`.

Layers, for L normal cells: stem, two stem cells, L normal cells with a reduction cell before the cells
L/3 and 2L/3, the auxiliary head (if asked for) after the last normal cell before the second reduction,
classifier. L counts all normal cells; the paper's first version counts those of one of the three stacks.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

from gpipe_bench.models import checks
from gpipe_bench.models.amoebanet.aux_head import AuxHead
from gpipe_bench.models.amoebanet.cell import Cell
from gpipe_bench.models.amoebanet.genotypes import GENOTYPES
from gpipe_bench.models.amoebanet.modules import BatchNorm2d, check_keep
from gpipe_bench.models.amoebanet.ops import Style, framed_conv, linear

STEMS = ("imagenet", "cifar")
MOVED_STRIDES = ("second reduction cell", "last normal cell")


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings in which the two published forms of AmoebaNet differ.

    Args:
        stem_filters: channels of the stem's convolution; None means D / 4.
        stem_relu: a ReLU before the stem's convolution, on the image.
        stem_padding: rows and columns of zeros around the image.
        stem_scale: width of the first stem cell in units of D; the second is twice as wide.
        first_prev: how the first cell gets its missing previous input (see `Cell`).
        padding: convention of padding and initialisation (see `amoebanet.ops`).
        final_relu: a ReLU before the last average.
        dropout: dropout before the classifier.
        aux_head, num_classes, label_smoothing: the form's training settings.
    """

    stem_filters: int | None
    stem_relu: bool
    stem_padding: int
    stem_scale: float
    first_prev: str
    padding: str
    final_relu: bool
    dropout: float
    aux_head: bool
    num_classes: int
    label_smoothing: float


PRESETS: dict[str, Preset] = {
    "tf": Preset(
        stem_filters=32,
        stem_relu=False,
        stem_padding=0,
        stem_scale=0.25,
        first_prev="raw",
        padding="same",
        final_relu=True,
        dropout=0.5,
        aux_head=True,
        num_classes=1001,
        label_smoothing=0.1,
    ),
    "torchgpipe": Preset(
        stem_filters=None,
        stem_relu=True,
        stem_padding=1,
        stem_scale=0.5,
        first_prev="project",
        padding="symmetric",
        final_relu=False,
        dropout=0.0,
        aux_head=False,
        num_classes=1000,
        label_smoothing=0.0,
    ),
}


class Stem(nn.Module):
    """The first convolution and its normalization: (N, 3, S, S) -> (N, filters, S', S').

    Args:
        filters: channels of the map
        preset: the form
        stride: 2 halves the map, roughly
        frame: rows and columns of zeros around the image; None means the preset's
    """

    def __init__(self, filters: int, preset: Preset, *, stride: int = 2, frame: int | None = None) -> None:
        super().__init__()
        self.relu = nn.ReLU() if preset.stem_relu else nn.Identity()
        frame = preset.stem_padding if frame is None else frame
        self.conv = framed_conv(3, filters, 3, stride, frame, preset.padding)
        self.bn = BatchNorm2d(filters)

    def forward(self, image: Tensor) -> Tensor:
        x: Tensor = self.bn(self.conv(self.relu(image)))
        return x


class Classifier(nn.Module):
    """Averages the last map over all pixels and classifies: `(net, prev)` -> logits (N, classes).

    With auxiliary logits in the tuple the result is `(logits, auxiliary logits)`. torchgpipe averages 7x7
    pixels, which is the whole map at 224 pixels, the only size that it takes.
    """

    def __init__(self, channels: int, num_classes: int, dropout: float, preset: Preset) -> None:
        super().__init__()
        self.relu = nn.ReLU() if preset.final_relu else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.fc = linear(channels, num_classes, preset.padding)

    def forward(self, state: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        net, _, *aux = state
        logits = self.fc(self.dropout(self.relu(net).mean(dim=(2, 3))))
        return (logits, *aux) if aux else logits


def amoebanet(
    genotype: str,
    *,
    num_layers: int = 18,
    num_filters: int = 208,
    preset: str = "tf",
    num_classes: int | None = None,
    aux_head: bool | None = None,
    image_size: int = 224,
    dropout: float | None = None,
    drop_path_keep: float = 1.0,
    averaging_max_pool: bool = False,
    stem: str = "imagenet",
    stem_filters: int | None = None,
    moved_stride: str | None = None,
) -> nn.Sequential:
    """Builds AmoebaNet (L, D) of one genotype: images (N, 3, S, S) -> logits (N, num_classes).

    In training with an auxiliary head the result is `(logits, auxiliary logits)`.

    Args:
        genotype: `"a"`, `"b"`, `"c"` or `"d"`.
        num_layers: L, normal cells in all three stacks together; any L >= 1. For L not divisible by 3 the
            reduction cells come where the reference puts them. L = 1 has one reduction cell and no place
            for an auxiliary head, so it gets none, as in the reference.
        num_filters: D >= 8, width of the first stack; the widths D / 4 and D / 2 of the stem are rounded
            down.
        preset: `"tf"` or `"torchgpipe"`. torchgpipe itself builds only D with L divisible by 3.
        num_classes: None means the preset's: 1001 (class 0 is background) or 1000.
        aux_head: None means the preset's: with it, or without. It belongs to one image size: its last
            convolution covers the whole map.
        image_size: S in pixels; torchgpipe's preset takes only sizes whose halved maps are even, such as
            224 and 480.
        dropout: share dropped before the classifier; None means the preset's: 0.5 or 0.
        drop_path_keep: initial keep probability of drop path; see `set_drop_path`.
        averaging_max_pool: replaces the 3x3 maxima by averages, the defect that torchgpipe's published
            numbers contain. Parameters are the same; function, speed and memory are not.
        stem: `"imagenet"`, or `"cifar"` for images of few pixels, as in NASNet's CIFAR-10 network: the first
            convolution keeps the map's size and no stem cells follow.
        stem_filters: channels of the stem's convolution; None means the preset's, or 3 D with `"cifar"`.
        moved_stride: a control experiment of the paper's first version (section 5): the stem's convolution
            keeps the map's size, and the missing halving is done by the `"second reduction cell"` (stride 4
            for 2) or the `"last normal cell"` (2 for 1). Only with preset `"tf"` and its stem.

    Raises:
        ValueError: an option is out of range, or the image is too small for the auxiliary head.
    """
    plans = GENOTYPES[checks.one_of("genotype", genotype, GENOTYPES)]
    form = PRESETS[checks.one_of("preset", preset, PRESETS)]
    num_layers = checks.positive_int("num_layers", num_layers)
    if checks.positive_int("num_filters", num_filters) < 8:
        raise ValueError(
            f"num_filters={num_filters} is not allowed: the stem halves a quarter of it, so give at least 8"
        )
    if preset == "torchgpipe" and num_filters % 4:
        raise ValueError(
            f"num_filters={num_filters} is not allowed with preset='torchgpipe': give a multiple of 4"
        )
    if checks.positive_int("image_size", image_size) < 3:
        raise ValueError(
            f"image_size={image_size} is not allowed: the stem's 3x3 convolution needs at least 3"
        )
    num_classes = checks.positive_int("num_classes", form.num_classes if num_classes is None else num_classes)
    aux_head = checks.flag("aux_head", form.aux_head if aux_head is None else aux_head)
    dropout = checks.probability("dropout", form.dropout if dropout is None else dropout)
    averaging_max_pool = checks.flag("averaging_max_pool", averaging_max_pool)
    style = Style(form.padding, averaging_max_pool, check_keep(drop_path_keep))

    layers: OrderedDict[str, nn.Module] = OrderedDict()
    small = checks.one_of("stem", stem, STEMS) == "cifar"
    if moved_stride is not None:
        _check_moved(moved_stride, preset, small, num_layers)
    if stem_filters is None:
        preset_filters = num_filters // 4 if form.stem_filters is None else form.stem_filters
        stem_filters = 3 * num_filters if small else preset_filters
    stem_filters = checks.positive_int("stem_filters", stem_filters)
    stem_stride = 1 if small or moved_stride is not None else 2
    frame = 1 if small else form.stem_padding
    layers["stem"] = Stem(stem_filters, form, stride=stem_stride, frame=frame)
    reductions = [int(i / 3 * num_layers) for i in (1, 2)]

    # Channels and side of the last two outputs; the first cell has one input only.
    net = prev = (stem_filters, (image_size + 2 * frame - 3) // stem_stride + 1)
    before = stem_stride  # stride of the layer that made `net`

    def add_cell(name: str, scale: float, reduce: bool) -> None:
        nonlocal net, prev, before
        any_cell = len(layers) > 1
        cell, filters = plans.reduction if reduce else plans.normal, int(num_filters * scale)
        stride = (2 if reduce else 1) * (2 if name == moved else 1)
        size, out_size = net[1], -(-net[1] // stride)
        if reduce and form.padding == "symmetric" and "max2" in cell.operations and size % 2:
            raise ValueError(
                f"image_size={image_size} is not allowed with preset={preset!r}: {name} would halve a map of "
                f"{size} pixels, and its 2x2 maximum has no padding; use 224, or preset='tf'"
            )
        match = "reduce" if prev[1] != size else "project"
        layers[name] = Cell(
            cell,
            filters=filters,
            net_channels=net[0],
            prev_channels=prev[0],
            stride=stride,
            prev_stride=before,
            prev_match=match if any_cell else form.first_prev,
            reduce_concat=out_size != size,
            style=style,
        )
        net, prev, before = (len(cell.concat) * filters, out_size), net, stride

    moved = {MOVED_STRIDES[0]: "reduction_1", MOVED_STRIDES[1]: f"normal_{num_layers - 1}"}.get(
        moved_stride or ""
    )
    for i in () if small else (0, 1):
        add_cell(f"stem_cell_{i}", form.stem_scale * 2**i, reduce=True)
    scale = 1.0
    for i in range(num_layers):
        if i in reductions:
            scale *= 2
            add_cell(f"reduction_{reductions.index(i)}", scale, reduce=True)
        add_cell(f"normal_{i}", scale, reduce=False)
        if aux_head and i == reductions[1] - 1:
            if net[1] < 5:
                raise ValueError(
                    f"image_size={image_size} is too small for the auxiliary head, whose 5x5 average would "
                    f"get a map of {net[1]} pixels; use a larger image (tf: at least 67), "
                    f"aux_head=False, or stem='cifar'"
                )
            layers["aux_head"] = AuxHead(*net, num_classes, form.padding)
    layers["classifier"] = Classifier(net[0], num_classes, dropout, form)
    return nn.Sequential(layers)


def _check_moved(moved_stride: str, preset: str, small: bool, num_layers: int) -> None:
    """`ValueError` if there is no stride to move, or no cell to move it to."""
    checks.one_of("moved_stride", moved_stride, MOVED_STRIDES)
    if preset != "tf" or small:
        raise ValueError(
            f"moved_stride={moved_stride!r} is not allowed with preset={preset!r} and "
            f"stem={'cifar' if small else 'imagenet'!r}: give preset='tf' and stem='imagenet', whose first "
            "convolution has the stride"
        )
    if moved_stride == "second reduction cell" and num_layers == 1:
        raise ValueError(
            f"moved_stride={moved_stride!r} is not allowed with num_layers=1: there is one reduction cell"
        )
