"""The guard as a whole: exact counters, real processes of real and of broken trees, and the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.commands import guard as verb
from gpipe_bench.experiments.commands.guard import COUNTERS
from gpipe_bench.experiments.commands.output import BAD_USAGE, CASE_FAILED, DONE, VERDICT_FAILED
from gpipe_bench.experiments.guard.arms import Arm, Base, Subject, WorkerError
from gpipe_bench.experiments.guard.own import BENCHMARKS, CASES, content, counters, differences, encode, load
from gpipe_bench.experiments.guard.run import Finding, guard
from gpipe_bench.harness.rounds import ARMS, Change, Judgement, Sample
from gpipe_bench.pipeline.stage.layers import LayerRunner

ROOT = Path(__file__).parents[2]
NONE = Change(0.0, -0.01, 0.01)
SAME = Judgement("same", 8, NONE, NONE, None, 0.01, 0.01)
SLOWER = replace(SAME, verdict="regression", head=Change(0.1, 0.08, 0.12))
IMPROVED = replace(SAME, verdict="improved", head=Change(-0.1, -0.12, -0.08))
UNSURE = replace(SAME, verdict="inconclusive", head=Change(0.0, -0.2, 0.2))
EARLY = replace(UNSURE, trials=5, head=SLOWER.head, out_of_time=True)
VOID = replace(SAME, verdict="contaminated", control=Change(0.1, 0.08, 0.12))
BY_CPU = replace(UNSURE, verdict="regression", cpu=SLOWER.head, by_cpu=True)


def finding(name: str, judged: Judgement) -> Finding:
    return Finding(name, [[]], judged)


# Processes


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Another revision: the packages under test and nothing else, no guard among them."""
    for package in ("gpipe_bench", "pipeline", "models"):
        shutil.copytree(
            ROOT / package, tmp_path / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


def own(root: Path = ROOT) -> Subject:
    return Subject(root, [], (".",), ROOT / verb.OWN)


@contextmanager
def arm(tree: Path, folder: Path) -> Iterator[Arm]:
    with ExitStack() as stack:
        found = Arm("base", tree, own(), str(folder), stack)
        found.receive(60)
        yield found


def test_a_revision_that_forgot_to_recompute_is_not_timed(copied: Path) -> None:
    path, before = copied / "pipeline" / "arguments.py", "sizes = (num_stages, num_microbatches, remat, "
    assert path.read_text().count(before) == 1
    path.write_text(path.read_text().replace(before, before.replace("remat", '"never"')))
    with arm(copied, copied) as other, pytest.raises(WorkerError, match="RuntimeError: a step runs its"):
        other.build("tiny-layers")


# Trials and what they amount to


class Trials:
    """Stands in for processes: each start takes 2 s, each trial of a benchmark the seconds given; `heads`
    says how much slower which head is.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, took_s: dict[str, float], **heads: float) -> None:
        self.now_s, self.took_s, self.heads = 0.0, took_s, heads
        self.orders: list[tuple[str, ...]] = []
        self.taken: list[str] = []
        where = "gpipe_bench.experiments.guard.run"
        monkeypatch.setattr(f"{where}.arms_of", self.start)
        monkeypatch.setattr(f"{where}.measure", self.measure)
        monkeypatch.setattr(f"{where}.time.monotonic", lambda: self.now_s)

    @contextmanager
    def start(
        self, subject: Subject, base: Path, control: Path | None, order: tuple[str, ...]
    ) -> Iterator[None]:
        self.now_s += 2
        self.orders.append(order)
        yield

    def measure(self, arms: None, finding: Finding, *_: Any) -> None:
        name = finding.benchmark
        self.now_s += self.took_s[name]
        self.taken.append(name)
        if name == "hangs":
            raise WorkerError(f"{name} hangs")
        if name == "ends" and self.taken.count(name) == 3:
            error = WorkerError(f"{name} ends")
            error.lacks = True
            raise error
        of = {"base": 1.0, "head": 1.0 + self.heads.get(name, 0.0), "control": 1 + 0.1 * (name == "odd")}
        finding.trials.append([{arm: [Sample(each, each)] * 2 for arm, each in of.items()}])

    def run(self, **options: Any) -> list[Finding]:
        return guard(replace(own(), benchmarks=[*self.took_s]), ROOT, **options)


def test_every_trial_has_fresh_processes_that_start_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head came first, in every run, and the same code was called slower, twice alike."""
    trials = Trials(monkeypatch, {"tiny-layers": 1, "transformer": 1}, transformer=0.1)
    findings = trials.run()
    assert trials.taken == ["tiny-layers", "transformer"] * 8
    assert len(trials.orders) == 8
    assert {*trials.orders[:6]} == {*permutations(ARMS)}, "and none comes first more often"
    assert trials.orders[:6] != sorted(trials.orders[:6])
    assert [each.is_slower for each in findings] == [False, True]
    assert [each.is_told for each in findings] == [True, False]


def test_a_slow_benchmark_leaves_the_others_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch, {"long": 55, "short": 1, "hangs": 5})
    long, short, hangs = trials.run(budget_s=150)
    assert (len(long.trials), len(short.trials), short.judgement) == (2, 8, SAME_AFTER_8)
    assert "long: +0.0% [+0.0, +0.0] over 2 trials; no verdict before 8 trials" in long.conclusion()
    assert "out of time: --budget-s gives more" in long.conclusion()
    assert (hangs.failed, trials.taken.count("hangs")) == ("hangs hangs", 1)
    assert trials.now_s <= 150


