"""The guard as a whole: real processes of real and of broken trees, and the command around them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.commands import guard as verb
from gpipe_bench.experiments.commands.cli import parser
from gpipe_bench.experiments.commands.output import BAD_USAGE, CASE_FAILED, DONE, VERDICT_FAILED
from gpipe_bench.experiments.guard import arms as guard_arms
from gpipe_bench.experiments.guard.arms import Arm, Base, WorkerError, arms_of, this_project
from gpipe_bench.experiments.guard.counters import encode
from gpipe_bench.experiments.guard.run import Finding, guard, measure, table
from gpipe_bench.experiments.guard.worker import BENCHMARKS
from gpipe_bench.harness.guard import Change, Judgement

ROOT = Path(__file__).parents[2]
NONE = Change(0.0, -0.01, 0.01)
SAME = Judgement("same", 12, 0.975, NONE, NONE, NONE, 0.01, 0.01)
SLOWER = replace(SAME, verdict="regression", head=Change(0.1, 0.08, 0.12))
IMPROVED = replace(SAME, verdict="improved", head=Change(-0.1, -0.12, -0.08))
UNSURE = replace(SAME, verdict="inconclusive", head=Change(0.0, -0.2, 0.2))
VOID = replace(SAME, verdict="contaminated", control=Change(0.1, 0.08, 0.12))


# Behind the engine: after its actions it stays busy for four times as long as they took.
BUSY_FOR_LONGER = """

def run(*arguments, _run=run, **options):
    from time import perf_counter
    begin_s = perf_counter()
    _run(*arguments, **options)
    end_s = perf_counter() + 4.0 * (perf_counter() - begin_s)
    while perf_counter() < end_s:
        pass
