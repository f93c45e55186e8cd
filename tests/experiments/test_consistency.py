"""The consistency experiment's frozen protocol and its verdicts from records alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from gpipe_bench.experiments.paper.consistency.experiment import EXPERIMENT
from gpipe_bench.experiments.paper.consistency.judging import (
    METRICS,
    PATH,
    Finding,
    Plan,
    baseline,
    cells,
    exact,
    interval,
    load_protocol,
    statistical,
    welch,
)
from gpipe_bench.experiments.paper.consistency.tables import beyond_the_margin, spreads, tables
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.record import SCHEMA, Metric, Record
from gpipe_bench.harness.report.table import text_table
from gpipe_bench.harness.verdict import Comparison

PROTOCOL = load_protocol()
REPETITIONS = 200_000


def distances(plan: Plan, true: float, shared: float, seed: int = 0) -> numpy.ndarray:
    """Of repeated experiments, (repetitions, K): the distances seen where the true one is `true`.

    `shared` is the share of a score's variance that comes from its initial weights.
    """
    random = numpy.random.default_rng(seed)
    count = len(plan.sequential)
    initial = random.normal(0, math.sqrt(shared), (REPETITIONS, count))
    sequential = initial + random.normal(0, math.sqrt(1 - shared), (REPETITIONS, count))
    mean, deviation = sequential.mean(axis=1), sequential.std(axis=1, ddof=1)
    noise = random.normal(0, math.sqrt((1 - shared) / plan.runs), (REPETITIONS, len(plan.stages)))
    means = true + initial[:, : plan.runs].mean(axis=1)[:, None] + noise
    return abs(means - mean[:, None]) / deviation[:, None]


# The file


def test_the_seeds_follow_from_the_papers_number_alone() -> None:
    seeds: list[int] = []
    for model, plan in PROTOCOL.plans.items():
        roles = {"initial": plan.initial, "sequential": plan.sequential}
        roles |= {f"K={count}": seeds for count, seeds in plan.stages.items()}
        for role, own in roles.items():
            for number, seed in enumerate(own, start=1):
                words = f"1811.06965 {model} {role} {number}"
                assert seed == int(hashlib.sha256(words.encode()).hexdigest()[:8], 16) // 2
            seeds += own
    assert len(seeds) == len(set(seeds)) == 10 + 10 + 4 * 6 + 8 + 8 + 4 * 4
    assert min(seeds) > 1999, "earlier trainings took theirs from 0 to 1999"
    assert all({*map(len, plan.stages.values())} == {plan.runs} for plan in PROTOCOL.plans.values())


# The test that it describes


def farthest(plan: Plan) -> float:
    """The observed distance up to which the whole interval lies within the margin."""
    low, high = 0.0, PROTOCOL.margin
    for _ in range(40):
        middle = (low + high) / 2
        inside = interval(middle, plan.runs, len(plan.sequential), PROTOCOL.alpha)[1] <= PROTOCOL.margin
        low, high = (middle, high) if inside else (low, middle)
    return low


@pytest.mark.parametrize(("model", "one", "all_together"), [("images", 0.93, 0.80), ("text", 0.83, 0.56)])
def test_the_numbers_of_runs_suffice_for_the_stated_power(
    model: str, one: float, all_together: float
) -> None:
    """By repeated experiments; common initial weights only add to it."""
    plan = PROTOCOL.plans[model]
    most = farthest(plan)
    found = distances(plan, 0.0, 0.0) <= most
    assert found[:, 0].mean() == pytest.approx(one, abs=0.006)
    assert found.all(axis=1).mean() == pytest.approx(all_together, abs=0.006)
    stated = found.all(axis=1) if plan.power_of == "all K together" else found[:, 0]
    assert round(stated.mean(), 2) >= PROTOCOL.power
    paired = distances(plan, 0.0, 0.5) <= most
    assert paired.all(axis=1).mean() > found.all(axis=1).mean()


@pytest.mark.parametrize("model", ["images", "text"])
@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
def test_a_difference_as_large_as_the_margin_is_found_equal_no_oftener_than_alpha(
    model: str, shared: float
) -> None:
    plan = PROTOCOL.plans[model]
    share = (distances(plan, PROTOCOL.margin, shared)[:, 0] <= farthest(plan)).mean()
    assert 0.005 < share < PROTOCOL.alpha + 0.002


def test_welchs_interval_is_scipys() -> None:
    from scipy.stats import ttest_ind

    for seed in range(5):
        random = numpy.random.default_rng(seed)
        one, other = random.normal(1, 3, 6).tolist(), random.normal(0, 1, 10).tolist()
        low, high = ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
        assert welch(one, other)[1:] == (pytest.approx(low), pytest.approx(high))


IMAGES = PROTOCOL.plans["images"]
BASE = (0.976, 0.984) * 5
DEVIATION = 0.004 * (10 / 9) ** 0.5


def metric(name: str, value: float | None, unit: str = "number") -> Metric:
    return Metric(name=name, value=value, unit=unit, provenance="measured")


def record(part: str, score: float | None, *, model: str = "images", **more: Any) -> Record:
    """What a finished training leaves."""
    key = {"num_stages": 1, "num_microbatches": 2, "seed": 0, "processes": 1, "engine": "pipeline"}
    key["protocol"] = PROTOCOL.digest
    given = {name: more.pop(name) for name in list(more) if name in {*key, "stash", "rate"}}
    metrics = [metric(METRICS[model], score, "ratio" if model == "images" else "perplexity")]
    if part in ("same seed", "micro-batches"):
        gap = more.pop("gap", 0.0)
        metrics += [
            metric("reference " + METRICS[model], score),
            metric("largest weight difference", gap),
            metric("relative weight difference", gap),
            metric("numbers that differ", more.pop("different", 1 if gap else 0), "parameters"),
            metric("numbers compared", 1000, "parameters"),
        ]
    if part == "asynchronous":
        metrics += [
            metric("weights kept", 20.0, "bytes"),
            metric("weights of the model", 8.0, "bytes"),
        ]
    better = model == "images"
    details = {
        "metric": METRICS[model], "higher_is_better": better, "required": 0.97 if better else 130.0,
        "floor": 0.94 if better else 130.0, "requirement": "at least 97 %",
        "curve": [[10, 2.0, 0.5], [20, 1.0, score]], "layers_per_stage": [8],
        "weights_sha256": more.pop("digest", "ab" * 32), "staleness": [1, 0], "versions": [2, 1],
    }  # fmt: skip
    return Record(
        schema=SCHEMA, experiment="consistency", profile="short",
        case={"part": part, "model": model, **key, **given},
        status=more.pop("status", "done"), reason=more.pop("reason", ""), metrics=tuple(metrics),
        details=details, environment={}, command="", started_at="", duration_s=0.0,
        options=more.pop("options", {"seed": 0, "data": None}),
    )  # fmt: skip


def baselines(scores: Sequence[float | None] = BASE, **more: Any) -> list[Record]:
    """Sequential runs, with the protocol's seeds as far as they go."""
    return [
        record("baseline", score, seed=seed, **more)
        for seed, score in zip(IMAGES.sequential, scores, strict=False)
    ]


