"""The guard as a whole: real processes of real and of broken trees, and the command around them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from gpipe_bench.experiments.commands import cli, exits
from gpipe_bench.experiments.commands import guard as verb_guard
from gpipe_bench.experiments.commands.parsing.parser import parser
from gpipe_bench.experiments.guard import subject as guard_subject
from gpipe_bench.experiments.guard import trials as guard_trials
from gpipe_bench.experiments.guard.arms import Arm, arms_of
from gpipe_bench.experiments.guard.benchmarks import BENCHMARKS
from gpipe_bench.experiments.guard.run import Finding, guard, measure
from gpipe_bench.experiments.guard.text import conclusion, table
from gpipe_bench.harness import trials as harness_trials
from gpipe_bench.harness.guard.counters import encode
from gpipe_bench.harness.guard.judge import Change, Judgement, Look
from gpipe_bench.harness.guard.process import WorkerError
from gpipe_bench.harness.guard.tree import Base

ROOT = Path(__file__).parents[1]
NONE = Change(0.0, -0.01, 0.01)
SAME = Judgement("same", 12, 0.975, NONE, NONE, NONE, 0.01, 0.01)
SLOWER = replace(SAME, verdict="regression", head=Change(0.1, 0.08, 0.12))
ONE = {"tiny-layers": BENCHMARKS["tiny-layers"]}


# Processes


@pytest.mark.alone  # steps are timed
def test_a_slow_engine_is_measured_as_slow_and_the_processes_end() -> None:
    before = set(psutil.Process().children())
    with arms_of(ROOT, ROOT, ONE, slow_down=4.0) as arms:
        finding = Finding("tiny-layers")
        looks = (Look(2, 0.975),)
        judged = measure(arms, finding, "seed", looks=looks, sample_s=0.01)
        children = set(psutil.Process().children()) - before
        assert len(children) == 3
    assert 1.5 < judged.head.value < 8  # five times the engine's share of a step
    assert judged.cpu.value > 1.5  # it computes, rather than waits
    assert len(finding.samples_s) == 4
    assert finding.notes == []
    assert not any(child.is_running() for child in children)


def arm(tree: Path, stack: ExitStack, folder: Path, num_processes: int = 1) -> Arm:
    found = Arm("base", tree, num_processes, folder / "store", 0.0, stack)
    found.wait_until_started()
    return found


def test_two_processes_take_a_step_together(tmp_path: Path) -> None:
    with ExitStack() as stack:
        both = arm(ROOT, stack, tmp_path, num_processes=2)
        loss = both.build("two-processes").loss
        sample = both.sample("two-processes", 1)
        alone = both.build("transformer").loss
    assert loss == pytest.approx(alone, rel=1e-6)  # the same model, one process or two
    assert sample.wall_s > 0
    assert sample.cpu_s > 0


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Another revision: the packages under test and nothing else, no guard among them."""
    for package in ("gpipe_bench", "pipeline", "models"):
        shutil.copytree(
            ROOT / package, tmp_path / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def test_a_revision_that_forgot_to_recompute_is_not_timed(copied: Path) -> None:
    edit(
        copied / "pipeline" / "layout.py",
        "sizes = (num_stages, num_microbatches, remat, ",
        'sizes = (num_stages, num_microbatches, "never", ',
    )
    with ExitStack() as stack:
        other = arm(copied, stack, copied)
        with pytest.raises(
            WorkerError, match=r"runs its layers \[8\] times forward, not 15 times: M = 8 and"
        ):
            other.build("tiny-layers")


def test_a_revision_that_does_not_load_says_why(copied: Path) -> None:
    (copied / "pipeline" / "__init__.py").write_text("raise RuntimeError('half an edit')")
    with ExitStack() as stack, pytest.raises(WorkerError, match="RuntimeError: half an edit"):
        arm(copied, stack, copied)


# One run and what it amounts to


def scripted(monkeypatch: pytest.MonkeyPatch, verdicts: Mapping[str, str]) -> list[str]:
    """Replaces measuring by a script, benchmark -> verdicts of its runs; what was measured, in order."""
    order: list[str] = []

    @contextmanager
    def no_arms(base: Path, head: Path, benchmarks: Mapping[str, Any], **options: Any) -> Iterator[None]:
        order.append("start")
        yield None

    def judged(arms: None, finding: Finding, seed: str, **options: Any) -> Judgement:
        order.append(finding.benchmark)
        verdict = verdicts[finding.benchmark].split()[len(finding.runs)]
        return replace(SAME, verdict=verdict)  # type: ignore[arg-type]

    monkeypatch.setattr("gpipe_bench.experiments.guard.run.arms_of", no_arms)
    monkeypatch.setattr("gpipe_bench.experiments.guard.run.measure", judged)
    return order


def test_a_regression_is_measured_again_in_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    order = scripted(monkeypatch, {"transformer": "regression regression", "tiny-layers": "same"})
    findings = guard(ROOT, ROOT, ["transformer", "tiny-layers"], 1)
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
    names = ["transformer", "tiny-layers"]
    findings = guard(ROOT, ROOT, names, 1, budget_s=100.0, clock_s=lambda: now[0])
    assert ends == [30.0, 60.0, 100.0]
    assert [finding.confirmed for finding in findings] == [True, False]


def test_what_can_not_be_confirmed_in_time_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"transformer": "regression regression"})
    now = iter([0.0, 0.0, 95.0])
    (finding,) = guard(ROOT, ROOT, ["transformer"], 1, budget_s=100.0, clock_s=lambda: next(now))
    assert not finding.confirmed
    assert conclusion(finding) == (
        "transformer: slower by +0.0% [-1.0, +1.0], not confirmed; no time left to measure again"
    )


