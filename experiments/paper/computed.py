"""What takes no device: the stride control, quotients of printed numbers, what is counted, small networks.

Counted on models without memory, or divided; nothing is timed. Quotients confirm arithmetic and no more, so
all of them are identities; a wrong one would be an erratum. Two sentences about which networks GPipe takes
are put to the engine on small ones (`trained`). No GPU is needed:

    python -m experiments run computed

What follows so has no repeats and no interval. It may have a range, over what is not stated or over what
printed digits leave open, and that is kept with what it is made of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.experiments.paper.timed.workloads import Workload
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.paper import SENTENCES, PaperNumber, load_paper
from gpipe_bench.harness.record import Metric, Provenance, Record, Scalar, of_case
from gpipe_bench.harness.unknowns import Value, load_unknowns, steps_from_middle
from gpipe_bench.harness.verdict import Part, Result, Spread

if TYPE_CHECKING:
    import torch

STRIDE = "control-stride"
SECONDS = {STRIDE: 40.0, SENTENCES: 10.0}
ROUNDING = "rounding of the printed numbers"
TIED_TOLERANCE = 1e-12  # of float64 weights, where layers share some: the order of a sum may change


class Computed(NamedTuple):
    """Our number for a row of paper.csv, and its range, None where it is one number."""

    metric: Metric
    spread: Spread | None = None


def computed(
    row: str,
    column: str,
    value: float,
    unit: str,
    what: str,
    spread: Spread | None = None,
    provenance: Provenance = "modelled",
) -> Computed:
    """A number for that row and column; `what` says in a few words what it is."""
    key: dict[str, Scalar] = {"column": column}
    return Computed(Metric(row, value, unit, provenance, key=key, note=what), spread)


def over(what: str, values: Sequence[float]) -> Spread:
    """The range over several numbers that only one thing tells apart, such as the size of a model."""
    low, high = min(values), max(values)
    return Spread(low=low, high=high, parts=(Part(what=what, low=low, high=high),))


def cases(options: RunOptions) -> list[Case]:
    tables = list(QUOTIENTS) if options.profile == "smoke" else [*QUOTIENTS, STRIDE]
    published = [
        Case({"part": "as published", "table": table, "what": table}, SECONDS.get(table, 1.0))
        for table in tables
    ]
    return [*published, Case({"part": "trained", "table": SENTENCES}, 10.0)]


def run(case: Case, options: RunOptions) -> Outcome:
    import torch

    torch.set_num_threads(1)
    if case.key["part"] == "trained":
        return outcome(trained())
    table = str(case.key["table"])
    return outcome(stride() if table == STRIDE else QUOTIENTS[table]())


def outcome(answers: Sequence[Computed]) -> Outcome:
    """As a record keeps them."""
    spreads = [
        {"row": each.name, **each.key, **spread.to_data()} for (each, spread) in answers if spread is not None
    ]
    return Outcome(tuple(each.metric for each in answers), {"spreads": spreads})


def answers(record: Record, table: str, **more: Any) -> list[Result]:
    """An entry for every number on record, by its row and column, with the range that the record keeps."""
    spreads = {(each["row"], each["column"]): Spread.from_data(each) for each in record.details["spreads"]}
    places = [(metric, metric.name, str(metric.key["column"])) for metric in record.metrics]
    return [
        Result(
            table=table, row=row, column=column, metric=metric, spread=spreads.get((row, column)),
            record=record, note=metric.note, **more,
        )
        for metric, row, column in places
    ]  # fmt: skip


def cells(records: Sequence[Record]) -> list[Result]:
    """An entry for every answer on record."""
    found = []
    for record in of_case(records, "done"):
        question = "as published" if record.case["part"] == "as published" else "here"
        found += answers(record, str(record.case["table"]), question=question)
    return found


# The stride control of v1, section 5. The paper moved a stride from the first convolution of AmoebaNet-D
# (2, 256) to the last and says that activations grew fourfold and the model did not grow. Both are counted
# for all that is left open: where the stride went, the size of the images, whether the auxiliary head counts.

NUM_LAYERS, NUM_FILTERS = 6, 256  # v1 counts the normal cells of one stack: (2, 256)
SETTINGS = ("moved_stride", "image_size", "auxiliary_head")
BATCH_SIZE = 2
"""All that is kept is proportional to it; batch normalization treats a single example in another way."""


class Size(NamedTuple):
    """Bytes kept for the backward passes of one example, all layers, and trained parameters."""

    activation_bytes: float
    num_parameters: int


def size(image_size: int, auxiliary_head: bool, moved_stride: str | None) -> Size:
    """Of the model, in float32 and without re-materialization."""
    from gpipe_bench.pipeline.memory.profile import Profiler
    from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes

    options: dict[str, Any] = {
        "num_layers": NUM_LAYERS, "num_filters": NUM_FILTERS, "num_classes": 1001, "image_size": image_size,
        "aux_head": auxiliary_head, "moved_stride": moved_stride,
    }  # fmt: skip
    workload = Workload("AmoebaNet-D", "amoebanet-d", options, BATCH_SIZE)
    layers, loss = workload.profile(BATCH_SIZE, Profiler())
    kept = stage_bytes(layers, loss)
    parameters = sum(layer.num_parameters for layer in layers)
    return Size((kept.saved_bytes + kept.input_bytes) / BATCH_SIZE, parameters)


def stride() -> list[Computed]:
    """Activations and parameters of the moved stride over the original's."""
    unknowns = load_unknowns().of(STRIDE)
    allowed = {setting: unknowns[setting].allowed for setting in SETTINGS}
    ratios: dict[tuple[Value, ...], tuple[float, float]] = {}
    for image_size, head in itertools.product(allowed["image_size"], allowed["auxiliary_head"]):
        counted = head == "counted in"
        original = size(int(image_size), counted, None)
        for moved in allowed["moved_stride"]:
            found = size(int(image_size), counted, str(moved))
            ratios[moved, image_size, head] = (
                found.activation_bytes / original.activation_bytes,
                found.num_parameters / original.num_parameters,
            )
    rows = (
        ("activation memory over the original's", "kept for the backward pass of all layers"),
        ("parameters over the original's", "trained parameters"),
    )
    return [
        _over_settings(row, what, allowed, {point: pair[place] for point, pair in ratios.items()})
        for place, (row, what) in enumerate(rows)
    ]


