"""One process per stage: what ranks say, refuse and keep, on four of them that are started once. That they
compute what the plain model does is the table of `test_over_processes`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.run
from case_runner import Outcomes, assert_passed, named
from odd_layers import WIDTH, WORDS, OverwritesOne, sgd, tied_model, train, words
from ranks import Ranks, assert_gradients, grid, halves, joint_step, raises
from tiny_models import everything, everything_batch, mlp, mlp_batch, seeded
from torch import Tensor, nn
from tree_models import ByKey, Keyed

from gpipe_bench.pipeline import ActionError, InProcess, Kind, Pipeline, VerifyError
from gpipe_bench.pipeline.ranks import ends

pytestmark = pytest.mark.processes  # four at a time
cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss


# What a step is given


def keys_of_a_tree_that_change_between_calls() -> None:
    """Another name for a tensor, and another number, in any micro-batch; the next ones are right as well."""

    def build() -> nn.Sequential:
        return nn.Sequential(
            Keyed(lambda call: {"left" if call % 3 else "right": Tensor, "factor": call // 2}), ByKey()
        )

    ranks, plain = halves(), seeded(build)
    pipeline = ranks.pipeline(seeded(build), 3, remat="always")
    for step in range(4):
        part = mlp_batch(6, seed=step)
        pipeline.step(*ranks.own(*part), mse_loss)
        assert_gradients(pipeline, joint_step(plain, [part], mse_loss, 3, step=step))


def keys_of_a_tree_that_bring_other_tensors() -> None:
    """What the mini-batch shows is agreed on anew; what a layer makes up is refused, on every rank."""
    ranks = halves()
    plain, layers = (seeded(lambda: nn.Sequential(ByKey(), nn.Linear(6, 6))) for _ in range(2))
    pipeline = ranks.pipeline(layers, 2)
    for step, key in enumerate(("left", "right", "left", None, "right")):
        x, target = mlp_batch(4, seed=step)
        part = {"hidden": x, **({key: x + 1, "factor": step} if key else {})}, target
        pipeline.step(*ranks.own(*part), mse_loss)
        assert_gradients(pipeline, joint_step(plain, [part], mse_loss, 2, step=step))
    changing = seeded(lambda: nn.Sequential(Keyed(lambda n: {"left": Tensor} if n < 4 else {}), ByKey()))
    pipeline = ranks.pipeline(changing, 2, remat="never")
    with raises(ActionError, "call Pipeline.refresh() on every rank"):
        for step in range(3):
            pipeline.step(*ranks.own(*mlp_batch(4, seed=step)), mse_loss)


def shapes_that_change_unannounced() -> None:
    """Outputs may depend on the shapes that go in, but on nothing else."""
    ranks, calls = Ranks(), itertools.count()

    class Growing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, : 6 - next(calls) // 3]

    layers = [nn.Linear(6, 6), Growing(6, 6), nn.Identity(), nn.Identity()]
    pipeline = ranks.pipeline([layer.double() for layer in layers], 2, remat="never")
    with raises(ActionError, "the shape or dtype of the output of stage 1"):
        for _ in range(3):
            pipeline.step(*ranks.own(*mlp_batch(4)), lambda output, target: output.square().mean())


def a_loss_of_another_dtype_is_refused() -> None:
    """The others would take its bytes for a number of the dtype that was agreed on."""
    pair = halves()
    pipeline = pair.pipeline(seeded(mlp))
    pipeline.step(*pair.own(*mlp_batch(6)), mse_loss)
    with raises(RuntimeError, "the shape or dtype of the loss, () torch.float64 before"):
        pipeline.step(*pair.own(*mlp_batch(6)), lambda output, target: mse_loss(output, target).float())


class Views(nn.Linear):
    """Two tensors in one memory."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = super().forward(x)
        return h, h.view(-1, 2, 3)


def an_input_that_shares_memory_is_overwritten() -> None:
    """Which would show in the other one, were they not in other processes than the layer before."""
    ranks = Ranks()
    pipeline = ranks.pipeline([nn.Linear(6, 6), Views(6, 6), OverwritesOne(), nn.Linear(6, 6)])
    with raises(ActionError, "stage 2 changes an input of the stage in place that shares memory"):
        pipeline.step(*ranks.own(*mlp_batch(4, dtype=torch.float32)), mse_loss)


