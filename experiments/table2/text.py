"""Table 2 as text: fixed and fitted mini-batch apart, then how far to believe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpipe_bench.experiments.measuring.step_text import interval, percent, published, replay_errors
from gpipe_bench.experiments.table2.cells import TABLES, configurations, facts_of
from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.records.find import find
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.text import text_table
from gpipe_bench.pipeline.plan.partition import RULES

TITLES = {
    "fixed": "(a) the same mini-batch in all cells: only K and M differ",
    "fitted": "(b) the largest mini-batch under a memory cap in every cell, as the paper did",
}


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """Everything that `run` and `compare` print."""
    verdicts = {(c.table, c.row, c.column): c.verdict for c in comparisons}
    parts = [
        grid_of(record, model, batch, verdicts)
        for batch in TITLES
        for model in TABLES
        if (record := find(records, "done", model=model, batch=batch)) is not None
    ]
    parts += [replay_errors(records), partition_rules(records)]
    if comparisons:
        parts.append(text_table(comparisons))
    return "\n\n".join(part for part in parts if part)


def grid_of(record: Record, model: str, batch: str, verdicts: Mapping[tuple[str, str, str], str]) -> str:
    """One model's cells: paper, torchgpipe as published, ours, bound, verdict where it is judged."""
    details = record.details
    known = published(TABLES[model])
    lines = []
    for num_stages, count in configurations(record):
        name = f"K={num_stages} M={count}"
        paper = known.get(("paper", f"M={count}", f"K={num_stages}"))
        peer = known.get(("torchgpipe", f"M={count}", f"K={num_stages}"))
        ran = record.quantity("normalised real throughput", K=num_stages, M=count)
        facts = facts_of(record, num_stages, count)
        lines.append(
            [
                name,
                "-" if paper is None else paper.printed + ("" if paper.comparable else " *"),
                "-" if peer is None else peer.printed,
                interval(record.quantity("normalised throughput", K=num_stages, M=count), facts["why"]),
                "-" if ran is None else interval(ran),
                interval(record.quantity("normalised bound throughput", K=num_stages, M=count)),
                percent(record.quantity("share of the balanced step", K=num_stages, M=count)),
                f"{facts['batch_size']}",
                verdicts.get((TABLES[model], f"M={count}", f"K={num_stages}"), "-")
                if batch == "fitted"
                else "-",
            ]
        )
    scale = f"; scaled to this machine: {details['scale']}" if details["scale"] else ""
    link = details["link"]
    title = (
        f"{details['title']} {TITLES[batch]}\n"
        f"  normalised throughput, K=2 M=1 is 1; engine {details['engine']}{scale}\n"
        f"  replayed: actions timed in {details['processes']} process(es), laid out on K devices over "
        f"{link['name']} ({link['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s); measured: run on K devices\n"
        "  bound: the same work spread evenly over the stages, over a free link; of bound: step of the "
        "bound / "
        "replayed step"
    )
    headers = [
        "",
        "paper",
        "torchgpipe",
        "ours, replayed",
        "ours, measured",
        "bound",
        "of bound",
        "N",
        "verdict",
    ]
    notes = []
    if any(line[1].endswith("*") for line in lines):
        notes.append(f"  * {next(c.erratum for c in known.values() if not c.comparable)}")
    return Grid(title=title, columns=headers, lines=lines, notes=notes, right=numbers(headers)).text()


def partition_rules(records: Sequence[Record]) -> str:
    """What a pipeline loses to its cut: the paper's rule, the library's heuristic and ours."""
    from gpipe_bench.experiments.table2.partition_rules import bound_shares

    lines = []
    for model in TABLES:
        record = find(records, "done", model=model, batch="fixed")
        if record is None:
            continue
        size = min(record.details["layers_ms"], key=int)
        seconds = record.details["layers_ms"][size]
        for num_stages, count in configurations(record):
            if count != max(m for _, m in configurations(record)):
                continue
            shares = bound_shares(seconds, num_stages, count)
            lines.append(
                [record.details["title"], f"K={num_stages} M={count}"]
                + [
                    shares[rule] if isinstance(shares[rule], str) else f"{100 * shares[rule]:.0f} %"
                    for rule in RULES
                ]
            )
    if not lines:
        return ""
    title = (
        "What the partition costs: share of the balanced bound (modelled from the measured seconds of single "
        "layers)\n  bottleneck: ours, exact; variance: the paper's rule; cumulative: the published library's "
        "heuristic"
    )
    headers = ["", "cell", *RULES]
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()
