"""The guard in somebody else's repository: its checkouts, what it finds there, and what it refuses to vouch
for.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import their_repository
from their_repository import git

from gpipe_bench.experiments.commands import guard as verb
from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.experiments.guard import arms as guard_arms
from gpipe_bench.experiments.guard.arms import (
    Arm,
    Command,
    WorkerError,
    arms_of,
    base_tree,
    benchmarks_of,
    merge_base,
    subject_of,
)
from gpipe_bench.experiments.guard.run import Finding, measure
from gpipe_bench.harness.rounds import judge


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return their_repository.make(tmp_path / "theirs")


@pytest.fixture
def start(theirs: Path, tmp_path: Path) -> Iterator[Callable[[Path], Arm]]:
    """Starts the process that measures a checkout of their repository."""
    with ExitStack() as stack:

        def started(tree: Path = theirs) -> Arm:
            subject = subject_of(theirs, theirs / "benchmarks.py", None)
            arm = Arm("base", tree, subject, str(tmp_path), stack)
            arm.receive(guard_arms.START_S)
            return arm

        yield started


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


# The checkout of the base


def committed(root: Path, text: str) -> None:
    write(root / "file.txt", text)
    their_repository.commit(root, text)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """main: first - second; feature: first - third, checked out."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    committed(root, "first")
    git(root, "branch", "feature")
    committed(root, "second")
    git(root, "checkout", "--quiet", "feature")
    committed(root, "third")
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
    git(part, "init", "-q")
    committed(part, "of the base")
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


# Functions


@pytest.mark.alone  # steps are timed
def test_their_slower_commit_is_measured_as_slower(theirs: Path, tmp_path: Path) -> None:
    """Their `models/` is theirs and ours is ours; the base is their earlier commit."""
    git(theirs, "worktree", "add", "-q", "--detach", str(tmp_path / "base"), "HEAD")
    their_repository.slow_down(theirs, 3.0)
    subject = subject_of(theirs, theirs / "benchmarks.py", None)
    assert benchmarks_of(subject) == ["rows"]
    finding = Finding("rows")
    with arms_of(subject, tmp_path / "base") as arms:
        measure(arms, finding, subject, sample_s=0.01)
    judged = judge(finding.trials)
    assert judged.cpu is not None
    assert 1.5 < judged.head.value < 6  # four times as long
    assert abs(judged.control.value) < 1
    assert judged.cpu.value > 1.5  # it computes, rather than waits


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("BENCHMARKS = {}", "declares no benchmarks"),
        ("import sys; sys.exit('leaves')", "SystemExit: leaves"),
    ],
)
def test_a_file_without_benchmarks_says_so(theirs: Path, text: str, said: str) -> None:
    subject = subject_of(theirs, write(theirs / "benchmarks.py", text), None)
    with pytest.raises(ValueError, match=f"can't be used: head .*{said}"):
        benchmarks_of(subject)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("lambda: 3", "ValueError: once returned int; it must"),
        ("lambda: lambda: threading.Event().wait()", "has not answered for 1 s"),
        ("lambda: print('no such layer') or os._exit(1)", "ended with exit status 1:\nno such layer"),
        ("lambda: os.kill(os.getpid(), 9)", "ended with exit status -9"),
    ],
)
def test_a_function_that_can_not_be_timed_says_so(
    theirs: Path, start: Callable[..., Arm], monkeypatch: pytest.MonkeyPatch, function: str, said: str
) -> None:
    write(theirs / "benchmarks.py", f"import os, sys, threading\nBENCHMARKS = {{'once': {function}}}")
    if "answered" in said:
        monkeypatch.setattr(guard_arms, "BUILD_S", 1.0)
    with pytest.raises(WorkerError, match=said) as caught:
        start().build("once")
    assert not caught.value.lacks, "that is no reason to call it new"


def test_killing_it_ends_its_children_too(theirs: Path, tmp_path: Path) -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).pid"
    text = f"import subprocess, sys\nBENCHMARKS = {{'child': lambda: (pid := {child}) and (lambda: pid)}}"
    subject = subject_of(theirs, write(theirs / "benchmarks.py", text), None)
    with ExitStack() as stack:
        arm = Arm("base", theirs, subject, str(tmp_path), stack)
        arm.receive(guard_arms.START_S)
        process = psutil.Process(int(arm.build("child").result or 0))
        assert process.is_running()
    psutil.wait_procs([process], timeout=10)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


