"""What of the needed a machine has and lacks: packages, and GPUs that torch can use.

For `.ci/gpu` and `doctor`, which say so before anything else is imported: the standard library alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from gpipe_bench.harness import ROOT

_ASK_TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found],
    "gib": min((gpu.total_memory / 2**30 for gpu in found), default=0.0),
    "distributed": torch.distributed.is_available(),
    "threads": torch.get_num_threads(),
}))
"""


def ask_torch() -> dict[str, Any] | str:
    """What torch says about itself and the GPUs, or why it can't be asked.

    In a process of its own: a build that does not fit the machine dies without a message.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode < 0:
        return f"importing it ends with signal {-done.returncode}"
    if done.returncode > 0:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def why_no_gpu(torch: dict[str, Any] | str) -> str:
    """One line for a machine without a GPU that torch could use."""
    if isinstance(torch, str):
        return f"torch cannot be asked for GPUs: {torch}"
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built for CPUs only"
    return f"torch {torch['version']} ({build}) sees no GPU here"


def declared() -> list[str]:
    """What the project declares to need, with its experiments, such as "msgspec>=0.19"."""
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return [*project["dependencies"], *project["optional-dependencies"]["experiments"]]
    except OSError:  # installed without its sources
        lines = [line.partition(";") for line in importlib.metadata.requires("gpipe-bench") or []]
        return [what.strip() for what, _, when in lines if "extra" not in when or "experiments" in when]


def absent(requirements: Iterable[str]) -> list[str]:
    """Those of which no version is installed, or one that is too old."""

    def numbers(version: str) -> list[int]:
        found = [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
        return found + [0] * (4 - len(found))  # 1.0 is no older than 1.0.0

    missing = []
    for requirement in requirements:
        name, least = re.match(r"([\w.-]+)(?:.*>=\s*([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
        try:
            if numbers(importlib.metadata.version(name)) >= numbers(least or ""):
                continue
        except importlib.metadata.PackageNotFoundError:
            pass
        missing.append(requirement)
    return missing


def how_to_install(requirements: Sequence[str]) -> str:
    """Names of packages, and what to type."""
    names = ", ".join(re.split(r"[^\w.-]", each)[0] for each in requirements)
    return f"{names}: python -m pip install {' '.join(map(repr, requirements))}"
