"""AmoebaNet: genotypes, order, shapes, what travels between layers, the two presets."""

import math

import pytest
import torch
from torch import nn

from gpipe_bench.models import MODELS, loss_fn
from gpipe_bench.models.amoebanet.cell import Cell
from gpipe_bench.models.amoebanet.genotypes import GENOTYPES, OPERATIONS
from gpipe_bench.models.amoebanet.network import PRESETS, Classifier, Stem
from gpipe_bench.models.amoebanet.ops import Style

# A second transcription, in the reference's form: operations, the states they read, and 1 for each state
# that is used inside the cell and therefore not concatenated.
REFERENCE = {
    "a normal": ("avg3 max3 sep3 none none avg3 sep3 sep5 avg3 sep3", "0 0 1 1 0 1 0 2 5 0", "1010010"),
    "a reduction": ("sep3 avg3 max3 sep7 max3 max3 sep3 1x7 avg3 sep7", "1 0 0 2 1 0 4 0 1 0", "1100000"),
    "b normal": ("1x1 max3 none sep3 1x1 sep3 1x1 none avg3 1x1", "1 1 1 0 1 0 2 2 1 5", "0110010"),
    "b reduction": ("max2 max3 none 3x3 sep5 max3 none sep3 avg3 1x1", "0 0 2 1 2 2 3 1 4 3", "1111100"),
    "c normal": ("avg3 sep3 none sep3 avg3 sep3 none sep3 avg3 sep3", "0 0 0 0 2 1 0 1 3 0", "1001000"),
    "c reduction": ("max3 max3 sep7 sep3 sep7 max3 sep5 sep5 max3 sep3", "0 0 2 0 0 1 4 4 1 1", "0100000"),
    "d normal": ("1x1 max3 none 1x7 1x1 1x7 max3 none avg3 1x1", "1 1 1 0 0 0 2 2 1 5", "0110010"),
    "d reduction": ("max2 max3 none 3x3 1x7 max3 none max2 avg3 1x1", "0 0 2 1 2 2 3 1 2 3", "1111000"),
}


def build(letter="d", **options):
    defaults = {"num_layers": 3, "num_filters": 8, "num_classes": 5, "image_size": 32, "aux_head": False}
    return MODELS[f"amoebanet-{letter}"](**defaults | options)


def on_meta(letter="d", **options):
    with torch.device("meta"):
        return build(letter, **options)


def shapes(value):
    return [tuple(tensor.shape) for tensor in (value if isinstance(value, tuple) else (value,))]


@pytest.mark.parametrize("cell", REFERENCE)
def test_genotypes_agree_with_the_reference(cell):
    operations, inputs, used = REFERENCE[cell]
    letter, kind = cell.split()
    plan = getattr(GENOTYPES[letter], kind)
    assert [name[: 3 if name[1:3] == "x7" else 4] for name in plan.operations] == operations.split()
    assert " ".join(map(str, plan.inputs)) == inputs
    assert plan.concat == tuple(state for state, flag in enumerate(used) if flag == "0")
    assert set(plan.operations) <= set(OPERATIONS)


class Times(nn.Module):
    """Stands for an operation: what it contributes can be read off the result."""

    def __init__(self, factor, stride=1):
        super().__init__()
        self.factor = factor
        self.stride = stride

    def forward(self, x):
        return self.factor * x[..., :: self.stride, :: self.stride]


def stubbed(plan, stride):
    cell = Cell(
        plan,
        filters=1,
        net_channels=1,
        prev_channels=1,
        stride=stride,
        prev_match="raw",
        reduce_concat=False,
        style=Style(),
    )
    cell.net, cell.prev = Times(1.0), Times(1.0)
    primes = [2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0, 23.0, 29.0]
    cell.ops = nn.ModuleList(
        Times(prime, stride if state < 2 else 1) for prime, state in zip(primes, plan.inputs, strict=True)
    )
    return cell


def test_a_normal_cell_of_d_is_put_together_as_drawn():
    net, prev = torch.tensor([1.0, 100.0]).reshape(2, 1, 1, 1, 1)
    out, passed_on = stubbed(GENOTYPES["d"].normal, 1)((net, prev))
    h0, h1 = 1, 100
    h2 = 2 * h1 + 3 * h1
    h3 = 5 * h1 + 7 * h0
    h4 = 11 * h0 + 13 * h0
    h5 = 17 * h2 + 19 * h2
    h6 = 23 * h1 + 29 * h5
    assert out.flatten().tolist() == [h0, h3, h4, h6]
    assert passed_on is net


