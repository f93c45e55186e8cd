"""What GPUs torch sees, asked in a process of its own: a build that does not fit the machine dies without a
message, and who asks has to survive it. Needs the standard library alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ASK_TORCH = """
import json, torch
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "bytes": [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())],
    "distributed": torch.distributed.is_available(),
    "threads": torch.get_num_threads(),
}))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as torch has it."""

    name: str
    num_bytes: int

    @property
    def gib(self) -> float:
        return self.num_bytes / 2**30

    def __str__(self) -> str:
        return f"{self.name}, {self.gib:.0f} GiB"


def ask_torch(environment: Mapping[str, str] | None = None) -> dict[str, Any] | str:
    """What torch says about itself, or why it can't be asked."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True, text=True, timeout=120, check=False,
            env=None if environment is None else dict(environment),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode < 0:
        return f"importing it ends with signal {-done.returncode}"
    if done.returncode > 0:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def gpus_of(torch: dict[str, Any] | str) -> list[Gpu]:
    """The GPUs in torch's answer."""
    if isinstance(torch, str):
        return []
    return [Gpu(name, size) for name, size in zip(torch["gpus"], torch["bytes"], strict=True)]


def why_none(torch: dict[str, Any] | str) -> str:
    """One line for a machine without a GPU that torch could use."""
    if isinstance(torch, str):
        return f"torch cannot be asked for GPUs: {torch}"
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built for CPUs only"
    return f"torch {torch['version']} ({build}) sees no GPU here"
