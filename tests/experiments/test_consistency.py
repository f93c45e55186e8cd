"""The consistency experiment: its frozen protocol, verdicts from records alone, and trainings."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.experiments.paper.consistency import EXPERIMENT
from gpipe_bench.experiments.paper.consistency_judging import (
    Finding,
    baseline,
    beyond_the_margin,
    cells,
    exact,
    spreads,
    statistical,
    tables,
    welch,
)
from gpipe_bench.experiments.paper.consistency_protocol import (
    DAWNBENCH,
    DIGITS,
    METRICS,
    PATH,
    TOPICS,
    load_protocol,
    subject_of,
)
from gpipe_bench.experiments.paper.consistency_tasks import (
    Images,
    ImageTask,
    RMSPropTF,
    TextTask,
    digits,
    own_images,
    topics,
)
from gpipe_bench.experiments.paper.consistency_training import (
    Setting,
    Trained,
    is_statistic,
    train,
    train_asynchronously,
)
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.record import SCHEMA, Metric, Record
from gpipe_bench.harness.report.table import text_table
from gpipe_bench.harness.verdict import Comparison

PROTOCOL = load_protocol()


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
        metrics += [metric("weights kept", 20.0, "bytes"), metric("weights of the model", 8.0, "bytes")]
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


def sentence(records: Sequence[Record]) -> Comparison:
    """The paper's one row; the other K end with the sequential mean."""
    every = {record.case["num_stages"] for record in records if record.case["part"] == "own seeds"}
    more = [each for k in (1, 2, 4, 8) if k not in every for each in own(k, *(0.979, 0.981) * 3)]
    (found,) = compare(cells([*records, *more]))
    return found


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
        cell = sentence(records)
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
    assert sentence([*baselines(), *own(2, *(0.98,) * 5)]).verdict == "not run"


def test_records_under_another_protocol_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte in the file is enough."""
    records = [*baselines(), *own(2, 0.98)]
    assert found(records).word == "reproduced"
    other = load_protocol(tmp_path / PATH.name if (tmp_path / PATH.name).write_text(
        PATH.read_text().replace("\n# Ranges", "\n#  Ranges")
    ) else PATH)  # fmt: skip
    for place in ("consistency_judging", "consistency"):
        monkeypatch.setattr(f"gpipe_bench.experiments.paper.{place}.load_protocol", lambda: other)
    finding = found(records)
    assert finding.word == "not comparable"
    assert "under another protocol" in finding.reason
    assert sentence(records).verdict == "not comparable"
    keys = [case.key for case in EXPERIMENT.cases(RunOptions()) if "model" in case.key]
    assert {key["protocol"] for key in keys} == {other.digest} != {PROTOCOL.digest}
    stale = {(key["seed"], key["initial_seed"]) for key in keys if key["part"] == "asynchronous"}
    assert stale == {(plan.stages[1][0], plan.initial[0]) for plan in other.plans.values()}


def test_unequal_spreads_are_said_and_what_they_leave_open() -> None:
    """The frozen test takes them to be alike; Welch's interval does not."""
    narrow, wide = (0.979, 0.981) * 3, (0.970, 0.990) * 3
    records = [*baselines(), *own(2, *narrow), *own(8, *wide)]
    assert found(records, 8).word == "reproduced", "by the protocol, whose test looks at means"
    ratios = spreads(records, "images")
    assert [*ratios] == [2, 8]
    assert ratios[8] == pytest.approx(0.01 * 1.2**0.5 / DEVIATION)
    assert beyond_the_margin(records, "images") == [8]
    row = sentence(records)
    assert row.verdict == "undecided", "one K that is not decided leaves the sentence so"
    assert row.entry is not None
    assert row.entry.metric is not None
    assert row.entry.metric.key["over"] == "K=1: agrees, K=2: agrees, K=4: agrees, K=8: no test"
    assert sentence([*baselines(), *own(2, *narrow)]).verdict == "reproduced"
    assert sentence([*records[:16], *own(8, 0.95)]).verdict == "above", "one that differs makes it differ"
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
    own = subject_of("images", RunOptions(profile="short", data="folder")).recipe
    assert (own.augment, own.required_accuracy) == (True, 0.0), "nobody knows what one's own images reach"


TEXT = replace(
    TOPICS, num_steps=4, num_layers=2, d_model=16, ffn_dim=32, seq_len=12, batch_size=8, vocab_size=256
)
SMALL_IMAGES = replace(DIGITS, num_filters=8, stem_filters=8, image_size=9, num_epochs=1, batch_size=50)