def _over_settings(
    row: str, what: str, allowed: Mapping[str, tuple[Value, ...]], ratios: Mapping[tuple[Value, ...], float]
) -> Computed:
    """The range over all combinations, and of each setting alone with the others in their middle."""
    middle = tuple(values[steps_from_middle(values).index(0)] for values in allowed.values())
    parts = []
    for place, (setting, values) in enumerate(allowed.items()):
        alone = [ratios[*middle[:place], value, *middle[place + 1 :]] for value in values]
        parts.append(Part(what=setting, low=min(alone), high=max(alone)))
    low, high = min(ratios.values()), max(ratios.values())
    spread = Spread(low=low, high=high, parts=tuple(parts), combinations=len(ratios))
    said = f"{what}; the number is that of {', '.join(map(str, middle))}"
    return computed(row, "moved stride", ratios[middle], "ratio", said, spread)


# Quotients of printed numbers, and what single sentences of the text come to by counting.


def printed(table: str, row: str, column: str) -> PaperNumber:
    """A number that stands in the paper, or that it quotes."""
    place = (table, row, column)
    return next(cell for cell in load_paper() if cell.key == place and cell.source != "torchgpipe")


def growth() -> Computed:
    """How much the best ImageNet model grew in three years."""
    later, earlier = (printed("growth", name, "parameters") for name in ("SENet 2017", "GoogLeNet 2014"))
    low = (later.target - later.target_rounding) / (earlier.target + earlier.target_rounding)
    high = (later.target + later.target_rounding) / (earlier.target - earlier.target_rounding)
    row, what = "parameters of the best model, 2017 over 2014", f"{later.printed} over {earlier.printed}"
    return computed(row, "v1", later.target / earlier.target, "ratio", what, over(ROUNDING, (low, high)))


