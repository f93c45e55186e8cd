"""Pipelines of four processes compute what one process does, to the bit; `test_distributed` runs the cases.

Every rank gets other data than it should use: only the first rank's batch and the last rank's target may
count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from covering import pairwise
from odd_layers import Add
from ranks import Ranks, halves, raises, shared_folder
from tiny_models import (
    AMOEBANET,
    EXACT,
    assert_own_gradients,
    everything,
    everything_batch,
    mlp,
    mlp_batch,
    plain_step,
    seeded,
)
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench import models
from gpipe_bench.models import set_drop_path
from gpipe_bench.pipeline import (
    ActionError,
    InProcess,
    Pipeline,
    Pop,
    PortalSequential,
    Stash,
    checkpoint,
)
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.remat import REMAT_MODES

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss
TRANSFORMER = {
    "num_layers": 6, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "vocab_size": 50, "seq_len": 6,
    "dropout": 0.2,
}  # fmt: skip


def transparency(ranks: Ranks | None = None, numbers: tuple[int, ...] = (1, 3, 8)) -> None:
    ranks = ranks or Ranks()
    for num_microbatches, schedule, remat in pairwise(numbers, tuple(SCHEDULES), REMAT_MODES):
        batch, target = everything_batch(num_microbatches + 3)
        plain = plain_step(seeded(everything), batch, target, cross_entropy, num_microbatches)
        pipeline = ranks.pipeline(seeded(everything), num_microbatches, schedule=schedule, remat=remat)
        loss = pipeline.step(*ranks.own(batch, target), cross_entropy)
        torch.testing.assert_close(loss, plain.loss, **EXACT)
        assert_own_gradients(pipeline, plain.gradients, **EXACT)


def mini_batches_of_changing_shapes(ranks: Ranks | None = None) -> None:
    """Every size is a new kind of step; sizes seen before need no new agreement. Some have fewer examples
    than there are micro-batches.
    """
    ranks = ranks or Ranks()
    pipeline, alone = (
        ranks.pipeline(seeded(everything)),
        Pipeline(seeded(everything), num_stages=1, num_microbatches=4),
    )
    for step, size in enumerate((9, 4, 3, 9, 6, 1, 2, 12, 9)):
        batch, target = everything_batch(size, seed=step)
        loss = pipeline.step(*ranks.own(batch, target), cross_entropy)
        assert torch.equal(loss, alone.step(batch, target, cross_entropy))
        gradients = {name: p.grad for name, p in alone.named_parameters()}
        assert_own_gradients(pipeline, gradients)  # never zeroed: the steps accumulate
        if step % 2:
            output = pipeline(batch if ranks.is_first else None)
            wanted = alone(batch)
            assert (output is None) != ranks.is_last
            assert output is None or torch.equal(output, wanted)


def short_batches() -> None:
    """Fewer examples than micro-batches, between others, under schedules with several stages and halves."""
    ranks = Ranks()
    for schedule, num_stages, remat in (
        ("zb-h1", 4, "always"), ("zb-v", 8, "except_last"), ("interleaved", 8, "never"),
    ):  # fmt: skip
        pipeline = Pipeline(
            seeded(mlp), num_stages=num_stages, num_microbatches=4, schedule=schedule, remat=remat,
            group=ranks.group, cost=[1] * 8,
        )  # fmt: skip
        for step, size in enumerate((5, 3, 1, 4)):
            batch, target = mlp_batch(size, seed=step)
            plain = plain_step(seeded(mlp), batch, target, mse_loss, min(4, size), step=step)
            loss = pipeline.step(batch, target, mse_loss)
            torch.testing.assert_close(loss, plain.loss, **EXACT)
            assert_own_gradients(pipeline, plain.gradients, **EXACT)
            events = pipeline.gather_timeline().events
            assert {event.action.microbatch for event in events} == set(range(min(4, size)))
            pipeline.zero_grad()
            pipeline(batch[:2])


def short_batches_with_portals() -> None:
    ranks = Ranks()

    def build() -> nn.Sequential:
        return PortalSequential(
            Stash("a", nn.Linear(6, 6)), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Pop("a", Add())
        )

    pipeline = ranks.pipeline(seeded(build), schedule="1f1b")
    for step, size in enumerate((5, 3, 4)):
        batch, target = mlp_batch(size, seed=step)
        plain = seeded(build)
        mse_loss(plain(batch), target).backward()
        pipeline.step(*ranks.own(batch, target), mse_loss)
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        assert_own_gradients(pipeline, gradients, **EXACT)
        pipeline.zero_grad()


def memory_for_messages_of_many_sizes() -> None:
    """At most twice what those of the largest size take, in steps and in forwards alone."""
    ranks = Ranks()
    sizes, found = [256 * n for n in range(1, 25)], []
    for used in ([sizes[-1]] * 2, sizes):
        with ranks.pipeline(seeded(mlp)) as pipeline:
            for size in used:
                batch, target = mlp_batch(size)
                pipeline.step(*ranks.own(batch, target), mse_loss)
                pipeline(batch if ranks.is_first else None)
            found.append(pipeline.shared_message_bytes)
    assert 0 < found[1] <= 2 * found[0], found


def evaluation() -> None:
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(everything)).eval()
    plain = seeded(everything).eval()
    for size in (9, 4, 9):
        batch, _ = everything_batch(size)
        with torch.inference_mode():
            output = pipeline(batch if ranks.is_first else None)
            if ranks.is_last:
                torch.testing.assert_close(output, plain(batch), **EXACT)
        assert all(p.grad is None for p in pipeline.parameters())
    # Smaller messages than those of the evaluation come into the same buffers.
    batch, target = everything_batch(4)
    wanted = plain_step(plain.train(), batch, target, cross_entropy, 4)
    pipeline.train().step(*ranks.own(batch, target), cross_entropy)
    assert_own_gradients(pipeline, wanted.gradients, **EXACT)


class Views(nn.Linear):
    """Two tensors in one memory."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = super().forward(x)
        return h, h.view(-1, 2, 3)


