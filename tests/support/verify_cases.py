"""`Pipeline.verify` over processes: two pipelines of two, and dp x pp."""

from __future__ import annotations

import torch
from ranks import TIMEOUT_S, halves, raises
from side_effects import AsksForSpecial, Dense, HiddenTie, LeavesAux, MakesSpecial
from tiny_models import everything, everything_batch, mlp_batch, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.pipeline import ActionError, Pipeline, VerifyError

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss


def verify_says_nothing_of_what_is_right() -> None:
    for remat in ("always", "never"):
        ranks = halves()
        for step in range(2):
            batch, target = everything_batch(7)
            pipeline = ranks.pipeline(model := seeded(everything), 3, remat=remat)
            assert pipeline.verify(*ranks.own(batch, target), cross_entropy) < 1e-12
            if not step:
                pipeline.step(*ranks.own(batch, target), cross_entropy)
        assert isinstance(model, nn.Sequential)  # on every rank somebody holds it
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        with Pipeline(model := seeded(everything), mesh=mesh, num_microbatches=3, remat=remat) as pipeline:
            batch, target = everything_batch(7, seed=pipeline.grid.replica)
            assert pipeline.verify(batch, target, cross_entropy) < 1e-12
            pipeline.step(batch, target, cross_entropy)
            assert pipeline.verify(batch, target, cross_entropy) < 1e-12


def verify_names_what_a_cut_leaves_behind() -> None:
    batch, target = mlp_batch(8)
    dense = Dense()
    of_aux = nn.Sequential(LeavesAux(), Dense()).double()

    def with_aux(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) + of_aux[0].aux

    for layers, loss_fn, words in (
        (of_aux, with_aux, "the loss, which is"),
        ([MakesSpecial().double(), AsksForSpecial().double()], mse_loss, ""),
        (
            [dense.double(), HiddenTie(dense)],
            mse_loss,
            "",
        ),  # refused where it happens; another rank says that it misses that one
    ):
        torch.manual_seed(0)
        pipeline = halves().pipeline(layers, 2, remat="never")
        with raises((VerifyError, ActionError), words):
            pipeline.verify(batch, target, loss_fn)


def tensors_that_are_not_dense_stay_in_their_process() -> None:
    class Sparse(Dense):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).to_sparse()

    class FromSparse(Dense):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to_dense())

    layers = [Sparse().double(), FromSparse().double()]
    pipeline = halves().pipeline(layers, 2)
    with raises(ActionError, "to_dense()"):
        pipeline.step(*mlp_batch(4), mse_loss)


def verify_needs_the_whole_model() -> None:
    ranks = halves()
    pipeline = ranks.pipeline(
        nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double(), 2, timeout_s=TIMEOUT_S
    )
    with raises(VerifyError, "hold on to the layers that the pipeline was built of"):
        pipeline.verify(*mlp_batch(4), mse_loss)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "pp"))
    pipeline = Pipeline([nn.Linear(6, 6), nn.Linear(6, 6)], mesh=mesh, num_microbatches=2)
    with pipeline, raises(ValueError, "on a mesh without 'fsdp'"):
        pipeline.verify(*mlp_batch(4), mse_loss)


CASES = (
    verify_says_nothing_of_what_is_right,
    verify_names_what_a_cut_leaves_behind,
    tensors_that_are_not_dense_stay_in_their_process,
    verify_needs_the_whole_model,
)
