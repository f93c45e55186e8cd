"""Judges consistent training from records alone, and shows the results.

Nothing is called equal to a baseline that has not learned: weights that never change are always equal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import FEWEST, Metric, Record, of_case
from gpipe_bench.harness.report.grid import Grid, fill
from gpipe_bench.harness.verdict import Result

from ..drawing import paper_style
from .consistency_protocol import METRICS, Protocol, load_protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {"images": "AmoebaNet-D on images", "text": "Transformer on text"}
ANSWERS = {"reproduced": "agrees", "undecided": "no test", "above": "differs", "not comparable": "no test"}
"""Answers by the protocol's word."""
WHY = {
    "images": (
        "Micro-batches change results here by what they are for batch normalization: each is normalized by "
        "its own mean and variance, and the gradient flows through them. That is the paper's definition, not "
        "rounding."
    ),
    "text": (
        "Dropout draws other masks for other micro-batches, and sums over the mini-batch are taken in "
        "another order; each step's rounding differs from there on."
    ),
}


def cells(records: Sequence[Record]) -> list[Result]:
    """The result for the paper's sentence: trainings on images with their own seeds, by Welch's interval,
    which does not assume equal spreads. The sentence must hold for every K, so number and interval ends are
    the largest over K.
    """
    protocol, row, metric = load_protocol(), "distance to the sequential mean", None
    findings = {k: statistical(records, "images", k) for k in protocol.plans["images"].stages}
    open_ = next((each for each in findings.values() if each.reason or each.distance is None), None)
    if open_ is None:
        intervals = {k: apart(records, "images", k) for k in findings}
        value, low, high = map(max, zip(*intervals.values(), strict=True))
        words = {k: word_of(near, far, protocol.margin) for k, (_, near, far) in intervals.items()}
        metric = Metric(
            row, value, "standard deviations", "measured", low=low, high=high,
            key={"over": ", ".join(f"K={k}: {ANSWERS[word]}" for k, word in words.items())},
            note="the means of the runs of each K, with Welch's 95 % interval",
        )  # fmt: skip
    reason = "" if open_ is None else open_.reason
    compared = open_ is not None and open_.word == "not comparable"
    return [
        Result(
            table="consistency", row=row, column="largest over K", metric=metric,
            note="AmoebaNet-D scaled down, on digits unless other images were given; the paper trains "
            "(2, 128) on ImageNet",
            not_comparable=reason if compared else "", reason="" if compared else reason,
        )
    ]  # fmt: skip


# The test. The margin is in standard deviations of the sequential runs, estimated from the same few runs as
# their mean. So the distance follows a noncentral t distribution, and its interval is exact if scores spread
# equally at every K. Welch's interval, which is not the protocol's, assumes nothing about spreads.


def word_of(low: float, high: float, margin: float) -> str:
    """The word for an interval within the margin, on both sides of its end, or outside."""
    if high <= margin:
        return "reproduced"
    return "undecided" if low <= margin else "above"


def interval(distance: float, runs: int, baseline_runs: int, alpha: float) -> tuple[float, float]:
    """The interval of true distances that two one-sided tests at `alpha` do not reject."""
    from scipy.special import nctdtrinc

    # The standard deviation of the difference of the means, relative to one run's.
    scale, freedom = math.sqrt(1 / runs + 1 / baseline_runs), baseline_runs - 1
    # Centres of distributions with this share below the observed distance.
    low, high = (float(nctdtrinc(freedom, share, distance / scale)) for share in (1 - alpha, alpha))
    return scale * max(0.0, low), scale * high


