"""The evidence as text and as a picture: statistics, weights, and what micro-batches change.

Asynchronous training stands beside it for contrast.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.experiments.drawing import paper_style, without_frame
from gpipe_bench.experiments.paper.consistency_judging import (
    ANSWERS,
    METRICS,
    Baseline,
    Finding,
    apart,
    baseline,
    exact,
    learned,
    load_protocol,
    score_of,
    select,
    statistical,
    welch,
)
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.grid import Grid, fill

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"images": "AmoebaNet-D on images", "text": "Transformer on text"}
FEWEST = 6
"""Runs for which an interval carries a per cent; of fewer stand the smallest and the largest."""
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


def tables(records: Sequence[Record]) -> str:
    """Tables of the trainings, model by model."""
    parts: list[str] = []
    for model in TITLES:
        parts += [_evidence(records, model), _microbatches(records, model), _asynchronous(records, model)]
    return "\n\n".join(part for part in parts if part)


def _table(title: str, headers: str, lines: list[list[str]], *notes: str) -> str:
    """A table as text, empty without lines; `headers` are separated by bars."""
    wrapped = [fill(note) for note in notes if note]
    return Grid(title=title, columns=headers.split("|"), lines=lines, notes=wrapped).text() if lines else ""


def _shown(model: str, score: float | None) -> str:
    if score is None:
        return "diverged"
    return f"{100 * score:.2f} %" if model == "images" else f"{score:.4g}"


def _points(model: str, *differences: float) -> tuple[str, ...]:
    """Differences of scores: of accuracies in points, which are per cents without their sign."""
    scale = 100 if model == "images" else 1
    return tuple(f"{scale * each:+.2f}" for each in differences)


def spreads(records: Sequence[Record], model: str) -> dict[int, float]:
    """For each K, the spread of runs with their own seeds, in standard deviations of the sequential runs."""
    found = baseline(records, model)
    if found is None or not found.deviation:
        return {}
    each = {k: statistical(records, model, k).scores for k in load_protocol().plans[model].stages}
    return {k: statistics.stdev(scores) / found.deviation for k, scores in each.items() if len(scores) > 1}


def beyond_the_margin(records: Sequence[Record], model: str) -> list[int]:
    """The K whose Welch's interval reaches beyond the margin."""
    found, protocol = baseline(records, model), load_protocol()
    if found is None or len(found.scores) < FEWEST:
        return []
    return [
        k
        for k in protocol.plans[model].stages
        if len(statistical(records, model, k).scores) >= FEWEST
        and apart(records, model, k)[2] > protocol.margin
    ]


def _evidence(records: Sequence[Record], model: str) -> str:
    """Table of one model: the sequential runs, (a) every K's with their own seeds, (b) with the same seed."""
    found, protocol = baseline(records, model), load_protocol()
    if found is None or not found.scores:
        return ""
    plan = protocol.plans[model]
    runs = select(records, "baseline", model)
    done = next(run for run in runs if run.status == "done")
    margin = _points(model, protocol.margin * found.deviation)[0].removeprefix("+")
    spread = _points(model, found.deviation)[0].removeprefix("+")
    known = f"{sum(map(learned, runs))} of {len(runs)} learned"
    lines = [["sequential", f"{len(found.scores)}", _shown(model, found.mean), spread, "", "", known]]
    own = {num_stages: statistical(records, model, num_stages) for num_stages in plan.stages}
    lines += [_own_seeds(model, k, finding, found) for k, finding in own.items() if finding != Finding()]
    for record in select(records, "same seed", model):
        processes, compared = record.case["processes"], record.metric("numbers compared")
        where = f", {processes} processes" if processes != 1 else ""
        # A reason stands below the table.
        word = exact(record).replace("not judged: the training did not learn", "not judged")
        size = "" if compared is None or compared.value is None else f" ({compared.value:,} numbers)"
        name = f"(b) K = {record.case['num_stages']}{where}, the seed of K = 1"
        lines.append([name, "1", _shown(model, score_of(record)), "", "", "", word + size])
    singles = [*runs, *select(records, "own seeds", model)]
    missed = sum(not learned(record) for record in singles)
    requirement = (
        f"Required of the mean of the sequential runs and of that of each K: {done.details['requirement']}"
        + (f"; {missed} of {len(singles)} single runs missed it." if missed else ".")
    )
    several = select(records, "same seed", model)
    same = bool(several) and all(exact(record) == "identical" for record in several)
    difference = "difference [95 %, Welch]" if plan.runs >= FEWEST else "difference, least to most"
    reasons = dict.fromkeys(finding.reason for finding in own.values() if finding.reason)
    rule = (
        f"Protocol {protocol.digest}, frozen before the runs: the distance of each K's mean in standard "
        f"deviations of the sequential runs, with its {100 - 200 * protocol.alpha:g} % interval (noncentral "
        f"t). Agrees: all of it within {protocol.margin:g} ({margin} here); no test: it reaches beyond."
    )
    return _table(
        f"{TITLES[model]}: {METRICS[model]} (measured), M = {runs[0].case['num_microbatches']}",
        f"|runs|{METRICS[model]}|sd|{difference}|distance, sd [90 %]|",
        lines,
        requirement,
        f"No test: {'; '.join(reasons)}." if reasons else "",
        rule,
        _unequal(records, model),
        "From one seed all end with the same weights, so what differs between the K is the seeds'."
        if same
        else "",
    )


