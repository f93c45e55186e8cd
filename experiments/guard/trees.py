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
        without_hooks = ("-c", f"core.hooksPath={os.devnull}")
        _git(root, *without_hooks, "worktree", "add", "--quiet", "--detach", os.fspath(path), commit)
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


def check_place(root: Path, module: str, cwd: Path) -> None:
    """Raises ValueError, with the remedy, unless `cwd` lies in the checkout whose code is running.

    `root` is the folder of that code and `module` one of its files. A guard that is started elsewhere,
    through PYTHONPATH or an installation, would vouch for another checkout than its user has changed.
    Without any repository, as in an unpacked archive, the folders decide.
    """
    root, cwd = root.resolve(), cwd.resolve()
    ours, theirs = top_of(root), top_of(cwd)
    if ours is None and theirs is None and cwd.is_relative_to(root):
        return
    if ours is None or not _git(root, "ls-files", "--", module):
        raise ValueError(
            f"this guard runs from {root}, which is not a checkout of the repository that is to be guarded; "
            "start the guard in a clone, from its folder"
        )
    if theirs is None:
        raise ValueError(
            f"{cwd} is in no git repository that can be read, and this guard measures {root}; to guard that, "
            f"cd {root}"
        )
    if theirs == ours:
        return
    there = theirs / root.relative_to(ours)
    if (there / module).exists():
        raise ValueError(f"this guard measures {root}; to guard {there}, start from its folder: cd {there}")
    raise ValueError(
        f"{theirs} is another repository, and without --repo this guard measures {root}; to guard an engine "
        f"there: guard --repo {theirs} --engine module:attribute --base REF; to guard this one: cd {root}"
    )


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
