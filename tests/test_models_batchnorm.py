"""Batch normalization of a single value, where torch refuses to train and the reference does not."""

import copy

import pytest
import torch
from torch import nn

from gpipe_bench.models.amoebanet.modules import BatchNorm2d
from gpipe_bench.pipeline import Pipeline


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
