"""The files of a checkpoint: what they may hold, and which of them are its own.

torch.distributed.checkpoint keeps its index and whatever is no tensor (a learning rate) as pickles and
trusts them. A checkpoint that came from elsewhere must not be able to run anything, so only the few types
that such a file needs are let through.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

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


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While one job saves: makes the folder, and keeps others from saving there where the file system can.
    Removes what the index does not name, before (what a killed save left) and after (the version replaced).
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if fcntl is not None:
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RuntimeError("another job is saving there; save to a folder of its own") from error
            except OSError:  # a file system without such locks
                pass
        _tidy(folder)
        stack.callback(_tidy, folder)
        yield


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
    """Makes the names of files in it outlast a loss of power, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def digests(folder: Path, places: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Each of the places that an index names, and what is there in 32 characters."""
    file_of = attrgetter("relative_path")
    for name, some in groupby(sorted(places, key=file_of), file_of):
        with (folder / name).open("rb") as file:
            for place in some:
                file.seek(place.offset)
                yield place, hashlib.blake2b(file.read(place.length), digest_size=16).hexdigest()


class Reader(FileSystemReader):
    """Reads the index, once, and only if it consists of what `save` puts there; `ValueError` otherwise. Reads
    data only if it is what belongs to this index.
    """

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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = [self.storage_data[item.storage_index] for item in plan.items]
        for place, found in digests(Path(self.path), places):
            if getattr(place, "digest", found) != found:  # older checkpoints have none
                raise ValueError(f"{place.relative_path} is damaged or belongs to another checkpoint")
        return super().read_data(plan, planner)


class Planner(DefaultLoadPlanner):
    """Takes values that are no tensors only if they are plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], torch.Tensor):
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
