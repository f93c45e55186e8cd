"""The guard in somebody else's repository: what it finds there, and what it refuses to vouch for."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import their_repository

from gpipe_bench.experiments.commands import guard as verb
from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.experiments.guard import arms as guard_arms
from gpipe_bench.experiments.guard import run as guard_run
from gpipe_bench.experiments.guard.arms import Arm, Built, Subject, WorkerError, arms_of, repository
from gpipe_bench.experiments.guard.run import Finding, measure
from gpipe_bench.harness.guard import Change, Judgement, Sample

NONE = Change(0.0, -0.01, 0.01)
SAME = Judgement("same", 12, 0.975, NONE, NONE, NONE, 0.01, 0.01)
SLOWER = replace(SAME, verdict="regression", head=Change(0.1, 0.08, 0.12))
CANT_TELL = replace(SAME, verdict="inconclusive", head=Change(0.0, -0.1, 0.1))


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return their_repository.make(tmp_path / "theirs")


def subject_of(repo: Path, engine: str = their_repository.ENGINE, *, with_file: bool = False) -> Subject:
    return repository(repo, engine, repo / "benchmarks.py" if with_file else None, [])


def started(subject: Subject, tree: Path, stack: ExitStack, store: Path, num_processes: int = 1) -> Arm:
    arm = Arm("head", tree, subject, num_processes, store, stack)
    arm.wait_until_started()
    return arm


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


def test_both_processes_of_their_engine_take_a_step_together(theirs: Path, tmp_path: Path) -> None:
    subject = subject_of(theirs)
    with ExitStack() as stack:
        both = started(subject, theirs, stack, tmp_path / "store", 2)
        apart = both.build("two-processes")
        together = both.build("transformer")
        assert both.sample("two-processes", 1).wall_s > 0
    assert apart.refused == together.refused == ""
    assert apart.loss == pytest.approx(together.loss, rel=1e-5)


def test_an_engine_with_a_wrong_gradient_is_not_timed(theirs: Path, tmp_path: Path) -> None:
    edit(
        theirs / "fast_pipe" / "fill_drain.py",
        "loss_fn(value, wanted) / self.count",
        "loss_fn(value, wanted)",
    )
    with ExitStack() as stack:
        arm = started(subject_of(theirs), theirs, stack, tmp_path / "store")
        with pytest.raises(WorkerError, match="gradients of fast_pipe.engine:Engine are wrong"):
            arm.build("tiny-layers")


def test_what_an_engine_cannot_do_is_no_failure(theirs: Path, tmp_path: Path) -> None:
    edit(
        theirs / "fast_pipe" / "fill_drain.py",
        "        self.setup, self.count",
        "        if setup.num_stages > 2:\n            raise ValueError('two stages are all I know')\n"
        "        self.setup, self.count",
    )
    with ExitStack() as stack:
        arm = started(subject_of(theirs), theirs, stack, tmp_path / "store")
        assert arm.build("tiny-layers") == Built(None, "two stages are all I know")
        assert arm.build("transformer").refused == ""


def test_an_engine_that_is_installed_elsewhere_is_not_measured(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the same in all arms, and "same" a lie."""
    (theirs / "fast_pipe").rename(tmp_path / "fast_pipe")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ExitStack() as stack:
        arm = started(subject_of(theirs), theirs, stack, tmp_path / "store")
        with pytest.raises(WorkerError, match=f"comes from {tmp_path}.*nothing to compare; .* --path src"):
            arm.build("tiny-layers")


def test_modules_below_src_are_found(theirs: Path, tmp_path: Path) -> None:
    (theirs / "src").mkdir()
    (theirs / "fast_pipe").rename(theirs / "src" / "fast_pipe")
    with ExitStack() as stack:
        assert started(subject_of(theirs), theirs, stack, tmp_path / "store").build("tiny-layers").loss


def test_their_functions_are_named_without_being_run_here(theirs: Path) -> None:
    subject = subject_of(theirs, with_file=True)
    assert subject.benchmarks["rows"].describe == "sums of many rows"
    assert list(subject.benchmarks) == ["transformer", "tiny-layers", "two-processes", "rows"]
    assert list(repository(theirs, "", theirs / "benchmarks.py", []).benchmarks) == ["rows"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("BENCHMARKS = {}", "declares no benchmarks; give it BENCHMARKS = {'name': function}"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
    ],
)
def test_a_file_without_benchmarks_says_so(theirs: Path, text: str, message: str) -> None:
    (theirs / "benchmarks.py").write_text(text)
    with pytest.raises(WorkerError, match=message):
        subject_of(theirs, with_file=True)


