"""Weights that stages of several processes share: cases that `test_distributed` runs on four ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from mesh_grids import assert_gradients, joint_step, on_grid, own_part
from ranks import TIMEOUT_S, Ranks, halves, raises
from tiny_models import EXACT, assert_own_gradients, plain_step, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from gpipe_bench.pipeline import ActionError, Pipeline, checkpoint

WORDS, WIDTH = 7, 4


class Mixed(nn.Module):
    """Uses the embedding's weight a third time, between the other two."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.linear = nn.Linear(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(nn.functional.linear(x, self.weight)).tanh()


def tied_model(users: int) -> nn.Sequential:
    """An embedding, layers, and an output layer that has its weight; a layer between them, too, of three."""
    embedding, output = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    output.weight = embedding.weight
    middle = Mixed(embedding) if users == 3 else nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(embedding, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)), middle, output)


def words(batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(WORDS, (batch_size,), generator=generator) for _ in range(2))  # type: ignore[return-value]


def sgd(pipeline: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipeline.parameters(), lr=0.3, momentum=0.9)


def train(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: range, ranks: Ranks | None = None
) -> list[Tensor]:
    found = []
    for step in steps:
        batch, target = words(6, step)
        own = (batch, target) if ranks is None else ranks.own(batch, target)
        found.append(pipeline.step(*own, nn.functional.cross_entropy))
        found.append(pipeline.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_same_weights(pipeline: Pipeline, wanted: dict[str, Tensor]) -> None:
    for name, value in pipeline.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


def tied_weights_are_one_weight() -> None:
    """As in one process after some steps, whatever the ranks began with; also where the layers that share a
    weight lie on the ranks in turn. All copies have the same bits.
    """
    for ranks, users, schedule, remat, num_stages in (
        (Ranks(), 2, "gpipe", "always", 4),
        (Ranks(), 3, "zb-h1", "never", 4),
        (halves(), 3, "1f1b", "always", 2),
        (halves(), 3, "interleaved", "never", 4),
    ):
        alone = Pipeline(
            seeded(lambda users=users: tied_model(users), torch.float32),
            num_stages=1,
            num_microbatches=4,
            schedule="gpipe" if schedule == "gpipe" else "1f1b",
        )
        wanted = train(alone, sgd(alone), range(3))
        layers = seeded(lambda users=users: tied_model(users), torch.float32)
        if not ranks.is_first:
            layers[0].weight.data.normal_()
        pipeline = Pipeline(
            layers, num_stages=num_stages, num_microbatches=4, schedule=schedule, remat=remat,
            cost=[1] * 4, group=ranks.group, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        found = train(pipeline, sgd(pipeline), range(3), ranks)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert_same_weights(pipeline, alone.state_dict())
        weight = pipeline.state_dict().get("0.weight", pipeline.state_dict().get("3.weight"))
        copies = [copy for copy in pipeline.gather(weight) if copy is not None]
        assert len(copies) > 1
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def tied_gradients_add_up() -> None:
    """Over uneven micro-batches, in every schedule, and over steps without `zero_grad`."""
    ranks = Ranks()
    for schedule, remat in (("gpipe", "always"), ("1f1b", "never"), ("zb-h1", "except_last")):
        plain = seeded(lambda: tied_model(3))
        pipeline = ranks.pipeline(seeded(lambda: tied_model(3)), 3, schedule=schedule, remat=remat)
        for step in range(2):
            batch, target = words(7, step)
            wanted = plain_step(plain, batch, target, nn.functional.cross_entropy, 3, step=step)
            gradients = {
                **wanted.gradients,
                "2.weight": plain[0].weight.grad,
                "3.weight": plain[0].weight.grad,
            }
            pipeline.step(*ranks.own(batch, target), nn.functional.cross_entropy)
            assert_own_gradients(pipeline, gradients, **EXACT)
        pipeline(batch if ranks.is_first else None)
        assert_own_gradients(pipeline, gradients, **EXACT)
        pipeline.zero_grad()
        for layer in pipeline.children():
            layer.requires_grad_(requires_grad=layer is pipeline._modules.get("2"))
        for name, parameter in pipeline.named_parameters():
            if name in pipeline.tied_names or name in pipeline.tied_names.values():
                parameter.requires_grad_(requires_grad=False)
        pipeline.refresh()
        pipeline.step(*ranks.own(*words(7, 2)), nn.functional.cross_entropy)
        assert all((p.grad is None) != p.requires_grad for p in pipeline.parameters())


def tied_weights_in_checkpoints() -> None:
    """One entry of the weight and of its optimizer's state, however it was trained; runs go on alike."""
    ranks, pair = Ranks(), halves()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    alone = Pipeline(seeded(lambda: tied_model(2), torch.float32), num_stages=1, num_microbatches=1)
    train(alone, optimizer := sgd(alone), range(2))
    path = Path(folder[0])
    if ranks.is_first:
        checkpoint.save(path / "one", alone, optimizer)
    four = ranks.pipeline(seeded(lambda: tied_model(2), torch.float32), 1)
    train(four, its := sgd(four), range(2), ranks)
    checkpoint.save(path / "four", four, its)
    for name in ("one", "four"):
        entries = FileSystemReader(path / name).read_metadata().state_dict_metadata
        assert "model.0.weight" in entries, entries.keys()
        assert not [key for key in entries if "3.weight" in key], entries.keys()
        assert "optimizer.state.0.weight.momentum_buffer" in entries, entries.keys()
    wanted = train(alone, optimizer, range(2, 4))
    for name in ("one", "four"):
        other = pair.pipeline(seeded(lambda: tied_model(2), torch.float32, seed=3), 1)
        checkpoint.load(path / name, other, its := sgd(other))
        for found, expected in zip(train(other, its, range(2, 4), pair), wanted, strict=True):
            assert torch.equal(found, expected)
        assert_same_weights(other, alone.state_dict())
    one = Pipeline(seeded(lambda: tied_model(2), torch.float32, seed=3), num_stages=1, num_microbatches=1)
    checkpoint.load(path / "four", one, its := sgd(one))
    train(one, its, range(2, 4))
    assert_same_weights(one, alone.state_dict())


def a_tie_of_sparse_gradients_is_refused() -> None:
    pair = halves()
    embedding, output = nn.Embedding(WORDS, WIDTH, sparse=True), nn.Linear(WIDTH, WORDS)
    output.weight = embedding.weight
    pipeline = pair.pipeline([embedding, output], 1)
    with raises(RuntimeError, "is sparse and cannot be summed"):
        pipeline.step(*pair.own(*words(4, 0)), nn.functional.cross_entropy)


def a_tied_weight_that_was_replaced_is_refused() -> None:
    """The others' copies would not learn of it."""
    pair = halves()
    pipeline = pair.pipeline(seeded(lambda: tied_model(2)), 1)
    state = {name: value.clone() for name, value in pipeline.state_dict().items()}
    pipeline.load_state_dict(state, assign=True)
    with raises(RuntimeError, "parameter of '0.weight' is another one than when the pipeline was built"):
        pipeline.step(*pair.own(*words(4, 0)), nn.functional.cross_entropy)


class Hidden(nn.Module):
    """Uses the weight of another layer that it has not registered."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.hidden = [embedding]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.hidden[0].weight.T


def a_weight_of_another_stage_that_is_not_registered_is_refused() -> None:
    """Its second copy would never be trained. In one stage it is right."""
    ranks = Ranks()
    for schedule, num_stages in (("1f1b", 4), ("zb-h1", 4), ("gpipe", 1)):
        layers = [nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        model = nn.Sequential(*layers, Hidden(layers[0])).double()
        if num_stages == 1:
            Pipeline(model, num_stages=1, num_microbatches=2).step(*words(6, 0), nn.functional.cross_entropy)
            continue
        pipeline = ranks.pipeline(model, schedule=schedule, remat="never")
        with raises(
            (ValueError, ActionError), "uses 0.weight, which a stage of another process trains, and has"
        ):
            pipeline.step(*ranks.own(*words(6, 0)), nn.functional.cross_entropy)


def tied_weights_of_replicas() -> None:
    """Summed over the stages and the replicas, and added once to what was there; also where one rank has
    several of the stages.
    """
    for dp, pp, schedule in ((4, 1, "1f1b"), (2, 2, "1f1b"), (2, 2, "zb-v"), (4, 1, "interleaved")):
        model = seeded(lambda: tied_model(3))
        pipeline = on_grid(dp, pp, seeded(lambda: tied_model(3)), 3, schedule=schedule)
        for step in range(3):
            parts = [words((7, 4, 5, 6)[replica], 10 * step + replica) for replica in range(dp)]
            wanted = joint_step(model, parts, nn.functional.cross_entropy, 3, step=step)
            pipeline.step(*own_part(pipeline, parts), nn.functional.cross_entropy)
            weight = model[0].weight.grad
            wanted.gradients.update({"2.weight": weight, "3.weight": weight})
            assert_gradients(pipeline, wanted)
        pipeline.close()


CASES: tuple[Callable[[], None], ...] = (
    tied_weights_are_one_weight,
    tied_gradients_add_up,
    tied_weights_of_replicas,
    tied_weights_in_checkpoints,
    a_tie_of_sparse_gradients_is_refused,
    a_tied_weight_that_was_replaced_is_refused,
    a_weight_of_another_stage_that_is_not_registered_is_refused,
)