"""


def finding(name: str, *runs: Judgement) -> Finding:
    return Finding(name, list(runs), samples_s=[0.01, 0.02])


# Processes


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Another revision: the packages under test and nothing else, no guard among them."""
    for package in ("gpipe_bench", "pipeline", "models"):
        shutil.copytree(
            ROOT / package, tmp_path / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


@pytest.mark.alone  # steps are timed
def test_a_slow_engine_is_measured_as_slow_and_the_processes_end(copied: Path) -> None:
    with (copied / "pipeline" / "step.py").open("a", encoding="utf-8") as file:
        file.write(BUSY_FOR_LONGER)
    before = set(psutil.Process().children())
    with arms_of(replace(this_project(), root=copied), ROOT, ["tiny-layers"]) as arms:
        found = Finding("tiny-layers")
        judged = measure(arms, found, "seed", looks=(2,), sample_s=0.01)
        children = set(psutil.Process().children()) - before
        assert len(children) == 3
    assert judged is not None
    assert 1.5 < judged.head.value < 8  # five times the engine's share of a step
    assert judged.cpu.value > 1.5  # it computes, rather than waits
    assert len(found.samples_s) == 4
    assert found.notes == []
    assert not any(child.is_running() for child in children)


def arm(tree: Path, stack: ExitStack, folder: Path, num_processes: int = 1) -> Arm:
    found = Arm("base", tree, this_project(), num_processes, folder / "store", stack)
    found.wait_until_started()
    return found


def test_two_processes_take_a_step_together(tmp_path: Path) -> None:
    with ExitStack() as stack:
        both = arm(ROOT, stack, tmp_path, num_processes=2)
        loss = both.build("two-processes").result
        sample = both.sample("two-processes", 1)
        alone = both.build("transformer").result
    assert loss == pytest.approx(alone, rel=1e-6)  # the same model, one process or two
    assert sample.wall_s > 0
    assert sample.cpu_s > 0


def test_a_revision_that_forgot_to_recompute_is_not_timed(copied: Path) -> None:
    path, before = copied / "pipeline" / "arguments.py", "sizes = (num_stages, num_microbatches, remat, "
    assert path.read_text().count(before) == 1
    path.write_text(path.read_text().replace(before, before.replace("remat", '"never"')))
    with ExitStack() as stack:
        other = arm(copied, stack, copied)
        with pytest.raises(WorkerError, match="RuntimeError: tiny-layers: a step runs its"):
            other.build("tiny-layers")


@pytest.mark.parametrize("packages", [("gpipe_bench", "pipeline", "models"), ("pipeline", "models")])
def test_a_revision_is_loaded_whichever_layout_it_has(copied: Path, packages: tuple[str, ...]) -> None:
    """And none else in its place: one that does not load says why, though another one is installed."""
    (copied / "pipeline" / "__init__.py").write_text("raise RuntimeError('half an edit')")
    if "gpipe_bench" not in packages:
        shutil.rmtree(copied / "gpipe_bench")
    with ExitStack() as stack:
        other = arm(copied, stack, copied)
        with pytest.raises(WorkerError, match="RuntimeError: half an edit"):
            other.build("tiny-layers")


def test_a_revision_without_the_packages_is_not_replaced_by_an_installed_one(tmp_path: Path) -> None:
    with ExitStack() as stack:
        other = arm(tmp_path, stack, tmp_path)
        with pytest.raises(WorkerError, match="nothing to compare|No module named"):
            other.build("tiny-layers")


# One run and what it amounts to


def scripted(monkeypatch: pytest.MonkeyPatch, verdicts: Mapping[str, str]) -> list[str]:
    """Replaces measuring by a script, benchmark -> verdicts of its runs; what was measured, in order."""
    order: list[str] = []

    @contextmanager
    def no_arms(*arguments: Any) -> Iterator[None]:
        order.append("start")
        yield None

    def judged(arms: None, finding: Finding, seed: str, **options: Any) -> Judgement:
        order.append(finding.benchmark)
        verdict = verdicts[finding.benchmark].split()[len(finding.runs)]
        return replace(SAME, verdict=verdict)  # type: ignore[arg-type]

    monkeypatch.setattr("gpipe_bench.experiments.guard.run.arms_of", no_arms)
    monkeypatch.setattr("gpipe_bench.experiments.guard.run.measure", judged)
    return order


def guarded(*names: str, **options: Any) -> list[Finding]:
    return guard(this_project(), ROOT, names, 1, **options)


def test_a_regression_is_measured_again_in_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    order = scripted(monkeypatch, {"transformer": "regression regression", "tiny-layers": "same"})
    findings = guarded("transformer", "tiny-layers")
    assert order == ["start", "transformer", "tiny-layers", "start", "transformer"]
    assert [finding.confirmed for finding in findings] == [True, False]


def test_first_runs_leave_time_for_second_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two benchmarks of 100 s: 60 s are for their first runs, 30 each; what is left is for the second one."""
    scripted(monkeypatch, {"transformer": "regression regression", "tiny-layers": "same"})
    now, ends = [0.0], list[float]()

    def measured(arms: None, finding: Finding, seed: str, *, deadline_s: float, **options: Any) -> Judgement:
        ends.append(deadline_s)
        now[0] = deadline_s  # it takes all the time it has
        verdict = "regression" if finding.benchmark == "transformer" else "same"
        return replace(SAME, verdict=verdict)  # type: ignore[arg-type]

    monkeypatch.setattr("gpipe_bench.experiments.guard.run.measure", measured)
    findings = guarded("transformer", "tiny-layers", budget_s=100.0, clock_s=lambda: now[0])
    assert ends == [30.0, 60.0, 100.0]
    assert [finding.confirmed for finding in findings] == [True, False]


def test_what_can_not_be_confirmed_in_time_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"transformer": "regression regression"})
    now = iter([0.0, 0.0, 95.0])
    (found,) = guarded("transformer", budget_s=100.0, clock_s=lambda: next(now))
    assert not found.confirmed
    assert found.conclusion() == (
        "transformer: slower by +0.0% [-1.0, +1.0], not confirmed; no time left to measure again"
    )


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ((SLOWER, SLOWER), "slower by +10.0% [+8.0, +12.0], in two runs one after the other"),
        ((SLOWER, SAME), "a regression was not confirmed; then same, +0.0% [-1.0, +1.0]"),
        ((VOID,), "nothing proven: the base differs from itself by +10.0% [+8.0, +12.0]"),
        ((UNSURE,), "can't tell, +0.0% [-20.0, +20.0]; this machine now shows 36% or more"),
        (
            (replace(UNSURE, head=Change(-0.112, -0.14, -0.08), control=Change(0.02, -0.1, 0.173)),),
            "can't tell, -11.2% [-14.0, -8.0] is within the noise floor of 17.3%",
        ),
    ],
)
def test_what_runs_amount_to_in_a_sentence(runs: Sequence[Judgement], said: str) -> None:
    assert finding("x", *runs).conclusion() == f"x: {said}"


def test_the_table_says_how_noisy_it_was() -> None:
    text = table([finding("tiny-layers", SLOWER, SAME)]).text()
    assert "+10.0% [+8.0, +12.0]" in text
    assert "noise floor" in text
    assert f"{SAME.smallest_detectable:.1%}" in text


# The command


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A project folder of its own with quick counters; the path of their file."""
    path = tmp_path / "results" / "guard" / "counters.json"
    monkeypatch.setattr(verb, "ROOT", tmp_path)
    monkeypatch.setattr(guard_arms, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "COUNTERS", path)
    content = {"benchmarks": sorted(BENCHMARKS), "counters": {"case": {"flops": 8}}}
    monkeypatch.setattr("gpipe_bench.experiments.guard.counters.content", lambda: content)
    path.parent.mkdir(parents=True)
    path.write_text(encode(content))
    return path


def test_equal_counters_pass(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["guard"]) == DONE
    assert "counters: 1 cases equal results/guard/counters.json\nguard: passed" in capsys.readouterr().out


def test_a_win_fails_until_it_is_committed(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = fake.read_text()
    fake.write_text(wanted.replace("8", "10"))
    assert cli.main(["guard"]) == VERDICT_FAILED
    shown = capsys.readouterr().out
    assert "case: flops 10 -> 8 (-20.000%)" in shown
    assert wanted in shown  # the new file, to be copied from a log
    assert cli.main(["guard", "--json"]) == VERDICT_FAILED
    assert json.loads(capsys.readouterr().out)["problem"] == "case: flops 10 -> 8 (-20.000%)"
    assert cli.main(["guard", "--update"]) == DONE
    assert fake.read_text() == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "tiny-layer"], "unknown benchmark 'tiny-layer' (did you mean 'tiny-layers'?)"),
        (["--history", "x"], "--history keeps what was timed; give a revision to compare with, --base REF"),
        (["--base", "HEAD", "--budget-s", "0"], "--budget-s is 0; give seconds, such as 150"),
        (["--base", "HEAD"], "is no git repository"),
        ([], "does not exist; write it with --update"),
    ],
)
def test_bad_usage_is_one_line(
    fake: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if not arguments:
        fake.unlink()
    assert cli.main(["guard", *arguments]) == BAD_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.fixture
def found(fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Finding | WorkerError]:
    """What timing finds, against a made-up base; an error is raised."""
    result: list[Finding | WorkerError] = []

    @contextmanager
    def base(root: Path, ref: str) -> Iterator[Base]:
        yield Base(ref, "b" * 40, tmp_path / "base")

    def run(*arguments: Any, **options: Any) -> list[Any]:
        for each in result:
            if isinstance(each, WorkerError):
                raise each
        return result

    monkeypatch.setattr(verb, "base_tree", base)
    monkeypatch.setattr(verb, "merge_base", lambda root, ref: "")
    monkeypatch.setattr(verb, "guard", run)
    return result


def test_a_confirmed_regression_fails_and_is_annotated_summed_up_and_kept(
    found: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    found += [finding("tiny-layers", SLOWER, SLOWER), Finding("transformer", refused="not my kind")]
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    keeping = ["guard", "--base", "main", "--markdown", str(summary), "--history"]
    assert cli.main([*keeping, str(tmp_path / "h")]) == VERDICT_FAILED
    out, err = capsys.readouterr()
    assert "::error title=guard::tiny-layers: slower by +10.0%25" in err
    assert out.endswith("guard: FAILED\n")
    lines = summary.read_text().splitlines()
    assert lines[:2] == ["before", "### guard: FAILED"]
    assert "- tiny-layers: slower by +10.0% [+8.0, +12.0], in two runs one after the other" in lines
    assert any(line.startswith("| tiny-layers") and "| regression" in line for line in lines)
    # Each entry for the trend tool needs name, unit and a number, bigger being better.
    rate, against = json.loads((tmp_path / "h" / "github.json").read_text())
    assert (rate["name"], against["name"]) == ("tiny-layers", "tiny-layers against its base")
    assert (rate["unit"], rate["value"]) == (
        "steps/s",
        pytest.approx((1 / 0.01 + 1 / 0.02) / 2),
    )  # the median
    assert against["value"] == pytest.approx(1 / 1.1)
    assert against["range"] == "0.8929 to 0.9259"  # 1 / 1.12 and 1 / 1.08
    (tmp_path / "file").touch()
    assert cli.main([*keeping, str(tmp_path / "file")]) == BAD_USAGE
    assert "the history can't be written to" in capsys.readouterr().err


def test_one_regression_alone_annotates(
    found: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    found.append(finding("tiny-layers", SLOWER, SAME))
    assert cli.main(["guard", "--base", "main", "--json"]) == DONE
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert [run["verdict"] for run in data["runs"]] == ["regression", "same"]
    assert data["confirmed"] is False
    assert "::error" not in err


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([[SAME], [IMPROVED]], "guard: passed"),
        ([[SAME], [UNSURE]], "guard: passed, but nothing can be told of transformer"),
        ([[SLOWER, SAME], [VOID, VOID]], "guard: passed, but nothing can be told of transformer"),
        ([[UNSURE], [UNSURE]], "guard: inconclusive: nothing was measured well enough to tell"),
        ([[UNSURE], [VOID, VOID]], "guard: inconclusive: nothing was measured well enough to tell"),
        ([[SLOWER], [UNSURE]], "guard: inconclusive: nothing was measured well enough to tell"),
        ([[SLOWER, SLOWER], [UNSURE]], "guard: FAILED"),
    ],
)
def test_what_could_not_be_told_has_not_passed(
    found: list, capsys: pytest.CaptureFixture[str], runs: list, said: str
) -> None:
    found += [finding("tiny-layers", *runs[0]), finding("transformer", *runs[1])]
    status = cli.main(["guard", "--base", "main"])
    assert status == (VERDICT_FAILED if "FAILED" in said else DONE)
    assert capsys.readouterr().out.splitlines()[-1] == said
    status = cli.main(["guard", "--base", "main", "--require-conclusive"])
    assert status == (DONE if said == "guard: passed" else VERDICT_FAILED)


def test_counters_that_differ_fail_whatever_was_timed(
    fake: Path, found: list, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.write_text(fake.read_text().replace("8", "10"))
    found.append(finding("tiny-layers", UNSURE))
    assert cli.main(["guard", "--base", "main"]) == VERDICT_FAILED
    assert capsys.readouterr().out.splitlines()[-1] == "guard: FAILED"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([WorkerError("base: no such layer")], "error: base: no such layer"),
        (
            [Finding("transformer", refused="not my kind"), Finding("tiny-layers", refused="nor this")],
            "nothing was timed: transformer: not my kind; tiny-layers: nor this",
        ),
    ],
)
def test_where_nothing_can_be_timed_nothing_has_passed(
    found: list, capsys: pytest.CaptureFixture[str], result: list, message: str
) -> None:
    found += result
    assert cli.main(["guard", "--base", "main"]) == CASE_FAILED
    out, err = capsys.readouterr()
    assert message in err
    assert "passed" not in out


