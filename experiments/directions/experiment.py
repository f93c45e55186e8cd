"""Sentences of the paper that need training, tried in miniature: their direction alone.

Twenty-one results of the paper need ImageNet, 25 billion pairs of sentences and weeks of accelerators. What a
laptop can ask is whether a sentence points the right way where everything is small: whether later strides,
larger batches, more languages, wider models or more layers help there, and whether stale weights hurt. The
answers say something about a sentence and nothing about GPipe. They are in no total, and no number of them
is held against one of the paper's. "No power at this size" is an answer too.

    python -m experiments run directions
    python -m experiments run directions --only task=translation --data FOLDER    other message catalogues
    python -m experiments run directions --only task=images --data FOLDER         other images
    python -m experiments run directions --only task=text --text FILE             another text

What is compared, with which seeds, what would count and when it does stands in results/directions.toml, which
was committed before the first run with its seeds, with a pilot on other seeds. Every case is one training
with one seed, or one for each of a few languages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.consistency.recipes import image_layout, read_text
from gpipe_bench.experiments.directions.protocol import (
    UNITS,
    Contrast,
    Finding,
    interval,
    judged,
    load_protocol,
)
from gpipe_bench.experiments.report.drawing import paper_style, without_frame
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Quantity, Record
from gpipe_bench.harness.report.grid import Grid, fill

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL = "Toy size: it says something about the sentence and nothing about GPipe."
WHAT_IT_IS = (
    "TOY SIZE, AND NO REPRODUCTION. Models of at most a million parameters are trained here for seconds, on "
    "data that a laptop has. What is asked of a sentence of the paper is only whether it points the same way "
    "where everything is small. A yes does not confirm the paper and a no does not contradict it; neither "
    "says anything about GPipe, and none is in any total."
)
SMOKE_ARMS = 2  # of each task
_BAR = 12  # columns of half a bar


def cases(options: RunOptions) -> list[Case]:
    """A training for each arm and seed of the protocol that a contrast with enough power needs.

    Raises ValueError for data of the user's that can't be trained on.
    """
    _check_data(options)
    protocol = load_protocol()
    runs = protocol.runs()
    seconds = {name: arm.seconds for name, arm in protocol.arms.items()}
    if options.profile == "smoke":
        tasks = {task: [n for n, arm in protocol.arms.items() if arm.task == task] for task in protocol.tasks}
        runs = {arm: protocol.seeds[:1] for arms in tasks.values() for arm in arms[:SMOKE_ARMS]}
        seconds = dict.fromkeys(seconds, 1.0)
    return [
        Case(
            {"task": protocol.arms[arm].task, "arm": arm, "seed": seed, "protocol": protocol.digest(arm)},
            seconds[arm],
            group="translation" if protocol.arms[arm].task == "translation" else "",  # reads catalogues once
        )
        for arm, seeds in runs.items()
        for seed in seeds
    ]


def _check_data(options: RunOptions) -> None:
    if options.data is not None:
        folder = Path(options.data)
        if not any(next(folder.rglob(f"*.{ending}"), None) for ending in ("mo", "po")):
            image_layout(options.data)
    if options.text is not None:
        read_text(options.text)


def run(case: Case, options: RunOptions) -> Outcome:
    """One training; all that is heavy is imported in here."""
    import torch

    from gpipe_bench.experiments.directions.training import NoDataError, ran

    torch.set_num_threads(1)
    try:
        found = ran(load_protocol().arms[str(case.key["arm"])], int(str(case.key["seed"])), options)
    except NoDataError as error:
        return Outcome(status="skipped", reason=str(error))
    units = {"accuracy": "%", "loss": "nats", "chrF": "number"}
    quantities = [Quantity(name, value, units[name], "measured") for name, value in found.metrics.items()]
    return Outcome(tuple(quantities), {"curve": found.curve, **found.details})


# Text


def tables(records: Sequence[Record]) -> str:
    """A line for each sentence, then each with the paper's words, the arms and what would make it fail."""
    protocol = load_protocol()
    found = {name: judged(contrast, records) for name, contrast in protocol.contrasts.items()}
    lines = [
        [
            contrast.title, _difference(contrast, found[name]) or "-", f"{contrast.counts:g}",
            _bar(contrast, found[name]), _word(found[name]),
        ]
        for name, contrast in protocol.contrasts.items()
    ]  # fmt: skip
    heading = ["toy size", f"difference [{100 * protocol.confidence:g} %]", "counts from", "", "verdict"]
    summary = Grid(
        columns=heading, lines=lines,
        notes=["", fill(
            "Differences are over pairs of runs with equal seeds and positive in the paper's direction; bars "
            "reach to three times what would count. 'small' is less than what would count. "
            f"{protocol.rule['verdict']}"
        )],
    )  # fmt: skip
    blocks = [_block(contrast, found[name], records) for name, contrast in protocol.contrasts.items()]
    return "\n\n".join([fill(WHAT_IT_IS), summary.text(), *blocks])


