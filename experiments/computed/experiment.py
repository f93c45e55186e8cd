"""What can be had without a run: the stride control and quotients of printed numbers.

Counted on models without memory, or divided; nothing is timed and nothing trained. No GPU is needed:

    python -m experiments run computed
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.computed.answer import spread_of, to_details, to_quantities
from gpipe_bench.experiments.computed.quotients import QUOTIENTS
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, PaperTable, RunOptions
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.harness.verdict import Entry, about

STRIDE = "control-stride"
SECONDS = {STRIDE: 40.0, "claims": 10.0}

ROUGHLY = (STRIDE, "activation memory over the original's", "moved stride")
"""A number in words, "four times": as near as `about` of the unknowns says."""


def cases(options: RunOptions) -> list[Case]:
    found = list(QUOTIENTS) if options.profile == "smoke" else [*QUOTIENTS, STRIDE]
    return [
        Case({"part": "as published", "table": table, "what": table}, SECONDS.get(table, 1.0))
        for table in found
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    import torch

    torch.set_num_threads(1)
    table = str(case.key["table"])
    if table == STRIDE:
        from gpipe_bench.experiments.computed.stride import stride

        answers = stride()
    else:
        answers = QUOTIENTS[table]()
    return Outcome(to_quantities(answers), to_details(answers))


def cells(records: Sequence[Record]) -> list[Entry]:
    """An entry for every answer on record."""
    (roughly,) = (cell for cell in load_paper() if cell.key == ROUGHLY)
    in_words = about(roughly, load_unknowns().find("claims", "about"))
    found = []
    for record in of_case(records, "done", part="as published"):
        table = str(record.case["table"])
        for quantity in record.quantities:
            row, column = quantity.name, str(quantity.key["column"])
            found.append(
                Entry(
                    table=table,
                    row=row,
                    column=column,
                    question="as published",
                    quantity=quantity,
                    spread=spread_of(record, row, column),
                    allowed=in_words if (table, row, column) == ROUGHLY else None,
                    record=record,
                    note=quantity.note,
                )
            )
    return found


EXPERIMENT = Experiment(
    name="computed",
    title="What follows without a run: stride control and quotients",
    source="arXiv v1, sections 1 and 5",
    describe=(
        "Activations and parameters of v1's stride control over all that it leaves open, and numbers that "
        "follow from printed ones."
    ),
    profiles={
        "smoke": "all but the stride control",
        "short": "everything; no device is needed",
        "full": "the same as short",
    },
    cases=cases,
    run=run,
    cells=cells,
    paper_tables={
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
    },
    options=(),
    untimed=True,
)
