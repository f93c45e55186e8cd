"""`list --machine`: what this machine can run, what it lacks, and the remedy for each lack.

Torch is imported in a separate process, so that a build that crashes on this processor does not take the
command down.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpipe_bench.experiments import gpu
from gpipe_bench.experiments.commands.output import DONE, VERDICT_FAILED, tell

Status = Literal["ok", "missing", "optional"]

_MEMORY_GIB = 3.0  # what Table 1 takes at the paper's full size
_INSTALL = "python -m pip install torch"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. "missing" stops the short profiles; "optional" only what `remedy` says."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0 if the short profiles run here, or with `--device cuda` what `.ci/gpu` runs,
    else 1.
    """
    checks = list(examine(arguments.results, on_gpu=arguments.device == "cuda"))
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines += [f"{check.status:<9}{check.name:<{width}}  {check.found}"]
        lines += [f"{'':<{9 + width}}  -> {check.remedy}"] * bool(check.remedy)
    missing = [check.name for check in checks if check.status == "missing"]
    able = "this machine can run the smoke and short profiles"
    if arguments.device == "cuda":
        able = f"`.ci/gpu` takes the steps above in this order; {gpu.ESTIMATED}"
    lines += ["", f"missing: {', '.join(missing)}" if missing else able]
    tell(arguments, checks, lambda: "\n".join(lines))
    return VERDICT_FAILED if missing else DONE


def examine(results: Path, *, on_gpu: bool = False) -> Iterator[Check]:
    """All findings, the needed ones first; `on_gpu` asks for a GPU and for what each step on it needs."""
    new_enough = sys.version_info >= (3, 11)
    yield Check(
        "python",
        "ok" if new_enough else "missing",
        platform.python_version(),
        "" if new_enough else "install Python 3.11 or newer",
    )
    yield _packages()
    torch = gpu.ask_torch()
    yield _torch(torch)
    yield from _machine()
    yield _results(results)
    if on_gpu:
        yield from _steps(torch)
        return
    yield _gpus(torch)


def _packages() -> Check:
    wanted = gpu.declared()
    if absent := gpu.absent(wanted):
        return Check("packages", "missing", *gpu.how_to_install(absent).split(": ", 1))
    return Check("packages", "ok", f"all {len(wanted)} that the project needs")


def _torch(torch: dict[str, Any] | str) -> Check:
    if isinstance(torch, str):
        return Check(
            "torch", "missing", torch, f"{_INSTALL}; for a build that fits your device see pytorch.org"
        )
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU only"
    if not torch["distributed"]:
        return Check("torch", "missing", f"{torch['version']}, built without torch.distributed", _INSTALL)
    return Check("torch", "ok", f"{torch['version']} ({build}), {torch['threads']} threads")


def _machine() -> Iterator[Check]:
    from gpipe_bench.harness.environment import environment

    try:
        here = environment()
    except ImportError as error:
        yield Check("machine", "missing", f"can't be examined: {error}", "python -m pip install psutil")
        return
    cores = len(here["affinity"] or []) or here["cores_logical"]
    quota = here["cgroup_cpus"]
    limit = f", of which a quota allows {quota:g}" if quota is not None and quota < cores else ""
    yield Check("processor", "ok", f"{here['cpu_model'] or here['architecture']}, {cores} cores{limit}")
    total = min(here["memory_total_gib"], here["cgroup_memory_gib"] or here["memory_total_gib"])
    free = min(here["memory_available_gib"], total)
    enough = free >= _MEMORY_GIB
    yield Check(
        "memory",
        "ok" if enough else "missing",
        f"{free:.1f} GiB free of {total:.1f} GiB",
        "" if enough else f"Table 1 takes up to {_MEMORY_GIB:g} GiB; close something, or run --profile smoke",
    )


def _results(folder: Path) -> Check:
    """Whether records can be written, tried with a real file."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as error:
        return Check(
            "results", "missing", f"{folder}: {error.strerror or error}", "choose another with --results DIR"
        )
    free_gib = shutil.disk_usage(existing).free / 2**30
    return Check("results", "ok", f"{folder} can be written, {free_gib:.1f} GiB free")


def _gpus(torch: dict[str, Any] | str) -> Check:
    gpus = torch["gpus"] if isinstance(torch, dict) else []
    if not gpus:
        return Check("gpus", "optional", "none that torch sees", "only the full profiles need one")
    return Check("gpus", "ok", f"{len(gpus)} x {gpus[0]}: the full profiles can run")


def _steps(torch: dict[str, Any] | str) -> Iterator[Check]:
    """The GPUs, and a finding for each step of `.ci/gpu`: what it takes and lacks."""
    if isinstance(torch, str) or not torch["gpus"]:
        yield Check("gpus", "missing", gpu.why_no_gpu(torch), "use a machine with one")
    else:
        yield Check("gpus", "ok", f"{len(torch['gpus'])} x {torch['gpus'][0]}")
    for step in gpu.STEPS:
        why = gpu.lacks(step, torch)
        yield Check(f"step {step.name}", "optional" if why else "ok", step.takes, why)
