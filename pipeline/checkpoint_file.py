"""Reads checkpoints of torch.distributed.checkpoint without running code from them.

That package keeps its index and whatever is no tensor (a learning rate) as pickles and trusts them. A
checkpoint that came from elsewhere must not be able to run anything, so only the few types that such a file
needs are let through.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

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


class Reader(FileSystemReader):
    """Reads the index only if it consists of what `save` puts there; `ValueError` otherwise."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            with path.open("rb") as file:
                _Plain(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is no index of a checkpoint: {error}") from error
        return super().read_metadata(*args, **kwargs)


class Planner(DefaultLoadPlanner):
    """Takes values that are no tensors only if they are plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            name = read_item.dest_index.fqn
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
