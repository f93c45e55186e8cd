"""Checkpoints between grids of four processes; `test_grid_checkpoints` starts them once and reports each case
as a test.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from mesh_grids import grid, on_grid, own_part, words
from mesh_grids import on as on_mesh
from ranks import on_first_rank, raises, shared_folder
from tiny_models import mlp_batch, seeded
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from gpipe_bench.models.parallel import tensor_parallel
from gpipe_bench.models.tasks import token_loss
from gpipe_bench.models.transformer.lm import transformer_lm
from gpipe_bench.pipeline import Pipeline, checkpoint

mse_loss = nn.functional.mse_loss
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
        batch, target = mlp_batch(12, dtype=torch.float64, seed=step)
        if pipeline.grid is not None:
            replicas = pipeline.grid.replicas
            parts = list(zip(batch.chunk(replicas), target.chunk(replicas), strict=True))
            batch, target = own_part(pipeline, parts)
        pipeline.step(batch, target, mse_loss)
        optimizer.step()
        optimizer.zero_grad()


def alone(seed: int = 0) -> Pipeline:
    layers = seeded(build, torch.float64, seed)
    return Pipeline(layers, num_stages=1, num_microbatches=MICROBATCHES)


def on(dp: int, pp: int, seed: int = 0) -> Pipeline:
    layers = seeded(build, torch.float64, seed)
    return on_grid(dp, pp, layers, MICROBATCHES // dp, schedule="1f1b")


def training_goes_on_from_grid_to_grid_as_if_it_had_never_stopped() -> None:
    """Weights, the optimizer's state, dropout; each grid begins with other weights."""
    folder, plain = shared_folder(), alone()
    plain_optimizer = rmsprop(plain)
    for number, (dp, pp) in enumerate(((2, 2), (4, 1), (1, 4), (1, 2), (2, 1))):
        pipeline = on(dp, pp, seed=number)
        optimizer = rmsprop(pipeline)
        if number:
            checkpoint.load(folder / str(number - 1), pipeline, optimizer)
        steps = range(2 * number, 2 * number + 2)
        assert pipeline.num_steps == steps.start
        advance(pipeline, optimizer, steps)
        advance(plain, plain_optimizer, steps)
        wanted = plain.state_dict()
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter, wanted[name], rtol=1e-9, atol=1e-12)
        if dist.get_rank() < dp * pp:  # where there are two of this grid, the first
            checkpoint.save(folder / str(number), pipeline, optimizer)
        dist.barrier()
        pipeline.close()
    last = alone(seed=9)
    last_optimizer = rmsprop(last)
    checkpoint.load(folder / str(number), last, last_optimizer)
    for pipeline, optimizer in ((last, last_optimizer), (plain, plain_optimizer)):
        advance(pipeline, optimizer, range(10, 11))
    for name, value in last.named_parameters():
        torch.testing.assert_close(value, dict(plain.named_parameters())[name], rtol=1e-9, atol=1e-12)


def every_process_writes_some_and_nothing_is_written_twice() -> None:
    """With the plain model's names. What is written is found in the index, which has each piece once."""
    folder, pipeline = shared_folder(), on(2, 2)
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
    pipeline.close()


