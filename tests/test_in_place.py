"""Layers that overwrite their input: a recomputation sees what the forward saw, wherever the stage begins."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tiny_models import mlp_batch, plain_step, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.remat import REMAT_MODES

mse_loss = nn.functional.mse_loss


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_a_layer_that_begins_to_overwrite_the_stage_input_is_refused_not_silently_wrong() -> None:
    class Late(InPlace):
        late = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.late else x * 2

    batch, target = mlp_batch(4)
    layers = seeded(lambda: nn.Sequential(Late(), nn.Linear(6, 6)))
    pipeline = Pipeline(layers, num_stages=1, num_microbatches=2, remat="always")
    pipeline.step(batch, target, mse_loss)
    layers[0].late = True
    with pytest.raises(RuntimeError, match=r"0R1 failed.*begun to change.*refresh.*inplace=False"):
        pipeline.step(batch.clone(), target, mse_loss)
    pipeline.refresh()
    pipeline.step(batch, target, mse_loss)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "naive"])
@pytest.mark.parametrize("remat", REMAT_MODES)
def test_the_first_layer_of_a_stage_may_be_in_place(remat: str, schedule: str) -> None:
    """Exact from the first step on; the stage before may pass on what it keeps itself."""
    depth, num_microbatches = 5, 3
    if schedule == "naive":
        num_microbatches = 1

    def build() -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(6, 6), nn.Identity(), nn.ReLU(inplace=True), nn.Dropout(0.3)]
        return nn.Sequential(InPlace(), *layers)

    plain, layers = seeded(build), seeded(build)
    pipeline = Pipeline(
        layers, num_stages=4 * depth + 1, num_microbatches=num_microbatches, remat=remat, schedule=schedule
    )
    for step in range(3):
        batch, target = mlp_batch(7, seed=step)
        plain.zero_grad()
        pipeline.zero_grad()
        wanted = plain_step(plain, batch.clone(), target, mse_loss, num_microbatches, step=step)
        kept = batch.clone()
        loss = pipeline.step(batch, target, mse_loss)
        if remat == "always":
            assert torch.equal(batch, kept)
        torch.testing.assert_close(loss, wanted.loss, rtol=1e-12, atol=0)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-14)
    found = [stage.overwrites_input for stage in pipeline.stages]
    again = [
        any(pipeline.schedule.recomputes(m, stage) for m in range(num_microbatches))
        for stage in range(len(found))
    ]
    assert found == [
        isinstance(layer, InPlace | nn.ReLU) and recomputes
        for layer, recomputes in zip(layers, again, strict=True)
    ]


def test_only_what_is_overwritten_is_copied() -> None:
    """One input of a stage in the forward and one in the recomputation, from the second micro-batch on."""
    copied: list[int] = []

    class Spied(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
            if function is Tensor.clone:
                copied.append(arguments[0].numel())
            return super().__torch_function__(function, types, arguments, options or {})

    class First(nn.Module):
        def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
            ids, x = inputs
            return x.mul_(2) + ids[:, None]

    x = torch.randn(4, 6).as_subclass(Spied)
    ids = torch.arange(4).as_subclass(Spied)
    for layer, wanted in ((First(), {12: 4}), (Out(), {})):
        pipeline = Pipeline([layer, nn.Linear(6, 6)], num_stages=1, num_microbatches=2, remat="always")
        pipeline.step((ids, x), None, lambda output, target: output.square().mean())
        copied.clear()
        pipeline.step((ids, x), None, lambda output, target: output.square().mean())
        assert Counter(copied) == wanted


class Views(nn.Module):
    """Two tensors in one memory: the whole and its rows' halves, in another shape, or half a row each."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        if self.kind == "overlapping":
            return h, h.view(-1, 2, 3)
        if self.kind == "without a gradient":
            return h, h.detach().view(-1, 2, 3)
        return h[:, :3], h[:, 3:].view(-1, 1, 3)


class OverwritesOne(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = pair
        return a.mul_(3).sum(1, keepdim=True) * b.square().flatten(1)


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("kind", ["overlapping", "without a gradient", "beside each other"])
def test_an_input_that_shares_memory_is_not_silently_overwritten(kind: str, remat: str) -> None:
    """Without a cut, what is changed in one tensor shows in the other, and in its gradients."""

    def build() -> nn.Sequential:
        return nn.Sequential(Views(kind), OverwritesOne())

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean()

    batch, target = mlp_batch(4)
    plain = plain_step(seeded(build), batch, target, loss_fn, 2)
    for num_stages in (1, 2):
        pipeline = Pipeline(
            seeded(build), num_stages=num_stages, num_microbatches=2, remat=remat, cost=[1] * 2
        )
        if num_stages == 2 and kind != "beside each other":
            with pytest.raises(RuntimeError, match=r"1F0 failed.*stage 1 changes.*shares memory.*clone"):
                pipeline.step(batch, target, loss_fn)
            with pytest.raises(RuntimeError, match=r"1F0 failed.*shares memory"):
                pipeline(batch)
            continue
        pipeline.step(batch, target, loss_fn)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.gradients[name], rtol=1e-12, atol=1e-14)


def test_tensors_of_the_mini_batch_may_share_memory() -> None:
    """Under re-materialization the one that is overwritten is copied, and the other one would not see it."""

    def build() -> nn.Sequential:
        return nn.Sequential(OverwritesOne(), nn.Linear(6, 6))

    x, target = mlp_batch(4)
    views = lambda: (kept := x.clone(), kept.view(-1, 2, 3))  # noqa: E731
    plain = plain_step(seeded(build), views(), target, mse_loss, 2)
    pipeline = Pipeline(seeded(build), num_stages=2, num_microbatches=2, remat="never")
    pipeline.step(views(), target, mse_loss)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.gradients[name], rtol=1e-12, atol=1e-14)
    pipeline = Pipeline(seeded(build), num_stages=2, num_microbatches=2, remat="always")
    with pytest.raises(RuntimeError, match=r"0F0 failed.*shares memory"):
        pipeline.step(views(), target, mse_loss)


class Out(nn.Module):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        ids, x = inputs
        return x * 2 + ids[:, None]


def test_overwriting_inside_a_stage_is_fine() -> None:
    batch, target = mlp_batch(4)
    gradients = []
    for inplace in (False, True):
        layers = seeded(lambda inplace=inplace: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=inplace)))
        Pipeline(layers, num_stages=1, num_microbatches=2).step(batch, target, mse_loss)
        gradients.append(layers[0].weight.grad)
    assert torch.equal(*gradients)
