"""The consistency experiment's verdicts from records alone, its cases, and what it says of wrong input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from gpipe_bench.experiments.commands import cli, exits
from gpipe_bench.experiments.consistency import experiment as consistency
from gpipe_bench.experiments.consistency.cells import (
    METRICS,
    baseline,
    cells,
    exact,
    interval,
    outside_by_chance,
    statistical,
)
from gpipe_bench.experiments.consistency.experiment import EXPERIMENT, FIRST_SEED, OWN_SEEDS, STAGES
from gpipe_bench.experiments.consistency.figures import figures
from gpipe_bench.experiments.consistency.recipe import DAWNBENCH, DIGITS
from gpipe_bench.experiments.consistency.tables import tables
from gpipe_bench.experiments.report.figures import draw
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.judging.compare import compare
from gpipe_bench.harness.records.record import SCHEMA, Quantity, Record

BASE = (0.975, 0.980, 0.985, 0.980, 0.980)


def quantity(name: str, value: float | None, unit: str = "number") -> Quantity:
    return Quantity(name=name, value=value, unit=unit, provenance="measured")


def record(part: str, score: float | None, *, model: str = "images", **more: Any) -> Record:
    """What a finished training leaves."""
    key = {"num_stages": 1, "num_microbatches": 2, "seed": 0, "processes": 1, "engine": "pipeline"}
    given = {name: more.pop(name) for name in list(more) if name in {*key, "stash", "rate"}}
    quantities = [quantity(METRICS[model], score, "ratio" if model == "images" else "perplexity")]
    if part in ("same seed", "micro-batches"):
        gap = more.pop("gap", 0.0)
        quantities += [
            quantity("reference " + METRICS[model], score),
            quantity("largest weight difference", gap),
            quantity("relative weight difference", gap),
            quantity("numbers that differ", more.pop("different", 1 if gap else 0), "parameters"),
            quantity("numbers compared", 1000, "parameters"),
        ]
    if part == "asynchronous":
        quantities += [
            quantity("weights kept", 20.0, "bytes"),
            quantity("weights of the model", 8.0, "bytes"),
        ]
    better = model == "images"
    details = {
        "metric": METRICS[model], "higher_is_better": better, "required": 0.97 if better else 130.0,
        "requirement": "at least 97 %", "curve": [[10, 2.0, 0.5], [20, 1.0, score]], "layers_per_stage": [8],
        "weights_sha256": more.pop("digest", "ab" * 32), "staleness": [1, 0], "versions": [2, 1],
    }  # fmt: skip
    return Record(
        schema=SCHEMA, experiment="consistency", profile="short",
        case={"part": part, "model": model, **key, **given},
        status=more.pop("status", "done"), reason=more.pop("reason", ""), quantities=tuple(quantities),
        details=details, environment={}, command="", started_at="", duration_s=0.0,
    )  # fmt: skip


def baselines(scores: Sequence[float] = BASE) -> list[Record]:
    return [record("baseline", score, seed=seed) for seed, score in enumerate(scores)]


def own(num_stages: int, *scores: float) -> list[Record]:
    return [record("own seeds", score, num_stages=num_stages, seed=10 + i) for i, score in enumerate(scores)]


# Verdicts


def test_the_band_is_two_standard_deviations_of_the_sequential_runs() -> None:
    found = baseline(baselines(), "images")
    assert found is not None
    assert found.mean == pytest.approx(0.98)
    assert found.deviation == pytest.approx(0.0035355, abs=1e-6)  # n - 1 in the denominator
    records = [*baselines(), *own(2, 0.9735), *own(4, 0.9725), *own(8, 0.9725, 0.9875)]
    found_by = {k: statistical(records, "images", k) for k in (1, 2, 4, 8)}
    assert [verdict for _, _, verdict in found_by.values()] == [
        "not run", "consistent", "undecided", "consistent",
    ]  # fmt: skip
    distances = {k: distance for k, (_, distance, _) in found_by.items() if distance is not None}
    assert distances[2].value == pytest.approx(1.838, abs=1e-3)
    assert distances[8].value == pytest.approx(0, abs=1e-9)


def test_the_bands_worth_is_that_of_repeated_experiments() -> None:
    random = numpy.random.default_rng(0)
    first = random.normal(size=(200_000, 5))
    for runs in (1, 2, 3):
        gap = random.normal(0, 1 / runs**0.5, size=200_000) - first.mean(axis=1)
        outside = float((abs(gap) > 2 * first.std(axis=1, ddof=1)).mean())
        assert outside_by_chance(runs, 5) == pytest.approx(outside, abs=0.003)


def test_what_chance_does_not_explain_deviates() -> None:
    better = [*baselines((0.975, 0.976, 0.977, 0.976, 0.976)), *own(2, 0.9795, 0.9795), *own(4, 0.984, 0.984)]
    verdicts = [statistical(better, "images", k)[2] for k in (2, 4)]
    assert verdicts == ["undecided", "deviates"], "in either direction"
    worse = [*baselines(), *own(2, 0.9705), *own(4, 0.9701, 0.9701), *own(8, 0.9701, 0.9702)]
    assert [statistical(worse, "images", k)[2] for k in (2, 4, 8)] == ["undecided"] * 3
    found = {c.column: c.verdict for c in compare(cells(better))}
    assert (found["pipeline-2"], found["pipeline-4"]) == ("reproduced", "deviates")


@pytest.mark.parametrize(("runs", "baseline_runs"), [(1, 5), (2, 5), (3, 4)])
@pytest.mark.parametrize("distance", [0.5, 3.0, 6.0])
def test_the_interval_is_that_of_repeated_experiments(distance: float, runs: int, baseline_runs: int) -> None:
    """At either bound, as many of 200,000 simulated experiments as should lie beyond the distance seen."""
    random = numpy.random.default_rng(0)

    def share_beyond(true: float) -> float:
        first = random.normal(size=(200_000, baseline_runs))
        gap = random.normal(true, 1 / runs**0.5, size=200_000) - first.mean(axis=1)
        return float((gap / first.std(axis=1, ddof=1) > distance).mean())

    low, high = interval(distance, runs, baseline_runs)
    assert share_beyond(high) == pytest.approx(0.975, abs=0.002)
    if low > 0:
        assert share_beyond(low) == pytest.approx(0.025, abs=0.002)
    else:
        assert share_beyond(0.0) > 0.025


def test_a_baseline_that_did_not_learn_makes_nothing_consistent() -> None:
    records = [*baselines((0.97, 0.98, 0.98, 0.969, 0.98)), *own(2, 0.975)]
    _, distance, verdict = statistical(records, "images", 2)
    assert distance is None
    assert "1 of 5 sequential runs did not learn" in verdict
    cell = next(c for c in compare(cells(records)) if c.column == "pipeline-2")
    assert (cell.verdict, cell.ours) == ("not run", None)
    assert "did not learn" in cell.reason
    text = tables(records, compare(cells(records)))
    assert "nothing is called consistent" in text
    assert " consistent " not in text.replace("called consistent", "")


def test_a_run_that_did_not_learn_or_diverged_is_not_consistent() -> None:
    """However near to the baseline it lies: here a sequential mean of 97.02 %."""
    low = baselines((0.9701, 0.9702, 0.9703, 0.9702, 0.9702))
    assert statistical([*low, *own(2, 0.9699)], "images", 2)[2] == "deviates: did not learn"
    assert statistical([*low, *own(2, 0.9699, 0.9704)], "images", 2)[2] == "consistent", "by their mean"
    text = " ".join(tables([*low, *own(2, 0.9699, 0.9704)], []).split())
    assert "1 of 2 single runs with own seeds missed it" in text
    assert next(c for c in compare(cells([*low, *own(2, 0.9699)])) if c.column == "pipeline-2").ours is None
    failed = record("own seeds", None, num_stages=2, status="failed", reason="broke")
    assert statistical([*baselines(), failed], "images", 2)[2] == "not run: a run did not finish"
    diverged = record("own seeds", None, num_stages=2)
    assert statistical([*baselines(), diverged], "images", 2)[2].startswith("deviates")


def test_equal_or_too_few_scores_have_no_band() -> None:
    assert "no standard deviation" in statistical([*baselines([0.98] * 5), *own(2, 0.98)], "images", 2)[2]
    assert "no standard deviation" in statistical([*baselines(BASE[:2]), *own(2, 0.98)], "images", 2)[2]


def test_lower_perplexity_is_learning() -> None:
    good = [record("baseline", score, model="text", seed=i) for i, score in enumerate((50, 51, 52))]
    found = baseline(good, "text")
    assert found is not None
    assert not found.problem
    found = baseline([*good, record("baseline", 131.0, model="text", seed=9)], "text")
    assert found is not None
    assert "did not learn" in found.problem


def test_weights_are_identical_or_they_are_not() -> None:
    assert exact(record("same seed", 0.98)) == "identical"
    assert exact(record("same seed", 0.98, gap=1e-38)) == "deviates"
    assert exact(record("same seed", 0.98, gap=0.0, different=1)) == "deviates"  # a running statistic
    assert exact(record("same seed", 0.5)).startswith("not judged")  # weights that never moved are equal too
    assert exact(record("same seed", 0.98, status="failed", reason="broke")) == "not run: broke"


def test_cells_are_held_against_the_papers_claim() -> None:
    records = [*baselines(), *own(1, 0.98), *own(2, 0.9725)]
    found = {c.column: c for c in compare(cells(records))}
    assert found["pipeline-1"].verdict == "reproduced"
    assert found["pipeline-2"].verdict == "reproduced", "its interval reaches into the band"
    assert found["pipeline-8"].verdict == "not run"
    assert found["pipeline-1"].unit == "standard deviations"


def test_the_text_shows_all_levels_and_the_figures_are_drawn(tmp_path: Path) -> None:
    records = [
        *baselines(), *own(1, 0.98), *own(2, 0.978),
        record("same seed", 0.98, num_stages=8), record("same seed", 0.98, num_stages=2, processes=2),
        record("micro-batches", 0.97, num_microbatches=1, gap=2.5, digest="cd" * 32),
        record("micro-batches", 0.97, num_microbatches=1, gap=2.5, digest="cd" * 32, engine="sequential"),
        record("asynchronous", 0.9, num_stages=2, stash=True, rate=1.0),
        record("asynchronous", 0.95, num_stages=2, stash=True, rate=0.5),
        record("asynchronous", 0.96, num_stages=1, stash=True, rate=0.5),
    ]  # fmt: skip
    text = tables(records, compare(cells(records)))
    for part in (
        "(a) own seeds", "0.57 sd [0.00, ", "(b) same seed", "K = 2, 2 processes",
        "identical (1,000 numbers)",
        "(c) AmoebaNet-D", "Equal digests", "14 of 100", "2.50 x the model", "did not learn, -8.00 points",
        "asynchronous, with stashing, K = 2  ", "asynchronous, with stashing, K = 2, rate / 2",
        "sequential, rate / 2 ",
    ):  # fmt: skip
        assert part in text, part
    paths = draw(EXPERIMENT, records, tmp_path)
    assert [path.name for path in paths] == ["consistency.png", "consistency.svg"]
    assert paths[0].stat().st_size > 20_000
    assert figures([]) == []
    assert "Equal digests" not in tables([*records[:-5], *records[-3:]], [])


# Cases


def test_seeds_of_baseline_and_stages_are_their_own() -> None:
    for model in ("images", "text"):
        found = [c.key for c in EXPERIMENT.cases(RunOptions()) if c.key.get("model") == model]
        seeds = [c["seed"] for c in found if c["part"] in ("baseline", "own seeds")]
        assert len(seeds) == len(set(seeds))
        assert sum(c["part"] == "baseline" for c in found) == 5
        assert {c["num_stages"] for c in found if c["part"] == "own seeds"} == set(STAGES)
        same = [c for c in found if c["part"] == "same seed"]
        assert {(c["num_stages"], c["processes"]) for c in same} == {(2, 1), (4, 1), (8, 1), (2, 2)}
        assert {c["seed"] for c in same} == {FIRST_SEED[model] + OWN_SEEDS[1]}


@pytest.mark.parametrize(("model", "option"), [("images", "--data"), ("text", "--text")])
def test_the_papers_size_needs_data_of_ones_own(model: str, option: str) -> None:
    options = RunOptions(profile="full", device="cpu")
    case = next(c for c in EXPERIMENT.cases(options) if c.key.get("model") == model)
    outcome = EXPERIMENT.run(case, options)
    assert outcome.status == "skipped"
    assert option in outcome.reason


def test_the_papers_recipe_is_the_published_one() -> None:
    recipe = consistency.subject_of("images", RunOptions(profile="full", data="/data")).recipe
    assert recipe == DAWNBENCH
    assert (recipe.num_layers, recipe.num_filters, recipe.batch_size, recipe.num_epochs) == (6, 128, 1024, 35)
    own_data = consistency.subject_of("images", RunOptions(data="/data")).recipe
    assert own_data == replace(DIGITS, augment=True, required_accuracy=0.0)


# Wrong input


def complaint(capsys: pytest.CaptureFixture[str], results: Path, *arguments: str) -> str:
    """The one line that a run ends with before anything is run."""
    status = cli.main(["run", "consistency", "--profile", "smoke", "--results", str(results), *arguments])
    captured = capsys.readouterr()
    assert status == exits.BAD_USAGE
    assert not captured.out
    (line,) = captured.err.splitlines()
    assert not list(results.glob("*.jsonl"))
    return line


def test_a_missing_path_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for option in ("--data", "--text"):
        line = complaint(capsys, tmp_path, option, str(tmp_path / "nowhere"))
        assert line.startswith(f"error: {option} {tmp_path / 'nowhere'}: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no text in it"),
        (b" \n\t\n", "has no text in it"),
        (b"\xff\xfe\x00a", "byte 0 is not UTF-8"),
        (b"one short line", "makes 1 block"),
        (b"\n\n".join(b"abcab %d " % i * 300 for i in range(9)), "too small for a vocabulary of 512 pieces"),
    ],
)
def test_text_that_can_not_be_trained_on(
    content: bytes, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    line = complaint(capsys, tmp_path, "--text", str(path))
    assert str(path) in line
    assert message in line


def test_files_that_are_not_parallel(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("eins\n")
    line = complaint(capsys, tmp_path, "--text", str(tmp_path / "a"), "--parallel-text", str(tmp_path / "b"))
    assert "2 and 1 lines" in line
    line = complaint(capsys, tmp_path, "--parallel-text", str(tmp_path / "b"))
    assert "with --text" in line


def test_image_folders_that_can_not_be_trained_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def touch(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()

    touch("file", "one/cat/1.png", "empty/cat/1.png", "empty/dog/notes.txt", "none/readme.txt")
    touch("parts/train/cat/1.png", "parts/train/dog/1.png", "parts/val/cat/1.png", "parts/val/cow/1.png")
    touch("cifar/cifar-10-batches-py/data_batch_1")
    for name, message in (
        ("file", "this is a file"),
        ("one", "holds one class (cat)"),
        ("none", "holds no class"),
        ("empty", "dog holds no image"),
        ("parts", "different classes (cow is in one"),
        ("cifar", "lacks test_batch, batches.meta"),
    ):
        assert message in complaint(capsys, tmp_path / "results", "--data", str(tmp_path / name))


def test_other_experiments_take_no_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = cli.main(["run", "figure2", "--results", str(tmp_path), "--data", str(tmp_path)])
    assert status == exits.BAD_USAGE
    assert "figure2 takes no data" in capsys.readouterr().err


def test_records_depend_on_the_data() -> None:
    case = EXPERIMENT.cases(RunOptions())[0]
    options = [RunOptions(), RunOptions(data="/a"), RunOptions(text="/a"), RunOptions(text="/b")]
    assert len({EXPERIMENT.identity(case, each) for each in options}) == len(options)
