"""What a training leaves on disk: checkpoints while it runs, and at its end what it ended with.

A checkpoint appears by renaming a folder that is complete: a kill while it is written leaves the one before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from gpipe_bench.harness.records.files import file_lock

Watch = Callable[[str, int], None]
"""Told what has just happened ("step", "saving", "saved", "finished") and how many steps are done."""


@dataclass(frozen=True)
class Trained:
    """What a training ended with. `curve` holds (steps done, mean training loss since the last, score)."""

    curve: tuple[tuple[int, float, float], ...]
    weights: dict[str, Tensor]  # parameters and buffers
    layers_per_stage: tuple[int, ...]

    @property
    def score(self) -> float:
        return self.curve[-1][2]

    @property
    def digest(self) -> str:
        """SHA-256 of all weights, without the running statistics."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights.items()):
            if not is_statistic(name):
                digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def is_statistic(name: str) -> bool:
    """Whether an entry of a state dict is batch normalization's and not a weight."""
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps."""
    found = [path for path in folder.glob("step-*") if path.suffix != ".part"]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def drop_checkpoints(folder: Path, but: Path | None = None) -> None:
    for path in folder.glob("step-*"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def save_checkpoint(
    folder: Path,
    write: Callable[[Path], None],
    state: Mapping[str, Any],
    rank: int,
    group: distributed.ProcessGroup | None,
    watch: Watch,
) -> None:
    """`write` puts model and optimizer into the folder it is given, `state` is the loop's. All ranks call."""
    target = folder / f"step-{state['done']:08d}"
    part = target.with_name(target.name + ".part")
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)  # what a killed run left
        part.mkdir(parents=True)
    if group is not None:
        distributed.barrier(group)
    write(part)
    torch.save(dict(state), part / f"loop-{rank}.pt")
    watch("saving", state["done"])
    if group is not None:
        distributed.barrier(group)
    if rank == 0:
        part.rename(target)
        drop_checkpoints(folder, but=target)
    watch("saved", state["done"])


@contextmanager
def alone(folder: Path, rank: int, group: distributed.ProcessGroup | None) -> Iterator[None]:
    """Keeps out another run, and worker processes that outlive a killed one; waits until they are done."""
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as file, file_lock(file.fileno()):
            if group is not None:
                distributed.barrier(group)
            yield
        return
    distributed.barrier(group)
    yield


def keep(folder: Path, trained: Trained, rank: int) -> None:
    """Keeps what a finished training ended with."""
    part = folder / f"final-{rank}.pt.part"
    content = {"curve": trained.curve, "weights": trained.weights, "layers": trained.layers_per_stage}
    torch.save(content, part)
    part.rename(folder / f"final-{rank}.pt")


def kept(folder: Path, rank: int) -> Trained | None:
    """What a training that finished here ended with."""
    path = folder / f"final-{rank}.pt"
    if not path.exists():
        return None
    content = torch.load(path, weights_only=True)
    return Trained(tuple(tuple(point) for point in content["curve"]), content["weights"], content["layers"])


def folder_name(**what: object) -> str:
    """A folder name for a training: a digest of all that its result depends on."""
    plain = {key: repr(value) for key, value in what.items()}
    text = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
