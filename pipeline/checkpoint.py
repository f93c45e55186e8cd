"""Checkpoints that any number of stages can continue from.

Every rank names parameters as the plain model does, so torch.distributed.checkpoint can save with one number
of stages and load with another. A checkpoint also holds the number of steps taken, on which the random
streams depend. On a grid all processes write one checkpoint: a share of what several of them have, and their
own part of what is divided.

The ranks agree through the pipeline's connections, not torch's collectives, which wait for as long as the
user's process group says and cannot tell which rank is missing.

The index `.metadata` defines the checkpoint: it names its files. A save writes new files beside the old ones,
then replaces the old index by its own in one step, so the checkpoint is the old or the new one.
"""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from .api import Pipeline
from .errors import summary

T = TypeVar("T")


def save(path: Path | str, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> None:
    """Writes weights, buffers, optimizer state and step count to the folder `path`. All ranks must call, on a
    grid all ranks of the mesh; a rank that has nothing to train passes None as its optimizer.

    Raises `RuntimeError` on every rank if one of them cannot write or the pipeline has failed, and
    `ActionError` if a rank does not call within the pipeline's `timeout_s`. If a save fails or is killed,
    `path` holds the old checkpoint or the new one, and the next save removes the remains. Only one job at a
    time may save there.
    """
    path, planner = Path(path), DefaultSavePlanner()
    writer = FileSystemWriter(path)
    # If the pipeline has failed, this raises before anything is written.
    places, (name, *_) = zip(*pipeline.gather_all((pipeline.place, writer.save_id)), strict=True)
    rank = places.index(pipeline.place)

    def plan() -> Any:
        if rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            _tidy(path)  # the remains of a killed save
        planner.set_up_planner(_state(pipeline, optimizer), writer.storage_meta(), is_coordinator=rank == 0)
        for key, place in planner.mappings.items():
            if place[0] == "optimizer" and any(isinstance(part, int) for part in place):
                raise ValueError(f"the optimizer keeps tensors in a list, {key}; dictionaries can be saved")
        # Every file name contains the rank.
        writer.set_up_storage_writer(rank == 0, rank=f"{rank}_{name}", use_collectives=False)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write() -> Any:
        work = writer.write_data(planner.finish_plan(mine), planner)
        work.wait()
        return work.value()

    def finish() -> None:
        if rank == 0:
            for file in {result.storage_data.relative_path for some in results for result in some}:
                if not (path / file).exists():
                    raise FileNotFoundError(f"{file} is not seen here; all hosts must see the same folder")
            writer.finish(metadata, results)
            sync(path)
            os.replace(path / f"__{rank}_{name}.metadata", path / ".metadata")
            sync(path)
            sync(path.parent)

    what = f"the checkpoint {path} can't be written"
    try:
        # Every rank makes the plan of all ranks; it is the same everywhere.
        plans, metadata = planner.create_global_plan(_on_all(pipeline, plan, what))
        mine = writer.prepare_global_plan(plans)[rank]
        results = _on_all(pipeline, write, what)
        _on_all(pipeline, finish, what)
    finally:
        if rank == 0:
            _tidy(path)  # the files of the old checkpoint, or those of a save that failed


def load(path: Path | str, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> None:
    """Reads a checkpoint that `save` wrote with any number of stages and on any grid. Training goes on with
    the same bits, unless the grid sums gradients in another order or divides layers otherwise.

    Raises `ValueError` on every rank if the checkpoint is damaged, has another model or optimizer or was
    written with another seed, and `ActionError` if a rank does not call within the pipeline's `timeout_s`.
    Neither changes the pipeline or the optimizer. No code in the files is run, whatever they hold. All ranks
    must call.
    """
    there: dict[str, Any]
    optimizer_state: dict[str, Any]
    reader: Reader

    def read() -> tuple[str, set[str]]:
        nonlocal there, optimizer_state, reader
        here, reader = _state(pipeline, optimizer), Reader(Path(path))
        there = _places(here, reader.index, _names(pipeline))
        planner = Planner()
        planner.set_up_planner(there, reader.index)
        reader.set_up_storage_reader(reader.index, is_coordinator=False)
        reader.read_data(planner.create_local_plan(), planner).wait()
        if there["seed"] != here["seed"]:
            seed = int(there["seed"])
            raise ValueError(
                f"it was written with seed {seed}, the pipeline has {pipeline.seed}; give the same"
            )
        if optimizer is not None:
            optimizer_state = _by_position(there["optimizer"], pipeline, optimizer)
        return reader.identity, set(here["model"])

    what = f"the checkpoint {path} can't be loaded"
    identities, models = zip(*_on_all(pipeline, read, what, ValueError), strict=True)
    if len(set(identities)) > 1:
        raise ValueError(f"{what}: it was replaced while the ranks read it; load again")
    saved = {path[1] for path in reader.index.planner_data.values() if path[0] == "model"}
    if unknown := saved.difference(*models):
        raise ValueError(f"{what}: it has {min(unknown)}, which the model does not have")
    first = pipeline.tied_names
    pipeline.load_state_dict({name: there["model"][first.get(name, name)] for name in pipeline.state_dict()})
    if optimizer is not None:
        optimizer.load_state_dict(optimizer_state)
    pipeline.num_steps = int(there["num_steps"])


def _on_all(
    pipeline: Pipeline, part: Callable[[], T], what: str, kind: type[Exception] = RuntimeError
) -> list[T]:
    """Runs `part` on all ranks; returns their results. If one raises, all raise `kind`, with its cause."""
    result, failure = None, None
    try:
        result = part()
    except Exception as error:
        failure = error
    except BaseException as error:  # an interrupt: the other ranks must fail, too
        pipeline._transport.abort(None, error)
        raise
    found = pipeline.gather_all((pipeline.place, result, summary(failure) if failure is not None else None))
    for place, _, cause in found:
        if cause is not None:
            raise kind(f"{what}, says {place}: {cause}") from failure
    return [result for _, result, _ in found]  # type: ignore[misc]


def _names(pipeline: Pipeline) -> dict[Tensor, str]:
    """The name of each parameter in a checkpoint: the first one, if it has several."""
    first = pipeline.tied_names
    return {parameter: first.get(name, name) for name, parameter in pipeline.named_parameters()}


def _state(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """All that a run depends on. The optimizer's state is by name: positions depend on the cut."""
    first, names = pipeline.tied_names, _names(pipeline)
    state: dict[str, Any] = {}
    options: dict[str, Any] = {}
    groups, states = ([], {}) if optimizer is None else (optimizer.param_groups, optimizer.state)
    for group in groups:
        for parameter in group["params"]:
            if parameter not in names:
                shape = tuple(parameter.shape)
                raise ValueError(
                    f"the optimizer has a parameter of shape {shape} that is none of `pipeline.parameters()`"
                )
            state[names[parameter]] = states.get(parameter, {})
            own = group.keys() - {"params", "param_names"}
            options[names[parameter]] = {key: value for key, value in group.items() if key in own}
    return {
        "model": {first.get(name, name): value for name, value in pipeline.state_dict().items()},
        "optimizer": {"state": state, "param_groups": options},
        "num_steps": torch.tensor(pipeline.num_steps),
        "seed": torch.tensor(pipeline.seed),
    }


def _places(here: Mapping[str, Any], index: Metadata, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """New memory to read a checkpoint into: the model's as in `here`, the optimizer's as in `index`."""
    parameters = {name: parameter for parameter, name in names.items()}
    model = {
        name: _place(value.shape, value.dtype, value) if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in here["model"].items()
    }
    optimizer: dict[str, Any] = {k: {name: {} for name in some} for k, some in here["optimizer"].items()}
    for key, (part, *path) in index.planner_data.items():
        if part != "optimizer":
            continue
        kind, name, *outer, last = path
        if name in optimizer[kind]:
            place = optimizer[kind][name]
            for inner in outer:
                place = place.setdefault(inner, {})
            place[last] = None  # replaced by the value that is read
            found = index.state_dict_metadata[key]
            if isinstance(found, TensorStorageMetadata):
                place[last] = _place(found.size, found.properties.dtype, parameters[name])
    numbers = {name: torch.zeros_like(here[name]) for name in ("num_steps", "seed")}
    return {"model": model, "optimizer": optimizer, **numbers}


def _place(size: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Memory for a tensor that belongs to `like`: divided as `like` is, else whole and on the host."""
    if isinstance(like, DTensor) and size:
        shared = size == like.shape
        return torch.empty_like(like, dtype=dtype) if shared else like.new_empty(size, dtype=dtype)
    return torch.empty(size, dtype=dtype)


def _by_position(
    saved: Mapping[str, Any], pipeline: Pipeline, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The optimizer's part of a checkpoint in the form of its `load_state_dict`."""
    names, positions = _names(pipeline), itertools.count()
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = {next(positions): names[parameter] for parameter in group["params"]}
        state |= {position: saved["state"][name] for position, name in own.items() if saved["state"][name]}
        options: dict[str, Any] = {}
        for name in own.values():
            before, options = options, saved["param_groups"][name]
            if missing := optimizer.defaults.keys() - options.keys():
                raise ValueError(f"it has no `{min(missing)}` for {name}: it is of another optimizer")
            if before and before != options:
                raise ValueError(f"{name} is in one group with parameters that have other options there")
        groups.append({**group, **options, "params": list(own)})
    return {"state": state, "param_groups": groups}


# The files. torch.distributed.checkpoint keeps its index and whatever is no tensor (a learning rate) as
# pickles and trusts them. A checkpoint from elsewhere must not run anything: only the types that it needs may
# pass.

_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
}  # fmt: skip
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


def _tidy(folder: Path) -> None:
    """Removes files of checkpoints that the index does not name. What can't be removed is left."""
    try:
        named = {place.relative_path for place in Reader(folder).index.storage_data.values()}
    except FileNotFoundError:
        named = set()
    except (OSError, ValueError):  # nobody knows whose the files are
        return
    for file in folder.glob("__*_*"):
        if file.suffix in (".distcp", ".metadata", ".tmp") and file.name not in named:
            with suppress(OSError):
                file.unlink()


def sync(folder: Path) -> None:
    """Makes the names of files in `folder` outlast a loss of power, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Reader(FileSystemReader):
    """Reads the index, once, and only if it consists of what `save` puts there; `ValueError` otherwise."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / ".metadata"
        content = path.read_bytes()
        self.identity = hashlib.sha256(content).hexdigest()
        try:
            self.index = _Plain(io.BytesIO(content)).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is no index of a checkpoint: {error}") from error
        if not isinstance(self.index, Metadata):
            raise ValueError(f"{path} is no index of a checkpoint: it is a {type(self.index).__name__}")


class Planner(DefaultLoadPlanner):
    """Takes values that are no tensors only if they are plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], Tensor):
            raise ValueError(f"{name} should be a tensor and is none")
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{name} is no plain data, which is all that is loaded") from error
        value.seek(0)
        super().load_bytes(read_item, value)


class _Plain(pickle.Unpickler):
    """Finds no function and no class but those that an index is made of."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        path = module.partition(".")[0] == "pathlib" and name in _PATHS
        if dtype or path or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