class OverwritesOne(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = pair
        return a.mul_(3) * b.flatten(1)


def an_input_that_shares_memory_is_overwritten() -> None:
    """Which would show in the other one, were they not in other processes than the layer before."""
    ranks = Ranks()
    for remat in ("always", "never"):
        layers = [nn.Linear(6, 6), Views(6, 6), OverwritesOne(), nn.Linear(6, 6)]
        with raises(ActionError, "stage 2 changes an input of the stage in place that shares memory"):
            ranks.pipeline(layers, remat=remat).step(*ranks.own(*mlp_batch(4, dtype=torch.float32)), mse_loss)


def train(
    name: str, options: dict, make: Callable[[nn.Sequential], Pipeline], ranks: Ranks | None
) -> Pipeline:
    """Three RMSProp steps with dropout, drop path and batch normalization."""
    torch.manual_seed(0)
    model = models.MODELS[name](**options)
    set_drop_path(model, 0.7)
    pipeline = make(model)
    optimizer = torch.optim.RMSprop(pipeline.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch, target = models.example_batch(name, 7, generator=generator, **options)
        if ranks is not None:
            batch, target = ranks.own(batch, target)
        pipeline.step(batch, target, models.loss_fn(name, **options))
        optimizer.step()
        optimizer.zero_grad()
    return pipeline


def bitwise(name: str, options: dict, schedule: str) -> None:
    alone = train(
        name,
        options,
        lambda model: Pipeline(model, num_stages=1, num_microbatches=3, schedule=schedule),
        None,
    )
    wanted = alone.state_dict()
    for ranks in (halves(), Ranks()):
        pipeline = train(
            name, options, lambda m, r=ranks: r.pipeline(m, 3, schedule=schedule, remat="except_last"), ranks
        )
        for key, value in pipeline.state_dict().items():
            assert torch.equal(value, wanted[key]), f"K = {ranks.size}: {key}"


def bitwise_amoebanet() -> None:
    bitwise("amoebanet-d", AMOEBANET, "gpipe")


def bitwise_transformer() -> None:
    bitwise("transformer-lm", TRANSFORMER, "1f1b")


def checkpoint_from_two_stages_to_four() -> None:
    """Saved with K = 2, continued with K = 4 by other processes, equal to a run with K = 1 that never
    stopped.
    """

    def advance(
        pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: range, ranks: Ranks | None
    ) -> None:
        for step in steps:
            batch, target = everything_batch(7, torch.float32, seed=step)
            if ranks is not None:
                batch, target = ranks.own(batch, target)
            pipeline.step(batch, target, cross_entropy)
            optimizer.step()
            optimizer.zero_grad()

    def rmsprop(pipeline: Pipeline) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(pipeline.parameters(), lr=1e-3, momentum=0.9)

    folder = shared_folder()
    pair = halves()
    if dist.get_rank() < 2:
        pipeline = pair.pipeline(seeded(everything, torch.float32))
        optimizer = rmsprop(pipeline)
        advance(pipeline, optimizer, range(3), pair)
        checkpoint.save(folder, pipeline, optimizer)
    dist.barrier()
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(everything, torch.float32, seed=9))
    optimizer = rmsprop(pipeline)
    checkpoint.load(folder, pipeline, optimizer)
    advance(pipeline, optimizer, range(3, 5), ranks)

    alone = Pipeline(seeded(everything, torch.float32), num_stages=1, num_microbatches=4)
    advance(alone, rmsprop(alone), range(5), None)
    for key, value in pipeline.state_dict().items():
        assert torch.equal(value, alone.state_dict()[key]), key
    other = ranks.pipeline(seeded(everything, torch.float32), seed=1)
    with raises(ValueError, "written with seed 0, the pipeline has 1"):
        checkpoint.load(folder, other, rmsprop(other))


def timeline_of_all_ranks() -> None:
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp))
    for _ in range(2):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
    timeline = pipeline.gather_timeline()
    assert sorted(event.action for event in timeline.events) == sorted(pipeline.schedule)
    for stage, row in enumerate(pipeline.schedule.actions):
        assert [event.action for event in timeline.of_stage(stage)] == list(row)
    # On one clock, what a stage needs has ended elsewhere before it starts.
    end_s = {event.action: event.end_s for event in timeline.events}
    for event in timeline.events:
        action = event.action
        if action.kind == "F" and action.stage > 0:
            assert end_s[type(action)(action.stage - 1, action.kind, action.microbatch)] <= event.start_s
    assert set(timeline.conditions) == {"threads", "pinned_cores"}
    assert timeline.conditions["threads"] == "1"


