"""Keyword arguments that the layers share in a step, in one process; over several see `tree_cases`."""

from __future__ import annotations

import pytest
import torch
from shared_models import Anything, Masked, shared_model, what_is_shared
from tiny_models import mlp_batch, plain_step, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.pipeline.stage.rng import run_plain
from gpipe_bench.pipeline.stage.trees import Keywords

EXACT = {"rtol": 1e-12, "atol": 1e-14}
mse_loss = nn.functional.mse_loss


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("num_stages", [1, 3, 6])
def test_each_layer_gets_the_arguments_that_it_names(num_stages: int, remat: str) -> None:
    plain, layers = seeded(shared_model), seeded(shared_model)
    pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=3, remat=remat)
    for step in range(3):
        (batch, target), shared = mlp_batch(7, seed=step), what_is_shared(step)
        wanted = plain_step(plain, batch, target, mse_loss, 3, step=step, shared=shared)
        loss = pipeline.step(batch, target, mse_loss, shared=shared)
        torch.testing.assert_close(loss, wanted.loss, **EXACT)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], **EXACT)
    whole = run_plain(plain.eval(), batch, seed=0, step=0, microbatch=0, shared=shared)
    torch.testing.assert_close(pipeline.eval()(batch, shared=shared), whole, **EXACT)


def test_names_that_nobody_takes_and_tensors_that_need_a_gradient_are_refused() -> None:
    pipeline = Pipeline([Masked(6, 6).double(), nn.Linear(6, 6).double()], num_stages=2, num_microbatches=2)
    batch, target = mlp_batch(4)
    with pytest.raises(ValueError, match="shared has 'maks'.*the layers take 'factor', 'mask'"):
        pipeline.step(batch, target, mse_loss, shared={"maks": torch.ones(6)})
    with pytest.raises(ValueError, match="shared has 'input', but no layer"):
        pipeline(batch, shared={"input": torch.ones(6)})
    with pytest.raises(ValueError, match="shared holds a tensor that requires a gradient"):
        pipeline.step(batch, target, mse_loss, shared={"mask": torch.ones(6, requires_grad=True)})
    with pytest.raises(RuntimeError, match="missing 1 required positional argument: 'mask'"):
        pipeline.step(batch, target, mse_loss)


def test_a_layer_that_changes_what_is_shared_is_refused() -> None:
    class Greedy(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x * mask.mul_(0.5))

    pipeline = Pipeline([Greedy(6, 6).double()], num_stages=1, num_microbatches=2)
    with pytest.raises(RuntimeError, match="a layer has changed a tensor of shared in place"):
        pipeline.step(*mlp_batch(4), mse_loss, shared={"mask": torch.ones(6)})


def test_torchs_own_layers_take_keywords() -> None:
    encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    assert {"src_mask", "is_causal"} <= Keywords.of(encoder).names
    assert Keywords.of(nn.Linear(1, 1)) == Keywords()
    assert Keywords.of(Anything(1, 1)).any_name
    pipeline = Pipeline([encoder, nn.Linear(6, 6)], num_stages=2, num_microbatches=2)
    x, mask = torch.randn(4, 5, 6), nn.Transformer.generate_square_subsequent_mask(5)
    torch.testing.assert_close(
        pipeline(x, shared={"src_mask": mask}), pipeline.get_submodule("1")(encoder(x, src_mask=mask))
    )
