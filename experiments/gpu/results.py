"""What the steps leave: one archive, which the next call on another machine goes on from.

In it are the experiments' records, what every step printed, and a line of facts for each step. The archive is
written anew after every step, so that one which is ended from outside costs itself alone.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

ARCHIVE = "gpu-results.tar.gz"
_KEPT = ("records", "logs", "steps")
_NOT_KEPT = ("unfinished", "figures")

Status = Literal["done", "failed", "cut", "skipped"]


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken. "cut" is one that the time did not suffice for; `why` says more."""

    name: str
    status: Status
    seconds: float
    exit_status: int | None
    device: str
    finished_at: str
    why: str = ""
    rehearsed: bool = False


class Results:
    """A folder of results, unpacked; `work` must not lie in the folder of the archive."""

    def __init__(self, work: Path) -> None:
        self.work = work
        for name in _KEPT:
            (work / name).mkdir(parents=True, exist_ok=True)

    @property
    def records(self) -> Path:
        """Where the experiments keep their records."""
        return self.work / "records"

    def log(self, step: str) -> Path:
        """The file for what a step prints."""
        return self.work / "logs" / f"{step}.txt"

    def taken(self) -> dict[str, Taken]:
        """The steps that were taken, by name."""
        found = {}
        for path in sorted((self.work / "steps").glob("*.json")):
            try:
                taken = Taken(**json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError):  # half written or foreign: as if it had not been taken
                continue
            found[taken.name] = taken
        return found

    def add(self, taken: Taken) -> None:
        """Keeps the facts of a step."""
        path = self.work / "steps" / f"{taken.name}.json"
        path.write_text(json.dumps(asdict(taken), indent=1) + "\n", encoding="utf-8")

    def read(self, places: Iterable[Path]) -> list[Path]:
        """Takes over earlier results: archives, folders with archives, or unpacked ones; returns those found.

        Of a step that several have, the latest counts; records are joined.
        """
        found: list[Path] = []
        for place in places:
            archives = [place] if place.is_file() else sorted(place.glob("*.tar.gz"))
            for archive in archives:
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        with tarfile.open(archive) as file:
                            file.extractall(folder, filter="data")
                    except (tarfile.TarError, OSError, EOFError):
                        continue  # cut off on its way; the steps are taken again
                    if self._take_over(Path(folder)):
                        found.append(archive)
            if place.is_dir() and self._take_over(place):
                found.append(place)
        return found

    def _take_over(self, folder: Path) -> bool:
        if folder.resolve() == self.work.resolve() or not (folder / "steps").is_dir():
            return False
        here, other = self.taken(), Results(folder).taken()
        for name, taken in other.items():
            if name not in here or here[name].finished_at < taken.finished_at:
                self.add(taken)
                if (log := folder / "logs" / f"{name}.txt").is_file():
                    shutil.copyfile(log, self.log(name))
        for path in (folder / "records").glob("*.jsonl"):
            known = self.records / path.name
            lines = known.read_bytes().splitlines(keepends=True) if known.exists() else []
            seen = set(lines)
            more = [line for line in path.read_bytes().splitlines(keepends=True) if line not in seen]
            known.write_bytes(b"".join([*lines, *more]))
        return True

    def pack(self, folder: Path) -> Path:
        """Writes the archive; one that was there stays until the new one is whole."""
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / ARCHIVE
        part = target.with_name(f".{ARCHIVE}.{os.getpid()}")
        try:
            with tarfile.open(part, "w:gz") as file:
                for name in _KEPT:
                    file.add(self.work / name, name, filter=_kept)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if set(Path(entry.name).parts) & set(_NOT_KEPT) else entry