def stages_without_anything_to_train() -> None:
    ranks = Ranks()
    model, other = seeded(mlp), seeded(mlp)
    pipeline = ranks.pipeline(other, 3)
    for step, frozen in enumerate(((0, 1, 2), (0, 1, 2, 4, 5), ())):
        for net in (model, other):
            for index, layer in enumerate(net):
                layer.requires_grad_(index not in frozen)
        pipeline.refresh()
        plain_step(model, *mlp_batch(8), mse_loss, 3, step=step)
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
        assert_own_gradients(pipeline, {name: p.grad for name, p in model.named_parameters()}, **EXACT)
    folder, trains = shared_folder(), not ranks.is_first  # the first rank's layers are frozen for good
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1) if trains else None
    checkpoint.save(folder, pipeline, optimizer)
    checkpoint.load(folder, pipeline, optimizer)


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
    ranks = Ranks()
    layers = [Layout() for _ in range(4)]
    pipeline = ranks.pipeline(layers, 2, remat="never")
    image = torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last)
    for _ in range(2):
        pipeline.step(image if ranks.is_first else None, None, lambda output, target: output.square().mean())
    assert layers[ranks.rank].seen == [True] * 4


def arguments_that_do_not_fit() -> None:
    ranks = Ranks()
    with raises(ValueError, "4 ranks for 3 stages"):
        Pipeline(seeded(mlp), num_stages=3, num_microbatches=2, group=dist.group.WORLD)
    with raises(ValueError, "transport= is how stages of one process"):
        ranks.pipeline(seeded(mlp), transport=InProcess())
    with raises(ValueError, "rank 2 builds another pipeline than rank 0"):
        ranks.pipeline(seeded(mlp), seed=int(ranks.rank == 2))
    with raises(ValueError, "SyncBatchNorm normalizes over replicas"):  # which only the last rank would hold
        ranks.pipeline([*seeded(mlp), nn.SyncBatchNorm(4)])