def test_a_benchmark_that_vanished_is_an_error(
    found: list, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = tmp_path / "base" / "results" / "guard" / "counters.json"
    before.parent.mkdir(parents=True)
    before.write_text(encode({"benchmarks": ["tiny-layers", "gone"], "counters": {}}))
    found.append(finding("tiny-layers", SAME))
    assert cli.main(["guard", "--base", "main"]) == BAD_USAGE
    assert (
        "benchmarks that are gone: gone; if that is intended, say --removed gone" in capsys.readouterr().err
    )
    assert cli.main(["guard", "--base", "main", "--removed", "gone"]) == DONE


# The workflow


def test_commands_of_the_workflow_and_of_the_documentation_are_accepted() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "guard.yml").read_text())
    steps = workflow["jobs"]["guard"]["steps"]
    assert steps[0]["with"]["fetch-depth"] == 0
    commands = [step["run"].partition("nox -s guard")[2] for step in steps if "guard" in step.get("run", "")]
    assert len(commands) == 2
    text = (ROOT / "docs" / "guard.md").read_text(encoding="utf-8")
    commands += re.findall(r"(?:nox -s guard|gpipe-bench guard)\b(?! ?`)([^\n`#|]*)", text)
    assert len(commands) >= 7
    for command in commands:
        given = parser().parse_args(["guard", *shlex.split(command.replace(" -- ", " "))])
        assert given.verb == "guard"
