"""The evidence as text and as a picture: statistics, weights, and what micro-batches change.

Asynchronous training stands beside it for contrast, and deep networks for trainability.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from gpipe_bench.experiments.paper.consistency.judging import (
    METRICS,
    baseline,
    exact,
    joint_power,
    learned,
    load_protocol,
    power,
    score_of,
    select,
    statistical,
)
from gpipe_bench.experiments.report.drawing import paper_style, without_frame
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.report.grid import Grid, fill

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"images": "AmoebaNet-D on images", "text": "Transformer on text"}
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
    """What was trained, model by model."""
    parts: list[str] = []
    for model in TITLES:
        parts += [_evidence(records, model), _microbatches(records, model), _asynchronous(records, model)]
    return "\n\n".join(part for part in [*parts, _deep(records)] if part)


def _table(title: str, headers: str, lines: list[list[str]], *notes: str) -> str:
    """Nothing without lines; `headers` are separated by bars."""
    wrapped = [fill(note) for note in notes if note]
    return Grid(title=title, columns=headers.split("|"), lines=lines, notes=wrapped).text() if lines else ""


def _shown(model: str, score: float | None) -> str:
    if score is None:
        return "diverged"
    return f"{100 * score:.2f} %" if model == "images" else f"{score:.4g}"


def _values(record: Record) -> dict[str, float]:
    return {metric.name: metric.value or 0.0 for metric in record.metrics}


def _evidence(records: Sequence[Record], model: str) -> str:
    """Of one model: the sequential runs, (a) every K's with their own seeds, (b) with the same seed."""
    found, protocol = baseline(records, model), load_protocol()
    if found is None:
        return ""
    plan = protocol.plans[model]

    def each(scores: Sequence[float]) -> str:
        """Every run: a range would hide what the mean is made of."""
        words = " ".join(_shown(model, score) for score in scores)
        return words.replace(" %", "") + " %" if model == "images" and scores else words

    runs = select(records, "baseline", model)
    low, high = (found.mean + sign * protocol.margin * found.deviation for sign in (-1, 1))
    deviation = f"{100 * found.deviation:.2f} points" if model == "images" else f"{found.deviation:.3g}"
    lines = [
        ["baseline", "sequential runs", each(found.scores), "",
         f"{sum(map(learned, runs))} of {len(runs)} learned"],
        ["", "mean, standard deviation", _shown(model, found.mean), f"sd {deviation}",
         f"margin {_shown(model, low)} to {_shown(model, high)}"],
    ]  # fmt: skip
    own = {num_stages: statistical(records, model, num_stages) for num_stages in plan.stages}
    for num_stages, finding in own.items():
        if finding.scores or finding.reason:
            away = finding.distance
            distance = "{:.2f} sd [{:.2f}, {:.2f}]".format(*away) if away else ""
            lines.append(["(a) own seeds", f"K = {num_stages}", each(finding.scores), distance, finding.word])
    for record in select(records, "same seed", model):
        values, processes = _values(record), record.case["processes"]
        gap, compared = values.get("largest weight difference"), values.get("numbers compared")
        lines.append(
            ["(b) same seed as K = 1",
             f"K = {record.case['num_stages']}" + (f", {processes} processes" if processes != 1 else ""),
             _shown(model, score_of(record)),
             "" if gap is None else f"largest weight difference {gap:g}",
             # A reason stands below the table.
             exact(record).replace("not judged: the training did not learn", "not judged")
             + ("" if compared is None else f" ({compared:,} numbers)")]
        )  # fmt: skip
    singles = [*runs, *select(records, "own seeds", model)]
    missed = sum(not learned(record) for record in singles)
    requirement = (
        f"Required of the mean of the sequential runs and of that of each K: {runs[0].details['requirement']}"
        + (f"; {missed} of {len(singles)} single runs missed it." if missed else ".")
    )
    reasons = dict.fromkeys(finding.reason for finding in own.values() if finding.reason)
    numbers = plan.runs, len(plan.sequential), protocol.margin, protocol.alpha
    rule = (
        f"Protocol {protocol.digest}, frozen before the runs: the distance of each K's mean in standard "
        f"deviations of the sequential runs, with its {100 - 200 * protocol.alpha:g} % interval (noncentral "
        f"t; two one-sided tests at {100 * protocol.alpha:g} %). Reproduced: all of it within "
        f"{protocol.margin:g}; undecided: it reaches beyond. If nothing differs, one K is found equal in "
        f"{100 * power(*numbers):.0f} of 100 repetitions, all {len(plan.stages)} in "
        f"{100 * joint_power(len(plan.stages), *numbers):.0f}. The weights are the sharper "
        "evidence: there is no margin."
    )
    return _table(
        f"{TITLES[model]}: {METRICS[model]} (measured), M = {runs[0].case['num_microbatches']}",
        f"evidence||{METRICS[model]}|distance|verdict",
        lines,
        requirement,
        f"Not judged: {'; '.join(reasons)}." if reasons else "",
        rule,
    )


