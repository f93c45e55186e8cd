"""The environment of a record: read, cheap, and absent where it can't be known."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest
import torch

from gpipe_bench.harness import environment as module
from gpipe_bench.harness.compare import differences
from gpipe_bench.harness.environment import code_state, environment


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git work tree with one source file, and its git command."""
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "tester@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = (tmp_path / "work").resolve()
    (root / "harness").mkdir(parents=True)
    (root / "harness" / "one.py").write_text("ONE = 1\n")

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", root, *arguments], check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    code_state.cache_clear()
    return root, git


def test_only_variables_that_matter_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somebodys/folder")
    module._software.cache_clear()
    found = environment()["variables"]
    module._software.cache_clear()
    assert found["OMP_NUM_THREADS"] == "1"
    assert "SECRET_TOKEN" not in found
    assert "TORCHINDUCTOR_CACHE_DIR" not in found, "a folder changes no number"


def test_a_clean_work_tree_gives_its_commit_and_a_changed_one_its_difference(repository):
    root, git = repository
    clean = code_state(root)
    assert clean["git_commit"] == git("rev-parse", "HEAD").strip()
    assert clean["git_dirty"] is False
    digests = {clean["code_sha256"]}
    for content in ("ONE = 2\n", "ONE = 3\n"):
        (root / "harness" / "one.py").write_text(content)
        code_state.cache_clear()
        changed = code_state(root)
        assert changed["git_dirty"] is True
        digests.add(changed["code_sha256"])
    assert len(digests) == 3


def test_without_git_the_sources_still_have_their_digest(repository, monkeypatch, tmp_path):
    root, _ = repository
    with_git = code_state(root)["code_sha256"]
    monkeypatch.setenv("PATH", str(tmp_path))
    code_state.cache_clear()
    without = code_state(root)
    assert without == {
        "git_commit": None, "git_dirty": None, "code_sha256": with_git,
    }  # fmt: skip


def test_differences_name_what_numbers_depend_on_and_leave_out_what_always_changes():
    one = {**environment(), "load": [0.1], "cpu_model": "one"}
    two = {**one, "load": [9.0], "memory_available_gib": 0.1, "cpu_model": "two"}
    assert differences([one, two, one]) == {"cpu_model": ["one", "two"]}
    assert differences([one, one]) == differences([]) == {}
    assert differences([one, {**one, "torch_threads": None, "gpus": None, "code_sha256": "another"}]) == {}


def test_how_gpus_compute_is_kept_where_there_are_any(monkeypatch):
    """What torch holds to be so, and what the driver says; a machine without a GPU has neither."""
    gpu = SimpleNamespace(name="H100", total_memory=80 * 2**30, major=9, minor=0)
    assert "gpu_numerics" not in environment() or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    now, ever = b"1410 MHz, 2619 MHz, 71, 688.10 W, 0x4\n", b"580.65.06, 1980 MHz, 2619 MHz, 700.00 W\n"
    monkeypatch.setattr(module, "_said", lambda *command: now if "clocks.sm" in command[1] else ever)
    module._driver.cache_clear()
    here = environment()
    module._driver.cache_clear()
    assert here["gpu_driver"][0]["driver_version"] == "580.65.06"
    assert here["gpu_now"][0]["temperature.gpu"] == "71"
    numerics = here["gpu_numerics"]
    assert numerics["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    other = {**here, "gpu_numerics": {**numerics, "cudnn_allow_tf32": not numerics["cudnn_allow_tf32"]}}
    assert "gpu_numerics" in differences([here, other])
    assert differences([here, {**here, "gpu_now": None}]) == {}
