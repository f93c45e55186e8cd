"""Checkpoints that any number of stages can continue from.

Names of parameters are those of the plain model on every rank, so torch.distributed.checkpoint can save with
one split and load with another. Beside model and optimizer a run depends on the number of steps taken, which
keys the random streams.

On a grid all processes of the mesh write one checkpoint: of what several of them have, each writes some, and
of a parameter that is divided each its part. Which part is where is in the index, so that any other grid
finds its own.

The ranks agree through connections of the pipeline's own and not through the collectives of that package,
which wait for as long as the user's process group says and cannot tell which rank is missing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gpipe_bench.pipeline.api import Pipeline
from gpipe_bench.pipeline.checkpoint_file import Planner, Reader
from gpipe_bench.pipeline.errors import summary

# Optimizer entries by name: positions in a parameter group depend on the split.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
T = TypeVar("T")


def save(path: Path | str, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Writes weights, buffers, optimizer state and step count to the folder `path`. All ranks must call, on a
    grid those of the whole mesh.

    `RuntimeError`, on every rank, if one of them cannot write or the pipeline has failed; `ActionError` if a
    rank does not come within the pipeline's `timeout_s`. The checkpoint is complete when its file `.metadata`
    is there.
    """
    writer, planner = FileSystemWriter(Path(path)), DefaultSavePlanner()
    places = pipeline.gather_all(pipeline.place)  # raises before anything is written if nothing is sound
    rank = places.index(pipeline.place)

    def plan() -> Any:
        planner.set_up_planner(_state(pipeline, optimizer), writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write() -> Any:
        work = writer.write_data(planner.finish_plan(mine), planner)
        work.wait()
        return work.value()

    def finish() -> None:
        if rank == 0:
            writer.finish(metadata, results)

    what = f"the checkpoint {path} can't be written"
    # Every rank makes the plan of all, which is the same everywhere.
    plans, metadata = planner.create_global_plan(_on_all(pipeline, plan, what))
    mine = writer.prepare_global_plan(plans)[rank]
    results = _on_all(pipeline, write, what)
    _on_all(pipeline, finish, what)


def load(path: Path | str, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Reads what `save` wrote, for whatever split and grid; training then goes on as if it had never stopped:
    bit for bit, unless the grid sums gradients in another order or divides layers otherwise.

    `ValueError`, on every rank, if the checkpoint is damaged or was written with another seed; `ActionError`
    if a rank does not come within the pipeline's `timeout_s`. No code from the files is run, whatever they
    hold. All ranks must call.
    """
    state = _state(pipeline, optimizer)
    seed = int(state["seed"])

    def read() -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                reader = Reader(Path(path))
                reader.read_metadata()  # torch 2.11 hides why an index can't be read
                state_dict_loader.load(state, storage_reader=reader, planner=Planner(), no_dist=True)
        except CheckpointException as error:  # a BaseException, which callers that catch errors would miss
            ((cause, _),) = error.failures.values()
            raise cause from error

    _on_all(pipeline, read, f"the checkpoint {path} can't be loaded", ValueError)
    if int(state["seed"]) != seed:
        raise ValueError(
            f"the checkpoint was written with seed {int(state['seed'])}, the pipeline has {seed}; build it "
            "with the same seed"
        )
    first = pipeline.tied_names
    pipeline.load_state_dict({name: state["model"][first.get(name, name)] for name in pipeline.state_dict()})
    here = {first[name]: name for name, _ in pipeline.named_parameters() if name in first}
    set_optimizer_state_dict(
        pipeline, optimizer, optim_state_dict=_renamed(state["optimizer"], here), options=_BY_NAME
    )
    pipeline.num_steps = int(state["num_steps"])


def _on_all(
    pipeline: Pipeline, part: Callable[[], T], what: str, kind: type[Exception] = RuntimeError
) -> list[T]:
    """What each rank's `part` returns; if one raises, every rank raises `kind`, which says who and why."""
    result, failure = None, None
    try:
        result = part()
    except Exception as error:
        failure = error
    found = pipeline.gather_all((pipeline.place, result, summary(failure) if failure is not None else None))
    for place, _, cause in found:
        if cause is not None:
            raise kind(f"{what}, says {place}: {cause}") from failure
    return [result for _, result, _ in found]  # type: ignore[misc]


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """An optimizer's flattened state with other names for some parameters."""
    found = {}
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        for old, new in names.items():
            if rest.startswith(f"{old}."):
                key = f"{kind}.{new}{rest.removeprefix(old)}"
                break
        found[key] = value
    return found


def _state(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    first = pipeline.tied_names  # a weight with several names, in one process or several, is one entry
    # Creates the optimizer's state if there is none yet, which loading needs as a place to load into.
    state = get_optimizer_state_dict(pipeline, optimizer, options=_BY_NAME)
    return {
        "model": {first.get(name, name): value for name, value in pipeline.state_dict().items()},
        "optimizer": _renamed(state, first),
        "num_steps": torch.tensor(pipeline.num_steps),
        "seed": torch.tensor(pipeline.seed),
    }