def _microbatches(records: Sequence[Record], model: str) -> str:
    """What may differ: the same seed at other numbers of micro-batches."""
    plain, single = "the plain model, no pipeline", "K = 1, M = 1"
    lines = []
    for record in select(records, "micro-batches", model):
        if record.status == "done":
            values, sequential = _values(record), record.case["engine"] == "sequential"
            lines.append(
                [plain if sequential else f"K = 1, M = {record.case['num_microbatches']}",
                 _shown(model, score_of(record)),
                 f"{values['largest weight difference']:.3g}",
                 f"{100 * values['relative weight difference']:.3g} %",
                 f"{values['numbers that differ']:,.0f} of {values['numbers compared']:,.0f}",
                 str(record.details["weights_sha256"])[:12]]
            )  # fmt: skip
    count = next((r.case["num_microbatches"] for r in select(records, "baseline", model)), "?")
    digests = [line[-1] for line in lines if line[0] in (plain, single)]
    same = len(digests) == 2 and digests[0] == digests[1]
    return _table(
        f"(c) {TITLES[model]}: from the same seed with other micro-batches, against K = 1, M = {count}",
        f"|{METRICS[model]}|largest weight difference|relative, all|differ|weights (SHA-256)",
        lines,
        WHY[model],
        "Equal digests are equal weights: the plain model is what K = 1, M = 1 computes." if same else "",
    )


def _asynchronous(records: Sequence[Record], model: str) -> str:
    """Beside GPipe's training from the same seed, which is the same at any K."""
    found = [r for r in select(records, "asynchronous", model) if r.status == "done"]
    reference = [r for r in select(records, "own seeds", model) if r.case["num_stages"] == 1][:1]
    lines = []
    for record in [*reference, *found] if found else []:
        loss, score = record.details["curve"][-1][1], score_of(record)
        line = [name_of(record), _shown(model, score), "not finite" if loss is None else f"{loss:.4g}"]
        verdict = "learned" if learned(record) else "did not learn"
        if record in reference:
            lines.append([*line, "0", "1", "1.00 x the model", verdict])
            continue
        if reference and score is not None:
            wanted = score_of(reference[0])
            if wanted is None:
                verdict += ", GPipe diverged"
            elif model == "images":
                verdict += f", {100 * (score - wanted):+.2f} points"
            else:
                verdict += f", {100 * (score / wanted - 1):+.1f} %"
        stages = [" ".join(map(str, record.details[what])) for what in ("staleness", "versions")]
        kept = _values(record)["weights kept"] / _values(record)["weights of the model"]
        lines.append([*line, *stages, f"{kept:.2f} x the model", verdict])
    return _table(
        f"{TITLES[model]}: what inconsistency looks like (measured; the same seed and data)",
        f"|{METRICS[model]}|training loss|staleness by stage|versions by stage|weights kept|verdict",
        lines,
        "Staleness is counted in updates between a mini-batch's forward and the update with its "
        "gradient. Rates are the recipe's, and those divided by K, as staleness of K updates asks for; the "
        "sequential training at that rate shows what is the rate's doing. Times are not compared: the stages "
        "take turns in one process.",
    )


def name_of(record: Record) -> str:
    """Such as `asynchronous, with stashing, K = 8, rate / 8`. With one stage nothing is stale, so it is a
    sequential one.
    """
    if record.case["part"] != "asynchronous":
        return "GPipe (any K)"
    num_stages, rate = record.case["num_stages"], float(record.case["rate"] or 1.0)
    slower = "" if rate == 1 else f", rate / {1 / rate:g}"
    if num_stages == 1:
        return f"sequential{slower}"
    return f"asynchronous, {'with' if record.case['stash'] else 'without'} stashing, K = {num_stages}{slower}"


def _deep(records: Sequence[Record]) -> str:
    found = of_case(records, "done", part="trainability")
    if not found:
        return ""
    lines = []
    for record in found:
        values = _values(record)
        lines.append(
            [f"{record.case['rate']:g}",
             "by 1 / L" if record.case["deep_init"] else "no",
             f"at {record.details['clip']:g}" if record.case["logit_clip"] else "no",
             *(f"{values[f'{which} gradient norm']:.3g}" for which in ("first", "median", "largest")),
             f"{values['non-finite steps']:.0f} of {len(record.details['norms'])}",
             f"{values['held-out perplexity']:.4g}"]
        )  # fmt: skip
    details = found[0].details
    return _table(
        f"Trainability: a Transformer of {details['recipe']['num_layers']} layers, "
        f"{details['recipe']['d_model']} wide (measured; v5, section 5)",
        "rate|scaled start|clipped logits|first norm|median norm|largest norm|non-finite|perplexity",
        lines,
        "Norms of the whole gradient; no warm-up, no gradient clipping. The unigram model has "
        f"{details['unigram_perplexity']:.4g}.",
    )