def own(num_stages: int, *scores: float | None, **more: Any) -> list[Record]:
    """The runs of a number of stages; one score is that of all."""
    given = scores * IMAGES.runs if len(scores) == 1 else scores
    return [
        record("own seeds", score, num_stages=num_stages, seed=seed, **more)
        for seed, score in zip(IMAGES.stages[num_stages], given, strict=False)
    ]


def found(records: Sequence[Record], num_stages: int = 2) -> Finding:
    return statistical(records, "images", num_stages)


def column(records: Sequence[Record], num_stages: int = 2) -> Comparison:
    return next(c for c in compare(cells(records)) if c.column == f"pipeline-{num_stages}")


# Verdicts


def test_the_margin_is_two_standard_deviations_of_the_sequential_runs() -> None:
    sequential = baseline(baselines(), "images")
    assert sequential is not None
    assert sequential.mean == pytest.approx(0.98)
    assert sequential.deviation == pytest.approx(DEVIATION, rel=1e-9)  # n - 1 in the denominator
    distance = found([*baselines(), *own(2, 0.98 - 0.7 * DEVIATION)]).distance
    assert distance is not None
    assert distance == (pytest.approx(0.7), 0.0, pytest.approx(1.5724, abs=1e-4))  # of 90 %


def test_only_an_interval_inside_the_margin_is_reproduced() -> None:
    """In either direction: being better than the sequential runs is a difference, too."""
    for sign in (-1, 1):
        away = {2: 1.0, 4: 1.2, 8: 5.0}
        records = baselines((0.986, 0.988) * 5)  # far from the requirement
        deviation = 0.001 * (10 / 9) ** 0.5
        records += [r for k, d in away.items() for r in own(k, 0.987 + sign * d * deviation)]
        assert [found(records, k).word for k in (1, 2, 4, 8)] == [
            "not run", "reproduced", "undecided", "above",
        ]  # fmt: skip