def test_a_reduction_cell_of_d_is_put_together_as_drawn():
    net, prev = torch.ones(1, 1, 4, 4), torch.full((1, 1, 4, 4), 100.0)
    out, _ = stubbed(GENOTYPES["d"].reduction, 2)((net, prev))
    h0, h1 = 1, 100
    h2 = 2 * h0 + 3 * h0
    h3 = 5 * h2 + 7 * h1
    h4 = 11 * h2 + 13 * h2
    h5 = 17 * h3 + 19 * h1
    h6 = 23 * h2 + 29 * h3
    assert out.shape == (1, 3, 2, 2)
    assert out[0, :, 0, 0].tolist() == [h4, h5, h6]


ORDERS = {
    1: "R0",
    2: "R0R1",
    3: "0R1R2",
    4: "0R1R23",
    5: "0R12R34",
    6: "01R23R45",
    7: "01R23R456",
    12: "0123R4567R891011",
}


@pytest.mark.parametrize(("num_layers", "order"), ORDERS.items())
def test_reduction_cells_come_where_the_reference_puts_them(num_layers, order):
    names = [name for name, _ in on_meta(num_layers=num_layers).named_children()]
    assert names[:3] == ["stem", "stem_cell_0", "stem_cell_1"]
    assert names[-1] == "classifier"
    middle = names[3:-1]
    assert (
        "".join("R" if name.startswith("reduction") else name.removeprefix("normal_") for name in middle)
        == order
    )
    assert [n for n in middle if n.startswith("reduction")] == [
        f"reduction_{i}" for i in range(order.count("R"))
    ]


@pytest.mark.parametrize("num_layers", [2, 3, 4, 5, 6, 7, 18])
def test_the_auxiliary_head_follows_the_last_normal_cell_before_the_second_reduction(num_layers):
    names = [
        name for name, _ in on_meta(num_layers=num_layers, aux_head=True, image_size=96).named_children()
    ]
    at = names.index("aux_head")
    assert names[at - 1] == f"normal_{int(2 / 3 * num_layers) - 1}"
    assert names[at + 1] == "reduction_1"


SIDES = {
    ("tf", 224): [111, 56, 28, 14, 7],
    ("tf", 299): [149, 75, 38, 19, 10],
    ("tf", 331): [165, 83, 42, 21, 11],
    ("tf", 480): [239, 120, 60, 30, 15],
    ("torchgpipe", 224): [112, 56, 28, 14, 7],
}


@pytest.mark.parametrize(("preset", "image_size"), SIDES)
def test_shapes_between_all_layers_of_d(preset, image_size):
    check_shapes("d", preset, image_size, per_stack=2)


@pytest.mark.parametrize("letter", "abc")
def test_shapes_between_all_layers_of_the_others(letter):
    check_shapes(letter, "tf", 331, per_stack=1)


def check_shapes(letter, preset, image_size, per_stack):
    D, N = 16, 2
    options = {"preset": preset, "image_size": image_size, "aux_head": True, "num_classes": 7}
    model = on_meta(letter, num_layers=3 * per_stack, num_filters=D, **options)
    normal, reduction = (len(getattr(GENOTYPES[letter], kind).concat) for kind in ("normal", "reduction"))
    stem, cell0, cell1, stack2, stack3 = SIDES[preset, image_size]
    scale = D // 4 if preset == "tf" else D // 2
    outputs = [
        (32 if preset == "tf" else D // 4, stem),
        (reduction * scale, cell0),
        (reduction * scale * 2, cell1),
        *[(normal * D, cell1)] * per_stack,
        (reduction * 2 * D, stack2),
        *[(normal * 2 * D, stack2)] * per_stack,
        "aux",
        (reduction * 4 * D, stack3),
        *[(normal * 4 * D, stack3)] * per_stack,
    ]
    images = state = torch.empty(N, 3, image_size, image_size, device="meta")
    previous, aux = [], []
    for layer, expected in zip(model[:-1], outputs, strict=True):
        state = layer(state)
        if expected == "aux":
            aux = [(N, 7)]
        else:
            current, previous = (N, expected[0], expected[1], expected[1]), previous[:1]
            previous = [current, *previous]
        assert shapes(state) == [*previous, *aux]
    assert shapes(model[-1](state)) == [(N, 7), (N, 7)]
    if letter == "d":
        assert shapes(model.eval()(images)) == [(N, 7)]


@pytest.mark.parametrize("num_layers", range(1, 8))
def test_any_number_of_layers_trains(num_layers):
    torch.manual_seed(num_layers)
    model = build(num_layers=num_layers, num_filters=8, image_size=20)
    output = model(torch.randn(2, 3, 20, 20))
    loss_fn("amoebanet-d")(output, torch.tensor([1, 4])).backward()
    assert output.shape == (2, 5)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("image_size", [3, 4, 7, 9, 17, 33, 65])
def test_any_image_size_from_3_pixels_is_accepted_without_an_auxiliary_head(image_size):
    model = build(image_size=image_size, num_filters=8)
    assert model.eval()(torch.randn(1, 3, image_size, image_size)).shape == (1, 5)


def test_the_auxiliary_head_works_in_training_only_and_changes_nothing_else():
    torch.manual_seed(0)
    model = build(aux_head=True, image_size=67, dropout=0.0)
    images = torch.randn(2, 3, 67, 67)
    logits, aux = model(images)
    assert logits.shape == aux.shape == (2, 5)
    assert isinstance(model.eval()(images), torch.Tensor)
    without = build(image_size=67, dropout=0.0)
    without.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("aux_head")})
    torch.testing.assert_close(without(images), logits)


