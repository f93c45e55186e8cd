"""Table 2 from its records alone: the entries that are judged, then everything that is printed.

Judged is what the paper prints, normalised throughput with a mini-batch chosen as the paper chose it. The
text shows fixed and fitted mini-batch apart, then how far to believe them: what the replay errs by, and what
a step loses to the rule that cuts the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpipe_bench.experiments.measuring.tables.replay_error import UNKNOWN, next_error, replayed_spread
from gpipe_bench.experiments.measuring.tables.step_text import (
    SMOKE,
    interval,
    percent,
    published,
    replay_errors,
)
from gpipe_bench.experiments.published.entries import as_published, prediction_text
from gpipe_bench.experiments.table2.sentences import sentences
from gpipe_bench.harness.record import Quantity, Record, find, of_case
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.table import text_table
from gpipe_bench.harness.verdict import Comparison, Entry
from gpipe_bench.pipeline.plan.breakdown import even_stages
from gpipe_bench.pipeline.plan.partition import RULES, partition
from gpipe_bench.pipeline.plan.replay import SLOTS, replay
from gpipe_bench.pipeline.plan.schedule import gpipe

TABLES = {"amoebanet": "table2-amoebanet", "transformer": "table2-transformer"}
JUDGED = "fitted"  # the mini-batch as the paper chose it


def configurations(record: Record) -> list[tuple[int, int]]:
    """(K, M) of all that was timed, in the order of the table."""
    return sorted(
        (facts["num_stages"], facts["num_microbatches"]) for facts in record.details["cells"].values()
    )


def facts_of(record: Record, num_stages: int, num_microbatches: int) -> dict[str, Any]:
    """What is known of one configuration beside its numbers."""
    return next(
        facts
        for facts in record.details["cells"].values()
        if (facts["num_stages"], facts["num_microbatches"]) == (num_stages, num_microbatches)
    )


def cells(records: Sequence[Record]) -> list[Entry]:
    """An entry for each (K, M) of each model on record, and for the sentences about them."""
    found = [cell for model in TABLES for cell in _of_model(records, model)]
    return found + sentences(records, JUDGED) + as_published(records)


def _of_model(records: Sequence[Record], model: str) -> Iterator[Entry]:
    record = find(records, "done", model=model, batch=JUDGED)
    if record is None:
        return
    error = next_error(records, model)
    for num_stages, num_microbatches in configurations(record):
        quantity = record.quantity("normalised throughput", K=num_stages, M=num_microbatches)
        spread = replayed_spread(quantity, error, "as the step grows")
        yield Entry(
            table=TABLES[model],
            row=f"M={num_microbatches}",
            column=f"K={num_stages}",
            quantity=quantity,
            spread=spread,
            record=record,
            not_comparable=SMOKE if record.profile == "smoke" else "" if spread else UNKNOWN,
            note=_note(record),
        )


def _note(record: Record) -> str:
    scale = record.details["scale"]
    where = f"A scaled model ({scale}): the shape of the table is compared, not its speeds. " if scale else ""
    return (
        f"{where}Exact partition by measured seconds, early recomputation, the mini-batch fitted to a memory "
        "cap; the paper gives neither its mini-batches nor its partitions."
    )


TITLES = {
    "fixed": "(a) the same mini-batch in all cells: only K and M differ",
    "fitted": "(b) the largest mini-batch under a memory cap in every cell, as the paper did",
}


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """Everything that `run` and `compare` print."""
    verdicts = {c.place: c.verdict for c in comparisons if c.question == "here"}
    parts = [
        grid_of(record, model, batch, verdicts)
        for batch in TITLES
        for model in TABLES
        if (record := find(records, "done", model=model, batch=batch)) is not None
    ]
    parts += [replay_errors(records), shared_cores(records), partition_rules(records)]
    parts.append(prediction_text(records))
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


def shared_cores(records: Sequence[Record]) -> str:
    """The steps that ran for real in more processes than there are cores: memory and loss, no times."""
    lines = []
    for record in of_case(records, "done", batch="on shared cores"):
        stages = range(record.details["num_stages"])
        loss, alone = (record.quantity("loss", stages=k) for k in (len(stages), 1))
        for stage in stages:
            counted, modelled = (
                record.quantity("peak", stage=stage, how=how) for how in ("counted", "modelled")
            )
            if counted is None or modelled is None or counted.value is None or not modelled.value:
                continue
            lines.append(
                [
                    record.details["title"] if stage == 0 else "", f"{stage}",
                    f"{record.details['actions'][stage]}", f"{counted.value / 2**20:.2f}",
                    f"{modelled.value / 2**20:.2f}", f"{counted.value / modelled.value:.2f}",
                    _losses(loss, alone) if stage == stages[-1] else "",
                ]
            )  # fmt: skip
    if not lines:
        return ""
    title = (
        "K=4 M=4 for real, four processes that share the cores: every stage took its schedule's actions in "
        "their order\n  no time is taken; counted is more than modelled by what the transport keeps in flight"
    )
    headers = ["", "stage", "actions", "peak counted (MiB)", "modelled (MiB)", "ratio", "loss, K=4 and K=1"]
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _losses(loss: Quantity | None, alone: Quantity | None) -> str:
    values = [None if each is None else each.value for each in (loss, alone)]
    return "equal" if values[0] == values[1] else f"{values[0]} and {values[1]}"


def partition_rules(records: Sequence[Record]) -> str:
    """What a pipeline loses to its cut: the paper's rule, the library's heuristic and ours."""
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


def bound_shares(layers_s: Sequence[float], num_stages: int, num_microbatches: int) -> dict[str, float | str]:
    """By rule: the step of perfectly even stages over the step of the rule's stages (modelled), or why the
    rule gives none. Forward : recomputation : backward = 1 : 1 : 2, a free link.
    """
    schedule = gpipe(num_stages, num_microbatches, "always")
    shares: dict[str, float | str] = {}
    for rule in RULES:
        try:
            stages = partition(layers_s, num_stages, rule)
        except ValueError as error:
            shares[rule] = str(error).partition(":")[0]
            continue
        stages_s = [sum(layers_s[i] for i in span) for span in stages]
        work = {action: SLOTS[action.kind] * stages_s[action.stage] for action in schedule}
        even_s = replay(schedule, even_stages(work, schedule).__getitem__).makespan_s
        shares[rule] = even_s / replay(schedule, work.__getitem__).makespan_s
    return shares