def a_rank_of_a_grid_that_cannot_write() -> None:
    """Nor read: every rank of both pipelines says which one and why, changes nothing, and goes on."""
    folder, pipeline = shared_folder(), on(2, 2)
    optimizer = rmsprop(pipeline)
    full = OSError(28, "No space left on device")
    patch = mock.patch.object(FileSystemWriter, "write_data", side_effect=full)
    with (
        patch if dist.get_rank() == 2 else nullcontext(),
        raises(RuntimeError, "can't be written, says rank 2 (dp=1 pp=0): OSError: [Errno 28] No space left"),
    ):
        checkpoint.save(folder, pipeline, optimizer)
    assert not (folder / ".metadata").exists()
    checkpoint.save(folder, pipeline, optimizer)
    checkpoint.load(folder, pipeline, optimizer)
    advance(pipeline, optimizer, range(2))
    before = copy.deepcopy((pipeline.state_dict(), optimizer.state_dict()))
    patch = mock.patch.object(FileSystemReader, "read_data", side_effect=OSError(5, "Input/output error"))
    with (
        patch if dist.get_rank() == 2 else nullcontext(),
        raises(ValueError, "can't be loaded, says rank 2 (dp=1 pp=0): OSError: [Errno 5] Input/output error"),
    ):
        checkpoint.load(folder, pipeline, optimizer)
    torch.testing.assert_close((pipeline.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert pipeline.num_steps == 2
    advance(pipeline, optimizer, range(2, 3))
    with raises(ValueError, "can't be loaded, says rank 0 (dp=0 pp=0): "):
        checkpoint.load(Path("/nowhere"), pipeline, optimizer)
    pipeline.close()


GRIDS: tuple[tuple[dict[str, int], int | None], ...] = (
    ({"dp": 2, "pp": 2}, None), ({"pp": 2, "tp": 2}, None), ({"fsdp": 2, "pp": 2}, 2),
    ({"dp": 4, "pp": 1}, None), ({"fsdp": 2, "pp": 2}, 3), ({"dp": 2, "pp": 1, "tp": 2}, None),
    ({"dp": 2, "fsdp": 2, "pp": 1}, 2),
)  # fmt: skip


def transformer(seed: int) -> nn.Sequential:
    """With a vocabulary that two processes cannot divide evenly."""
    torch.manual_seed(seed)
    return transformer_lm(
        num_layers=2, d_model=8, ffn_dim=16, num_heads=4, vocab_size=11, seq_len=6, dropout=0.1
    )


def adam(pipeline: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipeline.parameters(), lr=1e-2)


def divided(sizes: dict[str, int], zero: int | None, seed: int) -> Pipeline:
    mesh, model = grid(**sizes), transformer(seed)
    if "tp" in sizes:
        tensor_parallel(model, mesh["tp"])
    replicas = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    return on_mesh(mesh, model, MICROBATCHES // replicas, zero=zero)


def train_on_words(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    assert pipeline.grid is not None
    parts = [words(2, seed=10 * pipeline.num_steps + replica) for replica in range(MICROBATCHES)]
    replicas = pipeline.grid.replicas
    some = [torch.cat(part).chunk(replicas) for part in zip(*parts, strict=True)]
    pipeline.step(*own_part(pipeline, list(zip(*some, strict=True))), token_loss)
    optimizer.step()
    optimizer.zero_grad()


def in_one_process(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by name."""
    pipeline = Pipeline(transformer(99), num_stages=1, num_microbatches=MICROBATCHES)
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
        pipeline = divided(sizes, zero, seed=number)
        optimizer = adam(pipeline)
        if number:
            checkpoint.load(folder / f"{number - 1} trained", pipeline, optimizer)
            checkpoint.save(folder / f"{number} read", pipeline, optimizer)

            def is_the_same(number: int = number, how: tuple = (sizes, zero)) -> None:
                read = in_one_process(folder / f"{number} read")
                assert read.keys() == trained[-1].keys()
                for name, value in trained[-1].items():
                    assert torch.equal(read[name], value), (*how, name)

            on_first_rank(is_the_same)
        train_on_words(pipeline, optimizer)
        checkpoint.save(folder / f"{number} trained", pipeline, optimizer)

        def has_all_steps(number: int = number) -> None:
            trained.append(in_one_process(folder / f"{number} trained"))
            assert trained[-1]["steps"] == number + 1

        on_first_rank(has_all_steps)
        pipeline.close()


def a_run_with_divided_parameters_goes_on_to_the_bit() -> None:
    for sizes, zero in (GRIDS[1], GRIDS[2], GRIDS[4]):
        folder, whole = shared_folder(), divided(sizes, zero, seed=0)
        optimizer = adam(whole)
        train_on_words(whole, optimizer)
        checkpoint.save(folder, whole, optimizer)
        again = divided(sizes, zero, seed=1)
        others = adam(again)
        for parameter in again.parameters():
            parameter.grad = torch.ones_like(parameter)
        checkpoint.load(folder, again, others)
        others.zero_grad()
        for pipeline, of_it in ((whole, optimizer), (again, others)):
            train_on_words(pipeline, of_it)
        for (name, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local()), (sizes, zero, name)  # type: ignore[attr-defined]
        whole.close()
        again.close()


CASES = (
    training_goes_on_from_grid_to_grid_as_if_it_had_never_stopped,
    every_process_writes_some_and_nothing_is_written_twice,
    a_rank_of_a_grid_that_cannot_write,
    divided_parameters_are_whole_between_grids,
    a_run_with_divided_parameters_goes_on_to_the_bit,
)
