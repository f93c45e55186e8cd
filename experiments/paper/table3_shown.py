"""What Table 3 shows below the comparison: its text and its figures, from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.experiments.paper.timed import claims
from gpipe_bench.experiments.paper.timed.replay import HIDDEN, TimedActions, hidden_from, slowdowns
from gpipe_bench.experiments.report.drawing import picture
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Metric, Record, Scalar
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.links import LINKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES = {"amoebanet": "table3-amoebanet", "transformer": "table3-transformer"}
SAME_SHARE = "PCIe, same share"
SHOWN_LINKS = ("ethernet-10g", "pcie3-host", "infiniband-hdr", "nvlink2")


def of_part(records: Sequence[Record], part: str) -> dict[str, Record]:
    return claims.by_model(records, TABLES, part=part)


def stage_counts(record: Record) -> list[int]:
    """The values of K on record."""
    return [facts["num_stages"] for facts in record.details["stages"].values()]


# Text


def tables(records: Sequence[Record]) -> str:
    """The modelled steps of the paper's size beside the replayed ones."""
    steps, papers = of_part(records, "steps"), of_part(records, "paper size")
    parts = []
    for model, table in TABLES.items():
        ours, paper = steps.get(model), papers.get(model)
        known = ours or paper
        if known is None:
            continue
        printed, lines = claims.published(table), []
        for k in stage_counts(known):
            theirs = printed.get(("paper", "M=32", f"K={k}"))
            lines.append(
                [
                    f"K={k}",
                    "-" if theirs is None else theirs.printed,
                    *(_cell(ours, "normalised throughput", link=link, K=k) for link in _LINKS),
                    _cell(ours, "normalised bound", K=k),
                    claims.percent(ours.metric("share of the balanced step", K=k) if ours else None),
                    _plain(ours.metric("hidden from", K=k) if ours else None, ".2g"),
                    _plain(paper.metric("hidden from", K=k) if paper else None, ".2g"),
                ]
            )
        parts.append(numbers_text(_title(known, ours, paper), _COLUMNS, lines))
    return "\n\n".join(part for part in parts if part)


_LINKS = (SAME_SHARE, "PCIe", "free link")
_COLUMNS = [
    "", "paper", "PCIe,\nsame share", "PCIe", "free\nlink", "bound", "of\nbound",
    "hidden\nfrom", "P100:\nhidden from",
]  # fmt: skip


def _cell(record: Record | None, name: str, **key: Scalar) -> str:
    return "-" if record is None else claims.interval(record.metric(name, **key))


def _plain(metric: Metric | None, form: str) -> str:
    return "-" if metric is None or metric.value is None else f"{metric.value:{form}}"


def _title(known: Record, steps: Record | None, paper_size: Record | None) -> str:
    lines = [f"{known.details['title']}, M=32: throughput, K=2 is 1"]
    if steps is not None:
        details, k = steps.details, stage_counts(steps)[-1]
        scale = f"; scaled to this machine: {details['scale']}" if details["scale"] else ""
        lines += [
            f"  replayed: actions timed in steps of {details['timed_microbatches']} micro-batches{scale}; "
            f"a forward takes {details['stages'][f'K={k}']['mean_forward_ms']:.1f} ms at K={k}",
            "  PCIe: 16 lanes of PCIe 3 through the host, 7.9 GB/s; same share: slowed down with the "
            f"computation, {details['slowed_link']['bandwidth_bytes_per_s'] / 1e6:,.1f} MB/s",
            "  not in the interval: over links on which a message takes half a forward or longer, steps of "
            "two\n    processes took 6 to 19 % longer than their replay (TCP, measured once)",
            "  bound: the same work spread evenly over the stages, over a free link",
        ]
    lines.append(
        "  hidden from: least GB/s per direction with a step at most 5 % longer than over a free link"
    )
    if paper_size is not None:
        details = paper_size.details
        lines.append(
            f"  P100, hidden from: modelled at the paper's size, N={details['batch_size']} (not given), "
            f"no set-up, no update;\n    {details['assumption']}"
        )
    return "\n".join(lines)


# Figures


def figures(records: Sequence[Record]) -> list[Plot]:
    """Throughput over the link's bandwidth: modelled at the paper's size, replayed at this machine's."""
    drawings = (
        ("table3-bandwidth", "The paper's size on P100s, modelled", of_part(records, "paper size")),
        ("table3-this-machine", "This machine's models, replayed", of_part(records, "steps")),
    )
    return [
        picture(
            name=name,
            caption="Table 3: throughput over the bandwidth of the link",
            alt=(
                "Curves of throughput over bandwidth on a logarithmic axis, with the point where "
                "communication stops being hidden."
            ),
            draw=partial(_drawn, title, laid_out),
        )
        for name, title, laid_out in drawings
        if laid_out
    ]


def _drawn(title: str, laid_out: Mapping[str, Record]) -> Figure:
    """A panel for each model: the steps of every K over links of any bandwidth, a dot from where on
    communication is hidden.
    """
    import numpy
    import pandas
    import seaborn
    from matplotlib.figure import Figure

    models = [model for model in TABLES if model in laid_out]
    figure = Figure(figsize=(4.4 * len(models) + 0.6, 4.0), layout="constrained")
    every = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    x, y = "bandwidth of the link, GB/s per direction", "throughput, relative to a free link"
    for axes, model in zip(every, models, strict=True):
        details = laid_out[model].details
        curves = {}
        for facts in details["stages"].values():
            timed = TimedActions.from_data(facts["actions"])
            curves[f"K = {timed.num_stages}, M = {timed.num_microbatches}"] = timed
        dots = [
            (least / 1e9, slowdowns(timed, [least])[0], label)
            for label, timed in curves.items()
            if (least := hidden_from(timed)) is not None
        ]
        seen = [dot for dot, *_ in dots] or [LINKS["pcie3-host"].bandwidth_bytes_per_s / 1e9]
        swept = numpy.geomspace(min(seen) / 10, max(seen) * 10, 60).tolist()
        lines = [
            (bandwidth, share, label)
            for label, timed in curves.items()
            for bandwidth, share in zip(swept, slowdowns(timed, [1e9 * each for each in swept]), strict=True)
        ]
        look = {"x": x, "y": y, "hue": "", "hue_order": list(curves), "palette": "viridis", "ax": axes}
        seaborn.lineplot(pandas.DataFrame(lines, columns=[x, y, ""]), **look)
        if dots:
            seaborn.scatterplot(pandas.DataFrame(dots, columns=[x, y, ""]), legend=False, zorder=3, **look)
        for link in SHOWN_LINKS:
            speed = LINKS[link].bandwidth_bytes_per_s / 1e9
            if swept[0] < speed < swept[-1]:
                axes.axvline(speed, color="0.55", linewidth=0.8, linestyle=":")
                axes.annotate(link, (speed, 0.02), rotation=90, fontsize=7, color="0.35", ha="right")
        axes.set(xscale="log", ylim=(0, 1.05), xlim=(swept[0], swept[-1]))
        axes.set_title(claims.scaled(details), fontsize=9)
        axes.legend(loc="center right", fontsize=7.5)
    figure.suptitle(
        f"{title}; dots: over faster links a step is at most {HIDDEN:.0%} longer than over a free one",
        fontsize=9,
    )
    return figure
