"""The guard speaks for the checkout that it runs from, and refuses to where another may be meant."""

from __future__ import annotations

import os
import subprocess

import pytest

from gpipe_bench.experiments.commands import guard as verb_guard
from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.harness.guard.tree import check_place

MODULE = "package/__init__.py"


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    """A repository with the guarded package."""
    root = tmp_path / "checkout"
    (root / "package").mkdir(parents=True)
    (root / MODULE).touch()
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


@pytest.fixture
def other(tmp_path):
    """A repository of somebody else."""
    root = tmp_path / "other"
    root.mkdir()
    git(root, "init", "-q")
    return root


@pytest.mark.parametrize("arguments", [[], ["--base", "HEAD"], ["--update"]])
def test_in_another_repository_nothing_is_measured(other, monkeypatch, capsys, arguments):
    measured = []
    monkeypatch.setattr(verb_guard, "check_counters", lambda *_: measured.append("counters") or 0)
    monkeypatch.setattr(verb_guard, "check_time", lambda *_: measured.append("time") or 0)
    monkeypatch.chdir(other)
    assert main(["guard", *arguments]) == 2
    assert measured == []
    captured = capsys.readouterr()
    assert "passed" not in captured.out
    assert f"cd {verb_guard.ROOT}" in captured.err


def test_its_own_folders_are_the_right_place(checkout, tmp_path):
    check_place(checkout, MODULE, checkout)
    check_place(checkout, MODULE, checkout / "package")
    link = tmp_path / "link"
    link.symlink_to(checkout)
    check_place(checkout, MODULE, link / "package")
    check_place(link, MODULE, checkout)


def test_a_project_below_the_top_of_a_repository(other):
    (other / "project" / "package").mkdir(parents=True)
    (other / "project" / MODULE).touch()
    git(other, "add", "-A")
    check_place(other / "project", MODULE, other)


def test_another_worktree_is_another_checkout(checkout, tmp_path):
    tree = tmp_path / "tree"
    git(checkout, "worktree", "add", "-q", "--detach", tree)
    with pytest.raises(ValueError, match=f"to guard {tree}, start from its folder: cd {tree}$"):
        check_place(checkout, MODULE, tree / "package")
    check_place(tree, MODULE, tree)


def test_another_repository_is_not_guarded(checkout, other):
    with pytest.raises(
        ValueError, match=f"{other} is another repository, .* --repo {other} .* cd {checkout}$"
    ):
        check_place(checkout, MODULE, other)


def test_outside_any_repository(checkout, tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is in no git repository .*; .* cd {checkout}$"):
        check_place(checkout, MODULE, tmp_path)


def test_an_installed_package_is_no_checkout(other):
    """Not even where the environment lies in the very repository."""
    site = other / ".venv" / "site-packages"
    (site / "package").mkdir(parents=True)
    (site / MODULE).touch()
    (other / ".gitignore").write_text(".venv\n")
    with pytest.raises(ValueError, match="is not a checkout .* start the guard in a clone"):
        check_place(site, MODULE, other)


def test_an_unpacked_archive_can_be_guarded_from_within(tmp_path):
    """Counters need no history."""
    (tmp_path / "package").mkdir()
    check_place(tmp_path, MODULE, tmp_path / "package")


def test_what_a_hook_tells_git_is_not_meant_for_the_guard(checkout, other, monkeypatch):
    monkeypatch.setenv("GIT_DIR", os.fspath(checkout / ".git"))
    with pytest.raises(ValueError, match="another repository"):
        check_place(checkout, MODULE, other)
