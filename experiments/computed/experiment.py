"""What takes no device: the stride control, quotients of printed numbers, what is counted, small networks.

Counted on models without memory, or divided; nothing is timed. Quotients confirm arithmetic and no more, so
all of them are identities; a wrong one would be an erratum. Two sentences about which networks GPipe takes
are put to the engine on small ones (`trained`). No GPU is needed:

    python -m experiments run computed
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from gpipe_bench.experiments.computed.answer import Computed, over, spread_of, to_details, to_quantities
from gpipe_bench.experiments.timed.claims import CORRELATION, REDUCTION, TABLE, admitted
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, PaperTable, RunOptions
from gpipe_bench.harness.paper import PaperNumber, load_paper
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.verdict import Answer

STRIDE = "control-stride"
SECONDS = {STRIDE: 40.0, TABLE: 10.0}
ROUNDING = "rounding of the printed numbers"


def cases(options: RunOptions) -> list[Case]:
    found = list(QUOTIENTS) if options.profile == "smoke" else [*QUOTIENTS, STRIDE]
    published = [
        Case({"part": "as published", "table": table, "what": table}, SECONDS.get(table, 1.0))
        for table in found
    ]
    return [*published, Case({"part": "trained", "table": TABLE}, 10.0)]


def run(case: Case, options: RunOptions) -> Outcome:
    import torch

    torch.set_num_threads(1)
    table = str(case.key["table"])
    if case.key["part"] == "trained":
        from gpipe_bench.experiments.computed.trained import trained

        answers = trained()
    elif table == STRIDE:
        from gpipe_bench.experiments.computed.stride import stride

        answers = stride()
    else:
        answers = QUOTIENTS[table]()
    return Outcome(to_quantities(answers), to_details(answers))


def cells(records: Sequence[Record]) -> list[Answer]:
    """An entry for every answer on record."""
    paper = {cell.key: cell for cell in load_paper() if cell.source == "paper"}
    places = [
        (record, quantity, (str(record.case["table"]), quantity.name, str(quantity.key["column"])))
        for record in of_case(records, "done")
        for quantity in record.quantities
    ]
    return [
        Answer(
            table=place[0],
            row=place[1],
            column=place[2],
            question="as published" if record.case["part"] == "as published" else "here",
            quantity=quantity,
            spread=spread_of(record, *place[1:]),
            allowed=admitted(paper[place]),
            record=record,
            note=quantity.note,
        )
        for record, quantity, place in places
    ]


def printed(table: str, row: str, name: str) -> PaperNumber:
    """A number that stands in the paper, or that it quotes."""
    place = (table, row, name)
    return next(cell for cell in load_paper() if cell.key == place and cell.source != "torchgpipe")


def growth() -> list[Computed]:
    """How much the best ImageNet model grew in three years."""
    later = printed("growth", "SENet 2017", "parameters")
    earlier = printed("growth", "GoogLeNet 2014", "parameters")
    low = (later.target - later.target_rounding) / (earlier.target + earlier.target_rounding)
    high = (later.target + later.target_rounding) / (earlier.target - earlier.target_rounding)
    return [
        Computed(
            row="parameters of the best model, 2017 over 2014",
            column="v1",
            value=later.target / earlier.target,
            unit="ratio",
            what=f"{later.printed} over {earlier.printed}",
            spread=over(ROUNDING, (low, high)),
        )
    ]


def error_rates() -> list[Computed]:
    """What the printed accuracies leave to 100 %."""
    found = []
    for name in ("CIFAR-10", "CIFAR-100"):
        accuracy = printed("transfer", name, "top-1")
        error, off = 100 - accuracy.target, accuracy.target_rounding
        found.append(
            Computed(
                row=name,
                column="error rate",
                value=error,
                unit="%",
                what=f"100 - {accuracy.printed}",
                spread=over(ROUNDING, (error - off, error + off)),
            )
        )
    return found


def correlation() -> Computed:
    """Of the seven models of v1's Table 2: of ranks, and with the logarithm of the parameters."""
    from scipy.stats import pearsonr, spearmanr

    of_row: dict[str, dict[str, float]] = {}
    for cell in load_paper():
        if cell.table == "imagenet-models" and cell.column in ("parameters", "top-1"):
            of_row.setdefault(cell.row, {})[cell.column] = cell.value
    both = [each for each in of_row.values() if len(each) == 2]
    sizes, accuracies = [math.log(each["parameters"]) for each in both], [each["top-1"] for each in both]
    of_ranks = float(spearmanr(sizes, accuracies).statistic)
    of_logarithms = float(pearsonr(sizes, accuracies).statistic)
    return Computed(
        row=CORRELATION,
        column="v1 Table 2",
        value=of_ranks,
        unit="number",
        what=f"{len(both)} models: of ranks, and of accuracy and the logarithm of the parameters",
        spread=over("which coefficient", (of_ranks, of_logarithms)),
    )


NUM_STAGES = 8


def sentences() -> list[Computed]:
    """What single sentences of the text come to by counting."""
    return [*reductions(), spmd(), pipedream()]


def reductions() -> list[Computed]:
    """What a normal cell of AmoebaNet-D (18, 256) has over one of the stack before it."""
    from gpipe_bench.experiments.predicted.sizes import of_the_paper

    full = of_the_paper("table2", "amoebanet")
    stacks = [
        (size, full.sent_bytes(last, 1, "float32"))
        for size, layers in itertools.groupby(range(len(full.layers)), lambda n: full.parameters[n])
        if size and len(several := list(layers)) > 2
        for last in several[-1:]
    ]
    found = []
    for place, column in ((1, "its activations"), (0, "its parameters")):
        ratios = [after[place] / before[place] for before, after in itertools.pairwise(stacks)]
        found.append(
            Computed(
                row=REDUCTION,
                column=column,
                value=ratios[0],
                unit="ratio",
                what="of the normal cells of one stack over those of the stack before it, both times",
                spread=over("which reduction", ratios),
            )
        )
    return found


def spmd(num_layers: int = 24) -> Computed:
    """Bytes that an accelerator sends: of each layer's two products of matrices split in the middle, a ring
    over the activations forward and backward; of the pipeline, one boundary each way.
    """
    ring = 2 * Fraction(NUM_STAGES - 1, NUM_STAGES)
    return Computed(
        row="bytes of SPMD's AllReduces over the pipeline's",
        column=f"Transformer-{num_layers} on {NUM_STAGES} accelerators",
        value=float(4 * num_layers * ring / 2),
        unit="ratio",
        what="four rings over a layer's activations, of every layer, against the two messages of a boundary",
    )


def pipedream() -> Computed:
    """Versions of the weights, each stage of 8 with as many parameters."""
    kept = [NUM_STAGES - stage for stage in range(NUM_STAGES)]
    return Computed(
        row="PipeDream's versions of the weights over GPipe's one",
        column=f"{NUM_STAGES} accelerators, mean",
        value=sum(kept) / NUM_STAGES,
        unit="ratio",
        what=f"stage k keeps {NUM_STAGES} - k; the first has {kept[0]}, the last {kept[-1]}",
    )


QUOTIENTS: dict[str, Callable[[], list[Computed]]] = {
    TABLE: sentences,
    "growth": lambda: [*growth(), correlation()],
    "transfer": error_rates,
}
"""By the table that they answer."""


EXPERIMENT = Experiment(
    name="computed",
    title="What takes no device: stride control, quotients, small networks",
    source="arXiv v1, sections 1 and 5",
    describe=(
        "Activations and parameters of v1's stride control over all that it leaves open, numbers that "
        "follow from printed ones, and whether every network of the zoo trains the same on several stages."
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
