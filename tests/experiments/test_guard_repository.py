"""The guard in somebody else's repository: what it finds there, and what it refuses to vouch for."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import their_repository

from gpipe_bench.experiments.commands import guard as verb
from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.experiments.guard import arms as guard_arms
from gpipe_bench.experiments.guard import run as guard_run
from gpipe_bench.experiments.guard.arms import Arm, Built, Subject, WorkerError, arms_of, repository
from gpipe_bench.experiments.guard.command import Command, check_changes, check_unit
from gpipe_bench.experiments.guard.run import Finding, measure
from gpipe_bench.experiments.guard.worker import check_origins
from gpipe_bench.harness.guard import Change, Judgement, Sample

SAME = Judgement("same", 12, 0.975, *[Change(0.0, -0.01, 0.01)] * 3, 0.01, 0.01)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return their_repository.make(tmp_path / "theirs")


def subject_of(repo: Path, engine: str = their_repository.ENGINE, *, with_file: bool = False) -> Subject:
    return repository(repo, engine, repo / "benchmarks.py" if with_file else None, [])


@pytest.fixture
def start(theirs: Path, tmp_path: Path) -> Iterator[Callable[..., Arm]]:
    """Starts the processes that measure their repository."""
    with ExitStack() as stack:

        def started(num_processes: int = 1, *, with_file: bool = False) -> Arm:
            subject = subject_of(theirs, with_file=with_file)
            arm = Arm("head", theirs, subject, num_processes, tmp_path / "store", stack)
            arm.wait_until_started()
            return arm

        yield started


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


# What is measured


@pytest.mark.alone  # steps are timed
def test_their_slower_commit_is_measured_as_slower(theirs: Path, tmp_path: Path) -> None:
    """Their `models/` is theirs and ours is ours; the base is their earlier commit."""
    their_repository.git(theirs, "worktree", "add", "-q", "--detach", str(tmp_path / "base"), "HEAD")
    their_repository.slow_down(theirs, 3.0)
    subject = subject_of(theirs, with_file=True)
    names = ("tiny-layers", "rows")
    with arms_of(subject, tmp_path / "base", names) as arms:
        for name in names:
            judged = measure(arms, Finding(name), "seed", looks=(2,), sample_s=0.01)
            assert judged is not None
            assert 1.5 < judged.head.value < 6  # four times as long
            assert abs(judged.control.value) < 1


def test_both_processes_of_their_engine_take_a_step_together(start: Callable[..., Arm]) -> None:
    both = start(2)
    apart, together = both.build("two-processes"), both.build("transformer")
    assert both.sample("two-processes", 1).wall_s > 0
    assert apart.refused == together.refused == ""
    assert apart.result == pytest.approx(together.result, rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "loss_fn(value, wanted) / self.count", "loss_fn(value, wanted)",
            "gradients of fast_pipe.engine:Engine are wrong",
        ),
        (
            "        kept, losses = [], []", "        import threading; threading.Event().wait()",
            "has not answered for 1 s",
        ),
    ],
)  # fmt: skip
def test_an_engine_that_is_wrong_or_hangs_is_not_timed(
    theirs: Path, start: Callable[..., Arm], monkeypatch: pytest.MonkeyPatch,
    before: str, after: str, message: str,
) -> None:  # fmt: skip
    edit(theirs / "fast_pipe" / "fill_drain.py", before, after)
    arm = start()
    if "threading" in after:
        monkeypatch.setattr(guard_arms, "BUILD_S", 1.0)
    with pytest.raises(WorkerError, match=message):
        arm.build("tiny-layers")


def test_what_an_engine_cannot_do_is_no_failure(theirs: Path, start: Callable[..., Arm]) -> None:
    edit(
        theirs / "fast_pipe" / "fill_drain.py",
        "        self.setup, self.count",
        "        if setup.num_stages > 2:\n            raise ValueError('two stages are all I know')\n"
        "        self.setup, self.count",
    )
    edit(
        theirs / "fast_pipe" / "fill_drain.py",
        "        kept, losses = [], []",
        "        if not batch.is_floating_point():\n            raise ValueError('no integers')\n"
        "        kept, losses = [], []",
    )
    arm = start()
    assert arm.build("tiny-layers") == Built(None, "two stages are all I know")
    assert arm.build("transformer").refused == "no integers", "which only a batch can tell"


def test_an_engine_that_is_installed_elsewhere_is_not_measured(
    theirs: Path, start: Callable[..., Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the same in all arms, and "same" a lie."""
    (theirs / "fast_pipe").rename(tmp_path / "fast_pipe")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(WorkerError, match=f"comes from {tmp_path}.*nothing to compare; .* --path src"):
        start().build("tiny-layers")


