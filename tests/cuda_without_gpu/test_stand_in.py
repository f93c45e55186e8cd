"""What is said where the runtime without a device cannot be built, and which walks over it have failed."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest
import stand_in


def test_a_machine_without_a_compiler_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in.shutil, "which", lambda tool: None if tool == "g++" else tool)
    with pytest.raises(stand_in.CannotBuildError, match=r"^g\+\+ not found; install a C\+\+ compiler"):
        stand_in.prepare(tmp_path / "folder")
    monkeypatch.setattr(stand_in.platform, "machine", lambda: "arm64")
    with pytest.raises(stand_in.CannotBuildError, match="is for Linux on x86_64, and this is .* on arm64"):
        stand_in.prepare(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("status", "took_bytes", "said", "wanted"),
    [
        (0, 3 * 2**29, "== grid: two steps\n== grid: found", "ok, 0 s, 1.5 of 2 GiB"),
        (3, 0, "== grid: two steps\n== grid: exit status 1", "failed, 0 s, 0.0 of 2 GiB"),
        (0, 5 * 2**29, "== grid: two steps\n== grid: found", "failed, 0 s, 2.5 of 2 GiB"),
        (0, 0, "grid: skipped: needs 2 GPUs", "ok, 0 s, 0.0 of 2 GiB"),
        (0, 0, "== grid: two steps", "failed: no result of grid, 0 s, 0.0 of 2 GiB"),
    ],
)
def test_a_walk_fails_that_takes_more_memory_than_was_said_or_gives_no_reason(
    status: int, took_bytes: int, said: str, wanted: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    walks = runpy.run_path(str(Path(stand_in.__file__).with_name("__main__.py")))

    def run(command: list[str], *, env: dict[str, str], stdout: TextIO, **_: object) -> object:
        assert command[1:] == ["a command", "--results", str(tmp_path / "out" / "grid-2")]
        assert (env["FAKE_GPUS"], env["FAKE_GIB"]) == ("2", "44.4")
        (Path(env["FAKE_PEAKS"]) / "17").write_text(f"4096\n{took_bytes}\n")
        print(said, file=stdout)
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", run)
    walk = walks["Walk"]("grid", 2, 44.4, ("a command",), ("grid",), most_gib=2.0)
    is_right = walks["take"](walk, tmp_path)
    first, *shown = capsys.readouterr().out.splitlines()
    assert first.partition(": ")[2].partition(";")[0] == wanted
    assert is_right == (not wanted.startswith("failed"))
    behind = said.splitlines()[status == 0 and said.startswith("==") :]  # of one that failed all that it said
    assert shown == [f"    {line}" for line in behind]
