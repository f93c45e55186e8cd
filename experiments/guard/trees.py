"""The two checkouts compared: the working tree, and the merge base of HEAD and a given revision.

`git worktree` shares the object store, so that a checkout takes a second and needs no network except
for submodules; it is removed whatever happens, and what a killed guard left is removed by the next.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from gpipe_bench.harness.programs import run

DEEPER = "this clone is shallow: git fetch --unshallow, or fetch-depth: 0 in the checkout step"
TIMEOUT_S = 120


class Base(NamedTuple):
    """The revision that the working tree is compared with, and where it is checked out."""

    ref: str
    commit: str
    path: Path


@contextlib.contextmanager
def base_tree(root: Path, ref: str) -> Iterator[Base]:
    """Checks out the commit where the working tree at `root` left `ref`, until the block ends.

    Raises ValueError, with the remedy, as `merge_base`, and where a submodule can't be checked out.
    """
    commit = merge_base(root, ref)
    prefix = _git(root, "rev-parse", "--show-prefix")
    _remove_left(root)
    folder = Path(tempfile.mkdtemp(prefix=f"guard-{os.getpid()}-"))
    path = folder / "base"
    try:
        # The user's checkout hooks are meant for the user's own checkouts.
        without_hooks = ("-c", f"core.hooksPath={os.devnull}")
        _git(root, *without_hooks, "worktree", "add", "--quiet", "--detach", os.fspath(path), commit)
        if (path / ".gitmodules").is_file():
            try:
                _git(path, *without_hooks, "submodule", "update", "--init", "--recursive", "--quiet")
            except ValueError as error:
                raise ValueError(f"the submodules of the base can't be checked out: {error}") from error
        yield Base(ref, commit, path / prefix)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(ValueError):
            _git(root, "worktree", "prune")


def _remove_left(root: Path) -> None:
    """Removes checkouts of guards that were killed."""
    for line in _git(root, "worktree", "list", "--porcelain").splitlines():
        folder = Path(line.removeprefix("worktree ")).parent
        name = re.fullmatch(r"guard-(\d+)-\w+", folder.name)
        if line.startswith("worktree ") and name and not psutil.pid_exists(int(name[1])):
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ValueError):
        _git(root, "worktree", "prune")


def merge_base(root: Path, ref: str) -> str:
    """The commit where HEAD left `ref`.

    Raises ValueError, with the remedy, without git or a repository, for an unknown revision, and where the
    history that was fetched does not reach the common commit.
    """
    try:
        is_shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
    except ValueError as error:
        raise ValueError(
            f"{root} is no git repository that can be read ({error}); "
            "two revisions are compared, so run this in a clone"
        ) from error
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except ValueError as error:
        raise ValueError(
            f"unknown revision {ref!r}; {f'{DEEPER}; ' if is_shallow else ''}fetch it first (git fetch), or "
            "name a branch, tag or commit that `git rev-parse` knows, such as HEAD~1"
        ) from error
    try:
        return _git(root, "merge-base", commit, "HEAD")
    except ValueError as error:
        remedy = DEEPER if is_shallow else "compare with a revision of the same history"
        raise ValueError(f"{ref!r} and HEAD have no common commit here; {remedy}") from error


def top_of(folder: Path) -> Path | None:
    """The top of the git working tree that a folder lies in; None in no repository that can be read."""
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel")).resolve()
    except ValueError:
        return None


def _git(root: Path, *arguments: str) -> str:
    """Output of a git command, stripped. Raises ValueError with what git said."""
    # Inside a hook git points these at the hook's own repository and index.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = run(["git", "-C", os.fspath(root), *arguments], TIMEOUT_S, env=environment)
    except OSError as error:
        raise ValueError(f"git can't be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"git {arguments[0]} has not ended for {TIMEOUT_S} s") from error
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"git {arguments[0]} failed with status {done.returncode}")
    return done.stdout.strip()