def test_modules_below_src_are_found(theirs: Path, start: Callable[..., Arm]) -> None:
    (theirs / "src").mkdir()
    (theirs / "fast_pipe").rename(theirs / "src" / "fast_pipe")
    assert start().build("tiny-layers").result


def test_their_functions_are_named_without_being_run_here(theirs: Path) -> None:
    subject = subject_of(theirs, with_file=True)
    assert subject.benchmarks["rows"].describe == "sums of many rows"
    assert list(subject.benchmarks) == ["transformer", "tiny-layers", "two-processes", "rows"]
    assert list(repository(theirs, "", theirs / "benchmarks.py", []).benchmarks) == ["rows"]


@pytest.mark.parametrize("text", ["BENCHMARKS = {}", "import nothing_of_that_name"])
def test_a_file_without_benchmarks_says_so(theirs: Path, text: str) -> None:
    (theirs / "benchmarks.py").write_text(text)
    with pytest.raises(ValueError, match="can't be used: head"):
        subject_of(theirs, with_file=True)


def test_a_function_that_builds_nothing_says_so(theirs: Path, start: Callable[..., Arm]) -> None:
    (theirs / "benchmarks.py").write_text("BENCHMARKS = {'once': lambda: 3}")
    with pytest.raises(WorkerError, match="TypeError: once returned int; it must"):
        start(with_file=True).build("once")


