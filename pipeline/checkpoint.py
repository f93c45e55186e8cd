"""Checkpoints that any number of stages can continue from.

Names of parameters are those of the plain model on every rank, so torch.distributed.checkpoint can save with
one split and load with another. Beside model and optimizer a run depends on the number of steps taken, which
keys the random streams.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gpipe_bench.pipeline.api import Pipeline
from gpipe_bench.pipeline.checkpoint_file import Planner, Reader

# Optimizer entries by name: positions in a parameter group depend on the split.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save(path: Path | str, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Writes weights, buffers, optimizer state and step count to the folder `path`. All ranks must call."""
    state_dict_saver.save(_state(pipeline, optimizer), checkpoint_id=Path(path), **_where(pipeline))


def load(path: Path | str, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Reads what `save` wrote, for whatever split; training then goes on, bit for bit, as if it had never
    stopped.

    `ValueError` if the checkpoint is damaged or was written with another seed. No code from the files is run,
    whatever they hold. All ranks must call.
    """
    state = _state(pipeline, optimizer)
    seed = int(state["seed"])
    try:
        state_dict_loader.load(
            state, storage_reader=Reader(Path(path)), planner=Planner(), **_where(pipeline)
        )
    except CheckpointException as error:  # a BaseException, which callers that catch errors would miss
        rank, (cause, _) = min(error.failures.items())
        raise ValueError(f"the checkpoint {path} can't be loaded, says rank {rank}: {cause}") from error
    if int(state["seed"]) != seed:
        raise ValueError(
            f"the checkpoint was written with seed {int(state['seed'])}, the pipeline has {seed}; build it "
            "with the same seed"
        )
    pipeline.load_state_dict(state["model"])
    set_optimizer_state_dict(pipeline, optimizer, optim_state_dict=state["optimizer"], options=_BY_NAME)
    pipeline.num_steps = int(state["num_steps"])


def _state(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": pipeline.state_dict(),
        # Creates the optimizer's state if there is none yet, which loading needs as a place to load into.
        "optimizer": get_optimizer_state_dict(pipeline, optimizer, options=_BY_NAME),
        "num_steps": torch.tensor(pipeline.num_steps),
        "seed": torch.tensor(pipeline.seed),
    }


def _where(pipeline: Pipeline) -> dict[str, Any]:
    return {"process_group": pipeline.group, "no_dist": pipeline.group is None}
