"""A checkout of the base, the processes of the guard, and where it refuses to measure."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpipe_bench.experiments.guard.trees import base_tree, merge_base


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(root: Path, text: str) -> str:
    (root / "file.txt").write_text(text)
    git(root, "add", "file.txt")
    git(root, "commit", "--quiet", "--message", text)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """main: first - second; feature: first - third, checked out."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--quiet")
    commit(root, "first")
    git(root, "branch", "feature")
    commit(root, "second")
    git(root, "checkout", "--quiet", "feature")
    commit(root, "third")
    return root


def worktrees(root: Path) -> int:
    return len(git(root, "worktree", "list").splitlines())


def test_the_base_is_where_the_head_left_and_then_it_is_gone(repository: Path) -> None:
    (repository / "file.txt").write_text("not committed")
    with pytest.raises(KeyboardInterrupt), base_tree(repository, "main") as base:  # noqa: PT012
        assert (base.path / "file.txt").read_text() == "first"
        assert base.commit == git(repository, "rev-parse", "main~1")
        assert worktrees(repository) == 2
        (base.path / "new.txt").write_text("left behind")
        raise KeyboardInterrupt
    assert not base.path.parent.exists()
    assert worktrees(repository) == 1
    assert (repository / "file.txt").read_text() == "not committed"
    assert git(repository, "rev-parse", "--abbrev-ref", "HEAD") == "feature"


def test_what_a_killed_guard_left_is_removed_by_the_next(repository: Path, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, used = tmp_path / f"guard-{ended.pid}-abcd", tmp_path / f"guard-{os.getpid()}-abcd"
    for folder in (left, used):
        git(repository, "worktree", "add", "--quiet", "--detach", os.fspath(folder / "base"), "main")
    with base_tree(repository, "main"):
        assert not left.exists()
        assert (used / "base" / "file.txt").exists()
        assert worktrees(repository) == 3
    assert worktrees(repository) == 2


def test_submodules_are_checked_out_too(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the base has them; git clones from folders only where a user allows it."""
    part = tmp_path / "part"
    part.mkdir()
    git(part, "init", "--quiet")
    commit(part, "of the base")
    allow = ("-c", "protocol.file.allow=always")
    git(repository, *allow, "submodule", "--quiet", "add", os.fspath(part), "part")
    git(repository, "commit", "--quiet", "--message", "part")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", os.fspath(home))
    with pytest.raises(ValueError, match="the submodules of the base can't be checked out"):
        base_tree(repository, "HEAD").__enter__()
    (home / ".gitconfig").write_text('[protocol "file"]\n\tallow = always\n')
    with base_tree(repository, "HEAD") as base:
        assert (base.path / "part" / "file.txt").read_text() == "of the base"
    assert worktrees(repository) == 1


@pytest.mark.parametrize("ref", ["nonsense", "--all"])
def test_an_unknown_revision_is_named(repository: Path, ref: str) -> None:
    with pytest.raises(ValueError, match=f"unknown revision '{ref}'; fetch it first"):
        merge_base(repository, ref)
