"""Costs between calls: a file for each model as it is timed, read only where everything is as it was.

A file's name and contents tell what it was timed of: the layers, the text of every file that they come from,
torch, this machine and its cores, and the code here that times and runs them. Whatever differs, is damaged,
or is older than a month is as if it were not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

import torch

import gpipe_bench
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.model import Model
from gpipe_bench.planner.request import Request

MONTH_S = 30 * 24 * 3600.0
PARTS = ("pipeline", "models", "planner")
"""Of this package: what decides how layers are run and timed."""


def user_folder() -> Path:
    """Where programs of this user keep what can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "gpipe-bench" / "costs"


def facts(
    model: Model,
    request: Request,
    *,
    sizes: Sequence[int],
    processes: int,
    seconds: float,
    sharded: bool,
) -> dict[str, Any]:
    """All that seconds depend on, as plain data."""
    layers = [
        {
            "layer": str(layer),
            "parameters": [
                [name, list(t.shape), str(t.dtype), t.requires_grad]
                for name, t in (*layer.named_parameters(), *layer.named_buffers())
            ],
        }
        for layer in model.layers
    ]
    return {
        "model": [model.name, repr(model.source.options)],
        "layers": _digest(json.dumps(layers)),
        "inputs": repr((model.inputs.tensors, model.target.tensors)),
        "files": _texts(_files_of(model)),
        "code": _digest("".join(_texts(_own_files()).values())),
        "sizes": list(sizes),
        "processes": processes,
        "accelerators": request.accelerators,
        "batch_size": request.batch_size,
        "optimizer": request.optimizer,
        "seconds": seconds,
        "sharded": sharded,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": [platform.node(), platform.machine(), _processor()],
        "cores": sorted(os.sched_getaffinity(0)),
    }


def read(
    folder: Path, wanted: Mapping[str, Any], profiles: Callable[[int, bool, int], Any] | None = None
) -> tuple[Costs, float] | None:
    """The costs with these facts, and when they were timed; None unless all of it is whole and the same."""
    try:
        data = json.loads(_path(folder, wanted).read_text(encoding="utf-8"))
        costs, since = data["costs"], float(data["since"])
        if data["facts"] != wanted or data["digest"] != _digest(json.dumps([costs, since])):
            return None
        if not 0 <= time() - since < MONTH_S:
            return None
        return Costs.from_data(costs, profiles), since
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(folder: Path, timed_of: Mapping[str, Any], costs: Costs) -> None:
    """Keeps them, whole or not at all; a folder that cannot be written keeps nothing."""
    data, since = json.loads(json.dumps(costs.to_data())), time()
    found = {"facts": timed_of, "since": since, "digest": _digest(json.dumps([data, since])), "costs": data}
    path = _path(folder, timed_of)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(found) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()


def _path(folder: Path, of: Mapping[str, Any]) -> Path:
    return folder / f"{_digest(json.dumps(of, sort_keys=True))[:32]}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _texts(files: Sequence[Path]) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def _files_of(model: Model) -> list[Path]:
    """Where the layers' classes and the function stand, and every module that lies beside or below them."""
    names = {type(module).__module__ for layer in model.layers for module in layer.modules()}
    names |= {getattr(model.loss_fn, "__module__", ""), model.name.partition(":")[0]}
    known = {
        name: Path(file)
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and file.endswith(".py")
    }
    own = [
        known[name]
        for name in names
        if name in known and name.partition(".")[0] not in ("torch", "gpipe_bench")
    ]
    folders = {path.parent for path in own}
    beside = [
        path for path in known.values() if folders & set(path.parents) and "site-packages" not in path.parts
    ]
    return sorted({*own, *beside})


def _own_files() -> list[Path]:
    root = Path(next(iter(gpipe_bench.__path__)))
    return sorted(path for part in PARTS for path in (root / part).rglob("*.py"))


def _processor() -> str:
    """As Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
