"""A file that is replaced is the one before or the new one, whatever happens in between."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.harness.store import write_whole

ROOT = Path(__file__).parents[2]
FULL = """
import resource, sys
from pathlib import Path
from gpipe_bench.harness.store import write_whole
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
write_whole(Path(sys.argv[1]), "new " * 10_000)
"""


def test_folders_are_made_and_the_file_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "page.html"
    for text in ("first\n", "é: 第二\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in path.parent.iterdir()] == ["page.html"]


def test_an_interrupt_right_behind_the_replacement_is_that_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def interrupted(source: str, target: Path) -> None:
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "page.html", "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("page.html", "new")]


def test_no_room_for_the_new_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "counters.json"
    write_whole(path, "old")
    process = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "OSError" in process.stderr
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["counters.json"]