def test_time_that_only_a_quick_benchmark_can_use_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch, {"odd": 3, "one": 40, "other": 40})
    trials.run(budget_s=150)
    assert 150 - 2 - 3 < trials.now_s <= 150


def test_what_fails_in_a_later_trial_failed_and_is_not_new(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch, {"ends": 1, "short": 1})
    ends, short = trials.run()
    assert (ends.failed, ends.lacking, short.verdict) == ("ends ends", "", "same")


SAME_AFTER_8 = Judgement("same", 8, *[Change(0.0, 0.0, 0.0)] * 3, 1.0, 1.0)


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (SLOWER, "slower by +10.0% [+8.0, +12.0] over 8 trials"),
        (IMPROVED, "improved, -10.0% [-12.0, -8.0] over 8 trials"),
        (VOID, "nothing proven over 8 trials: the base differs from itself by +10.0% [+8.0, +12.0]"),
        (UNSURE, "can't tell, +0.0% [-20.0, +20.0] over 8 trials; only changes of 35% or more would show"),
        (EARLY, "+10.0% [+8.0, +12.0] over 5 trials; no verdict before 8 trials; out of time: --budget-s "
                "gives more"),
        (BY_CPU, "slower by +10.0% [+8.0, +12.0] by processor time over 8 trials"),
        (replace(BY_CPU, verdict="same", cpu=NONE),
         "same, as exact counters are, +0.0% [-1.0, +1.0] by processor time over 8 trials"),
    ],
)  # fmt: skip
def test_what_trials_amount_to_in_a_sentence(judged: Judgement, said: str) -> None:
    assert finding("x", judged).conclusion() == f"x: {said}"