class Layout(nn.Module):
    """A convolution that records the memory layout in which its input arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1).to(memory_format=torch.channels_last)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return self.conv(x)


def memory_layout_survives() -> None:
    ranks, layers = Ranks(), [Layout() for _ in range(4)]
    pipeline = ranks.pipeline(layers, 2, remat="never")
    image = torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last)
    for _ in range(2):
        pipeline.step(image if ranks.is_first else None, None, lambda output, target: output.square().mean())
    assert layers[ranks.rank].seen == [True] * 4


def stages_without_anything_to_train() -> None:
    """Layers that are frozen and thawed between steps."""
    ranks, model, layers = Ranks(), seeded(mlp), seeded(mlp)
    pipeline = ranks.pipeline(layers, 3)
    for step, frozen in enumerate(((0, 1, 2), (0, 1, 2, 4, 5), ())):
        for index, both in enumerate(zip(model, layers, strict=True)):
            for layer in both:
                layer.requires_grad_(index not in frozen)
        pipeline.refresh()
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
        assert_gradients(pipeline, joint_step(model, [mlp_batch(8)], mse_loss, 3, step=step))


def an_optimizer_that_decides_by_all_gradients() -> None:
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp))
    with raises(ValueError, "LBFGS decides by the gradients of all parameters, and each rank has only"):
        torch.optim.LBFGS(pipeline.parameters()).step(lambda: torch.zeros(()))


# Messages


def messages_of_many_sizes_take_little_memory() -> None:
    """At most twice what those of the largest size take, in steps and in forwards alone."""
    ranks, sizes, found = Ranks(), [256 * n for n in range(1, 25)], []
    for used in ([sizes[-1]] * 2, sizes):
        with ranks.pipeline(seeded(mlp)) as pipeline:
            for size in used:
                batch, target = mlp_batch(size)
                pipeline.step(*ranks.own(batch, target), mse_loss)
                pipeline(batch if ranks.is_first else None)
            found.append(pipeline.shared_message_bytes)
    assert 0 < found[1] <= 2 * found[0], found


def over_both_transports() -> Iterator[Ranks]:
    """Through memory and through the network, with as few buffers as messages that take memory have."""
    with mock.patch.object(ends, "SMALL_BYTES", 0):
        for share_memory in (True, False):
            torch.manual_seed(0)  # of the models, on all ranks
            yield Ranks(share_memory=share_memory)


def what_a_user_keeps_of_messages() -> None:
    """Inputs, gradients and outputs that were kept stay as they are while other mini-batches follow."""
    for ranks in over_both_transports():
        layers = [nn.Linear(6, 6).double(), nn.Identity(), nn.Identity(), nn.Flatten()]
        pipeline = ranks.pipeline(layers, 4, schedule="1f1b")
        kept: list[tuple[Tensor, Tensor]] = []

        def keep(tensor: Tensor, kept: list[tuple[Tensor, Tensor]] = kept) -> None:
            kept.append((tensor, tensor.clone()))

        def hook(module: nn.Module, inputs: tuple[Tensor, ...], keep: Any = keep) -> None:
            keep(inputs[0].detach())
            if inputs[0].requires_grad:
                inputs[0].register_hook(keep)

        layers[ranks.rank].register_forward_pre_hook(hook)
        for step in range(2):
            batch, target = mlp_batch(8, seed=step)
            pipeline.step(*ranks.own(batch, target), mse_loss)
            output = pipeline.eval()(batch if ranks.is_first else None)
            pipeline.train()
            if output is not None:
                keep(output)
        assert all(map(torch.equal, *zip(*kept, strict=True))), ranks.options


class Position(nn.Module):
    """Adds a parameter, seen through a view, so that its gradient may be taken for its `.grad` uncopied."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.position[None]).view(1, 6)