def _difference(contrast: Contrast, finding: Finding) -> str:
    """`+2.1 points [0.5, 3.7]`."""
    if finding.difference is None:
        return ""
    mean, low, high = finding.difference
    return f"{mean:+.3g} {UNITS[contrast.metric]} [{low:.3g}, {high:.3g}]"


def _word(finding: Finding) -> str:
    small = finding.reason and finding.word in ("same direction", "opposite")
    return f"{finding.word}, small" if small else finding.word


def _bar(contrast: Contrast, finding: Finding) -> str:
    """`.....|--o--.`: the interval in units of what counts, from -3 to 3; `|` is 0, and what lies beyond an
    end sticks to it.
    """
    if finding.difference is None:
        return ""
    mean, low, high = (
        round(_BAR * (1 + max(-1.0, min(1.0, value / (3 * contrast.counts))))) for value in finding.difference
    )
    marks = ["-" if low <= place <= high else "." for place in range(2 * _BAR + 1)]
    marks[_BAR] = "|"
    marks[mean] = "o"
    return "".join(marks)


def _block(contrast: Contrast, finding: Finding, records: Sequence[Record]) -> str:
    """All about one sentence."""
    protocol = load_protocol()
    unit = "%" if contrast.metric == "accuracy" else UNITS[contrast.metric]
    said = [("the paper", f"{contrast.sentence} ({contrast.source})"), ("asked here", contrast.asks)]
    arms = (contrast.better, contrast.worse)
    for place, arm in enumerate(arms):
        runs = protocol.select(records, arm, "done")
        mean = "" if finding.means is None else f": {finding.means[place]:.4g} {unit} in the mean"
        size = ""
        if runs:
            details = runs[0].details
            size = (
                f" ({details['parameters']:,} parameters, {details['steps']:,} steps of "
                f"{details['batch_size']}, {details['operations'] / 1e9:,.0f} G operations)"
            )
        said.append(("than" if place else "expected better", f"{protocol.arms[arm].says}{size}{mean}"))
    data = dict.fromkeys(
        str(run.details["data"]) for run in protocol.select(records, contrast.better, "done")
    )
    if data:
        said.append(("data", "; ".join(data)))
    if text := _difference(contrast, finding):
        each = ", ".join(f"{value:+.3g}" for value in finding.differences)
        said.append(("difference", f"{text}, of {len(finding.differences)} pairs: {each}"))
    elif all(protocol.arms[arm].pilot for arm in arms):
        better, worse = (protocol.arms[arm].pilot[contrast.metric] for arm in arms)
        shown = [" ".join(f"{value:.4g}" for value in values) for values in (better, worse)]
        said.append(("pilot", f"{shown[0]} against {shown[1]} {unit}, with other seeds"))
    if finding.power is not None:
        fails = "all of the interval below 0 is the opposite, 0 inside it leaves it undecided; what counts is"
        said.append(("would fail", f"{fails} {contrast.counts:g} {UNITS[contrast.metric]}"))
        said.append(("power", f"{100 * finding.power:.0f} %, by the pilot"))
    said.append(("verdict", finding.word + (f": {finding.reason}" if finding.reason else "")))
    return "\n".join(
        [f"{contrast.title} (toy size)", *(fill(text, f"  {name:<17}", " " * 19) for name, text in said)]
    )


# Figures


def figures(records: Sequence[Record]) -> list[Plot]:
    """Differences and curves, beside the records; a page has bars of text."""
    if not any(judged(c, records).difference for c in load_protocol().contrasts.values()):
        return []
    return [
        Plot(
            name="directions",
            caption=f"Mean differences over pairs of seeds, in units of what would count. {LABEL}",
            alt="A line for each sentence: the interval of the paired difference beside zero, in units of "
            "the difference that would count; right of zero is the paper's direction.",
            draw=partial(_draw_differences, records),
            style=partial(paper_style, 1.0),
            on_page=False,
        ),
        Plot(
            name="directions-curves",
            caption=f"Held-out results over the training, means and 95 % intervals over seeds. {LABEL}",
            alt="Learning curves of all arms, a panel for each direction.",
            draw=partial(_draw_curves, records),
            style=partial(paper_style, 1.1),
            on_page=False,
        ),
    ]


