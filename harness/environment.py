"""Describes the machine, the software and the code behind a number; unknown facts are None."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import ROOT
from .processes import run

PACKAGES = ("experiments", "harness", "models", "pipeline", "planner")

_DISTRIBUTIONS = (
    "torch", "torchvision", "numpy", "scipy", "pandas", "msgspec", "psutil", "torchgpipe",
)  # fmt: skip

# Only variables that change speed, memory or numbers; others are private.
_VARIABLE_PREFIXES = (
    "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "MALLOC_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "CUDA_",
    "CUBLAS_", "NCCL_", "GLOO_",
)  # fmt: skip
# Folders are private, too.
_FOLDERS = ("_DIR", "_HOME", "_PATH")
_VARIABLES = ("LD_PRELOAD", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "CI")


def environment() -> dict[str, Any]:
    """The environment as plain data, with torch's if it is loaded."""
    return {**_machine(), **_software(), **code_state(ROOT), **_torch(), **_now()}


def usable_cores() -> int:
    """Cores that this process may use: its affinity, limited by a container's share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _cgroup_cpus()
    return cores if share is None else max(1, min(cores, int(share)))


@functools.cache
def _machine() -> dict[str, Any]:
    import psutil

    return {
        "cpu_model": _cpu_model(),
        "architecture": platform.machine(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": psutil.cpu_count(logical=True),
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_total_gib": _gib(psutil.virtual_memory().total),
        "cgroup_cpus": _cgroup_cpus(),
        "cgroup_memory_gib": _cgroup_memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
    }


@functools.cache
def _software() -> dict[str, Any]:
    versions: dict[str, str | None] = dict.fromkeys(_DISTRIBUTIONS)
    for name in versions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    variables = {
        name: value.encode("utf-8", "backslashreplace").decode("utf-8")
        for name, value in sorted(os.environ.items())
        if (name.startswith(_VARIABLE_PREFIXES) and not name.endswith(_FOLDERS)) or name in _VARIABLES
    }
    return {"python": platform.python_version(), "versions": versions, "variables": variables}


@functools.cache
def code_state(root: Path) -> dict[str, Any]:
    """A digest of the sources and, where `root` is a git work tree, its commit and changes."""

    def git(*arguments: str) -> str:
        return _said("git", "--no-optional-locks", "-C", os.fspath(root), *arguments)

    digest = hashlib.sha256()
    for path in (path for part in PACKAGES for path in sorted((root / part).rglob("*.py"))):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    known: dict[str, Any] = {"git_commit": None, "git_dirty": None, "code_sha256": digest.hexdigest()}
    top, commit = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD")
    if not commit or Path(top).resolve() != root:
        return known  # also if installed inside another repository
    is_dirty = bool(git("status", "--porcelain", "--untracked-files=normal"))
    return {**known, "git_commit": commit, "git_dirty": is_dirty}


def _torch() -> dict[str, Any]:
    """Facts from torch, if it is loaded: its threads and build, the GPUs it sees and how they compute."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return {"torch_threads": None, "gpus": None, "cuda": None}
    gpus = [
        {"name": gpu.name, "memory_gib": _gib(gpu.total_memory), "capability": f"{gpu.major}.{gpu.minor}"}
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    known = {"torch_threads": torch.get_num_threads(), "gpus": gpus, "cuda": torch.version.cuda}
    if not gpus:
        return known
    return {**known, "gpu_numerics": _numerics(torch), "gpu_driver": _driver(), "gpu_now": of_gpus()}


def _numerics(torch: Any) -> dict[str, Any]:
    """Settings that decide a GPU's speed and precision: an H100 is eight times as fast in TF32."""
    cudnn, nccl = torch.backends.cudnn, None
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    version = None
    with contextlib.suppress(RuntimeError):  # cuDNN's version does not fit torch
        version = int(cudnn.version()) if cudnn.is_available() else None
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_allow_tf32": cudnn.allow_tf32,
        "cudnn_version": version,
        "cudnn_enabled": cudnn.enabled,
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "nccl_version": nccl,
    }


_NOW = (
    "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active",
)  # fmt: skip
"""Fields of nvidia-smi for a GPU's state now. The last is a mask of what keeps clocks low; 0x1 means idle."""


@functools.cache
def _driver() -> list[dict[str, str]] | None:
    """For each GPU: its driver's version, its highest clocks and its power limit."""
    return of_gpus(("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit"))


def of_gpus(asked: Sequence[str] = _NOW) -> list[dict[str, str]] | None:
    lines = _said("nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader").splitlines()
    return [dict(zip(asked, map(str.strip, line.split(",")), strict=False)) for line in lines] or None


def _now() -> dict[str, Any]:
    import psutil

    load = None
    with contextlib.suppress(OSError):
        load = [round(value, 2) for value in psutil.getloadavg()]
    return {"load": load, "memory_available_gib": _gib(psutil.virtual_memory().available)}


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 2)


def _cpu_model() -> str | None:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    said = _said("sysctl", "-n", "machdep.cpu.brand_string") if sys.platform == "darwin" else ""
    return said or platform.processor() or None


def _cgroup_cpus() -> float | None:
    """CPUs that the container's quota allows; if fewer than the visible cores, timings mislead."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    return round(int(quota) / int(period), 2) if quota.isdigit() and period.isdigit() else None


def _cgroup_memory_gib() -> float | None:
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return _gib(int(limit)) if limit.isdigit() else None


def _said(*command: str) -> str:
    """Output of a command; empty if the command is missing or fails."""
    try:
        done = run(command, 10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Text

_FIELDS = (
    ("cpu_model", "processor"), ("cores_logical", "cores"), ("memory_total_gib", "memory, GiB"),
    ("gpus", "GPUs"), ("system", "system"), ("python", "Python"),
    ("versions", "packages"), ("torch_threads", "threads of torch"), ("cuda", "CUDA"),
    ("gpu_numerics", "arithmetic of the GPUs"), ("gpu_driver", "driver of the GPUs"),
    ("variables", "variables"), ("git_commit", "commit"), ("git_dirty", "uncommitted changes"),
    ("code_sha256", "digest of the code"),
)  # fmt: skip
"""The fields of an environment that describe a machine, with labels."""


def environment_facts(environments: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Label and text of every known field; all values if records differ."""
    known = ([each.get(name) for each in environments if each.get(name)] for name, _ in _FIELDS)
    return tuple(
        (label, " | ".join(dict.fromkeys(map(_text, values))))
        for (_, label), values in zip(_FIELDS, known, strict=True)
        if values
    )


def _text(value: Any) -> str:
    """A value as text: lists joined, mappings as name=value, None as `unknown`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "unknown" if value is None else value if isinstance(value, str) else json.dumps(value)
