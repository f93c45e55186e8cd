"""Pytrees, keyword arguments and gradient scaling over two processes: cases that `test_distributed` runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from ranks import Ranks, halves, raises
from tiny_models import EXACT, assert_own_gradients, mlp_batch, plain_step, seeded
from torch import Tensor, nn
from tree_models import ByKey, Keyed, tree_batch, tree_loss, tree_model

from gpipe_bench.pipeline import ActionError, Pipeline
from gpipe_bench.pipeline.ranks import control
from gpipe_bench.pipeline.ranks.control import Control
from gpipe_bench.pipeline.ranks.ends import MessageSpec

mse_loss = nn.functional.mse_loss


class SpecsSent:
    """Counts what this rank tells of messages: specs of activations, of gradients and of what is shared,
    and other structures.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> SpecsSent:
        real, counts = Control.send, self.counts

        def send(to: Control, target: int, key: Any, content: Any, *arguments: Any) -> None:
            if isinstance(key, tuple):
                counts["gradient" if key[0][1] else "activation"] += content is not None
            elif isinstance(content, MessageSpec):
                counts[key] += 1
            real(to, target, key, content, *arguments)

        self._patch = mock.patch.object(Control, "send", send)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


def any_tree_crosses_a_boundary() -> None:
    """On four ranks and on two, over memory and the network; agreed on once."""
    for ranks in (Ranks(), halves(share_memory=False)):
        for schedule, remat in (("gpipe", "always"), ("1f1b", "except_last"), ("zb-h1", "never")):
            plain = seeded(tree_model)
            pipeline = ranks.pipeline(seeded(tree_model), 3, schedule=schedule, remat=remat)
            for step in range(3):
                batch, target = tree_batch(9, step, scale=1 / (1 + step))
                plain.zero_grad()
                pipeline.zero_grad()
                wanted = plain_step(plain, batch, target, tree_loss, 3, step=step)
                with SpecsSent() as sent:
                    loss = pipeline.step(*ranks.own(batch, target), tree_loss)
                torch.testing.assert_close(loss, wanted.loss, **EXACT)
                assert_own_gradients(pipeline, wanted.gradients, **EXACT)
                if step:  # a stage that passes the number on says so once, since it is another in each step
                    passes_on = ranks.is_first and ranks.size == 4
                    assert sent.counts["activation"] == int(passes_on), sent.counts
                    assert sent.counts["gradient"] == 0
            output = pipeline.eval()(batch if ranks.is_first else None)
            if ranks.is_last:
                whole = plain.eval()(batch)
                assert (list(output), output["temperature"]) == (list(whole), 0.5)
                torch.testing.assert_close(output["logits"], whole["logits"], **EXACT)


def keys_that_change_between_calls() -> None:
    """Another name for a tensor, and another number, in any micro-batch; the next ones are right as well."""
    ranks = halves()

    def changes(call: int) -> dict[str, Any]:
        return {"left" if call % 3 else "right": Tensor, "factor": call // 2}

    def build() -> nn.Sequential:
        return nn.Sequential(Keyed(changes), ByKey())

    for remat in ("always", "never"):
        plain, pipeline = seeded(build), ranks.pipeline(seeded(build), 3, remat=remat)
        for step in range(4):
            batch, target = mlp_batch(6, seed=step)
            wanted = plain_step(plain, batch, target, mse_loss, 3, step=step)
            loss = pipeline.step(*ranks.own(batch, target), mse_loss)
            torch.testing.assert_close(loss, wanted.loss, **EXACT)
            assert_own_gradients(pipeline, wanted.gradients, **EXACT)


def keys_that_bring_other_tensors() -> None:
    """What the mini-batch shows is agreed on anew; what a layer makes up is refused, on every rank."""
    ranks = halves()
    plain = seeded(lambda: nn.Sequential(ByKey(), nn.Linear(6, 6)))
    pipeline = ranks.pipeline(seeded(lambda: nn.Sequential(ByKey(), nn.Linear(6, 6))), 2)
    with mock.patch.object(control, "MOST_AGREEMENTS", 2):
        for step, key in enumerate(("left", "right", "left", None, "right", "left")):
            x, target = mlp_batch(4, seed=step)
            batch = {"hidden": x, **({key: x + 1, "factor": step} if key else {})}
            wanted = plain_step(plain, batch, target, mse_loss, 2, step=step)
            pipeline.step(*ranks.own(batch, target), mse_loss)
            assert_own_gradients(pipeline, wanted.gradients, **EXACT)

    def changes(call: int) -> dict[str, Any]:
        return {"left": Tensor} if call < 4 else {}

    pipeline = ranks.pipeline(seeded(lambda: nn.Sequential(Keyed(changes), ByKey())), 2, remat="never")
    for step in range(2):
        pipeline.step(*ranks.own(*mlp_batch(4, seed=step)), mse_loss)
    with raises(ActionError, "call Pipeline.refresh() on every rank") as refused:
        pipeline.step(*ranks.own(*mlp_batch(4)), mse_loss)
    assert "0F0" in refused.found


def in_place_layers_first() -> None:
    ranks = halves()

    def build() -> nn.Sequential:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))

    plain, pipeline = seeded(build), ranks.pipeline(seeded(build), 3, remat="always")
    for step in range(2):
        batch, target = mlp_batch(7, seed=step)
        wanted = plain_step(plain, batch.clone(), target, mse_loss, 3, step=step)
        pipeline.step(*ranks.own(batch, target), mse_loss)
        assert_own_gradients(pipeline, wanted.gradients, **EXACT)


def one_decision_about_scaled_gradients() -> None:
    """An infinite gradient on one rank: none takes the step, and all go on with the same scale.

    The last rank has nothing to train; the first makes the infinite gradient in the second step.
    """
    ranks = Ranks()

    def train(pipeline: Pipeline, own: Callable[..., Any]) -> list[Tensor]:
        losses = []
        scaler = pipeline.scaler(init_scale=8.0, growth_interval=2)
        parameters = list(pipeline.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None
        for step in range(4):
            losses.append(pipeline.step(*own(*mlp_batch(4, seed=step)), mse_loss, scaler=scaler))
            weight = pipeline._modules.get("0")
            if step == 1 and weight is not None:
                weight.bias.grad[0] = float("inf")  # type: ignore[union-attr,index]
            if step != 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            pipeline.zero_grad()
            losses.append(torch.tensor(scaler.get_scale()))
        return losses

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh())

    alone = Pipeline(seeded(build), num_stages=1, num_microbatches=2)
    wanted = train(alone, lambda *both: both)
    assert [float(scale) for scale in wanted[1::2]] == [8, 4, 4, 8]
    pipeline = ranks.pipeline(seeded(build), 2)
    for found, expected in zip(train(pipeline, ranks.own), wanted, strict=True):
        assert torch.equal(found, expected)
    for name, value in pipeline.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name
    with raises(ValueError, "make it with pipeline.scaler() on every rank"):
        pipeline.step(*ranks.own(*mlp_batch(4)), mse_loss, scaler=torch.amp.GradScaler("cpu"))


CASES: tuple[Callable[[], None], ...] = (
    any_tree_crosses_a_boundary,
    keys_that_change_between_calls,
    keys_that_bring_other_tensors,
    in_place_layers_first,
    one_decision_about_scaled_gradients,
)
