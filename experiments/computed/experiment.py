"""What can be had without a run: the stride control, quotients of printed numbers, claims of write-ups.

Counted on models without memory, laid out on replayed schedules, or divided; nothing is timed and nothing
trained. No GPU is needed:

    python -m experiments run computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpipe_bench.experiments.computed.answer import spread_of, to_details, to_quantities
from gpipe_bench.experiments.computed.quotients import QUOTIENTS
from gpipe_bench.experiments.computed.write_ups import WRITE_UPS
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.judging.allowed import Allowed, about, printed
from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.judging.paper import PaperCell, load_paper
from gpipe_bench.harness.judging.unknowns import load_unknowns
from gpipe_bench.harness.records.record import Record, of_case
from gpipe_bench.harness.report.table import text_table
from gpipe_bench.harness.shown import PaperTable

STRIDE = "control-stride"
WRITTEN = "write-ups"
SECONDS = {STRIDE: 40.0, "claims": 10.0, "operations": 10.0, "traffic": 3.0, "sizes": 8.0}

ROUGHLY = (
    (STRIDE, "activation memory over the original's", "moved stride"),
    (WRITTEN, "throughput with twice the devices", "large M"),
)
"""Numbers in words, "four times" and "approximately doubles": as near as `about` of the unknowns says."""
ENOUGH = (WRITTEN, "bubble negligible", "M / K")
"""Printed as "at least": with so many micro-batches the bubble is negligible, so no more may be needed."""


def cases(options: RunOptions) -> list[Case]:
    found = [(table, table) for table in QUOTIENTS] + [(WRITTEN, what) for what in WRITE_UPS]
    if options.profile != "smoke":
        found.append((STRIDE, STRIDE))
    return [
        Case({"part": "as published", "table": table, "what": what}, SECONDS.get(what, 1.0))
        for table, what in found
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    import torch

    torch.set_num_threads(1)
    table, what = str(case.key["table"]), str(case.key["what"])
    if table == STRIDE:
        from gpipe_bench.experiments.computed.stride import stride

        answers = stride()
    else:
        answers = (WRITE_UPS[what] if table == WRITTEN else QUOTIENTS[what])()
    return Outcome(to_quantities(answers), to_details(answers))


def cells(records: Sequence[Record]) -> list[Entry]:
    """An entry for every answer on record."""
    published = {(cell.source, *cell.key): cell for cell in load_paper()}
    found = []
    for record in of_case(records, "done", part="as published"):
        table = str(record.case["table"])
        source = "write-up" if table == WRITTEN else "paper"
        for quantity in record.quantities:
            row, column = quantity.name, str(quantity.key["column"])
            found.append(
                Entry(
                    table=table,
                    row=row,
                    column=column,
                    source=source,
                    question="as published",
                    quantity=quantity,
                    spread=spread_of(record, row, column),
                    allowed=_allowed(published[source, table, row, column]),
                    record=record,
                    note=quantity.note,
                )
            )
    return found


def _allowed(cell: PaperCell) -> Allowed | None:
    """What the words admit, where they stand for a number that they do not give."""
    if cell.key in ROUGHLY:
        return about(cell, load_unknowns().find("claims", "about"))
    return printed(replace(cell, bound="at most")) if cell.key == ENOUGH else None


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """The paper's numbers, and apart from them, as they count nowhere among them, those of others."""
    of_paper = [comparison for comparison in comparisons if comparison.source == "paper"]
    others = [comparison for comparison in comparisons if comparison.source != "paper"]
    parts = [text_table(of_paper)] if of_paper else []
    if others:
        parts.append(f"What others write about GPipe, not among the paper's numbers\n\n{text_table(others)}")
    return "\n\n".join(parts)


PAPER_TABLES = {
    "control-stride": PaperTable(
        title="Control experiment: the stride of AmoebaNet-D (2, 256)",
        short="Stride control",
        about="Larger activations at the same number of parameters, first version, section 5.",
    ),
    "growth": PaperTable(
        title="Figure 1: how models have grown",
        short="Growth of models",
        about="Sizes, accuracies and accelerators that the introduction sets out from.",
    ),
    "write-ups": PaperTable(
        title="What others write about GPipe",
        short="Write-ups",
        about="Claims of web pages about GPipe; where they contradict the paper, the row says so.",
    ),
}


EXPERIMENT = Experiment(
    name="computed",
    title="What follows without a run: stride control, quotients, claims of write-ups",
    source="arXiv v1, sections 1 and 5; web pages about GPipe",
    describe=(
        "Activations and parameters of v1's stride control over all that it leaves open, numbers that follow "
        "from printed ones, and what write-ups about GPipe claim, by formula, replay and count."
    ),
    profiles={
        "smoke": "all but the stride control",
        "short": "everything; no device is needed",
        "full": "the same as short",
    },
    cases=cases,
    run=run,
    cells=cells,
    paper_tables=PAPER_TABLES,
    tables=tables,
    options=(),
    untimed=True,
)
