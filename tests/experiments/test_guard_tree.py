"""A checkout of the base in repositories made for the purpose, and where the guard refuses to measure any."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpipe_bench.experiments.commands import guard as verb
from gpipe_bench.experiments.commands.cli import main
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
    with base_tree(repository, "main") as base:
        assert (base.path / "file.txt").read_text() == "first"
        assert base.commit == git(repository, "rev-parse", "main~1")
        assert worktrees(repository) == 2
    assert not base.path.parent.exists()
    assert worktrees(repository) == 1
    assert (repository / "file.txt").read_text() == "not committed"
    assert git(repository, "rev-parse", "--abbrev-ref", "HEAD") == "feature"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_it_is_gone_after_a_failure_too(repository: Path, error: type[BaseException]) -> None:
    paths = []

    def work() -> None:
        with base_tree(repository, "main") as base:
            (base.path / "new.txt").write_text("left behind")
            paths.append(base.path)
            raise error

    with pytest.raises(error):
        work()
    assert not paths[0].parent.exists()
    assert worktrees(repository) == 1


def test_a_folder_of_a_larger_repository_is_found_again(repository: Path) -> None:
    inner = repository / "inner"
    inner.mkdir()
    (inner / "x").write_text("x")
    git(repository, "add", "inner")
    git(repository, "commit", "--quiet", "--message", "inner")
    with base_tree(inner, "HEAD") as base:
        assert (base.path / "x").read_text() == "x"


def test_hooks_of_the_repository_do_not_run(repository: Path) -> None:
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch ran-a-hook\n")
    hook.chmod(0o755)
    with base_tree(repository, "main") as base:
        assert not (base.path / "ran-a-hook").exists()


def test_inside_a_hook_the_folder_counts(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere/.git")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    assert len(merge_base(repository, "main")) == 40


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


@pytest.mark.parametrize("ref", ["nonsense", "--all", "", "main:file.txt"])
def test_an_unknown_revision_is_named(repository: Path, ref: str) -> None:
    with pytest.raises(ValueError, match=f"unknown revision '{ref}'; fetch it first"):
        merge_base(repository, ref)


def test_no_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no git repository .*run this in a clone"):
        merge_base(tmp_path, "main")


def test_no_git_at_all_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="git can't be started"):
        merge_base(tmp_path, "main")


def test_a_shallow_clone_is_told_how_to_go_on(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--depth", "1", "--no-single-branch", f"file://{repository}", "shallow")
    with pytest.raises(ValueError, match="shallow: git fetch --unshallow, or fetch-depth:"):
        merge_base(tmp_path / "shallow", "origin/main")


def test_another_history_has_no_base(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "--orphan", "other")
    commit(repository, "other")
    with pytest.raises(ValueError, match="'main' and HEAD have no common"):
        merge_base(repository, "main")


# Where it is started


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A repository of somebody else."""
    root = tmp_path / "other"
    root.mkdir()
    git(root, "init", "-q")
    return root


@pytest.mark.parametrize("arguments", [[], ["--base", "HEAD"], ["--update"]])
def test_in_another_repository_nothing_is_measured(
    other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    measured: list[str] = []
    for tier in ("check_counters", "check_time"):
        monkeypatch.setattr(verb, tier, lambda *_: measured.append("something"))
    monkeypatch.chdir(other)
    assert main(["guard", *arguments]) == 2
    assert measured == []
    captured = capsys.readouterr()
    assert "passed" not in captured.out
    assert f"measures {verb.ROOT}" in captured.err