def test_a_function_that_builds_nothing_says_so(theirs: Path, tmp_path: Path) -> None:
    (theirs / "benchmarks.py").write_text("BENCHMARKS = {'once': lambda: 3}")
    with ExitStack() as stack:
        arm = started(subject_of(theirs, with_file=True), theirs, stack, tmp_path / "store")
        with pytest.raises(WorkerError, match="once returned int; it must build what is timed and return a"):
            arm.build("once")


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


# What a run amounts to


def scripted(monkeypatch: pytest.MonkeyPatch, findings: dict[str, list[Judgement] | str]) -> None:
    """What `guard` finds, instead of timing."""

    def found(*arguments: Any, **options: Any) -> list[Finding]:
        return [
            Finding(name, refused=runs) if isinstance(runs, str) else Finding(name, runs, [], [0.1, 0.2])
            for name, runs in findings.items()
        ]

    monkeypatch.setattr(verb, "guard", found)


def guarded(theirs: Path, *more: str) -> int:
    return main(
        ["guard", "--repo", str(theirs), "--engine", their_repository.ENGINE, "--base", "HEAD", *more]
    )


def test_a_confirmed_regression_fails_and_the_summary_says_which(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, {"transformer": [SLOWER, SLOWER], "tiny-layers": [SAME]})
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    assert guarded(theirs, "--markdown", str(summary)) == 1
    out = capsys.readouterr().out
    assert "counters" not in out  # those are of this project
    lines = summary.read_text().splitlines()
    assert lines[:2] == ["before", "### guard: FAILED"]
    assert "- transformer: slower by +10.0% [+8.0, +12.0], in two runs one after the other" in lines
    assert any(line.startswith("| tiny-layers") and "| same" in line for line in lines)


@pytest.mark.parametrize(("option", "status"), [((), 0), (("--require-conclusive",), 1)])
def test_what_cannot_be_told_passes_only_unless_it_must_be(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    option: tuple[str, ...], status: int,
) -> None:  # fmt: skip
    scripted(monkeypatch, {"transformer": [SAME], "tiny-layers": [CANT_TELL]})
    assert guarded(theirs, *option) == status
    assert "nothing can be told of tiny-layers" in capsys.readouterr().out


def test_an_engine_that_refuses_everything_has_not_passed(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, {"transformer": "not my kind", "tiny-layers": "nor this"})
    assert guarded(theirs) == 3
    captured = capsys.readouterr()
    assert "nothing was timed: transformer: not my kind; tiny-layers: nor this" in captured.err
    assert "passed" not in captured.out


def test_history_for_a_trend_tool(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"transformer": [SLOWER], "tiny-layers": "not my kind"})
    assert guarded(theirs, "--history", str(tmp_path / "h")) == 0
    rate, against = json.loads((tmp_path / "h" / "github.json").read_text())
    assert (rate["name"], against["name"]) == ("transformer", "transformer against its base")
    assert rate["value"] == pytest.approx((1 / 0.1 + 1 / 0.2) / 2)  # the median of two
    assert against["value"] == pytest.approx(1 / 1.1)
    assert against["range"] == "0.8929 to 0.9259"  # 1 / 1.12 and 1 / 1.08


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
    with pytest.raises(WorkerError, match="transformer: the base runs it, the head refuses: too deep"):
        measured(monkeypatch, Built(1.0), Built(None, "too deep"))


def test_an_engine_that_hangs_ends_the_run(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(
        theirs / "fast_pipe" / "fill_drain.py",
        "        kept, losses = [], []",
        "        import threading; threading.Event().wait()",
    )
    monkeypatch.setattr(guard_arms, "BUILD_S", 1.0)
    with ExitStack() as stack:
        arm = started(subject_of(theirs), theirs, stack, tmp_path / "store")
        with pytest.raises(WorkerError, match="has not answered for 1 s"):
            arm.build("tiny-layers")
