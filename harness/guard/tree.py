"""A second checkout of the repository, for as long as two revisions are compared.

`git worktree` shares the object store, so it takes a second and needs no network; it is removed whatever
happens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Base:
    """The revision that the working tree is compared with, and where it is checked out."""

    ref: str
    commit: str
    path: Path


@contextlib.contextmanager
def base_tree(root: Path, ref: str) -> Iterator[Base]:
    """Checks out the commit where the working tree at `root` left `ref`, until the block ends.

    Raises ValueError, with the remedy, without git or a repository, for an unknown revision, and where the
    history that was fetched does not reach the common commit.
    """
    commit = merge_base(root, ref)
    prefix = _git(root, "rev-parse", "--show-prefix")
    folder = Path(tempfile.mkdtemp(prefix="guard-"))
    path = folder / "base"
    try:
        # A checkout hook is the user's, for checkouts of the user's.
        _git(
            root, "-c", f"core.hooksPath={os.devnull}", "worktree", "add", "--quiet", "--detach",
            os.fspath(path), commit,
        )  # fmt: skip
        yield Base(ref, commit, path / prefix)
    finally:
        with contextlib.suppress(ValueError):
            _git(root, "worktree", "remove", "--force", os.fspath(path))
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(ValueError):
            _git(root, "worktree", "prune")


def merge_base(root: Path, ref: str) -> str:
    """The commit where HEAD left `ref`."""
    try:
        _git(root, "rev-parse", "--show-toplevel")
    except ValueError as error:
        raise ValueError(
            f"{root} is no git repository that can be read ({error}); "
            "two revisions are compared, so run this in a clone"
        ) from error
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except ValueError as error:
        raise ValueError(
            f"unknown revision {ref!r}; fetch it first (git fetch), or name a branch, tag or commit that "
            "`git rev-parse` knows, such as HEAD~1"
        ) from error
    try:
        return _git(root, "merge-base", commit, "HEAD")
    except ValueError as error:
        shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
        remedy = (
            "this clone is shallow: git fetch --unshallow, or fetch-depth: 0 in the checkout step"
            if shallow
            else "compare with a revision of the same history"
        )
        raise ValueError(f"{ref!r} and HEAD have no common commit here; {remedy}") from error


def _git(root: Path, *arguments: str) -> str:
    """Output of a git command, stripped. Raises ValueError with what git said."""
    # Inside a hook git points these at the hook's own repository and index.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(root), *arguments],
            capture_output=True, env=environment, stdin=subprocess.DEVNULL, check=False, text=True,
            timeout=120,
        )  # fmt: skip
    except OSError as error:
        raise ValueError(f"git can't be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"git {arguments[0]} has not ended for 120 s") from error
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"git {arguments[0]} failed with status {done.returncode}")
    return done.stdout.strip()