def a_parameter_keeps_the_gradient_that_arrives() -> None:
    """To which the others are added; on its way to the stage before it must not become their sum. What is
    right is summed outside of autograd, whose own sum goes wrong where two gradients share memory.
    """
    for ranks in over_both_transports():
        for schedule in ("1f1b", "gpipe"):
            layers: list[nn.Module] = [nn.Linear(6, 6), nn.Tanh(), Position(), nn.Linear(6, 6)]
            model, (batch, target) = nn.Sequential(*layers).double(), mlp_batch(4)
            parameters = dict(model.named_parameters())
            sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
            for x, y in zip(batch.split(1), target.split(1), strict=True):
                found = torch.autograd.grad(mse_loss(model(x), y) / 4, [*parameters.values()])
                for name, gradient in zip(sums, found, strict=True):
                    sums[name] += 2 * gradient
            pipeline = ranks.pipeline(model, 4, schedule=schedule, remat="never")
            for _ in range(2):
                pipeline.step(*ranks.own(batch, target), mse_loss)
            for name, parameter in pipeline.named_parameters():
                torch.testing.assert_close(parameter.grad, sums[name], rtol=1e-12, atol=1e-14)


def timeline_of_all_ranks() -> None:
    """On one clock, what a stage needs has ended elsewhere before it starts."""
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp))
    for _ in range(2):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
    timeline = pipeline.gather_timeline()
    for stage, row in enumerate(pipeline.schedule.actions):
        assert [event.action for event in timeline.of_stage(stage)] == list(row)
    end_s = {event.action: event.end_s for event in timeline.events}
    for event in timeline.events:
        if event.action.kind is Kind.F and event.action.stage:
            assert end_s[event.action._replace(stage=event.action.stage - 1)] <= event.start_s
    assert (timeline.conditions["threads"], "pinned_cores" in timeline.conditions) == ("1", True)


# Building, verifying and closing


def arguments_that_do_not_fit() -> None:
    ranks = Ranks()
    with raises(ValueError, "4 ranks for 3 stages"):
        ranks.pipeline(seeded(mlp), num_stages=3)
    with raises(ValueError, "transport= is for stages of one process"):
        ranks.pipeline(seeded(mlp), transport=InProcess())
    with raises(ValueError, "rank 2 builds another pipeline than rank 0"):
        ranks.pipeline(seeded(mlp), seed=int(ranks.rank == 2))
    with raises(ValueError, "SyncBatchNorm normalizes over replicas"):  # which only the last rank would hold
        ranks.pipeline([*seeded(mlp), nn.SyncBatchNorm(4)])


def verify_compares_with_the_whole_model() -> None:
    """Which somebody has to hold: each rank has only its part; without 'fsdp', whose parts nobody has."""
    ranks, layers = halves(), seeded(everything)
    pipeline = ranks.pipeline(layers, 3, remat="always")
    for _ in range(2):
        assert pipeline.verify(*ranks.own(*everything_batch(7)), cross_entropy) < 1e-12
        pipeline.step(*ranks.own(*everything_batch(7)), cross_entropy)
    with Pipeline(layers, mesh=grid(dp=2, pp=2), num_microbatches=3) as pipeline:
        part = everything_batch(7, seed=pipeline.grid.replica)
        assert pipeline.verify(*part, cross_entropy) < 1e-12
    pipeline = ranks.pipeline(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double(), 2)
    with raises(VerifyError, "hold on to the layers that the pipeline was built of"):
        pipeline.verify(*mlp_batch(4), mse_loss)
    parts = Pipeline([nn.Linear(6, 6), nn.Linear(6, 6)], mesh=grid(fsdp=2, pp=2), num_microbatches=2)
    with parts, raises(ValueError, "on a mesh without 'fsdp'"):
        parts.verify(*mlp_batch(4), mse_loss)


class LeavesAux(nn.Linear):
    """Leaves an attribute behind, which the loss reads; over processes it stays where it is."""

    aux: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.square().mean()
        return super().forward(x)


def verify_names_what_a_cut_leaves_behind() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(LeavesAux(6, 6), nn.Linear(6, 6)).double()
    pipeline = halves().pipeline(layers, 2, remat="never")
    with raises((VerifyError, ActionError), "the loss, which is"):
        pipeline.verify(*mlp_batch(8), lambda output, target: mse_loss(output, target) + layers[0].aux)


def what_is_closed_stays_closed() -> None:
    """Whatever is asked of it, it says so, and no rank is blamed."""
    pair, (batch, target) = halves(), mlp_batch(6)
    pipeline = pair.pipeline(seeded(mlp), schedule="1f1b")
    pipeline.step(*pair.own(batch, target), mse_loss)
    asked: tuple[Callable[[], object], ...] = (
        lambda: pipeline.step(*pair.own(batch, target), mse_loss),
        lambda: pipeline(batch if pair.is_first else None),
        lambda: pipeline.clip_grad_norm_(1.0),
        pipeline.gather_timeline,
    )
    for ask in asked:
        pipeline.close()
        with raises(RuntimeError, "this pipeline is closed; build a new one on every rank"):
            ask()


