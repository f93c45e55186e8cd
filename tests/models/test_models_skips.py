"""Models whose layers skip others: ResNet-101 against torchvision's, and attention residuals by hand and
through pipelines.
"""

import copy
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.models.attnres import Mean
from gpipe_bench.models.torchvision_shim import import_torchvision
from gpipe_bench.pipeline import Pipeline

# ResNet-101


def from_torchvision(state):
    """A state dict of torchvision's `resnet101`, or whatever has its names, by the names of ours."""
    found = {}
    for name, tensor in state.items():
        name = re.sub(r"^(layer\d)\.(\d+)\.downsample\.", r"\1_\2_residual.downsample.", name)
        found[re.sub(r"^(layer\d)\.(\d+)\.((?:conv|bn)\d)\.", r"\1_\2_\3.module.", name)] = tensor
    return found


@pytest.fixture(scope="module")
def pair():
    """torchvision's model and ours with its weights, in float64, no tensor at its default."""
    torch.manual_seed(0)
    theirs = import_torchvision().models.resnet101(num_classes=10)
    for norm in theirs.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
                nn.init.uniform_(tensor, 0.2, 0.4)
    ours = MODELS["resnet101"](num_classes=10)
    ours.load_state_dict(from_torchvision(theirs.state_dict()))
    return theirs.double(), ours.double()


def test_outputs_gradients_and_statistics_equal_torchvisions(pair):
    theirs, ours = pair
    images = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-12, atol=0)
    left, right = ours.train()(images), theirs.train()(images)
    torch.testing.assert_close(left, right, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.state_dict(), from_torchvision(theirs.state_dict()), rtol=1e-12, atol=0)
    left.square().sum().backward()
    right.square().sum().backward()
    grads = from_torchvision({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-10, atol=1e-12)


def test_the_installed_torchvision_can_be_imported_and_models_does_not_do_it():
    script = (
        "import sys, models; assert 'torchvision' not in sys.modules; "
        "from gpipe_bench.models.torchvision_shim import import_torchvision as load; "
        "tv = load(); assert tv is load(); import torch, torchvision; assert torchvision is tv; "
        "print(tv.transforms.CenterCrop(2)(torch.ones(3, 4, 4)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "torch.Size([3, 2, 2])", done.stderr


# Attention residuals

SIZES = {
    "num_layers": 6, "layers_per_block": 2, "d_model": 8, "ffn_dim": 12, "num_heads": 2, "vocab_size": 11,
    "seq_len": 5,
}  # fmt: skip


def build(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = MODELS["attnres"](**{**SIZES, **options}).double()
    for name, parameter in model.named_parameters():  # vectors start at 0 or 1, which hides mistakes
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.0 if name.endswith("query") else 1.0, 0.5)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_mean_over_the_depth_by_hand() -> None:
    torch.manual_seed(0)
    mean = Mean(4).double()
    sources = [torch.randn(1, 2, 4).double() for _ in range(3)]
    torch.testing.assert_close(mean(*sources), sum(sources) / 3)  # at first all weights are equal
    nn.init.normal_(mean.query)
    nn.init.normal_(mean.norm.weight)
    for token in range(2):
        scores = []
        for source in sources:
            x = source[0, token]
            scores.append((mean.query * mean.norm.weight * x).sum() / ((x * x).mean() + 1e-5).sqrt())
        weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
        expected = sum(weight * source[0, token] for weight, source in zip(weights, sources, strict=True))
        torch.testing.assert_close(mean(*sources)[0, token], expected)


@pytest.mark.parametrize(("per_block", "sources"), [(1, (1, 2, 3, 4, 5, 6, 7)), (2, (1, 2, 2, 3, 3, 4, 4)),
                                                     (4, (1, 2, 2, 2, 2, 3, 3))])  # fmt: skip
def test_what_every_layer_reads(per_block: int, sources: tuple[int, ...]) -> None:
    """The embedding, all blocks before, and from the second layer of a block on its own sum so far."""
    model, seen = build(layers_per_block=per_block), []
    for layer in [*model][1:]:
        mean = layer.mean if hasattr(layer, "mean") else layer.before_attention
        mean.register_forward_hook(lambda module, given, out: seen.append(len(given)))
    model(example_batch("attnres", 1, **SIZES)[0])
    assert tuple(seen) == sources


def test_no_token_sees_the_future() -> None:
    model, (tokens, _) = build(), example_batch("attnres", 2, **SIZES)
    other = tokens.clone()
    other[:, 3] = (other[:, 3] + 1) % 11
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(-1).all()


@pytest.mark.parametrize(
    ("num_stages", "schedule", "remat"),
    [(2, "1f1b", "never"), (3, "zb-h1", "never"), (3, "gpipe", "always"), (4, "1f1b", "always"),
     (4, "interleaved", "never"), (4, "zb-v", "never")],
)  # fmt: skip
@pytest.mark.parametrize("per_block", [1, 2, 4])
def test_training_is_the_plain_models_with_portals_and_without(
    num_stages: int, schedule: str, remat: str, per_block: int
) -> None:
    plain, loss = build(layers_per_block=per_block), loss_fn("attnres")
    with_portals = build(layers_per_block=per_block, portals=True)
    assert list(plain.state_dict()) == list(with_portals.state_dict())
    tokens, target = example_batch("attnres", 6, generator=torch.Generator().manual_seed(1), **SIZES)
    for model in (plain, with_portals):
        value = loss(model(tokens), target)
        value.backward()
        wanted = gradients(model)
        model.zero_grad()
        assert len(wanted) == len(list(plain.parameters()))
        pipeline = Pipeline(
            copy.deepcopy(model), num_stages=num_stages, num_microbatches=3, schedule=schedule, remat=remat,
            cost=[1.0] * 8,
        )  # fmt: skip
        torch.testing.assert_close(pipeline.step(tokens, target, loss), value.detach(), rtol=1e-12, atol=0)
        for name, gradient in gradients(pipeline).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-11, atol=1e-15, msg=name)
        assert len(gradients(pipeline)) == len(wanted)
