"""Drop path: whole examples, the right expectation, and a keep probability that may change."""

import pytest
import torch
from torch import nn

from gpipe_bench.models import MODELS, set_drop_path
from gpipe_bench.models.amoebanet.modules import DropPath


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