def on_gpus() -> list[tuple[Any, Any]]:
    """A step over NCCL: the loss and the gradients, each beside the plain model's."""
    ranks = Ranks()
    device = torch.device("cuda", ranks.rank)
    batch, target = everything_batch(9)
    model = seeded(everything)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a GPU's generator draws other numbers
    other = copy.deepcopy(model)
    plain = plain_step(model, batch, target, cross_entropy, 4)
    pipeline = ranks.pipeline(other, devices=device, remat="except_last")
    for _ in range(2):
        pipeline.zero_grad()
        loss = pipeline.step(
            tuple(t.to(device) for t in batch) if ranks.is_first else None,
            target.to(device) if ranks.is_last else None,
            cross_entropy,
        )
    found = [(loss.cpu(), plain.loss)]
    found += [(p.grad.cpu().clone(), plain.gradients[name]) for name, p in pipeline.named_parameters()]
    assert pipeline.gather_timeline().makespan_s > 0
    pipeline.clip_grad_norm_(1.0)
    return [(ours.numpy(), theirs.numpy()) for ours, theirs in found]


def a_loss_of_another_dtype_is_refused() -> None:
    """The others would take its bytes for a number of the dtype that was agreed on."""
    pair, (batch, target) = halves(), mlp_batch(6)

    def halved(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target).float()

    for schedule in ("gpipe", "1f1b"):
        pipeline = pair.pipeline(seeded(mlp), schedule=schedule)
        pipeline.step(*pair.own(batch, target), nn.functional.mse_loss)
        with raises(RuntimeError, "the shape or dtype of the loss, () torch.float64 before"):
            pipeline.step(*pair.own(batch, target), halved)


def what_is_closed_stays_closed() -> None:
    """Whatever is asked of it, it says so, and no rank is blamed."""
    pair, (batch, target) = halves(), mlp_batch(6)
    pipeline = pair.pipeline(seeded(mlp), schedule="1f1b")
    pipeline.step(*pair.own(batch, target), nn.functional.mse_loss)
    pipeline.close()
    for ask in (
        lambda: pipeline.step(*pair.own(batch, target), nn.functional.mse_loss),
        lambda: pipeline(batch if pair.is_first else None),
        lambda: pipeline.clip_grad_norm_(1.0),
        pipeline.gather_timeline,
    ):
        try:
            ask()
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        assert said == "this pipeline is closed; build a new one on every rank", said
        pipeline.close()


CASES = (
    transparency,
    mini_batches_of_changing_shapes,
    short_batches,
    short_batches_with_portals,
    memory_for_messages_of_many_sizes,
    evaluation,
    an_input_that_shares_memory_is_overwritten,
    bitwise_amoebanet,
    bitwise_transformer,
    a_loss_of_another_dtype_is_refused,
    what_is_closed_stays_closed,
    checkpoint_from_two_stages_to_four,
    timeline_of_all_ranks,
    stages_without_anything_to_train,
    memory_layout_survives,
    arguments_that_do_not_fit,
)