# Where modules come from


@pytest.mark.parametrize("place", ["theirs/python", "elsewhere/site-packages"])
def test_a_module_that_is_not_the_arms_own_is_refused_by_name(
    theirs: Path, start: Callable[..., Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """As an editable installation finds it: it would be the same in all arms, and "same" a lie."""
    base, folder = tmp_path / "base", tmp_path / place
    for each in (base / "python", theirs / "python", folder):
        write(each / "their_package" / "__init__.py", "def work(): return 1")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    text = "import their_package\nBENCHMARKS = {'work': lambda: their_package.work}"
    write(theirs / "benchmarks.py", text)
    with pytest.raises(WorkerError, match=f"module their_package comes from {folder}/.*not from {base}"):
        start(base).build("work")


# One fault takes no other down


def test_a_benchmark_that_the_base_lacks_is_new_and_one_that_exits_is_named(
    theirs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And the others are timed, with the whole summary."""
    write(theirs / "models" / "more.py", "def work(): return 1")
    with (theirs / "benchmarks.py").open("a") as file:
        file.write(
            "def build_new():\n    import models.more\n    return models.more.work\n"
            "def build_bad():\n    raise SystemExit(5)\n"
            'BENCHMARKS |= {"bad": build_bad, "new": build_new}\n'
        )
    summary = tmp_path / "summary.md"
    asked = ["guard", "--repo", str(theirs), "--base", "HEAD", "--benchmarks", "benchmarks.py", "--json"]
    asked += ["--budget-s", "1", "--markdown", str(summary)]
    assert main(asked) == 3
    out, err = capsys.readouterr()
    rows, bad, fresh = [json.loads(line) for line in out.splitlines()]
    assert rows["trials"] == 1
    assert "SystemExit: 5" in bad["failed"]
    assert fresh["new"]
    assert not fresh["failed"]
    assert err.endswith("error: failed: bad\n")
    told = summary.read_text()
    assert "- new: new, not timed: base (" in told
    assert "ModuleNotFoundError: No module named 'models.more'" in told
    assert "- bad: failed: " in told
    assert "- rows: " in told
    assert main([*asked, "--only", "new", "--require-conclusive"]) == 0, "what is new has nothing to be told"


def test_what_is_compiled_is_built_for_both(
    theirs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Else the working tree's could be stale, and the base has none."""
    import importlib.machinery
    import sysconfig

    ending = importlib.machinery.EXTENSION_SUFFIXES[0]
    write(
        theirs / "work.c",
        '#include <Python.h>\nstatic struct PyModuleDef it = {PyModuleDef_HEAD_INIT, "work"};\n'
        "PyMODINIT_FUNC PyInit_work(void) { return PyModule_Create(&it); }\n",
    )
    write(theirs / "benchmarks.py", "import work\nBENCHMARKS = {'work': lambda: lambda: work.__name__}")
    write(theirs / ".gitignore", "*.so\n")
    their_repository.commit(theirs, "compiled")
    include = sysconfig.get_path("include")
    build = f"cc -shared -fPIC -I{include} work.c -o work{ending} && pwd >> {tmp_path}/built"
    asked = ["guard", "--repo", str(theirs), "--base", "HEAD", "--benchmarks", "benchmarks.py"]
    asked += ["--budget-s", "1"]
    assert main([*asked, "--build", build]) == 0, capsys.readouterr().err
    assert len({*(tmp_path / "built").read_text().splitlines()}) == 2
    capsys.readouterr()
    assert main(asked) == 2
    assert "work runs work, which is compiled; --build COMMAND builds it" in capsys.readouterr().err


# What is refused before anything is measured


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("nothing may be timed")

    monkeypatch.setattr(verb, "guard", refuse)
    monkeypatch.setattr(verb, "base_tree", refuse)


FILE = ["--benchmarks", "benchmarks.py"]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repo", ".", "--base", "HEAD"], "name one thing to be timed: --benchmarks FILE for functions"),
        ([*FILE, "--base", "no-such"], "unknown revision 'no-such'"),
        ([*FILE, "--base", "HEAD", "--only", "row"], "unknown benchmark 'row' (did you mean 'rows'?)"),
        ([*FILE, "--base", "HEAD", "--build", "echo no compiler; exit 7"],
         "in the working tree failed with status 7: no compiler"),
        (["--only", "tiny-layers"], "--only is about what is timed; give a revision, --base REF"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_with_the_remedy_here_and_in_the_summary(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(theirs)
    summary = tmp_path / "summary.md"
    assert main(["guard", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert "passed" not in captured.out
    assert main(["guard", *arguments, "--markdown", str(summary)]) == 2
    assert summary.read_text().startswith("### guard: not run\n\n")


# Commands that print a number


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A repository with a program of the shell, whose last commit lets it print a tenth more."""
    root = tmp_path / "program"
    root.mkdir()
    git(root, "init", "-q")
    for more in (100, 110):
        (root / "work.sh").write_text(f"echo 4 threads on cpu0; echo took {more}.0ms\n")
        their_repository.commit(root, f"{more}")
    return root


def guarded(program: Path, *options: str) -> int:
    return main(["guard", "--repo", str(program), "--base", "HEAD~1", *options])


def test_a_command_of_any_language_is_guarded_against_its_base(
    program: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Built once in each of three checkouts, and every run in the folder of its revision."""
    built = tmp_path / "built"
    build = f"pwd >> {built}; cp work.sh built.sh"
    options = ["--build", build, "--command", "sh built.sh", "--number", "took (.*)ms"]
    assert guarded(program, *options, "--json") == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    asked = ("verdict", "base_number", "head_number", "trials")
    assert tuple(found[name] for name in asked) == ("regression", 100.0, 110.0, 8)
    assert found["head"]["value"] == pytest.approx(0.1)
    assert "sh built.sh: worse by +10.0% [+10.0, +10.0] over 8 trials" in err
    trees = built.read_text().splitlines()
    assert len(set(trees)) == len(trees) == 3
    assert trees[0] == str(program)
    assert guarded(program, *options, "--higher-is-better", "--json") == 0, "more is better now"
    found = json.loads(capsys.readouterr().out)
    assert tuple(found[name] for name in asked) == ("improved", 100.0, 110.0, 8)


@pytest.mark.parametrize(
    ("said", "pattern", "number"),
    [
        ("4 threads on cpu0\n12.5ms", "", 12.5),
        ("1,234,567 instructions:u", "", 1234567.0),
        ("rate=3e-4/s v1.2", "", 3e-4),
        ("a: 1 s\nb: 4 s", r"(\d+) s$", 4.0),
        ("done", "", ValueError("printed no number on standard output, but done")),
        ("0", "", ValueError("printed 0; ratios are compared, so print numbers above 0")),
    ],
)
def test_the_number_of_an_output(said: str, pattern: str, number: float | ValueError) -> None:
    command = Command("true", pattern)
    if isinstance(number, ValueError):
        with pytest.raises(ValueError, match=str(number)):
            command.number(said)
    else:
        assert command.number(said) == number


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--command", "echo no; exit 3"],
            "of base (.*) failed with status 3: no; what the base has not yet",
        ),
        (
            ["--command", "sleep 60 & wait", "--timeout-s", "0.2"],
            "has not ended for 0.2 s; --timeout-s gives",
        ),
        (
            ["--command", "echo 1", "--build", "grep -q 110 work.sh"],
            "in the base's checkout failed with status 1",
        ),
        (["--command", "echo took 15.2 ms for 1000 items"], "printed 1000 last in every run of the base"),
        (
            ["--command", "wc -c < work.sh; grep -q 110 work.sh && date +1.%N || date +1000.%N"],
            "about a power of 1000 apart: its unit changes",
        ),
    ],
)
def test_a_command_that_can_not_be_measured_is_one_line(
    program: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert guarded(program, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for part in message.split(".*"):
        assert part in line