# The command


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A project folder of its own with quick counters; the path of their file."""
    path = tmp_path / "results" / "guard" / "counters.json"
    monkeypatch.setattr(verb, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "COUNTERS", path)
    content = {"benchmarks": sorted(BENCHMARKS), "counters": {"case": {"flops": 8}}}
    monkeypatch.setattr("gpipe_bench.experiments.guard.own.content", lambda: content)
    path.parent.mkdir(parents=True)
    path.write_text(encode(content))
    return path


def test_a_win_fails_until_it_is_committed(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = fake.read_text()
    fake.write_text(wanted.replace("8", "10"))
    assert cli.main(["guard"]) == VERDICT_FAILED
    shown = capsys.readouterr().out
    assert "case: flops 10 -> 8" in shown
    assert wanted in shown  # the new file, to be copied from a log
    assert cli.main(["guard", "--json"]) == VERDICT_FAILED
    assert json.loads(capsys.readouterr().out)["problem"] == "case: flops 10 -> 8"
    assert cli.main(["guard", "--update"]) == DONE
    assert fake.read_text() == wanted


@pytest.fixture
def found(fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Finding]:
    """What timing finds, against a made-up base."""
    result: list[Finding] = []

    @contextmanager
    def base(root: Path, ref: str) -> Iterator[Base]:
        yield Base(ref, "b" * 40, tmp_path / "base")

    monkeypatch.setattr(verb, "base_tree", base)
    monkeypatch.setattr(verb, "merge_base", lambda root, ref: "")
    monkeypatch.setattr(verb, "own_subject", lambda arguments: own())
    monkeypatch.setattr(verb, "guard", lambda *arguments, **options: result)
    return result


def test_a_regression_fails_and_is_annotated_and_summed_up(
    found: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    found += [finding("tiny-layers", SLOWER), Finding("transformer", lacking="no such layer")]
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    assert cli.main(["guard", "--base", "main", "--markdown", str(summary)]) == VERDICT_FAILED
    out, err = capsys.readouterr()
    assert "::error title=guard::tiny-layers: slower by +10.0%25" in err
    assert "::warning title=guard::transformer: new, not timed: no such layer" in err
    assert out.endswith("guard: FAILED\n")
    lines = summary.read_text().splitlines()
    assert lines[:2] == ["before", "### guard: FAILED"]
    assert "- tiny-layers: slower by +10.0% [+8.0, +12.0] over 8 trials" in lines
    assert any(line.startswith("| tiny-layers") and "| regression" in line for line in lines)
    assert cli.main(["guard", "--base", "main", "--markdown", str(tmp_path)]) == BAD_USAGE
    assert f"{tmp_path} can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([SAME, IMPROVED], "guard: passed"),
        ([SAME, UNSURE], "guard: passed, but inconclusive for transformer"),
        ([UNSURE, VOID], "guard: inconclusive: nothing was measured well enough to tell"),
    ],
)
def test_what_could_not_be_told_has_not_passed(
    found: list, capsys: pytest.CaptureFixture[str], runs: list, said: str
) -> None:
    found += [finding("tiny-layers", runs[0]), finding("transformer", runs[1])]
    assert cli.main(["guard", "--base", "main"]) == DONE
    assert capsys.readouterr().out.splitlines()[-1] == said
    status = cli.main(["guard", "--base", "main", "--require-conclusive"])
    assert status == (DONE if said == "guard: passed" else VERDICT_FAILED)


def test_where_nothing_can_be_timed_nothing_has_passed(
    found: list, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found.append(Finding("transformer", failed="base: no such layer"))
    summary = tmp_path / "summary.md"
    assert cli.main(["guard", "--base", "main", "--markdown", str(summary)]) == CASE_FAILED
    out, err = capsys.readouterr()
    assert "base: no such layer" in err
    assert "passed" not in out
    assert summary.read_text().startswith("### guard: failed\n")


# Exact counters


SMALL = CASES[0]


@pytest.fixture(scope="module")
def counted() -> dict:
    return content()


def changes(before: dict, now: dict) -> list[str]:
    return differences({"counters": before}, {"counters": now, "benchmarks": []})


def test_the_committed_numbers_are_what_the_code_does(counted: dict) -> None:
    assert differences(load(COUNTERS), counted) == [], "see docs/guard.md, --update"
    assert COUNTERS.read_text(encoding="utf-8") == encode(counted)


def test_the_numbers_are_those_of_the_algebra(counted: dict) -> None:
    """K = 4, M = 8: (M + K - 1) rounds of F and B, and recomputations that hide in no gap but the last."""
    plain = counted["counters"]["transformer-lm gpipe K=4 M=8 never"]
    again = counted["counters"]["transformer-lm gpipe K=4 M=8 always"]
    kept = counted["counters"]["transformer-lm gpipe K=4 M=8 except_last"]
    assert plain["makespan in slots"] == 3 * (8 + 4 - 1)
    assert plain["bubble"] == "3/11"
    assert again["graphs alive, per stage"] == "1 1 1 1"
    assert plain["graphs alive, per stage"] == "8 8 8 8"
    assert plain["messages forward"] == plain["messages backward"] == 3 * 8
    # (N, T, d) of float32 for each of the 3 boundaries.
    assert plain["bytes forward"] == 3 * 16 * 8 * 16 * 4
    # A forward is a third of forward and backward here: recomputing all of them adds a third.
    assert 3 * again["flops"] == 4 * plain["flops"]
    assert 24 * kept["flops"] == 31 * plain["flops"]
    one = counted["counters"]["transformer-lm 1f1b K=4 M=8 never"]
    assert one["graphs alive, per stage"] == "4 3 2 1"


def test_a_second_recomputation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before, once = counters(SMALL), LayerRunner.run

    def twice(self: LayerRunner, m: int, value: object, *, recording: bool) -> object:
        if not recording:  # a recomputation
            once(self, m, value, recording=False)
        return once(self, m, value, recording=recording)

    monkeypatch.setattr(LayerRunner, "run", twice)
    (line,) = changes({"case": before}, {"case": counters(SMALL)})
    assert line == f"case: flops {before['flops']} -> {before['flops'] * 5 // 4}"


def test_missing_and_new_entries_are_differences() -> None:
    expected = {"gone": {"x": 1}, "both": {"x": 1, "lost": 2}}
    counted = {"both": {"x": 1, "fresh": 3}, "new": {"x": 1}}
    assert differences(
        {"counters": expected, "benchmarks": ["a", "b"]}, {"counters": counted, "benchmarks": ["b", "c"]}
    ) == [
        "gone: x 1 -> nothing",
        "both: lost 2 -> nothing",
        "benchmark a timed -> nothing",
        "both: fresh nothing -> 3",
        "new: x nothing -> 1",
        "benchmark c nothing -> timed",
    ]
