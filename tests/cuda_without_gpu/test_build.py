"""What is said where the runtime without a device cannot be built, and what its plugin still looks at."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import build
import forms_only
import pytest
import torch


def test_a_machine_without_a_compiler_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda tool: None if tool == "g++" else tool)
    with pytest.raises(build.CannotBuildError, match=r"^g\+\+ not found; install a C\+\+ compiler"):
        build.prepare(tmp_path / "folder")
    monkeypatch.setattr(build.platform, "machine", lambda: "arm64")
    with pytest.raises(build.CannotBuildError, match="is for Linux on x86_64, and this is .* on arm64"):
        build.prepare(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_without_a_network_it_says_what_to_carry_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is missing at once; what lies there is not asked for."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> object:
        asked.append(command)
        return SimpleNamespace(returncode=1, stderr="\nERROR: No matching distribution", stdout="")

    monkeypatch.setattr(build.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "nvidia_cuda_crt-13.0.88-py3-none-manylinux2014_x86_64.whl").touch()
    with pytest.raises(build.CannotBuildError, match="No matching distribution; without a network, carry"):
        build.prepare(tmp_path)
    assert [word for word in asked[0] if "==" in word] == list(build.PINNED[:3])
    assert not (tmp_path / "site.sha256").exists()


def test_values_count_for_nothing_and_forms_for_everything() -> None:
    zeros, ones = torch.zeros(2), torch.ones(2)
    forms_only.assert_equal_forms([zeros], [ones], rtol=0)
    for other in ([torch.zeros(3)], [zeros.double()], [zeros, ones], [2.0]):
        with pytest.raises(AssertionError):
            forms_only.assert_equal_forms([zeros], other)
