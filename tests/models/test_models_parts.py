"""Layers of models: drop path, batch normalization of a single value, the stride control."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_bench.models import MODELS, count_parameters, set_drop_path
from gpipe_bench.models.amoebanet.modules import BatchNorm2d, DropPath
from gpipe_bench.models.amoebanet.network import MOVED_STRIDES
from gpipe_bench.pipeline import Pipeline


def test_examples_are_dropped_whole_and_the_kept_ones_scaled():
    torch.manual_seed(0)
    x = torch.randint(1, 5, (4000, 2, 3, 3)).float()
    ratio = DropPath(0.8)(x) / x
    per_example = ratio.flatten(1)
    assert (per_example == per_example[:, :1]).all()
    values = per_example[:, 0].unique()
    torch.testing.assert_close(values, torch.tensor([0.0, 1.25]))
    assert per_example.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (per_example[:, 0] > 0).float().mean().item() == pytest.approx(0.8, abs=0.02)


def test_gradients_follow_the_kept_examples():
    torch.manual_seed(0)
    x = torch.ones(50, 3, requires_grad=True)
    out = DropPath(0.5)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    assert set(x.grad.flatten().tolist()) == {0.0, 2.0}


def test_nothing_happens_or_is_drawn_at_1_and_in_evaluation():
    x = torch.randn(5, 2)
    state = torch.random.get_rng_state()
    assert DropPath(1.0)(x) is x
    assert DropPath(0.1).eval()(x) is x
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_seed_repeats_the_draw():
    path, x = DropPath(0.5), torch.ones(64, 1)
    torch.manual_seed(3)
    first = path(x)
    assert not torch.equal(path(x), first)
    torch.manual_seed(3)
    assert torch.equal(path(x), first)


def test_half_precision_stays_half_precision():
    assert DropPath(0.5)(torch.ones(4, 1, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_model_starts_with_its_option_and_can_be_changed():
    torch.manual_seed(0)
    options = {"num_layers": 2, "num_filters": 8, "num_classes": 3, "image_size": 16, "aux_head": False}
    model = MODELS["amoebanet-d"](drop_path_keep=0.6, dropout=0.0, **options)
    paths = [m for m in model.modules() if isinstance(m, DropPath)]
    assert {path.keep for path in paths} == {0.6}
    assert len(paths) == 6 * 8  # ten operations in each of six cells, two of them `none`
    images = torch.randn(2, 3, 16, 16)
    assert not torch.equal(model(images), model(images))
    assert set_drop_path(model, 1.0) == len(paths)
    assert torch.equal(model(images), model(images))
    assert set_drop_path(nn.Linear(2, 2), 0.5) == 0


# Batch normalization of a single value, where torch refuses to train and the reference does not


def pair():
    torch.manual_seed(0)
    ours, stock = BatchNorm2d(3), nn.BatchNorm2d(3)
    for parameter in ours.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def test_a_single_value_gives_the_shift_and_no_gradient_for_the_input():
    ours, stock = pair()
    x = torch.tensor([2.0, -3.0, 5.0]).reshape(1, 3, 1, 1).requires_grad_()
    with pytest.raises(ValueError, match="more than 1 value"):
        stock(x)
    out = ours(x)
    assert torch.equal(out.flatten(), ours.bias)
    (out * torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)).sum().backward()
    assert x.grad.flatten().tolist() == [0, 0, 0]
    assert ours.weight.grad.tolist() == [0, 0, 0]
    assert ours.bias.grad.tolist() == [1, 2, 3]
    torch.testing.assert_close(ours.running_mean, torch.tensor([0.2, -0.3, 0.5]))
    torch.testing.assert_close(ours.running_var, torch.full((3,), 0.9))
    assert ours.num_batches_tracked == 1


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (1, 3, 2, 1), (4, 3, 5, 5)])
def test_otherwise_it_is_the_stock_module(shape):
    ours, stock = pair()
    x = torch.randn(shape)
    assert torch.equal(ours(x), stock(x))
    assert all(map(torch.equal, ours.state_dict().values(), stock.state_dict().values()))
    assert torch.equal(ours.eval()(x), stock.eval()(x))


def test_a_single_value_in_evaluation_is_the_stock_module_too():
    ours, stock = pair()
    x = torch.randn(1, 3, 1, 1)
    assert torch.equal(ours.eval()(x), stock.eval()(x))


def test_the_average_of_all_batches_and_no_statistics():
    cumulative = BatchNorm2d(1, momentum=None)
    for value in (1.0, 2.0, 6.0):
        cumulative(torch.full((1, 1, 1, 1), value))
    assert cumulative.running_mean.item() == pytest.approx(3.0)
    untracked = BatchNorm2d(1, track_running_stats=False)
    assert untracked(torch.ones(1, 1, 1, 1)).item() == 0.0


def test_a_single_value_leaves_the_graph_of_a_batch_before_it_alone():
    """The graph of a batch has saved the averages, which its backward does not read."""
    ours, stock = pair()
    more = torch.randn(2, 3, 1, 1)
    total = ours(more).square().sum()
    (total + ours(torch.ones(1, 3, 1, 1)).sum()).backward()
    (stock(more).square().sum() + (stock.weight * 0 + stock.bias).sum()).backward()
    assert torch.equal(ours.weight.grad, stock.weight.grad)
    assert torch.equal(ours.bias.grad, stock.bias.grad)


@pytest.mark.parametrize("remat", ["never", "always", "except_last"])
def test_a_last_microbatch_of_one_example_trains_as_the_plain_model_does(remat):
    """Three examples in two micro-batches, of which the second is one: all graphs of the step are alive."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 2), nn.AdaptiveAvgPool2d(1), BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2)]
    model = nn.Sequential(*layers).double()
    plain = copy.deepcopy(model)
    images, target = torch.randn(3, 2, 4, 4).double(), torch.randn(3, 2).double()
    pipeline = Pipeline(model, num_stages=2, num_microbatches=2, remat=remat)
    loss = pipeline.step(images, target, nn.functional.mse_loss)
    parts = zip(images.split((2, 1)), target.split((2, 1)), (2 / 3, 1 / 3), strict=True)
    wanted = sum(share * nn.functional.mse_loss(plain(x), y) for x, y, share in parts)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# AmoebaNet of the stride control