def test_sequential_runs_that_did_not_learn_make_nothing_equal() -> None:
    for scores, reason in (
        ((0.976, 0.984, 0.984, 0.939, *BASE[4:]), "1 of 10 sequential runs failed"),
        ((0.969, 0.970) * 5, "the sequential runs did not learn"),
        ((None, *BASE[1:]), "1 of 10 sequential runs diverged"),
        ((0.98,) * 10, "no standard deviation"),
    ):
        records = [*baselines(scores), *own(2, 0.975)]
        finding = found(records)
        assert (finding.distance, finding.word) == (None, "not comparable")
        assert reason in finding.reason
        cell = column(records)
        assert (cell.verdict, cell.ours) == ("not comparable", None)
        assert reason in cell.reason
        text = text_table(compare(cells(records))) + tables(records)
        assert f"No test: {finding.reason[:20]}" in text
        assert not {"reproduced", "agrees"} & {*text.split()}
    single = [*baselines((0.969, *BASE[1:])), *own(2, 0.98)]
    assert found(single).word == "reproduced", "by the mean, one image below"
    assert "1 of 16 single runs missed it" in " ".join(tables(single).split())


def test_all_of_the_protocols_runs_are_needed_and_no_others() -> None:
    assert found([*baselines(BASE[:9]), *own(2, 0.98)]).reason == (
        "9 of the protocol's 10 sequential runs are finished"
    )
    assert found([*baselines(), *own(2, *(0.98,) * 5)]).reason == (
        "5 of the protocol's 6 runs with K = 2 are finished"
    )
    failed = replace(own(2, 0.98)[-1], status="failed", reason="broke")
    assert found([*baselines(), *own(2, 0.98)[:-1], failed]).word == "not run"
    assert column([*baselines(), *own(2, *(0.98,) * 5)]).verdict == "not run"


def test_records_under_another_protocol_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte in the file is enough."""
    records = [*baselines(), *own(2, 0.98)]
    assert found(records).word == "reproduced"
    other = load_protocol(tmp_path / PATH.name if (tmp_path / PATH.name).write_text(
        PATH.read_text().replace("\n# Ranges", "\n#  Ranges")
    ) else PATH)  # fmt: skip
    for place in ("judging", "tables", "experiment"):
        monkeypatch.setattr(f"gpipe_bench.experiments.paper.consistency.{place}.load_protocol", lambda: other)
    finding = found(records)
    assert finding.word == "not comparable"
    assert "under another protocol" in finding.reason
    assert column(records).verdict == "not comparable"
    keys = [case.key for case in EXPERIMENT.cases(RunOptions()) if "model" in case.key]
    assert {key["protocol"] for key in keys} == {other.digest} != {PROTOCOL.digest}


def test_unequal_spreads_are_said_and_what_they_leave_open() -> None:
    """The frozen test takes them to be alike; Welch's interval does not."""
    narrow, wide = (0.979, 0.981) * 3, (0.970, 0.990) * 3
    records = [*baselines(), *own(2, *narrow), *own(8, *wide)]
    assert found(records, 8).word == "reproduced", "by the protocol, whose test looks at means"
    ratios = spreads(records, "images")
    assert [*ratios] == [2, 8]
    assert ratios[8] == pytest.approx(0.01 * 1.2**0.5 / DEVIATION)
    assert beyond_the_margin(records, "images") == [8]
    text = " ".join(tables(records).split())
    assert "K = 8 spreads most, 2.6 times as widely" in text
    assert "reaches beyond the margin for K = 8: by it these are not decided" in text
    assert "beyond the margin" not in tables([*baselines(), *own(2, *narrow)])


def test_weights_are_identical_or_they_are_not() -> None:
    assert exact(record("same seed", 0.98)) == "identical"
    assert exact(record("same seed", 0.98, gap=1e-38)) == "deviates"
    assert exact(record("same seed", 0.98, gap=0.0, different=1)) == "deviates"  # a running statistic
    assert exact(record("same seed", 0.5)).startswith("not judged")  # weights that never moved are equal too
    assert exact(record("same seed", 0.98, status="failed", reason="broke")) == "not run: broke"


# Cases


def test_the_papers_size_needs_images_of_ones_own() -> None:
    options = RunOptions(profile="full", device="cpu")
    case = next(c for c in EXPERIMENT.cases(options) if c.key.get("model") == "images")
    outcome = EXPERIMENT.run(case, options)
    assert outcome.status == "skipped"
    assert "--data" in outcome.reason
