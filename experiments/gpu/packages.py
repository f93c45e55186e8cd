"""Which packages a machine lacks, and how they get there where nothing can be downloaded: as wheels.

Needs the standard library alone.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpipe_bench.harness.places import ROOT

_PROJECT = ROOT / "pyproject.toml"
WHEELS = ROOT / ".wheels"
"""Where carried wheels are looked for."""


def declared() -> list[str]:
    """What the project declares to need, such as "msgspec>=0.19"."""
    try:
        found: list[str] = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
        return found
    except OSError:  # installed without its sources
        lines = importlib.metadata.requires("gpipe-bench") or []
        return [line for line in lines if "extra ==" not in line]


def name_of(requirement: str) -> str:
    """The package of a requirement."""
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]


def absent(requirements: Iterable[str], path: Sequence[str] | None = None) -> list[str]:
    """Those of which no version is installed, or one that is too old; `path` is searched instead of
    `sys.path`.
    """
    return [requirement for requirement in requirements if not _fits(requirement, path)]


def _fits(requirement: str, path: Sequence[str] | None) -> bool:
    places = sys.path if path is None else list(path)
    found = next(iter(importlib.metadata.distributions(name=name_of(requirement), path=places)), None)
    if found is None:
        return False
    least = re.search(r">=\s*([0-9.]+)", requirement)
    return least is None or _numbers(found.version) >= _numbers(least[1])


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"[0-9.]*", version)
    numbers = [int(part) for part in leading[0].split(".") if part] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def wheels_for(requirements: Iterable[str], folder: Path) -> list[Path]:
    """The wheels in `folder` of the packages that are wanted."""
    wanted = {_normal(name_of(requirement)) for requirement in requirements}
    return [path for path in sorted(folder.glob("*.whl")) if _normal(path.name.split("-")[0]) in wanted]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def install(wheels: Sequence[Path], target: Path) -> str:
    """Unpacks wheels into a folder for PYTHONPATH, nothing being downloaded; "" or pip's last words."""
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade",
        "--target", str(target), *map(str, wheels),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"])[-1]


def how_to_carry(requirements: Sequence[str], folder: Path = WHEELS) -> str:
    """What to type on a machine with a network, for this Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = " ".join(f"'{requirement}'" for requirement in requirements)
    return (
        f"here `python -m pip install {wanted}`; without a network, elsewhere `python -m pip download "
        f"--no-deps --only-binary=:all: --python-version {version} --platform manylinux_2_17_x86_64 -d "
        f"{folder.name} {wanted}` and bring the folder {folder.name} along"
    )