def sides(moved_stride: str | None, image_size: int = 65, **options: object) -> dict[str, int]:
    """Side of the map behind every layer but the classifier, from a real forward."""
    given = {"num_layers": 6, "num_filters": 8, "stem_filters": 4, "aux_head": False, "num_classes": 2}
    torch.manual_seed(0)
    model = MODELS["amoebanet-d"](**given | options, image_size=image_size, moved_stride=moved_stride)
    value = torch.randn(2, 3, image_size, image_size)
    found = {}
    for name, layer in model.named_children():
        value = layer(value)
        first = value[0] if isinstance(value, tuple) else value
        if first.dim() == 4:
            found[name] = first.size(2)
    assert value.shape == (2, 2)
    return found


@pytest.mark.parametrize("image_size", [65, 66])
def test_maps_have_twice_the_side_up_to_the_layer_that_the_stride_moves_to(image_size: int) -> None:
    original = sides(None, image_size)
    for moved, last in zip(MOVED_STRIDES, ("reduction_1", "normal_5"), strict=True):
        found = sides(moved, image_size)
        assert list(found) == list(original)
        at = list(found).index(last)
        for place, (name, side) in enumerate(found.items()):
            if place >= at:
                assert side == original[name], name
            else:
                assert abs(side - 2 * original[name]) <= 2, name


def test_no_stride_is_moved_by_default() -> None:
    model = MODELS["amoebanet-d"](num_layers=3, num_filters=8)
    assert model.stem.conv.stride == (2, 2)
    cells = {name: cell for name, cell in model.named_children() if "_" in name}
    assert cells["reduction_1"].ops[0][0].stride == 2


def test_the_size_of_the_model_stays_where_no_layer_gets_a_stride_that_had_none() -> None:
    """The reduction cell has strided layers already; a normal cell's identities become convolutions."""
    with torch.device("meta"):
        counts = {
            moved: count_parameters(
                MODELS["amoebanet-d"](num_layers=6, num_filters=256, aux_head=False, moved_stride=moved)
            )
            for moved in (None, *MOVED_STRIDES)
        }
    assert counts["second reduction cell"] == counts[None]
    assert counts["last normal cell"] > counts[None]


def test_a_training_step_reaches_every_parameter() -> None:
    for moved in MOVED_STRIDES:
        model = MODELS["amoebanet-d"](
            num_layers=3, num_filters=8, stem_filters=4, image_size=67, num_classes=2, moved_stride=moved
        )
        logits, auxiliary = model(torch.randn(2, 3, 67, 67))
        (logits.sum() + auxiliary.sum()).backward()
        assert all(p.grad is not None for p in model.parameters())