def error_rates() -> list[Computed]:
    """What the printed accuracies leave to 100 %."""
    found = []
    for name in ("CIFAR-10", "CIFAR-100"):
        accuracy = printed("transfer", name, "top-1")
        error, off = 100 - accuracy.target, accuracy.target_rounding
        spread = over(ROUNDING, (error - off, error + off))
        found.append(computed(name, "error rate", error, "%", f"100 - {accuracy.printed}", spread))
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
    what = f"{len(both)} models: of ranks, and of accuracy and the logarithm of the parameters"
    spread = over("which coefficient", (of_ranks, of_logarithms))
    return computed("correlation of top-1 accuracy and size", "v1 Table 2", of_ranks, "number", what, spread)


NUM_STAGES = 8


def reductions() -> list[Computed]:
    """What a normal cell of AmoebaNet-D (18, 256) has over one of the stack before it."""
    from gpipe_bench.experiments.paper.predicted.sizes import of_the_paper

    full = of_the_paper("table2", "amoebanet")
    stacks = [
        (size, full.sent_bytes(last, 1, "float32"))
        for size, layers in itertools.groupby(range(len(full.layers)), lambda n: full.parameters[n])
        if size and len(several := list(layers)) > 2
        for last in several[-1:]
    ]
    found = []
    what = "of the normal cells of one stack over those of the stack before it, both times"
    for place, column in ((1, "its activations"), (0, "its parameters")):
        ratios = [after[place] / before[place] for before, after in itertools.pairwise(stacks)]
        spread = over("which reduction", ratios)
        row = "a layer after a reduction over one before it, AmoebaNet-D (18, 256)"
        found.append(computed(row, column, ratios[0], "ratio", what, spread))
    return found


def spmd(num_layers: int = 24) -> Computed:
    """Bytes that an accelerator sends: of each layer's two products of matrices split in the middle, a ring
    over the activations forward and backward; of the pipeline, one boundary each way.
    """
    ring = 2 * Fraction(NUM_STAGES - 1, NUM_STAGES)
    column = f"Transformer-{num_layers} on {NUM_STAGES} accelerators"
    what = "four rings over a layer's activations, of every layer, against the two messages of a boundary"
    row = "bytes of SPMD's AllReduces over the pipeline's"
    return computed(row, column, float(4 * num_layers * ring / 2), "ratio", what)


def pipedream() -> Computed:
    """Versions of the weights, each stage of 8 with as many parameters."""
    kept = [NUM_STAGES - stage for stage in range(NUM_STAGES)]
    row, column = "PipeDream's versions of the weights over GPipe's one", f"{NUM_STAGES} accelerators, mean"
    what = f"stage k keeps {NUM_STAGES} - k; the first has {kept[0]}, the last {kept[-1]}"
    return computed(row, column, sum(kept) / NUM_STAGES, "ratio", what)


QUOTIENTS: dict[str, Callable[[], list[Computed]]] = {
    SENTENCES: lambda: [*reductions(), spmd(), pipedream()],
    "growth": lambda: [growth(), correlation()],
    "transfer": error_rates,
}
"""By the table that they answer."""


# Two sentences about what GPipe takes and keeps, put to the engine on small networks. "Any network that can
# be expressed as a sequence of layers": every network of the zoo trains a few steps on several stages, and
# its weights are compared with those of one stage, bit by bit. "The moving average of the sufficient
# statistics using the entire mini-batch": what a batch normalization has kept after a step in micro-batches,
# over what the same layer keeps that sees the mini-batch whole.

_AMOEBANET = {"num_layers": 3, "num_filters": 16, "num_classes": 10, "image_size": 32, "aux_head": False}
_TEXT = {"d_model": 32, "num_heads": 2, "vocab_size": 100, "seq_len": 16}
NETWORKS: dict[str, dict[str, Any]] = {
    **{f"amoebanet-{kind}": _AMOEBANET for kind in "abcd"},
    "transformer-lm": {**_TEXT, "num_layers": 4, "ffn_dim": 64, "dropout": 0.1},
    "transformer-seq2seq": {**_TEXT, "num_layers": 2, "ffn_dim": 64, "head_dim": 16, "dropout": 0.1},
    "resnet101": {"num_classes": 10, "image_size": 32, "num_blocks": (1, 1, 2, 1), "num_filters": 8},
    "gpt2": {**_TEXT, "num_layers": 4},
    "llama": {**_TEXT, "num_layers": 4, "ffn_dim": 64},
    "unet": {"num_convs": 1, "num_filters": 4, "depth": 2, "image_size": 16},
    "attnres": {**_TEXT, "num_layers": 4, "ffn_dim": 64},
}
"""Every network of the zoo, small; dropout and batch normalization are on where it has them."""
STAGES = (2, 4)
NUM_MICROBATCHES, EXAMPLES, NUM_STEPS = 4, 8, 3