# What is refused before anything is measured


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("nothing may be timed")

    monkeypatch.setattr(verb, "guard", refuse)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "a:b", "--base", "HEAD"], "--engine is about another repository; name it: --repo DIR"),
        (["--repo", ".", "--base", "HEAD"], "--engine module:attribute for a pipeline engine"),
        (["--repo", ".", "--engine", "a:b"], "against one of its revisions; give it, --base REF"),
        (["--repo", "nowhere", "--engine", "a:b", "--base", "HEAD"], "--repo nowhere is no folder"),
        (["--repo", ".", "--engine", "a", "--base", "HEAD"], "'a' is not module:attribute"),
        (["--repo", ".", "--engine", "a:b", "--base", "no-such"], "unknown revision 'no-such'"),
        (["--repo", ".", "--engine", "a:b", "--base", "HEAD", "--update"], "this project's own counters"),
        (["--repo", ".", "--engine", "a:b", "--base", "HEAD", "--path", "lib"], "has no such folder"),
        (["--repo", ".", "--benchmarks", "no.py", "--base", "HEAD"], "--benchmarks no.py is no file"),
        (
            ["--repo", ".", "--engine", "a:b", "--base", "HEAD", "--only", "tiny-layer"],
            "did you mean 'tiny-layers'",
        ),
        (["--markdown", "out.md"], "give a revision to compare with, --base REF"),
        (["--require-conclusive"], "give a revision, --base REF"),
    ],
)
def test_bad_usage_is_one_line_with_the_remedy(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(theirs)
    assert main(["guard", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert "passed" not in captured.out


@pytest.mark.usefixtures("unmeasured")
def test_a_base_that_cannot_be_built_says_why(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(theirs)
    arguments = ["--repo", ".", "--engine", their_repository.ENGINE, "--base", "HEAD"]
    assert main(["guard", *arguments, "--build", "echo no compiler; exit 7"]) == 2
    assert "failed with status 7 in the base's checkout: no compiler" in capsys.readouterr().err


# Commands that print a number


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A repository with a program of the shell, whose last commit lets it print a tenth more."""
    root = tmp_path / "program"
    root.mkdir()
    their_repository.git(root, "init", "-q")
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
    setup = f"pwd >> {built}; cp work.sh built.sh"
    options = ["--setup", setup, "--command", "sh built.sh"]
    assert guarded(program, *options, "--json", "--history", str(tmp_path)) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["confirmed"]
    assert [(run["base"], run["head"], run["rounds"]) for run in found["runs"]] == [(100.0, 110.0, 12)] * 2
    assert "sh built.sh: worse by +10.0% [+10.0, +10.0], in two runs one after the other" in err
    trees = built.read_text().splitlines()
    assert len(set(trees)) == len(trees) == 3
    assert trees[-1] == str(program)
    rate, against = json.loads((tmp_path / "github.json").read_text())
    assert (rate["unit"], rate["value"]) == ("1/number", pytest.approx(1 / 110))
    assert against["value"] == pytest.approx(1 / 1.1)
    assert guarded(program, *options, "--higher-is-better", "--json") == 0, "more is better now"
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["verdict"], run["base"], run["head"]) == ("improved", 100.0, 110.0)


@pytest.mark.parametrize(
    ("said", "pattern", "numbers"),
    [
        ("4 threads on cpu0\n12.5ms", "", [12.5]),
        ("1,234,567 instructions:u", "", [1234567.0]),
        ("rate=3e-4/s v1.2", "", [3e-4]),
        ("15,16 s", "", [15.16]),
        ("took 12.5 ms\x1b[39m", "", [12.5]),
        ("1,23,4", "", ValueError("printed '1,23,4', which is no number; --number REGEX names it")),
        ("a: 1 s\nb: 4 s", r"(\d+) s$", [1.0, 4.0]),
        ("total 7", r"total \d+", ValueError("printed 'total 7', which is no number")),
        ("done", "", ValueError("printed no number on standard output, but done")),
        (
            "",
            r"\d+",
            ValueError("nothing that --number '.*' matches on standard output, but nothing at all"),
        ),
        ("0", "", ValueError("printed 0; ratios are compared, so print numbers above 0")),
    ],
)
def test_the_number_of_an_output(said: str, pattern: str, numbers: list[float] | ValueError) -> None:
    command = Command("true", pattern)
    if isinstance(numbers, ValueError):
        with pytest.raises(ValueError, match=str(numbers)):
            command.numbers(said)
    else:
        assert command.numbers(said) == numbers


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
        (["--command", "echo none"], "of base (.*) printed no number on standard output, but none"),
        (["--command", "cat work.sh", "--number", "(4|110)"], "base 1, head 2, control 1; give a --number"),
        (
            ["--command", "sleep 0.2; echo 1", "--budget-s", "2"],
            "the first look needs 72 of them in .*--budget-s",
        ),
        (["--command", "echo 1", "--number", "("], "--number '(' is no regular expression"),
        (["--command", "echo 1", "--number", "(a)(b)"], "has 2 groups; put one around the number"),
        (["--command", " "], "--command is empty; give what prints a number"),
        (["--command", "echo 1", "--timeout-s", "-1"], "--timeout-s is -1; give the seconds that one run"),
        (["--command", "echo 1", "--build", "make"], "a command's checkouts take --setup"),
        (["--command", "echo 1", "--engine", "a:b"], "--command is timed alone"),
        (["--command", "echo 1", "--setup", "exit 5"], "--setup 'exit 5' failed with status 5 in the base's"),
        (["--engine", "a:b", "--setup", "make"], "--setup is about a command; give it, --command LINE"),
    ],
)
def test_a_command_that_can_not_be_measured_is_one_line(
    program: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert guarded(program, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for part in message.split(".*"):
        assert part in line


def test_a_number_that_is_no_time_or_changes_its_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="printed 1000 last in every run of every revision"):
        check_changes([1000.0] * 6, Command("true"))
    check_changes([1000.0] * 6, Command("true", r"(\d+) items"))
    check_changes([1000.0, 1001.0], Command("true"))
    with pytest.raises(ValueError, match="its unit changes"):
        check_unit({"base": 890.0, "head": 1.01, "control": 900.0})
    check_unit({"base": 890.0, "head": 89.0, "control": 900.0})


def test_a_module_from_elsewhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head's own in the base's arm, and an installed copy of what the tree holds."""
    head, base = tmp_path / "head", tmp_path / "base"
    for tree in (head, base):
        (tree / "python" / "guarded_package").mkdir(parents=True)
        (tree / "python" / "guarded_package" / "__init__.py").touch()
    for place in (head / "python", tmp_path / "site-packages"):
        module = types.ModuleType("guarded_package")
        module.__file__ = str(place / "guarded_package" / "__init__.py")
        monkeypatch.setitem(sys.modules, "guarded_package", module)
        with pytest.raises(RuntimeError, match="module guarded_package comes from"):
            check_origins(base, head, head / "benchmarks.py")
    module.__file__ = str(base / "python" / "guarded_package" / "__init__.py")
    check_origins(base, head, head / "benchmarks.py")


def test_processor_time_decides_where_wall_time_is_contaminated_twice() -> None:
    away = Change(0.1, 0.02, 0.2)
    slower = Judgement("contaminated", 48, 0.984, away, away, Change(0.2, 0.15, 0.25), 1, 1.2)
    assert Finding("x", [slower, slower], cpu_noise=[0.02, 0.02]).confirmed
    assert "in processor time" in Finding("x", [slower, slower], cpu_noise=[0.02, 0.02]).conclusion()
    assert not Finding("x", [slower], cpu_noise=[0.02]).confirmed, "two runs must agree"
    assert not Finding("x", [slower, slower], cpu_noise=[0.02, 0.2]).confirmed, "the base differs as much"
    same = dataclasses.replace(slower, verdict="same", control=Change(0.0, -0.01, 0.01))
    assert not Finding("x", [slower, same], cpu_noise=[0.02, 0.02]).confirmed, "wall time has told"


# What a run amounts to


def measured(monkeypatch: pytest.MonkeyPatch, base: Built, head: Built) -> tuple[Judgement | None, Finding]:
    """With arms that say this of building, and rounds that find nothing."""

    class Told:
        def __init__(self, built: Built) -> None:
            self.build = lambda name: built
            self.sample = lambda name, repeats: Sample(1.0, 1.0)

    monkeypatch.setattr(guard_run, "run_rounds", lambda *_, **__: (SAME, []))
    finding = Finding("transformer")
    arms: Any = {"base": Told(base), "head": Told(head), "control": Told(base)}
    return measure(arms, finding, "seed"), finding


@pytest.mark.parametrize(
    ("base", "head", "refused"),
    [
        (Built(1.0), Built(1.0), ""),
        (Built(None, "no"), Built(None, "no"), "no"),
        (Built(None, "no"), Built(1.0), "the base refuses, the head runs it: no"),
    ],
)
def test_what_one_revision_refuses_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, base: Built, head: Built, refused: str
) -> None:
    judged, finding = measured(monkeypatch, base, head)
    assert (judged, finding.refused) == (None if refused else SAME, refused)


def test_a_head_that_computes_something_else_is_noted_and_one_that_unlearnt_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, finding = measured(monkeypatch, Built(1.0), Built(2.0))
    assert finding.notes == ["computes something else: the first loss was 1 and is 2"]
    what = "what it returns"
    _, finding = measured(monkeypatch, Built(7999.0, what=what), Built(9198.0, what=what))
    assert finding.notes == ["computes something else: what it returns was 7999 and is 9198"]
    with pytest.raises(WorkerError, match="transformer: the base runs it, the"):
        measured(monkeypatch, Built(1.0), Built(None, "too deep"))