def _own_seeds(model: str, num_stages: int, finding: Finding, found: Baseline) -> list[str]:
    """The line of one K."""
    scores, spread, difference, mean = finding.scores, "", "", ""
    if len(scores) > 1 and len(found.scores) > 1:
        spread, mean = (
            _points(model, statistics.stdev(scores))[0].removeprefix("+"),
            _shown(model, statistics.fmean(scores)),
        )
        if len(scores) >= FEWEST:
            difference = "{} [{}, {}]".format(*_points(model, *welch(scores, found.scores)))
        else:
            ends = [score - found.mean for score in (min(scores), max(scores))]
            difference = "{} to {}".format(*_points(model, *ends))
    distance = "{:.2f} [{:.2f}, {:.2f}]".format(*finding.distance) if finding.distance else ""
    word = ANSWERS.get(finding.word, "no test" if finding.word == "not comparable" else finding.word)
    name = f"(a) K = {num_stages}, seeds of its own"
    return [name, f"{len(scores)}", mean, spread, difference, distance, word]


def _unequal(records: Sequence[Record], model: str) -> str:
    """Text about an assumption of the protocol's test that the records contradict."""
    ratios = spreads(records, model)
    if not ratios:
        return ""
    widest = max(ratios, key=ratios.__getitem__)
    said = (
        f"The test takes scores to spread alike at every K. K = {widest} spreads most, "
        f"{ratios[widest]:.1f} times as widely as the sequential runs."
    )
    beyond = beyond_the_margin(records, model)
    if beyond:
        names = " and ".join(map(str, beyond))
        said += (
            f" Welch's interval does not assume it, and reaches beyond the margin for K = {names}: by it "
            "these are not decided."
        )
    return said


def _microbatches(records: Sequence[Record], model: str) -> str:
    """Table of runs that may differ: the same seed at other numbers of micro-batches."""
    lines, digests = [], {}
    for record in select(records, "micro-batches", model):
        if record.status == "done":
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
    """Table of asynchronous trainings beside GPipe's from the same seed, which is the same at any K."""
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
    """The asynchronous trainings after GPipe's from the same seed, by names such as `asynchronous, K = 8,
    stashing, rate / 8`. With one stage nothing is stale, so it is a sequential one.
    """
    found = [r for r in select(records, "asynchronous", model) if r.status == "done"]
    reference = [r for r in select(records, "own seeds", model) if r.case["num_stages"] == 1]
    yield from (("GPipe, any K", record) for record in reference[: 1 if found else 0])
    for record in found:
        num_stages, rate = record.case["num_stages"], float(record.case["rate"] or 1.0)
        name = "sequential" if num_stages == 1 else f"asynchronous, K = {num_stages}"
        if num_stages != 1:
            name += ", stashing" if record.case["stash"] else ", no stashing"
        yield name + ("" if rate == 1 else f", rate / {1 / rate:g}"), record


def figures(records: Sequence[Record]) -> list[Plot]:
    """Final scores against the sequential runs; nothing without records."""
    models = [m for m in TITLES if (found := baseline(records, m)) is not None and len(found.scores) > 1]
    if not models:
        return []
    return [
        Plot(
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
    ]


def _draw(records: Sequence[Record], models: Sequence[str]) -> Figure:
    """A column for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(models), 3.2), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        _draw_scores(axes, records, model)
    without_frame(figure)
    return figure


def _draw_scores(axes: Axes, records: Sequence[Record], model: str) -> None:
    """A dot for each run, the means as lines, the margin as a band."""
    import seaborn

    found, protocol = baseline(records, model), load_protocol()
    assert found is not None, "drawn only with a baseline"
    scale, reach = (100 if model == "images" else 1), protocol.margin * found.deviation
    groups = {"sequential": found.scores}
    groups |= {
        f"K = {k}": scores
        for k in protocol.plans[model].stages
        if (scores := statistical(records, model, k).scores)
    }
    flat = [(name, scale * score) for name, scores in groups.items() for score in scores]
    names, values = zip(*flat, strict=True)
    axes.axhspan(scale * (found.mean - reach), scale * (found.mean + reach), color="0.9", zorder=0)
    axes.axhline(scale * found.mean, color="0.4", linewidth=1)
    seaborn.swarmplot(x=names, y=values, color="0.35", ax=axes)
    for place, scores in enumerate(groups.values()):
        axes.hlines(scale * statistics.fmean(scores), place - 0.3, place + 0.3, color="black", linewidth=1.5)
    unit = " (%)" if model == "images" else ""
    axes.set(title=TITLES[model], ylabel=f"final {METRICS[model]}{unit}", xlabel="")
