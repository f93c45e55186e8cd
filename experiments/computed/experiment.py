"""What can be had without a run: the stride control and quotients of printed numbers.

Counted on models without memory, or divided; nothing is timed and nothing trained. Quotients confirm
arithmetic and no more, so all of them are identities; a wrong one would be an erratum. No GPU is needed:

    python -m experiments run computed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gpipe_bench.experiments.computed.answer import Answer, over, spread_of, to_details, to_quantities
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, PaperTable, RunOptions
from gpipe_bench.harness.paper import PaperCell, load_paper
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.harness.verdict import Entry, about
from gpipe_bench.models.paper import HALVES, column

STRIDE = "control-stride"
SECONDS = {STRIDE: 40.0, "claims": 10.0}

ROUGHLY = (STRIDE, "activation memory over the original's", "moved stride")
"""A number in words, "four times": as near as `about` of the unknowns says."""
ROUNDING = "rounding of the printed numbers"

_CLAIMS = (
    ("AmoebaNet: largest on 8 accelerators over naive-1", "amoebanet", "pipeline-8", "naive-1"),
    ("Transformer: largest on 128 partitions over naive-1", "transformer", "pipeline-128", "naive-1"),
    ("Transformer: larger by re-materialization alone", "transformer", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger on one accelerator", "amoebanet", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger from 1 to 8 accelerators", "amoebanet", "pipeline-8", "pipeline-1"),
)
"""Sentence, half of Table 1, and the two columns whose models are divided."""


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
    places = [
        (record, quantity, (str(record.case["table"]), quantity.name, str(quantity.key["column"])))
        for record in of_case(records, "done", part="as published")
        for quantity in record.quantities
    ]
    return [
        Entry(
            table=place[0],
            row=place[1],
            column=place[2],
            question="as published",
            quantity=quantity,
            spread=spread_of(record, *place[1:]),
            allowed=in_words if place == ROUGHLY else None,
            record=record,
            note=quantity.note,
        )
        for record, quantity, place in places
    ]


def printed(table: str, row: str, name: str) -> PaperCell:
    """A number that stands in the paper, or that it quotes."""
    place = (table, row, name)
    return next(cell for cell in load_paper() if cell.key == place and cell.source != "torchgpipe")


def growth() -> list[Answer]:
    """How much the best ImageNet model grew in three years."""
    later = printed("growth", "SENet 2017", "parameters")
    earlier = printed("growth", "GoogLeNet 2014", "parameters")
    low = (later.target - later.target_rounding) / (earlier.target + earlier.target_rounding)
    high = (later.target + later.target_rounding) / (earlier.target - earlier.target_rounding)
    return [
        Answer(
            row="parameters of the best model, 2017 over 2014",
            column="v1",
            value=later.target / earlier.target,
            unit="ratio",
            what=f"{later.printed} over {earlier.printed}",
            spread=over(ROUNDING, (low, high)),
        )
    ]


def error_rates() -> list[Answer]:
    """What the printed accuracies leave to 100 %."""
    found = []
    for name in ("CIFAR-10", "CIFAR-100"):
        accuracy = printed("transfer", name, "top-1")
        error, off = 100 - accuracy.target, accuracy.target_rounding
        found.append(
            Answer(
                row=name,
                column="error rate",
                value=error,
                unit="%",
                what=f"100 - {accuracy.printed}",
                spread=over(ROUNDING, (error - off, error + off)),
            )
        )
    return found


def claims() -> list[Answer]:
    """Quotients of exact counts of the models of Table 1."""
    return [
        Answer(
            row=f"quotient of the printed counts, {sentence}",
            column=f"{over} / {under}",
            value=parameters_of(half, over) / parameters_of(half, under),
            unit="ratio",
            what="the quotient of the two exact counts",
        )
        for sentence, half, over, under in _CLAIMS
    ]


def parameters_of(half: str, name: str) -> int:
    """Trained parameters of the model in a column of Table 1."""
    model, options = HALVES[half].model, dict(HALVES[half].options)
    size = column(half, name)
    if size.num_filters:
        options |= {"num_layers": size.num_layers, "num_filters": size.num_filters}
        return parameters(model, options)
    # Every layer of the Transformer is like every other one.
    one, two = (parameters(model, options | {"num_layers": layers}) for layers in (1, 2))
    return one + (size.num_layers - 1) * (two - one)


def parameters(name: str, options: dict[str, Any]) -> int:
    """Trained parameters of a model of the zoo, built without memory."""
    import torch

    from gpipe_bench.models import MODELS

    with torch.device("meta"):
        model = MODELS[name](**options)
    return sum(math.prod(p.shape) for p in model.parameters() if p.requires_grad)


QUOTIENTS: dict[str, Callable[[], list[Answer]]] = {
    "claims": claims,
    "growth": growth,
    "transfer": error_rates,
}
"""By the table that they answer."""


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