def text_task() -> TextTask:
    task = TextTask(TEXT, topics()[:60_000], 0)
    task.evaluate_every = 2
    return task


def image_task() -> ImageTask:
    """Four steps of the digits' first 200 images."""
    whole = digits(9, 0)
    train, held_out = whole.train[:200], whole.held_out[:50]
    targets = [whole.load(index, None)[1] for index in range(1797)]
    return ImageTask(SMALL_IMAGES, Images(whole.load, train, held_out, targets, whole.num_classes))


def same_weights(ours: Trained, wanted: Trained, *, statistics: bool = True) -> bool:
    assert ours.weights.keys() == wanted.weights.keys()
    names = [name for name in wanted.weights if statistics or not is_statistic(name)]
    return all(torch.equal(ours.weights[name], wanted.weights[name]) for name in names)


# Recipes


def test_rmsprop_is_tensorflows() -> None:
    """Three steps of one weight by hand: averages start at one, epsilon is inside the root."""
    weight = nn.Parameter(torch.tensor([[2.0]], dtype=torch.float64))
    optimizer = RMSPropTF([weight], lr=0.5, decay=0.9, momentum=0.8, eps=1.0, weight_decay=0.1)
    value, square, velocity = 2.0, 1.0, 0.0
    for rate, gradient in ((0.5, 3.0), (0.25, -1.0), (0.25, 0.5)):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.tensor([[gradient]], dtype=torch.float64)
        optimizer.step()
        g = gradient + 0.1 * value
        square = 0.9 * square + 0.1 * g * g
        velocity = 0.8 * velocity + rate * g / math.sqrt(square + 1.0)
        value -= velocity
        assert weight.item() == pytest.approx(value, rel=1e-12)


def test_the_rate_warms_up_and_falls_as_a_staircase() -> None:
    recipe = replace(DAWNBENCH, warmup_epochs=0.5)
    assert recipe.learning_rate(0, 100) == 0
    assert recipe.learning_rate(25, 100) == pytest.approx(2.56 / 2)
    assert recipe.learning_rate(50, 100) == recipe.learning_rate(99, 100) == 2.56
    assert recipe.learning_rate(100, 100) == pytest.approx(2.56 * 0.88)
    assert recipe.learning_rate(3499, 100) == pytest.approx(2.56 * 0.88**34)
    assert recipe.learning_rate(100 * 200, 100) == pytest.approx(2.56e-4)
    rates = [TOPICS.rate(step) for step in range(100)]
    assert rates.index(max(rates)) == TOPICS.warmup_steps - 1
    assert rates[0] == pytest.approx(0.5 * 48**-0.5 * 20**-1.5)


# Data


def test_no_held_out_example_is_trained_on() -> None:
    for seed in (0, 1):
        images = digits(9, seed)
        assert not set(images.train) & set(images.held_out)
        assert len(images.train) + len(images.held_out) == 1797
    assert digits(9, 0).held_out != digits(9, 1).held_out
    pixels, _ = digits(8, 0).batch(range(100), None)
    assert (pixels.min(), pixels.max()) == (-1, 1)


def test_the_tokenizer_knows_only_the_training_text() -> None:
    """Every block has a letter of its own; those of the held-out blocks are unknown to the pieces."""
    letters = [chr(0x4E00 + i) for i in range(20)]
    words = "the quick brown fox jumps over the lazy dog and runs away from it again "
    text = "\n\n".join(f"{letter} {words * 30}{i}" for i, letter in enumerate(letters))
    task = TextTask(replace(TEXT, vocab_size=100), text, 0)
    unknown = [letter for letter in letters if task.pieces.unk_id() in task.pieces.encode(letter)]
    assert len(unknown) == 2
    assert not (task.train_tokens == task.pieces.unk_id()).any()


def test_images_of_ones_own(tmp_path: Path) -> None:
    from PIL import Image

    def fill(folder: Path, count: int) -> None:
        folder.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (20, 14), (40 * i, 0, 90)).save(folder / f"{i}.png")

    for name in ("a", "b"):
        fill(tmp_path / "flat" / name, 6)
    flat = own_images(str(tmp_path / "flat"), 9, True, 0, None)
    assert (len(flat.train), len(flat.held_out), flat.num_classes) == (10, 2, 2)
    images, classes = flat.batch(range(12), 0)
    assert images.shape == (12, 3, 9, 9)
    assert images.abs().max() <= 1
    assert classes.tolist() == [0] * 6 + [1] * 6
    again, _ = flat.batch(range(12), 0)
    assert torch.equal(images, again)
    still, _ = flat.batch(range(12), None)
    assert all(not torch.equal(one, other) for one, other in zip(images[1:4], still[1:4], strict=True))
    (tmp_path / "flat" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="can't be read as an image;"):
        own_images(str(tmp_path / "flat"), 9, False, 0, None).batch(range(12), None)


