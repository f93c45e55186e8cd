"""What Table 3 shows below the comparison: its text and its figures, from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from gpipe_bench.experiments.predicted.records import predicted_text, prediction_text
from gpipe_bench.experiments.report.drawing import picture
from gpipe_bench.experiments.timed import claims
from gpipe_bench.experiments.timed.replay import HIDDEN, TimedActions, hidden_from, slowdowns
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Quantity, Record, Scalar, find
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
    """The modelled steps of the paper's size beside the measured ones, and how well the replay agrees with
    steps over a real slow link.
    """
    steps, papers = of_part(records, "steps"), of_part(records, "paper size")
    parts = []
    for model, table in TABLES.items():
        ours, paper = steps.get(model), papers.get(model)
        known = ours or paper
        if known is None:
            continue
        printed, lines = claims.published(table), []
        for k in stage_counts(known):
            place = table, "M=32", f"K={k}"
            theirs = printed.get(("paper", *place[1:]))
            lines.append(
                [
                    f"K={k}",
                    "-" if theirs is None else theirs.printed,
                    *(_cell(ours, "normalised throughput", link=link, K=k) for link in _LINKS),
                    _cell(ours, "normalised bound", K=k),
                    claims.percent(ours.quantity("share of the balanced step", K=k) if ours else None),
                    predicted_text(records, *place),
                    _plain(ours.quantity("hidden from", K=k) if ours else None, ".2g"),
                    _plain(paper.quantity("hidden from", K=k) if paper else None, ".2g"),
                ]
            )
        parts.append(numbers_text(_title(known, ours, paper), _COLUMNS, lines))
    parts += [_link_text(records), prediction_text(records)]
    return "\n\n".join(part for part in parts if part)


_LINKS = (SAME_SHARE, "PCIe", "free link")
_COLUMNS = [
    "", "paper", "PCIe,\nsame share", "PCIe", "free\nlink", "bound", "of\nbound",
    "PCIe, P100,\npredicted", "hidden\nfrom", "P100:\nhidden from",
]  # fmt: skip


def _cell(record: Record | None, name: str, **key: Scalar) -> str:
    return "-" if record is None else claims.interval(record.quantity(name, **key))


def _plain(quantity: Quantity | None, form: str) -> str:
    return "-" if quantity is None or quantity.value is None else f"{quantity.value:{form}}"


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


def _link_text(records: Sequence[Record]) -> str:
    """Every measured point with its error, or why there is none."""
    found = of_part(records, "link")
    lines, errors = [], []
    for record in found.values():
        for number, point in enumerate(record.details["points"]):
            bandwidth, latency, step, real, error = (
                record.quantity(name, messages_per_forward=point["multiple"])
                for name in ("bandwidth", "latency", "step", "real step", "replay error")
            )
            if error is not None and error.value is not None:
                rate = point["rate_bytes_per_s"]
                errors.append(abs(error.value))
                lines.append(
                    [
                        "" if number else record.details["title"],
                        "no limit" if rate is None else f"{rate / 1e6:.2f}",
                        _plain(bandwidth, ",.2f"),
                        *(_plain(each, ",.0f") for each in (latency, step, real)),
                        f"{100 * error.value:+.1f} %",
                    ]
                )
    if not lines:
        skipped = [find(records, "skipped", part="link", model=model) for model in TABLES]
        why = "; ".join(dict.fromkeys(record.reason for record in skipped if record is not None))
        return f"K=2 over a rate-limited link: not run: {why}" if why else ""
    facts = next(reversed(found.values())).details
    title = (
        f"K=2, M={facts['num_microbatches']} over a rate-limited link between two processes: the replay's "
        f"median absolute error {100 * median(errors):.1f} % over {len(lines)} points\n"
        "  the replay's link has the measured bandwidth (one bulk transfer) and latency (small messages)\n"
        f"  limit per direction: a token bucket of {1e3 * facts['burst_s']:g} ms, "
        f"{facts['queue_bytes'] // 2**20} MiB of queue, TCP {facts['congestion_control']}"
    )
    columns = [
        "", "limit\n(MB/s)", "measured\n(MB/s)", "latency\n(us)", "step (ms),\nreplayed",
        "step (ms),\nmeasured", "error",
    ]  # fmt: skip
    return numbers_text(title, columns, lines)


# Figures


def figures(records: Sequence[Record]) -> list[Plot]:
    """Throughput over the bandwidth of the link: modelled at the paper's size, and replayed and measured at
    this machine's.
    """
    papers, steps, links = (of_part(records, part) for part in ("paper size", "steps", "link"))
    drawings: tuple[tuple[str, str, dict[str, Record], dict[str, Record]], ...] = (
        ("table3-bandwidth", "The paper's size on P100s, modelled", papers, {}),
        ("table3-this-machine", "This machine's models, replayed", steps, links),
    )
    return [
        picture(
            name=name,
            caption="Table 3: throughput over the bandwidth of the link",
            alt=(
                "Curves of throughput over bandwidth on a logarithmic axis, with the point where "
                "communication stops being hidden."
            ),
            draw=partial(_drawn, title, laid_out, measured),
        )
        for name, title, laid_out, measured in drawings
        if laid_out or measured
    ]


def _drawn(title: str, laid_out: Mapping[str, Record], measured: Mapping[str, Record]) -> Figure:
    """A panel for each model: the steps of every K over links of any bandwidth, a dot from where on
    communication is hidden, and K = 2 as it was measured over the limited link.
    """
    import numpy
    import pandas
    import seaborn
    from matplotlib.figure import Figure

    models = [model for model in TABLES if model in laid_out or model in measured]
    figure = Figure(figsize=(4.4 * len(models) + 0.6, 4.0), layout="constrained")
    every = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    x, y = "bandwidth of the link, GB/s per direction", "throughput, relative to a free link"
    for axes, model in zip(every, models, strict=True):
        details = (laid_out.get(model) or measured[model]).details
        curves = {}
        for facts in laid_out[model].details["stages"].values() if model in laid_out else ():
            timed = TimedActions.from_data(facts["actions"])
            curves[f"K = {timed.num_stages}, M = {timed.num_microbatches}"] = timed
        dots = [
            (least / 1e9, slowdowns(timed, [least])[0], label)
            for label, timed in curves.items()
            if (least := hidden_from(timed)) is not None
        ]
        points = measured[model].details["points"] if model in measured else []
        if points:
            timed = TimedActions.from_data(measured[model].details["actions"])
            curves[f"K = 2, M = {timed.num_microbatches}, as measured"] = timed
        seen = [dot for dot, *_ in dots] + [point["bandwidth_bytes_per_s"] / 1e9 for point in points]
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
        for point in points:
            place = point["bandwidth_bytes_per_s"] / 1e9, point["throughput"]
            axes.plot(*place, "s", color="black", fillstyle="none", markersize=6)
            error = measured[model].quantity("replay error", messages_per_forward=point["multiple"])
            if error is not None and error.value is not None:
                text = f"{100 * error.value:+.0f} %"
                axes.annotate(text, place, (4, -11), textcoords="offset points", fontsize=7)
        for link in SHOWN_LINKS:
            speed = LINKS[link].bandwidth_bytes_per_s / 1e9
            if swept[0] < speed < swept[-1]:
                axes.axvline(speed, color="0.55", linewidth=0.8, linestyle=":")
                axes.annotate(link, (speed, 0.02), rotation=90, fontsize=7, color="0.35", ha="right")
        axes.set(xscale="log", ylim=(0, 1.05), xlim=(swept[0], swept[-1]))
        axes.set_title(claims.scaled(details), fontsize=9)
        axes.legend(loc="center right", fontsize=7.5)
    figure.suptitle(
        f"{title}; dots: over faster links a step is at most {HIDDEN:.0%} longer than over a free one"
        + ("\nsquares: measured, with the replay's error" if measured else ""),
        fontsize=9,
    )
    return figure