def test_the_stems_differ_as_published():
    torch.manual_seed(0)
    dark = -torch.rand(2, 3, 9, 9)
    tf, torchgpipe = Stem(32, PRESETS["tf"]), Stem(4, PRESETS["torchgpipe"])
    assert tf(dark).shape == (2, 32, 4, 4)
    assert torchgpipe(dark).shape == (2, 4, 5, 5)
    assert tf.conv(tf.relu(dark)).abs().sum() > 0
    assert torchgpipe.conv(torchgpipe.relu(dark)).abs().sum() == 0
    assert (tf(dark) < 0).any()  # nothing follows the normalization
    assert (torchgpipe(dark.abs()) < 0).any()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_classifier_by_hand(preset):
    torch.manual_seed(0)
    head = Classifier(4, 3, 0.0, PRESETS[preset])
    net = torch.randn(2, 4, 7, 7)
    x = net.relu() if preset == "tf" else net
    expected = x.flatten(2).mean(2) @ head.fc.weight.T + head.fc.bias
    torch.testing.assert_close(head((net, net)), expected)
    aux = torch.randn(2, 3)
    logits, passed_on = head((net, net, aux))
    torch.testing.assert_close(logits, expected)
    assert passed_on is aux


def test_torchgpipe_pads_symmetrically():
    tf, torchgpipe = (build(preset=preset).get_submodule("reduction_0") for preset in PRESETS)
    position = next(i for i, name in enumerate(GENOTYPES["d"].reduction.operations) if name == "3x3")
    assert torchgpipe.ops[position][4].padding == (1, 1)
    with torch.no_grad():
        for weight, other in zip(tf.parameters(), torchgpipe.parameters(), strict=False):
            if weight.shape == other.shape:
                other.copy_(weight)
    x = torch.randn(1, 16, 6, 6)
    assert not torch.allclose(tf.ops[position].eval()(x), torchgpipe.ops[position].eval()(x))


def test_the_reference_initialisation_has_variance_2_over_fan_out():
    torch.manual_seed(0)
    model = build("b", num_filters=64, num_classes=1000, aux_head=True, image_size=67)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.numel() > 8000:
            out = module.weight.shape[0]
            kernel = math.prod(module.weight.shape[2:])
            fan_out = out // getattr(module, "groups", 1) * kernel
            assert module.weight.var().item() * fan_out == pytest.approx(2.0, rel=0.1)
            assert module.weight.abs().max().item() <= 2 * math.sqrt(2.6 / fan_out) * 1.0001
    assert not model.classifier.fc.bias.any()
    assert not model.aux_head.fc.bias.any()


def test_the_cifar_form_keeps_small_images_at_their_size():
    options = {"num_layers": 3, "num_filters": 8, "num_classes": 5, "dropout": 0.0}
    model = MODELS["amoebanet-d"](**options, stem="cifar", image_size=16)
    names = "stem normal_0 reduction_0 normal_1 aux_head reduction_1 normal_2 classifier"
    assert [name for name, _ in model.named_children()] == names.split()
    images = torch.randn(2, 3, 16, 16)
    assert model.stem(images).shape == (2, 24, 16, 16)  # 3 D channels
    assert model[:2](images)[0].shape[2:] == (16, 16)
    logits, aux = model(images)
    assert logits.shape == aux.shape == (2, 5)
    assert (
        MODELS["amoebanet-d"](**options, stem="cifar", image_size=9, stem_filters=4).stem.conv.out_channels
        == 4
    )