# Weights


@pytest.mark.parametrize(("make", "num_stages"), [(text_task, 2), (image_task, 8)])
def test_the_number_of_stages_changes_no_bit(make: Any, num_stages: int) -> None:
    one = train(make(), Setting(num_stages=1, num_microbatches=3))
    many = train(make(), Setting(num_stages=num_stages, num_microbatches=3))
    assert len(many.layers_per_stage) == num_stages
    assert same_weights(many, one)
    assert many.curve == one.curve


@pytest.mark.parametrize("make", [text_task, image_task])
def test_one_micro_batch_is_the_plain_model(make: Any) -> None:
    plain = train(make(), Setting("sequential"))
    pipeline = train(make(), Setting(num_stages=4))
    other = train(make(), Setting(num_microbatches=2))
    assert same_weights(pipeline, plain, statistics=False)
    assert plain.digest == pipeline.digest != other.digest


class _Still(TextTask):
    """Ends with the weights it began with."""

    def learning_rate(self, step: int) -> float:
        return 0.0


def test_paired_runs_begin_with_the_same_weights_and_see_other_data() -> None:
    task = _Still(TEXT, topics()[:60_000], 0)
    seeds = {"one": (5, 7), "paired": (6, 7), "other": (5, 8)}
    ends = {
        name: train(task, Setting(seed=seed, initial_seed=initial)) for name, (seed, initial) in seeds.items()
    }
    assert same_weights(ends["one"], ends["paired"])
    assert not same_weights(ends["one"], ends["other"])
    assert ends["one"].curve[-1][1] != ends["paired"].curve[-1][1], "other mini-batches, another loss"
    stale = train_asynchronously(task, 2, 6, stash=True, initial_seed=7)
    assert all(torch.equal(stale.weights[name], ends["one"].weights[name]) for name in stale.weights)


# Asynchronous training


class Scale(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def product() -> Any:
    """y = a b x with the loss y^2 / 2: everything can be followed by hand."""

    def batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([1.0 + step / 10], dtype=torch.float64), torch.zeros(1)

    return SimpleNamespace(
        num_steps=6, evaluate_every=6, average_decay=None, batch=batch,
        build=lambda: nn.Sequential(Scale(0.9), Scale(1.1)),
        loss=lambda output, target: output.square().mean() / 2,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
        learning_rate=lambda step: 0.1, held_out=lambda: [batch(0, 0)],
        count=lambda output, target: (float(output.sum()), 1.0),
        score=lambda total, number: total / number,
    )  # fmt: skip


@pytest.mark.parametrize("stash", [True, False])
def test_two_asynchronous_stages_by_hand(stash: bool) -> None:
    """Stage 0 (a) runs one forward ahead. Of its gradient, d loss / d a = x b (a b x), b and the product are
    those of the forward at stage 1; with stashing or without, `a` does not enter its own gradient again, but
    it does enter the one that a third stage would get.
    """
    found = train_asynchronously(product(), 2, 0, stash=stash)
    a, b = 0.9, 1.1
    hidden = {0: a * 1.0, 1: a * 1.1}  # forwards of stage 0, one ahead
    for step in range(6):
        x = 1.0 + step / 10
        y = b * hidden[step]
        to_a, to_b = x * b * y, hidden[step] * y
        b -= 0.1 * to_b
        a -= 0.1 * to_a
        if step + 2 < 6:  # the forward after this backward sees the new a
            hidden[step + 2] = a * (1.0 + (step + 2) / 10)
    assert found.weights["0.weight"].item() == pytest.approx(a, rel=1e-12)
    assert found.weights["1.weight"].item() == pytest.approx(b, rel=1e-12)
    assert found.staleness == (1, 0)
    assert found.versions == ((2, 1) if stash else (1, 1))


@pytest.mark.parametrize(("make", "stash"), [(text_task, True), (image_task, False)])
def test_one_asynchronous_stage_is_the_sequential_training(make: Any, stash: bool) -> None:
    found = train_asynchronously(make(), 1, 0, stash=stash)
    plain = train(make(), Setting("sequential"))
    assert all(torch.equal(found.weights[name], plain.weights[name]) for name in plain.weights)
    assert (found.staleness, found.versions, found.curve) == ((0,), (1,), plain.curve)