def trained() -> list[Computed]:
    """Both sentences."""
    return [networks(), statistics()]


def networks() -> Computed:
    """The share of the networks whose weights are the same with every number of stages: in every bit, and to
    rounding where layers share a weight, whose gradients each owner adds up first.
    """
    from gpipe_bench.models import MODELS

    tied = [name for name in MODELS if _is_tied(name)]
    same = [name for name in MODELS if _trains_the_same(name, TIED_TOLERANCE if name in tied else 0.0)]
    others = [name for name in MODELS if name not in same]
    row, steps = (
        "networks that train to the same weights whatever K is",
        f"{NUM_STEPS} steps on 1, 2 and 4 stages",
    )
    what = f"{len(same)} of {len(MODELS)} small networks, {steps}, every bit"
    what += f"; tied weights to rounding ({', '.join(tied)})" if tied else ""
    what += f"; not {', '.join(others)}" if others else ""
    share = len(same) / len(MODELS)
    return computed(row, "share of the zoo", share, "ratio", what, provenance="measured")


def _is_tied(name: str) -> bool:
    from gpipe_bench.models import MODELS
    from gpipe_bench.pipeline.memory.workers import shared_weights

    return bool(shared_weights(list(MODELS[name](**NETWORKS[name]))))


def _trains_the_same(name: str, tolerance: float) -> bool:
    """Whether all numbers of stages end at the same weights, in float64 where they may differ at all."""
    import torch

    dtype = torch.float64 if tolerance else torch.float32
    first, *others = [_weights(name, count, dtype) for count in (1, *STAGES)]
    return all(
        each.keys() == first.keys()
        and all(torch.allclose(each[key], first[key], rtol=tolerance, atol=tolerance) for key in first)
        for each in others
    )


def _weights(name: str, num_stages: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights and buffers after a few steps from one seed."""
    import torch

    from gpipe_bench.models import MODELS, example_batch, loss_fn
    from gpipe_bench.pipeline import Pipeline

    torch.manual_seed(0)
    options = NETWORKS[name]
    model = MODELS[name](**options).to(dtype)
    pipeline = Pipeline(model, num_stages=num_stages, num_microbatches=NUM_MICROBATCHES)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    compute_loss, draws = loss_fn(name, **options), torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        inputs, target = example_batch(name, EXAMPLES, generator=draws, **options)
        pipeline.step(inputs, target, compute_loss)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in pipeline.state_dict().items()}


def statistics() -> Computed:
    """Running mean and variance after one step of several micro-batches over those of the mini-batch."""
    import torch
    from torch import nn

    from gpipe_bench.pipeline import Pipeline

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 10)]
    model = nn.Sequential(*layers).double()
    images, classes = torch.randn(EXAMPLES, 3, 8, 8).double(), torch.randint(10, (EXAMPLES,))
    whole = nn.BatchNorm2d(8).double()
    whole(model[0](images))
    pipeline = Pipeline(model, num_stages=2, num_microbatches=NUM_MICROBATCHES)
    pipeline.step(images, classes, nn.functional.cross_entropy)
    kept = pipeline.state_dict()
    ratios = [
        float(ratio)
        for name in ("running_mean", "running_var")
        for ratio in kept[f"1.{name}"] / whole.state_dict()[name]
    ]
    row = "batch normalization's running statistics over the mini-batch's"
    what = f"means and variances of {len(ratios) // 2} channels after one step, float64"
    mean, spread = sum(ratios) / len(ratios), over("which channel", ratios)
    return computed(row, f"M={NUM_MICROBATCHES}", mean, "ratio", what, spread, "measured")


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
    paper_tables=("control-stride", "growth"),
    untimed=True,
)