def _draw_differences(records: Sequence[Record]) -> Figure:
    from matplotlib.figure import Figure

    contrasts = load_protocol().contrasts
    figure = Figure(figsize=(7.2, 0.7 + 0.27 * len(contrasts)), layout="constrained")
    axes = figure.add_subplot()
    labels = []
    edge, color = 3.0, "0.25"  # one colour: neither direction is a success
    for place, contrast in enumerate(contrasts.values()):
        finding = judged(contrast, records)
        labels.append(contrast.title)
        said = _word(finding)
        if finding.difference is not None:
            mean, low, high = (value / contrast.counts for value in finding.difference)
            axes.plot([max(-edge, low), min(edge, high)], [place, place], color=color, linewidth=2)
            axes.plot([mean], [place], "o", color=color)
            for beyond, at, mark in ((low < -edge, -edge, "<"), (high > edge, edge, ">")):
                if beyond:
                    axes.plot([at], [place], mark, color=color, clip_on=False)
            said = f"{_difference(contrast, finding)}, {said}"
        axes.text(edge + 0.3, place, said, va="center", fontsize=7)
    for at, style in ((0, "-"), (1, ":"), (-1, ":")):
        axes.axvline(at, color="0.5", linewidth=0.8, linestyle=style, zorder=0)
    axes.set_yticks(range(len(labels)), labels)
    axes.set(
        ylim=(len(labels) - 0.5, -0.5),
        xlim=(-edge, edge),
        xlabel=f"paired difference over seeds, {100 * load_protocol().confidence:g} % interval, "
        "in units of the smallest that counts (dotted);\n"
        "right of 0 is the paper's direction, arrows lie beyond",
    )
    axes.set_title("Toy size. Not a reproduction, and in no total", fontsize=10)
    axes.grid(visible=False)
    without_frame(figure)
    return figure


LENGTHS = ("original strides", "moved stride", "original strides, longer")
WIDTHS = ("half as wide", "original strides", "twice as wide")
TOKENS = ("batch 1x, 16x the steps", "batch 4x, 4x the steps", "batch 16x")
LANGUAGES = ("bilingual", "multilingual, wide", "multilingual, deep")
STALE = (
    "GPipe",
    "without stashing",
    "with stashing",
    "without stashing, rate / 8",
    "with stashing, rate / 8",
)
PANELS = (
    ("Strides of AmoebaNet-D", "accuracy, %", LENGTHS, "steps"),
    ("Width of AmoebaNet-D", "accuracy, %", WIDTHS, "steps"),
    ("Batch size, equal steps", "loss, nats", ("batch 1x", "batch 4x", "batch 16x"), "steps"),
    ("Batch size, equal tokens", "loss, nats", TOKENS, "thousand tokens"),
    ("Into English, three languages with few messages", "loss, nats", LANGUAGES, "steps"),
    ("Asynchronous stages, K = 8", "loss, nats", STALE, "steps"),
)
"""Title, what is followed, arms, and what a step is counted in."""


def _draw_curves(records: Sequence[Record]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    for axes, (title, what, arms, unit) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        _draw_panel(axes, records, arms, unit)
        axes.set(title=title, xlabel=unit, ylabel=f"held-out {what}")
    figure.suptitle(f"{LABEL} Not a reproduction. Bands: 95 % intervals of the mean over seeds", fontsize=9)
    without_frame(figure)
    return figure


def _draw_panel(axes: Axes, records: Sequence[Record], arms: Iterable[str], unit: str) -> None:
    """A line for each arm, its mean over the seeds, and the interval of the mean by Student's t."""
    import pandas
    import seaborn

    protocol = load_protocol()
    rows: list[dict[str, Any]] = []
    for arm in arms:
        for record in protocol.select(records, arm, "done"):
            scale = record.details["tokens_per_step"] / 1000 if unit == "thousand tokens" else 1
            rows += [{"at": scale * at, "score": score, "": arm} for at, score in record.details["curve"]]
    if len({row[""] for row in rows}) < 2:
        axes.axis("off")  # what one arm alone learns compares nothing
        axes.text(0.5, 0.5, "one arm at most was run", ha="center", transform=axes.transAxes)
        return

    def band(values: Any) -> tuple[float, float]:
        if len(values) < 2:
            return float(values.iloc[0]), float(values.iloc[0])
        return interval([*map(float, values)], protocol.confidence)[1:]

    data = pandas.DataFrame(rows)
    seaborn.lineplot(
        data, x="at", y="score", hue="", style="", errorbar=band, ax=axes, markers=True, dashes=False
    )
    axes.legend(fontsize=7, frameon=False)


EXPERIMENT = Experiment(
    name="directions",
    title="Toy size: which way sentences that need training point, and nothing about GPipe",
    source="arXiv v1, section 5; v5, sections 4, 5 and 6",
    describe=(
        "No reproduction: small models on small data, for the direction of a sentence alone, by a protocol "
        "that was frozen before the runs. Later strides, wider and deeper models, larger batches, many "
        "languages at once, stale weights. In no total of this page."
    ),
    profiles={
        "smoke": "a few steps of some of the trainings",
        "short": "all trainings that a pilot gave power",
        "full": "the same as short: what is larger needs the paper's data",
    },
    cases=cases,
    run=run,
    cells=lambda records: [],  # no row of the paper has these tasks
    tables=tables,
    figures=figures,
    options=("data", "text"),
    untimed=True,
)