def test_the_table_says_how_noisy_it_was() -> None:
    text = table([Finding("tiny-layers", [SLOWER, SAME])])
    assert "+10.0% [+8.0, +12.0]" in text
    assert "noise floor" in text
    assert f"{SAME.smallest_detectable:.1%}" in text
    assert "slower by +10.0%" in conclusion(Finding("x", [SLOWER, SLOWER]))
    assert "not confirmed; then same" in conclusion(Finding("x", [SLOWER, SAME]))
    assert "nothing proven" in conclusion(Finding("x", [replace(SAME, verdict="contaminated")]))
    assert "can't tell" in conclusion(Finding("x", [replace(SAME, verdict="inconclusive")]))


# The command


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A project folder of its own with quick counters; the path of their file."""
    path = tmp_path / "results" / "guard" / "counters.json"
    monkeypatch.setattr(verb_guard, "ROOT", tmp_path)
    monkeypatch.setattr(guard_subject, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb_guard, "COUNTERS", path)
    content = {"benchmarks": sorted(BENCHMARKS), "counters": {"case": {"flops": 8}}}
    monkeypatch.setattr("gpipe_bench.experiments.guard.counters.content", lambda: content)
    path.parent.mkdir(parents=True)
    path.write_text(encode(content))
    return path


def test_equal_counters_pass(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["guard"]) == exits.DONE
    assert "counters: 1 cases equal results/guard/counters.json\nguard: passed" in capsys.readouterr().out


def test_a_win_fails_until_it_is_committed(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = fake.read_text()
    fake.write_text(wanted.replace("8", "10"))
    assert cli.main(["guard"]) == exits.VERDICT_FAILED
    shown = capsys.readouterr().out
    assert "case: flops 10 -> 8 (-20.000%)" in shown
    assert wanted in shown  # the new file, to be copied from a log
    assert cli.main(["guard", "--json"]) == exits.VERDICT_FAILED
    assert json.loads(capsys.readouterr().out)["problem"] == "case: flops 10 -> 8 (-20.000%)"
    assert cli.main(["guard", "--update"]) == exits.DONE
    assert fake.read_text() == wanted


def test_without_a_file_it_says_how_to_get_one(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.unlink()
    assert cli.main(["guard"]) == exits.BAD_USAGE
    assert "does not exist; write it with --update" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "tiny-layer"], "unknown benchmark 'tiny-layer' (did you mean 'tiny-layers'?)"),
        (["--history", "x"], "--history keeps what was timed; give a revision to compare with, --base REF"),
        (["--base", "HEAD", "--budget-s", "0"], "--budget-s is 0; give seconds, such as 150"),
        (["--base", "HEAD"], "is no git repository"),
    ],
)
def test_bad_usage_is_one_line(
    fake: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["guard", *arguments]) == exits.BAD_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def with_base(monkeypatch: pytest.MonkeyPatch, tree: Path, result: list[Finding] | WorkerError) -> None:
    @contextmanager
    def base(root: Path, ref: str) -> Iterator[Base]:
        yield Base(ref, "b" * 40, tree)

    def run(*arguments: Any, **options: Any) -> list[Finding]:
        if isinstance(result, WorkerError):
            raise result
        return result

    monkeypatch.setattr(verb_guard, "base_tree", base)
    monkeypatch.setattr(verb_guard, "guard", run)


def finding(name: str, *runs: Judgement) -> Finding:
    return Finding(name, list(runs), samples_s=[0.01, 0.02])


def test_a_confirmed_regression_fails_and_is_annotated(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with_base(monkeypatch, tmp_path / "base", [finding("tiny-layers", SLOWER, SLOWER)])
    assert cli.main(["guard", "--base", "main", "--history", str(tmp_path / "h")]) == exits.VERDICT_FAILED
    out, err = capsys.readouterr()
    assert "::error title=guard::tiny-layers: slower by +10.0%25" in err
    assert out.endswith("guard: FAILED\n")
    assert json.loads((tmp_path / "h" / "github.json").read_text())[0]["name"] == "tiny-layers"


def test_one_regression_alone_annotates(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with_base(monkeypatch, tmp_path / "base", [finding("tiny-layers", SLOWER, SAME)])
    assert cli.main(["guard", "--base", "main", "--json"]) == exits.DONE
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert [run["verdict"] for run in data["runs"]] == ["regression", "same"]
    assert data["confirmed"] is False
    assert "::error" not in err


def test_a_benchmark_that_fails_is_an_error(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with_base(monkeypatch, tmp_path / "base", WorkerError("base: no such layer"))
    assert cli.main(["guard", "--base", "main"]) == exits.CASE_FAILED
    assert "error: base: no such layer" in capsys.readouterr().err


def test_a_benchmark_that_vanished_is_an_error(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = tmp_path / "base" / "results" / "guard" / "counters.json"
    before.parent.mkdir(parents=True)
    before.write_text(encode({"benchmarks": ["tiny-layers", "gone"], "counters": {}}))
    with_base(monkeypatch, tmp_path / "base", [finding("tiny-layers", SAME)])
    assert cli.main(["guard", "--base", "main"]) == exits.BAD_USAGE
    assert (
        "benchmarks that are gone: gone; if that is intended, say --removed gone" in capsys.readouterr().err
    )
    assert cli.main(["guard", "--base", "main", "--removed", "gone"]) == exits.DONE


# The workflow and the trials


def test_the_workflow_is_valid_and_its_commands_too() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "guard.yml").read_text())
    steps = workflow["jobs"]["guard"]["steps"]
    assert steps[0]["with"]["fetch-depth"] == 0
    commands = [step["run"] for step in steps if "guard" in step.get("run", "")]
    assert len(commands) == 2
    for command in commands:
        _, _, arguments = command.partition("nox -s guard")
        given = parser().parse_args(["guard", *shlex.split(arguments.replace(" -- ", " "))])
        assert given.verb == "guard"


def test_commands_of_the_documentation_are_accepted() -> None:
    text = (ROOT / "docs" / "guard.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?:nox -s guard|python -m experiments guard)\b(?! ?`)([^\n`#|]*)", text)
    assert len(commands) >= 5
    for command in commands:
        parser().parse_args(["guard", *shlex.split(command.replace(" -- ", " "))])


def test_the_trials_are_mixed_and_all_there() -> None:
    planned = list(guard_trials.plan())
    assert len(planned) == len(set(planned)) == sum(guard_trials.TRIALS.values())
    half = [kind for kind, _, _ in planned[: len(planned) // 2]]
    assert 9 <= half.count("slower") <= 11
    assert {name for _, _, name in planned} == set(BENCHMARKS)


def test_a_trial_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    harness_trials.append(path, {"number": 0})
    with path.open("a") as file:
        file.write('{"number": 1, "ki')
    assert harness_trials.load(path) == [{"number": 0}]
    harness_trials.append(path, {"number": 1})
    assert harness_trials.load(path) == [{"number": 0}, {"number": 1}]
    path.write_text('{"number": 0}\nnonsense\n{"number": 1}\n')
    with pytest.raises(ValueError, match=r"trials.jsonl:2: no JSON"):
        harness_trials.load(path)


def test_the_committed_trials_hold_what_is_promised() -> None:
    """At most one false alarm, none confirmed; four fifths of the slow-downs found; 3 minutes at most."""
    records = harness_trials.load(guard_trials.SERIES.records)
    same = [record for record in records if record["kind"] == "same"]
    slower = [record for record in records if record["kind"] == "slower"]
    assert sum(any(run["verdict"] == "regression" for run in record["runs"]) for record in same) <= 1
    assert not any(record["confirmed"] for record in same)
    assert sum(record["confirmed"] for record in slower) >= 0.8 * len(slower)
    for kind, found in (("other repository, same", False), ("other repository, slower", True)):
        assert {record["confirmed"] for record in records if record["kind"] == kind} == {found}
    assert max(record["duration_s"] for record in records) < 180
    text = guard_trials.summary(records)
    assert f"same: {len(same)} of 40 trials" in text
    assert f"slower: {len(slower)} of 20 trials" in text


def test_the_page_says_what_the_trials_say() -> None:
    text = guard_trials.SERIES.docs.read_text(encoding="utf-8")
    assert guard_trials.SERIES.rewritten(text, harness_trials.load(guard_trials.SERIES.records)) == text, (
        "stale: --write-docs"
    )
    with pytest.raises(ValueError, match="has lost its markers"):
        guard_trials.SERIES.rewritten(text.replace(harness_trials.END, ""), [])


def test_intervals_of_rates_are_exact() -> None:
    assert harness_trials.rate(0, 40) == "0 of 40 (0.0%, 95 % interval 0.0% to 8.8%)"
    assert harness_trials.rate(20, 20) == "20 of 20 (100.0%, 95 % interval 83.2% to 100.0%)"