# Weights that stages of several processes share


def tied_weights_are_one_weight() -> None:
    """Whatever the ranks began with: after some steps all copies have the same bits, which are those of one
    process to rounding.
    """
    ranks = Ranks()
    alone = Pipeline(seeded(lambda: tied_model(3), torch.float32), num_stages=1, num_microbatches=4)
    wanted = train(alone, sgd(alone), range(3))
    layers = seeded(lambda: tied_model(3), torch.float32)
    if not ranks.is_first:
        layers[0].weight.data.normal_()
    pipeline = ranks.pipeline(layers, schedule="1f1b")
    found = train(pipeline, sgd(pipeline), range(3), ranks)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    state = pipeline.state_dict()
    copies = [
        each for each in pipeline.gather(state.get("0.weight", state.get("3.weight"))) if each is not None
    ]
    assert len(copies) > 1
    assert all(torch.equal(each, copies[0]) for each in copies)


def a_frozen_tie_gets_no_gradient() -> None:
    """And what is trained between its places does."""
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(lambda: tied_model(3)), 3, schedule="1f1b")
    for name, parameter in pipeline.named_parameters():
        parameter.requires_grad_(name not in ("0.weight", "2.weight", "3.weight"))
    pipeline.refresh()
    pipeline.step(*ranks.own(*words(7, 2)), cross_entropy)
    assert all((p.grad is None) != p.requires_grad for p in pipeline.parameters())


def a_tie_of_sparse_gradients_is_refused() -> None:
    pair = halves()
    embedding, output = nn.Embedding(WORDS, WIDTH, sparse=True), nn.Linear(WIDTH, WORDS)
    output.weight = embedding.weight
    pipeline = pair.pipeline([embedding, output], 1)
    with raises(RuntimeError, "is sparse and cannot be summed"):
        pipeline.step(*pair.own(*words(4, 0)), cross_entropy)


def a_tied_weight_that_was_replaced_is_refused() -> None:
    """The others' copies would not learn of it."""
    pair = halves()
    pipeline = pair.pipeline(seeded(lambda: tied_model(2)), 1)
    pipeline.load_state_dict({k: v.clone() for k, v in pipeline.state_dict().items()}, assign=True)
    with raises(RuntimeError, "parameter of '0.weight' is another one than when the pipeline was built"):
        pipeline.step(*pair.own(*words(4, 0)), cross_entropy)


class Hidden(nn.Module):
    """Uses the weight of another layer that it has not registered."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.hidden = [embedding]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.hidden[0].weight.T


def a_weight_of_another_stage_that_is_not_registered_is_refused() -> None:
    """Its second copy would never be trained."""
    ranks = Ranks()
    for schedule in ("1f1b", "zb-h1"):
        layers = [nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        model = nn.Sequential(*layers, Hidden(layers[0])).double()
        pipeline = ranks.pipeline(model, schedule=schedule, remat="never")
        with raises((ValueError, ActionError), "uses 0.weight, which a stage of another process trains, and"):
            pipeline.step(*ranks.own(*words(6, 0)), cross_entropy)


CASES = named(
    keys_of_a_tree_that_change_between_calls, keys_of_a_tree_that_bring_other_tensors,
    shapes_that_change_unannounced, a_loss_of_another_dtype_is_refused,
    an_input_that_shares_memory_is_overwritten, memory_layout_survives, stages_without_anything_to_train,
    an_optimizer_that_decides_by_all_gradients, messages_of_many_sizes_take_little_memory,
    timeline_of_all_ranks, arguments_that_do_not_fit, verify_compares_with_the_whole_model,
    verify_names_what_a_cut_leaves_behind, what_is_closed_stays_closed, tied_weights_are_one_weight,
    a_frozen_tie_gets_no_gradient, a_tie_of_sparse_gradients_is_refused,
    a_tied_weight_that_was_replaced_is_refused,
    a_weight_of_another_stage_that_is_not_registered_is_refused, what_a_user_keeps_of_messages,
    a_parameter_keeps_the_gradient_that_arrives,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)
