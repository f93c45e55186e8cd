"""Checkpoints of several processes: whole between any grids, with the plain model's names, no piece twice."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from case_runner import Outcomes, assert_passed, named
from odd_layers import sgd, tied_model, train
from ranks import Ranks, grid, halves, on, on_first_rank, own_part, raises, shared_folder, transformer, words
from tiny_models import mlp_batch, seeded
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from gpipe_bench.models.parallel import tensor_parallel
from gpipe_bench.models.tasks import token_loss
from gpipe_bench.pipeline import Pipeline, checkpoint, split

pytestmark = pytest.mark.processes  # four at a time
MICROBATCHES = 4  # of all replicas together


def build() -> nn.Sequential:
    """Four layers, each with dropout and normalization. A bias before one would have gradients of nothing
    but rounding, which the optimizer scales up.
    """
    return nn.Sequential(*(
        nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2),
                      nn.Linear(6, 6, bias=False))
        for _ in range(4)
    ))  # fmt: skip


def rmsprop(pipeline: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(pipeline.parameters(), lr=1e-2, momentum=0.9)


def advance(pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Training steps, whose batches depend on their numbers alone; each replica takes its share."""
    for step in steps:
        replicas = pipeline.grid.replicas if pipeline.grid is not None else 1
        parts = [each.chunk(replicas) for each in mlp_batch(12, seed=step)]
        pipeline.step(*own_part(pipeline, list(zip(*parts, strict=True))), nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()


def alone(seed: int = 0) -> Pipeline:
    return Pipeline(seeded(build, seed=seed), num_stages=1, num_microbatches=MICROBATCHES)


def replicated(dp: int, pp: int, seed: int = 0) -> Pipeline:
    return on(grid(dp=dp, pp=pp), seeded(build, seed=seed), MICROBATCHES // dp, schedule="1f1b")


def training_goes_on_from_grid_to_grid_as_if_it_had_never_stopped() -> None:
    """Weights, the optimizer's state, dropout; each begins with other weights, the last is one process."""
    folder, plain = shared_folder(), alone()
    plain_optimizer = rmsprop(plain)
    for number, (dp, pp) in enumerate(((2, 2), (4, 1), (1, 4), (1, 2), (1, 1))):
        pipeline = replicated(dp, pp, seed=number) if dp * pp > 1 else alone(seed=number)
        optimizer = rmsprop(pipeline)
        if number:
            checkpoint.load(folder / str(number - 1), pipeline, optimizer)
        steps = range(2 * number, 2 * number + 2)
        assert pipeline.num_steps == steps.start
        advance(pipeline, optimizer, steps)
        advance(plain, plain_optimizer, steps)
        wanted = dict(plain.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter, wanted[name], rtol=1e-9, atol=1e-12)
        if dist.get_rank() < dp * pp:  # where there are two of this grid, the first
            checkpoint.save(folder / str(number), pipeline, optimizer)
        dist.barrier()


def every_process_writes_some_and_nothing_is_written_twice() -> None:
    """With the plain model's names. What is written is found in the index, which has each piece once."""
    folder, pipeline = shared_folder(), replicated(2, 2)
    optimizer = rmsprop(pipeline)
    advance(pipeline, optimizer, range(1))
    checkpoint.save(folder, pipeline, optimizer)
    found = FileSystemReader(folder).read_metadata()
    names = {name.removeprefix("model.") for name in found.state_dict_metadata if name.startswith("model.")}
    assert names == set(build().state_dict())
    files = {info.relative_path for info in found.storage_data.values()}
    assert sorted(path.name for path in folder.glob("*.distcp")) == sorted(files)
    assert len({name.split("_")[2] for name in files}) == 4
    written = sum((folder / name).stat().st_size for name in files)
    assert written == sum(info.length for info in found.storage_data.values())


def a_rank_that_cannot_write_or_read() -> None:
    """Every rank of both pipelines says which one and why, changes nothing, and goes on."""
    folder, pipeline = shared_folder(), replicated(2, 2)
    optimizer = rmsprop(pipeline)
    advance(pipeline, optimizer, range(2))
    before = copy.deepcopy((pipeline.state_dict(), optimizer.state_dict()))
    full, broken = OSError(28, "No space left on device"), OSError(5, "Input/output error")
    for owner, name, error, call, text in (
        (FileSystemWriter, "write_data", full, checkpoint.save, "be written, says rank 2 (dp=1 pp=0): OSE"),
        (FileSystemReader, "read_data", broken, checkpoint.load, "be loaded, says rank 2 (dp=1 pp=0): OSE"),
    ):  # fmt: skip
        patch = mock.patch.object(owner, name, side_effect=error)
        with patch if dist.get_rank() == 2 else nullcontext(), raises((RuntimeError, ValueError), text):
            call(folder, pipeline, optimizer)
        assert (folder / ".metadata").exists() == (owner is FileSystemReader)
        torch.testing.assert_close((pipeline.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
        checkpoint.save(folder, pipeline, optimizer)
    checkpoint.load(folder, pipeline, optimizer)
    advance(pipeline, optimizer, range(2, 3))
    with raises(ValueError, "can't be loaded, says rank 0 (dp=0 pp=0): "):
        checkpoint.load(Path("/nowhere"), pipeline, optimizer)


# Parameters that are divided

GRIDS: tuple[tuple[dict[str, int], int | None], ...] = (
    ({"dp": 2, "pp": 2}, None), ({"pp": 2, "tp": 2}, None), ({"fsdp": 2, "pp": 2}, 2),
    ({"fsdp": 2, "pp": 2}, 3), ({"dp": 2, "fsdp": 2, "pp": 1}, 2),
)  # fmt: skip


def language_model(seed: int) -> nn.Sequential:
    return seeded(lambda: transformer(num_layers=2, dropout=0.1), torch.float32, seed)


def adam(pipeline: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipeline.parameters(), lr=1e-2)


def divided(sizes: dict[str, int], zero: int | None, seed: int) -> tuple[Pipeline, torch.optim.Optimizer]:
    mesh, model = grid(**sizes), language_model(seed)
    if "tp" in sizes:
        tensor_parallel(model, mesh["tp"])
    replicas = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    pipeline = on(mesh, model, MICROBATCHES // replicas, zero=zero)
    return pipeline, adam(pipeline)


def train_on_words(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    parts = [words(2, seed=10 * pipeline.num_steps + replica) for replica in range(MICROBATCHES)]
    some = [torch.cat(part).chunk(pipeline.grid.replicas) for part in zip(*parts, strict=True)]
    pipeline.step(*own_part(pipeline, list(zip(*some, strict=True))), token_loss)
    optimizer.step()
    optimizer.zero_grad()


def in_one_process(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by name."""
    pipeline = Pipeline(language_model(99), num_stages=1, num_microbatches=MICROBATCHES)
    optimizer = adam(pipeline)
    checkpoint.load(folder, pipeline, optimizer)
    found = {**pipeline.state_dict(), "steps": torch.tensor(pipeline.num_steps)}
    for name, parameter in pipeline.named_parameters():
        found |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    assert len(found) == 1 + 4 * len(list(pipeline.parameters()))
    return found


def divided_parameters_are_whole_between_grids() -> None:
    """Each grid reads what the one before wrote, writes it again as it is, and goes on from there."""
    folder = shared_folder()
    trained: list[dict[str, torch.Tensor]] = []  # what the checkpoints hold, on the first rank
    for number, (sizes, zero) in enumerate(GRIDS):
        run = divided(sizes, zero, seed=number)
        if number:
            checkpoint.load(folder / f"{number - 1} trained", *run)
            checkpoint.save(folder / f"{number} read", *run)

            def is_the_same(number: int = number, how: tuple[Any, ...] = (sizes, zero)) -> None:
                read = in_one_process(folder / f"{number} read")
                assert read.keys() == trained[-1].keys()
                for name, value in trained[-1].items():
                    assert torch.equal(read[name], value), (*how, name)

            on_first_rank(is_the_same)
        train_on_words(*run)
        checkpoint.save(folder / f"{number} trained", *run)

        def has_all_steps(number: int = number) -> None:
            trained.append(in_one_process(folder / f"{number} trained"))
            assert trained[-1]["steps"] == number + 1

        on_first_rank(has_all_steps)


def a_run_with_divided_parameters_goes_on_to_the_bit() -> None:
    for sizes, zero in (GRIDS[1], GRIDS[2], GRIDS[3]):
        folder, whole, again = shared_folder(), divided(sizes, zero, seed=0), divided(sizes, zero, seed=1)
        train_on_words(*whole)
        checkpoint.save(folder, *whole)
        for parameter in again[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        checkpoint.load(folder, *again)
        again[1].zero_grad()
        for run in (whole, again):
            train_on_words(*run)
        for (name, a), b in zip(whole[0].named_parameters(), again[0].parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local()), (sizes, zero, name)  # type: ignore[attr-defined]


# Weights with several places


class Tied(nn.Module):
    """A model whose output layer has the embedding's weight, and which uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.second, self.output = nn.Linear(4, 4), nn.Linear(4, 7)
        self.output.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(ids)).tanh()
        return self.output(self.first(self.second(x)).tanh())


def of_a_graph(seed: int) -> Any:
    torch.manual_seed(seed)
    return split(Tied(), ["first", "second", "output"])


def of_layers(seed: int) -> Any:
    return seeded(lambda: tied_model(2), torch.float32, seed)


def a_tied_weight_is_one_entry_however_it_was_trained() -> None:
    """By the model's first name; and runs go on alike on one process, two and four."""
    path, ranks, pair = shared_folder(), Ranks(), halves()
    for make, prefix in ((of_layers, "0.weight"), (of_a_graph, "embedding.weight")):

        def built(where: Ranks | None, seed: int, make: Any = make) -> Any:
            one = {"num_stages": 1, "num_microbatches": 1}
            pipeline = Pipeline(make(seed), **one) if where is None else where.pipeline(make(seed), 1)
            return pipeline, sgd(pipeline)

        alone, four = built(None, 0), built(ranks, 0)
        train(*alone, range(2))
        train(*four, range(2), ranks)
        if ranks.is_first:
            checkpoint.save(path / prefix / "one", *alone)
        checkpoint.save(path / prefix / "four", *four)
        wanted = train(*alone, range(2, 4))
        for name in ("one", "four"):
            entries = FileSystemReader(path / prefix / name).read_metadata().state_dict_metadata
            of_weight = [
                key for key in entries if key.endswith((f"model.{prefix}", "output.weight", "3.weight"))
            ]
            assert of_weight == [f"model.{prefix}"], entries.keys()
            assert f"optimizer.state.{prefix}.momentum_buffer" in entries, entries.keys()
            for where in (None, *((pair,) if make is of_layers else ()), ranks):
                run = built(where, 3)
                checkpoint.load(path / prefix / name, *run)
                torch.testing.assert_close(train(*run, range(2, 4), where), wanted, rtol=1e-5, atol=1e-6)


CASES = named(
    training_goes_on_from_grid_to_grid_as_if_it_had_never_stopped,
    every_process_writes_some_and_nothing_is_written_twice, a_rank_that_cannot_write_or_read,
    divided_parameters_are_whole_between_grids, a_run_with_divided_parameters_goes_on_to_the_bit,
    a_tied_weight_is_one_entry_however_it_was_trained,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)