def welch(scores: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """The difference of the means of scores and others, with its 95 % interval; at least two of each."""
    from scipy.special import stdtrit

    one, other = (statistics.variance(each) / len(each) for each in (scores, others))
    gap = statistics.fmean(scores) - statistics.fmean(others)
    if not one + other:
        return gap, gap, gap
    freedom = (one + other) ** 2 / (one**2 / (len(scores) - 1) + other**2 / (len(others) - 1))
    reach = float(stdtrit(freedom, 0.975)) * math.sqrt(one + other)
    return gap, gap - reach, gap + reach


def apart(records: Sequence[Record], model: str, num_stages: int) -> tuple[float, float, float]:
    """The distance of the mean of a K's runs from the sequential mean, in standard deviations of the
    sequential runs, with Welch's interval. Raises ValueError without a baseline.
    """
    found = baseline(records, model)
    if found is None or not found.deviation:
        raise ValueError(f"{model}: no sequential runs with a standard deviation are on record")
    scores = statistical(records, model, num_stages).scores
    gap, low, high = (each / found.deviation for each in welch(scores, found.scores))
    nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return abs(gap), nearest, max(abs(low), abs(high))


# The records


def select(records: Sequence[Record], part: str, model: str) -> list[Record]:
    """Records of trainings under the present protocol."""
    return of_case(records, part=part, model=model, protocol=load_protocol().digest)


def score_of(record: Record) -> float | None:
    """The final score of a finished training; None if it diverged or did not finish."""
    metric = record.metric(METRICS[str(record.case["model"])])
    value = metric.value if metric is not None and record.status == "done" else None
    return None if value is None else float(value)


def _scores(runs: Sequence[Record]) -> tuple[float, ...]:
    return tuple(score for run in runs if (score := score_of(run)) is not None)


def learned(record: Record) -> bool:
    """Whether the training met its requirement."""
    score = score_of(record)
    return score is not None and _suffices(score, record, "required")


def _suffices(score: float, record: Record, what: str) -> bool:
    """Whether the score reaches the record's "required" or "floor"."""
    wanted = float(record.details[what])
    return score >= wanted if record.details["higher_is_better"] else score <= wanted


@dataclass(frozen=True)
class Finding:
    """The result of the protocol's test for one number of stages.

    `distance` is that of the means, in standard deviations of one run, with its interval; `word` is
    "reproduced", "undecided" or "above", or with a `reason` "not comparable" or "not run".
    """

    scores: tuple[float, ...] = ()
    distance: tuple[float, float, float] | None = None
    word: str = "not run"
    reason: str = ""


@dataclass(frozen=True)
class Baseline:
    """The sequential runs of one model. With a `reason` nothing is compared with them, and `word` is "not
    run" or "not comparable".
    """

    scores: tuple[float, ...]
    mean: float
    deviation: float
    word: str
    reason: str


def baseline(records: Sequence[Record], model: str) -> Baseline | None:
    """The sequential runs of a model; None without records under the present protocol."""
    runs = select(records, "baseline", model)
    if not runs:
        return None
    protocol, scores = load_protocol(), _scores(runs)
    mean = statistics.fmean(scores) if scores else 0.0
    deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
    missing = _missing(runs, protocol.plans[model].sequential, "sequential runs")
    if missing:
        return Baseline(scores, mean, deviation, "not run", missing)
    problem = _problem(runs, scores, mean, deviation, protocol)
    return Baseline(scores, mean, deviation, "not comparable" if problem else "", problem)


def _missing(runs: Sequence[Record], seeds: Sequence[int], what: str) -> str:
    """How many of the protocol's runs are finished; empty if all are."""
    done = {run.case["seed"] for run in runs if run.status == "done"}
    count = sum(seed in done for seed in seeds)
    return "" if count == len(seeds) else f"{count} of the protocol's {len(seeds)} {what} are finished"


def _problem(
    runs: Sequence[Record], scores: Sequence[float], mean: float, deviation: float, protocol: Protocol
) -> str:
    """Why nothing can be compared with these sequential runs; empty if it can."""
    if any(run.options != runs[0].options for run in runs):
        return "the sequential runs are of several data sets or devices; keep each in a folder of its own"
    if runs[0].options.get("seed", protocol.split_seed) != protocol.split_seed:
        return f"the held-out examples are chosen by another seed than the protocol's {protocol.split_seed}"
    if len(scores) < len(runs):
        return f"{len(runs) - len(scores)} of {len(runs)} sequential runs diverged"
    failed = sum(not _suffices(score, runs[0], "floor") for score in scores)
    if failed:
        return f"{failed} of {len(runs)} sequential runs failed, so nothing is called equal to them"
    if not _suffices(mean, runs[0], "required"):
        return f"the sequential runs did not learn ({runs[0].details['requirement']})"
    return (
        "" if deviation else "all sequential runs end with the same score, so there is no standard deviation"
    )


def statistical(records: Sequence[Record], model: str, num_stages: int) -> Finding:
    """The protocol's test of the runs with their own seeds, by their mean."""
    protocol = load_protocol()
    runs = [r for r in select(records, "own seeds", model) if r.case["num_stages"] == num_stages]
    scores, found = _scores(runs), baseline(records, model)
    if found is None and of_case(records, part="baseline", model=model):
        reason = "the records were made under another protocol than results/consistency-protocol.toml is now"
        return Finding(scores, word="not comparable", reason=f"{reason}; run again")
    if not runs or found is None:
        return Finding(scores)
    if missing := _missing(runs, protocol.plans[model].stages[num_stages], f"runs with K = {num_stages}"):
        return Finding(scores, reason=missing)
    word, problem = found.word, found.reason
    if not problem and any(run.options != select(records, "baseline", model)[0].options for run in runs):
        problem = "the runs are of other data than the sequential ones; keep each in a folder of its own"
    if not problem and len(scores) < len(runs):
        problem = f"{len(runs) - len(scores)} of {len(runs)} runs diverged, so they have no mean"
    if problem:
        return Finding(scores, word=word or "not comparable", reason=problem)
    mean = statistics.fmean(scores)
    away = abs(mean - found.mean)
    value = away / found.deviation if away else 0.0
    low, high = interval(value, len(scores), len(found.scores), protocol.alpha)
    word = word_of(low, high, protocol.margin)
    if word != "above" and not _suffices(mean, runs[0], "required"):
        return Finding(scores, (value, low, high), "not comparable", "the runs did not learn")
    return Finding(scores, (value, low, high), word)


def exact(record: Record) -> str:
    """The verdict on a training that should end with its reference's weights."""
    largest = record.metric("largest weight difference")
    reference = record.metric("reference " + METRICS[str(record.case["model"])])
    if record.status != "done" or largest is None or largest.value is None:
        return f"not run: {record.reason}" if record.reason else "not run"
    if not learned(record) or reference is None or reference.value is None:
        return "not judged: the training did not learn"
    different = record.metric("numbers that differ")
    same = largest.value == 0 and different is not None and different.value == 0
    return "identical" if same else "deviates"


def spreads(records: Sequence[Record], model: str) -> dict[int, float]:
    """For each K, the spread of its runs, in standard deviations of the sequential runs."""
    found = baseline(records, model)
    if found is None or not found.deviation:
        return {}
    each = {k: statistical(records, model, k).scores for k in load_protocol().plans[model].stages}
    return {k: statistics.stdev(scores) / found.deviation for k, scores in each.items() if len(scores) > 1}


def beyond_the_margin(records: Sequence[Record], model: str) -> list[int]:
    """Each K whose Welch's interval reaches beyond the margin, if there are enough runs."""
    found, protocol = baseline(records, model), load_protocol()
    if found is None or len(found.scores) < FEWEST:
        return []
    own = {k: statistical(records, model, k).scores for k in protocol.plans[model].stages}
    enough = [k for k, scores in own.items() if len(scores) >= FEWEST]
    return [k for k in enough if apart(records, model, k)[2] > protocol.margin]


# Text: statistics, weights, the effect of micro-batches, and asynchronous training for comparison


def tables(records: Sequence[Record]) -> str:
    """Tables of the trainings, model by model."""
    shown = (_evidence, _microbatches, _asynchronous)
    return "\n\n".join(filter(None, [text(records, model) for model in TITLES for text in shown]))


def _table(title: str, headers: str, lines: list[list[str]], *notes: str) -> str:
    """A table as text, empty without lines; `headers` are separated by bars."""
    wrapped = [fill(note) for note in notes if note]
    return Grid(title=title, columns=headers.split("|"), lines=lines, notes=wrapped).text() if lines else ""


def _shown(model: str, score: float | None) -> str:
    if score is None:
        return "diverged"
    return f"{100 * score:.2f} %" if model == "images" else f"{score:.4g}"


def _points(model: str, *differences: float, sign: str = "+") -> tuple[str, ...]:
    """Differences of scores; of accuracies in percentage points."""
    scale = 100 if model == "images" else 1
    return tuple(f"{scale * each:{sign}.2f}" for each in differences)


def _evidence(records: Sequence[Record], model: str) -> str:
    """The table of one model: sequential runs, (a) each K with its own seeds, (b) with the same seed."""
    found, protocol = baseline(records, model), load_protocol()
    if found is None or not found.scores:
        return ""
    plan, runs = protocol.plans[model], select(records, "baseline", model)
    margin, spread = _points(model, protocol.margin * found.deviation, found.deviation, sign="")
    known = f"{sum(map(learned, runs))} of {len(runs)} learned"
    lines = [["sequential", f"{len(found.scores)}", _shown(model, found.mean), spread, "", "", known]]
    own = {num_stages: statistical(records, model, num_stages) for num_stages in plan.stages}
    lines += [_own_seeds(model, k, finding, found) for k, finding in own.items() if finding != Finding()]
    several = select(records, "same seed", model)
    for record in several:
        processes, compared = record.case["processes"], record.metric("numbers compared")
        where = f", {processes} processes" if processes != 1 else ""
        # The reason is below the table.
        word = exact(record).replace("not judged: the training did not learn", "not judged")
        size = "" if compared is None or compared.value is None else f" ({compared.value:,} numbers)"
        name = f"(b) K = {record.case['num_stages']}{where}, the seed of K = 1"
        lines.append([name, "1", _shown(model, score_of(record)), "", "", "", word + size])
    singles = [*runs, *select(records, "own seeds", model)]
    missed = sum(not learned(record) for record in singles)
    wanted = next(run.details["requirement"] for run in runs if run.status == "done")
    same = bool(several) and all(exact(record) == "identical" for record in several)
    difference = "difference [95 %, Welch]" if plan.runs >= FEWEST else "difference, least to most"
    reasons = dict.fromkeys(finding.reason for finding in own.values() if finding.reason)
    return _table(
        f"{TITLES[model]}: {METRICS[model]} (measured), M = {runs[0].case['num_microbatches']}",
        f"|runs|{METRICS[model]}|sd|{difference}|distance, sd [90 %]|",
        lines,
        f"Required of the mean of the sequential runs and of that of each K: {wanted}"
        + (f"; {missed} of {len(singles)} single runs missed it." if missed else "."),
        f"No test: {'; '.join(reasons)}." if reasons else "",
        f"Protocol {protocol.digest}, frozen before the runs: the distance of each K's mean in standard "
        f"deviations of the sequential runs, with its {100 - 200 * protocol.alpha:g} % interval (noncentral "
        f"t). Agrees: all of it within {protocol.margin:g} ({margin} here); no test: it reaches beyond.",
        _unequal(records, model),
        "From one seed all end with the same weights, so what differs between the K is the seeds'."
        if same
        else "",
    )


def _own_seeds(model: str, num_stages: int, finding: Finding, found: Baseline) -> list[str]:
    """The table's line for one K."""
    scores, spread, difference, mean = finding.scores, "", "", ""
    if len(scores) > 1 and len(found.scores) > 1:
        (spread,) = _points(model, statistics.stdev(scores), sign="")
        mean = _shown(model, statistics.fmean(scores))
        if len(scores) >= FEWEST:
            difference = "{} [{}, {}]".format(*_points(model, *welch(scores, found.scores)))
        else:
            ends = [score - found.mean for score in (min(scores), max(scores))]
            difference = "{} to {}".format(*_points(model, *ends))
    distance = "{:.2f} [{:.2f}, {:.2f}]".format(*finding.distance) if finding.distance else ""
    word = ANSWERS.get(finding.word, finding.word)
    name = f"(a) K = {num_stages}, seeds of its own"
    return [name, f"{len(scores)}", mean, spread, difference, distance, word]


def _unequal(records: Sequence[Record], model: str) -> str:
    """A text if the records contradict the test's assumption of equal spreads."""
    ratios = spreads(records, model)
    if not ratios:
        return ""
    widest = max(ratios, key=ratios.__getitem__)
    said = (
        f"The test takes scores to spread alike at every K. K = {widest} spreads most, "
        f"{ratios[widest]:.1f} times as widely as the sequential runs."
    )
    names = " and ".join(map(str, beyond_the_margin(records, model)))
    open_ = f"reaches beyond the margin for K = {names}: by it these are not decided."
    return f"{said} Welch's interval does not assume it, and {open_}" if names else said


def _microbatches(records: Sequence[Record], model: str) -> str:
    """A table of the same seed with other numbers of micro-batches, which may differ."""
    lines, digests = [], {}
    for record in of_case(select(records, "micro-batches", model), "done"):
        values = {metric.name: metric.value or 0.0 for metric in record.metrics}
        name = f"K = 1, M = {record.case['num_microbatches']}"
        if record.case["engine"] == "sequential":
            name = "the plain model"
        digests[name] = record.details["weights_sha256"]
        lines.append(
            [name,
             _shown(model, score_of(record)),
             f"{values['largest weight difference']:.3g}",
             f"{100 * values['relative weight difference']:.3g} %",
             f"{values['numbers that differ']:,.0f} of {values['numbers compared']:,.0f}"]
        )  # fmt: skip
    count = next((r.case["num_microbatches"] for r in select(records, "baseline", model)), "?")
    plain = digests.get("the plain model")
    same = plain is not None and plain == digests.get("K = 1, M = 1")
    return _table(
        f"(c) {TITLES[model]}: from the same seed with other micro-batches, against K = 1, M = {count}",
        f"|{METRICS[model]}|largest weight difference|relative, all|differ",
        lines,
        WHY[model],
        "The plain model ends with the weights of K = 1, M = 1, bit by bit." if same else "",
    )


def _asynchronous(records: Sequence[Record], model: str) -> str:
    """A table of asynchronous trainings beside GPipe's with the same seed, which is equal for all K."""
    lines = []
    for name, record in _beside_each_other(records, model):
        loss, values = record.details["curve"][-1][1], {each.name: each.value for each in record.metrics}
        kept = (values.get("weights kept") or 1) / (values.get("weights of the model") or 1)
        staleness = max(record.details.get("staleness", [0]))
        lines.append(
            [name, _shown(model, score_of(record)), "not finite" if loss is None else f"{loss:.4g}",
             f"{staleness}", f"{kept:.2f} x the model", "learned" if learned(record) else "did not learn"]
        )  # fmt: skip
    return _table(
        f"{TITLES[model]}: what inconsistency looks like (measured; the same seed and data)",
        f"|{METRICS[model]}|training loss|staleness of stage 0|weights kept|",
        lines,
        "Staleness is counted in updates between a mini-batch's forward and the update with its "
        "gradient. Rates are the recipe's, and those divided by K, as staleness of K updates asks for; the "
        "sequential training at that rate shows what is the rate's doing. Times are not compared: the stages "
        "take turns in one process.",
    )


def _beside_each_other(records: Sequence[Record], model: str) -> Iterator[tuple[str, Record]]:
    """GPipe's training, then asynchronous ones with the same seed, by names such as `asynchronous, K = 8,
    stashing, rate / 8`. With one stage nothing is stale, so it is sequential.
    """
    found = of_case(select(records, "asynchronous", model), "done")
    reference = of_case(select(records, "own seeds", model), num_stages=1)
    yield from (("GPipe, any K", record) for record in reference[: 1 if found else 0])
    for record in found:
        num_stages, rate = record.case["num_stages"], float(record.case["rate"] or 1.0)
        stale = f"asynchronous, K = {num_stages}, {'stashing' if record.case['stash'] else 'no stashing'}"
        name = "sequential" if num_stages == 1 else stale
        yield name + ("" if rate == 1 else f", rate / {1 / rate:g}"), record


def figures(records: Sequence[Record]) -> list[Plot]:
    """Figures of final scores beside the sequential runs, a panel for each model; none without records."""
    found = {model: each for model in TITLES if (each := baseline(records, model)) is not None}
    models = {model: each for model, each in found.items() if len(each.scores) > 1}
    plot = Plot(
        name="consistency",
        caption=(
            "Final scores of runs with seeds of their own: dots are runs, bars their means, the band is "
            "the sequential mean and two standard deviations around it"
        ),
        alt=(
            "A dot for each run: the sequential ones, then those of 1, 2, 4 and 8 stages, over a band of "
            "two standard deviations around the sequential mean."
        ),
        draw=partial(_draw, records, models),
        style=partial(paper_style, 1.1),
    )
    return [plot] if models else []


def _draw(records: Sequence[Record], models: dict[str, Baseline]) -> Figure:
    """A dot for each run, the means as lines, the margin as a band."""
    import seaborn
    from matplotlib.figure import Figure

    protocol, figure = load_protocol(), Figure(figsize=(5.2 * len(models), 3.2), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, (model, found) in zip(panels, models.items(), strict=True):
        scale, unit = (100, " (%)") if model == "images" else (1, "")
        mean, reach = scale * found.mean, scale * protocol.margin * found.deviation
        own = {f"K = {k}": statistical(records, model, k).scores for k in protocol.plans[model].stages}
        groups = {name: scores for name, scores in {"sequential": found.scores, **own}.items() if scores}
        flat = [(name, scale * score) for name, scores in groups.items() for score in scores]
        names, values = zip(*flat, strict=True)
        axes.axhspan(mean - reach, mean + reach, color="0.9", zorder=0)
        axes.axhline(mean, color="0.4", linewidth=1)
        seaborn.swarmplot(x=names, y=values, color="0.35", ax=axes)
        for place, scores in enumerate(groups.values()):
            middle = scale * statistics.fmean(scores)
            axes.hlines(middle, place - 0.3, place + 0.3, color="black", linewidth=1.5)
        axes.set(title=TITLES[model], ylabel=f"final {METRICS[model]}{unit}", xlabel="")
    seaborn.despine(figure)
    return figure