def figures(records: Sequence[Record]) -> list[Plot]:
    """Learning curves with the baseline's band, and distances; nothing without records."""
    models = [model for model in TITLES if len(select(records, "baseline", model)) > 1]
    if not models:
        return []
    return [
        Plot(
            name="consistency",
            caption="Learning curves for every number of stages; final scores against sequential runs",
            alt=(
                "Above, held-out scores over the steps: the runs with 1 to 8 stages beside the band of "
                "the sequential runs, and asynchronous pipelines. Below, the distance of each final "
                "score to the sequential mean in standard deviations, with a band of two."
            ),
            draw=partial(_draw, records, models),
            style=partial(paper_style, 1.1),
        )
    ]


def _draw(records: Sequence[Record], models: Sequence[str]) -> Figure:
    """Curves above, distances below, a column for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 + 4.8 * len(models), 7), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False)
    for place, model in enumerate(models):
        _draw_curves(axes[0][place], records, model)
        _draw_distances(axes[1][place], records, model)
    _add_legend(figure, list(axes[0]), "outside right upper")
    _add_legend(figure, list(axes[1]), "outside right lower")
    without_frame(figure)
    return figure


def _add_legend(
    figure: Figure, several: Sequence[Axes], place: Literal["outside right upper", "outside right lower"]
) -> None:
    """One for all the panels beside each other, outside of them."""
    found: dict[str, Any] = {}
    for axes in several:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(list(found.values()), list(found), loc=place, fontsize="small", frameon=False)


def _points(record: Record) -> tuple[list[float], list[float]]:
    """Steps and scores, without those of a diverged training."""
    known = [(point[0], point[2]) for point in record.details["curve"] if point[2] is not None]
    return [step for step, _ in known], [score for _, score in known]


def _draw_curves(axes: Axes, records: Sequence[Record], model: str) -> None:
    """Mean and band of the sequential runs over the steps, and every other run as a line."""
    import numpy
    import seaborn

    stages = load_protocol().plans[model].stages
    colors = dict(zip(stages, seaborn.color_palette("crest", len(stages)), strict=True))
    runs = [_points(r)[1] for r in select(records, "baseline", model) if r.status == "done"]
    margin, steps = load_protocol().margin, _points(select(records, "baseline", model)[0])[0]
    length = min(len(steps), *map(len, runs))
    known, steps = numpy.array([run[:length] for run in runs]), steps[:length]
    means, spans = known.mean(axis=0), margin * known.std(axis=0, ddof=1)
    band = f"{len(runs)} sequential runs: mean, {margin:g} sd"
    axes.fill_between(steps, means - spans, means + spans, color="0.8", label=band, linewidth=0)
    axes.plot(steps, means, color="0.4")
    for num_stages in stages:
        own = of_case(select(records, "own seeds", model), num_stages=num_stages)
        for place, record in enumerate(own):
            label = f"K = {num_stages}, own seed" if not place else None
            axes.plot(*_points(record), color=colors[num_stages], marker=".", linewidth=1, label=label)
    for record in select(records, "asynchronous", model):
        if record.status == "done" and _points(record)[0]:
            color = "#c44e52" if record.case["rate"] == 1 else "#8c613c"
            if record.case["num_stages"] == 1:
                color = "0.2"
            style = "--" if record.case["stash"] else ":"
            axes.plot(*_points(record), color=color, linestyle=style, label=name_of(record))
    axes.set(xlabel="step", ylabel=METRICS[model], title=TITLES[model])
    if model == "images":
        axes.set_ylim(0, 1.02)
    else:
        axes.set_yscale("log")


def _draw_distances(axes: Axes, records: Sequence[Record], model: str) -> None:
    """Final scores minus the sequential mean, in standard deviations; one colour per kind of seed."""
    found = baseline(records, model)
    assert found is not None, "drawn only with a baseline"
    deviation = found.deviation or 1.0
    groups = [("all", select(records, "baseline", model), "0.4", "sequential runs")]
    for num_stages in load_protocol().plans[model].stages:
        own = of_case(select(records, "own seeds", model), num_stages=num_stages)
        groups.append((f"K={num_stages}", own, "#4c72b0", "own seeds"))
    for record in select(records, "same seed", model):
        name = f"K={record.case['num_stages']}"
        if record.case["processes"] != 1:
            name += f"\n{record.case['processes']} proc."
        groups.append((name, [record], "#dd8452", "the seed of the first K = 1"))
    groups = [group for group in groups if group[1]]
    margin = load_protocol().margin
    axes.axhspan(-margin, margin, color="0.9", zorder=0)
    axes.axhline(0, color="0.4", linewidth=1)
    for place, (_, runs, color, label) in enumerate(groups):
        values = [(score - found.mean) / deviation for r in runs if (score := score_of(r)) is not None]
        axes.scatter([place] * len(values), values, color=color, s=28, zorder=3, label=label)
    axes.set_xticks(range(len(groups)), [name for name, _, _, _ in groups])
    unit = "points" if model == "images" else ""
    size = f"{100 * deviation:.2f} {unit}" if model == "images" else f"{deviation:.3g}"
    axes.set(ylabel=f"difference to the mean / sd ({size})", title="final score; band: the margin")
