"""Table 3 from its records alone: the entries that are judged, then everything that is printed.

Judged is what the paper prints, throughput relative to K = 2, from steps that were measured. The text sets
the modelled steps of the paper's size beside them, and says how well the replay agrees with steps over a
real slow link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from gpipe_bench.experiments.measuring.tables.replay_error import UNKNOWN, next_error, replayed_spread
from gpipe_bench.experiments.measuring.tables.step_text import SMOKE, interval, percent, published
from gpipe_bench.experiments.published.entries import as_published, predicted_text, prediction_text
from gpipe_bench.experiments.table3.sentences import sentences
from gpipe_bench.harness.record import Quantity, Record, Scalar, find
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.table import text_table
from gpipe_bench.harness.verdict import Comparison, Entry

TABLES = {"amoebanet": "table3-amoebanet", "transformer": "table3-transformer"}


def stage_counts(record: Record) -> list[int]:
    """The values of K on record."""
    return [facts["num_stages"] for facts in record.details["stages"].values()]


def cells(records: Sequence[Record]) -> list[Entry]:
    """An entry for each K of each model whose steps were measured, and for the sentences about them."""
    found = [cell for model in TABLES for cell in _of_model(records, model)]
    return found + sentences(records) + as_published(records)


def _of_model(records: Sequence[Record], model: str) -> Iterator[Entry]:
    record = find(records, "done", part="steps", model=model)
    if record is None:
        return
    error = next_error(records, model)
    for k in stage_counts(record):
        quantity = record.quantity("normalised throughput", link=record.details["judged"], K=k)
        if quantity is None:  # nothing to be relative to: the steps of K = 2 found no room
            continue
        least, most = record.details["share_of_peak"][f"K={k}"]
        spread = replayed_spread(quantity, error, "as the step grows", [("share_of_peak", least, most)])
        yield Entry(
            table=TABLES[model],
            row="M=32",
            column=f"K={k}",
            quantity=quantity,
            record=record,
            spread=spread,
            note=_note(record),
            not_comparable=SMOKE if record.profile == "smoke" else "" if spread else UNKNOWN,
        )


def _note(record: Record) -> str:
    scale = record.details["scale"]
    where = (
        f"A scaled model ({scale}) over PCIe slowed down as much as its computation: balance of the stages, "
        "schedule and the share of the messages are compared, not speeds. "
        if scale
        else ""
    )
    return (
        f"{where}Exact partition by measured seconds; the paper gives neither its partitions nor its batches."
    )


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """Everything that `run` and `compare` print."""
    verdicts = {c.place: c.verdict for c in comparisons if c.question == "here"}
    parts = [_model(records, model, verdicts) for model in TABLES]
    parts += [_links(records), prediction_text(records)]
    if comparisons:
        parts.append(text_table(comparisons))
    return "\n\n".join(part for part in parts if part)


def _model(records: Sequence[Record], model: str, verdicts: Mapping[tuple[str, str, str], str]) -> str:
    """Paper, ours over PCIe three ways, bound, how fast a link must be, verdict."""
    steps, paper_size = (find(records, "done", part=part, model=model) for part in ("steps", "paper size"))
    known = steps or paper_size
    if known is None:
        return ""
    printed = published(TABLES[model])
    lines = []
    for k in stage_counts(known):
        paper = printed.get(("paper", "M=32", f"K={k}"))
        ours = [
            _cell(steps, "normalised throughput", link=link, K=k)
            for link in ("PCIe, same share", "PCIe", "free link")
        ]
        lines.append(
            [
                f"K={k}",
                "-" if paper is None else paper.printed,
                *ours,
                _cell(steps, "normalised bound", K=k),
                percent(steps.quantity("share of the balanced step", K=k) if steps else None),
                predicted_text(records, TABLES[model], "M=32", f"K={k}"),
                _bandwidth(steps, k),
                _bandwidth(paper_size, k),
                verdicts.get((TABLES[model], "M=32", f"K={k}"), "-"),
            ]
        )
    headers = [
        "", "paper", "PCIe,\nsame share", "PCIe", "free\nlink", "bound", "of\nbound",
        "PCIe, P100,\npredicted", "hidden\nfrom", "P100:\nhidden from", "verdict",
    ]  # fmt: skip
    title = _title(known, steps, paper_size)
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _title(known: Record, steps: Record | None, paper_size: Record | None) -> str:
    lines = [f"{known.details['title']}, M=32: throughput, K=2 is 1"]
    if steps is not None:
        details = steps.details
        scale = f"; scaled to this machine: {details['scale']}" if details["scale"] else ""
        forward = details["stages"][f"K={stage_counts(steps)[-1]}"]["mean_forward_ms"]
        lines += [
            f"  replayed: actions timed in steps of {details['timed_microbatches']} micro-batches{scale}; "
            f"a forward takes {forward:.1f} ms at K={stage_counts(steps)[-1]}",
            "  PCIe: 16 lanes of PCIe 3 through the host, 7.9 GB/s; same share: slowed down with the "
            "computation, "
            f"{details['slowed_link']['bandwidth_bytes_per_s'] / 1e6:,.1f} MB/s",
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


def _cell(record: Record | None, name: str, **key: Scalar) -> str:
    return "-" if record is None else interval(record.quantity(name, **key))


def _bandwidth(record: Record | None, num_stages: int) -> str:
    quantity = record.quantity("hidden from", K=num_stages) if record is not None else None
    return "-" if quantity is None or quantity.value is None else f"{quantity.value:.2g}"


def _links(records: Sequence[Record]) -> str:
    """Every measured point with its error, or why there is none."""
    lines, errors, reasons = [], [], []
    facts: dict[str, Any] = {}
    for model in TABLES:
        record = find(records, "done", part="link", model=model)
        skipped = find(records, "skipped", part="link", model=model)
        if record is None:
            if skipped is not None:
                reasons.append(skipped.reason)
            continue
        facts = record.details
        for point in record.details["points"]:
            at: dict[str, Scalar] = {"messages_per_forward": point["multiple"]}
            error = record.quantity("replay error", **at)
            if error is None or error.value is None:
                continue
            errors.append(abs(error.value))
            rate = point["rate_bytes_per_s"]
            lines.append(
                [
                    record.details["title"] if point is record.details["points"][0] else "",
                    "no limit" if rate is None else f"{rate / 1e6:.2f}",
                    _plain(record.quantity("bandwidth", **at), 2),
                    _plain(record.quantity("latency", **at), 0),
                    _plain(record.quantity("step", **at), 0),
                    _plain(record.quantity("real step", **at), 0),
                    f"{100 * error.value:+.1f} %",
                ]
            )
    if not lines:
        why = "; ".join(dict.fromkeys(reasons))
        return f"K=2 over a rate-limited link: not run: {why}" if why else ""
    title = (
        f"K=2, M={facts['num_microbatches']} over a rate-limited link between two processes: the replay's "
        f"median absolute error {100 * median(errors):.1f} % over {len(lines)} points\n"
        "  the replay's link has the measured bandwidth (one bulk transfer) and latency (small messages)\n"
        f"  limit per direction: a token bucket of {1e3 * facts['burst_s']:g} ms, "
        f"{facts['queue_bytes'] // 2**20} MiB of queue, TCP {facts['congestion_control']}"
    )
    headers = [
        "", "limit\n(MB/s)", "measured\n(MB/s)", "latency\n(us)", "step (ms),\nreplayed",
        "step (ms),\nmeasured", "error",
    ]  # fmt: skip
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _plain(quantity: Quantity | None, digits: int) -> str:
    return "-" if quantity is None or quantity.value is None else f"{quantity.value:,.{digits}f}"
