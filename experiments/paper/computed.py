"""Claims of the paper that need no accelerator: v1's moved stride, model sizes, which networks train.

What AmoebaNet-D's moved stride changes (the stride control, as results/reproduction.toml declares it) and
sizes of models are counted on the meta device. Two sentences about the networks that GPipe can train are
tested on small ones (`trained`). Nothing is timed:

    python -m experiments run computed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.paper import SENTENCES
from gpipe_bench.harness.record import Metric, Record, of_case
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.verdict import Result

if TYPE_CHECKING:
    import torch

TIED_TOLERANCE = 1e-12  # for shared weights in float64: the order of a sum may change
SIZES = {
    "amoebanet-b": ("amoebanet-b", "({num_layers}, {num_filters})"),
    "transformer-seq2seq": ("nmt-models", "T({num_layers}, {ffn_dim}, {num_heads})"),
}
"""For each model that is only counted: its table in results/paper.csv, and how a size is written there."""


def cases(options: RunOptions) -> list[Case]:
    sizes = [Case({"part": "size", "model": model, "size": size}, 0.4) for model, size in _zoo()]
    trained = Case({"part": "trained", "table": SENTENCES}, 10.0)
    return [trained, *sizes, *reproduced.cases("computed", options)]


def _zoo() -> Mapping[tuple[str, str], dict[str, Any]]:
    """Options of the models that are only counted, by model and by size as results/paper.csv writes it."""
    from gpipe_bench.models.zoo import CONFIGURATIONS

    return {(name, SIZES[name][1].format(**size)): size for name, size in CONFIGURATIONS if name in SIZES}


def run(case: Case, options: RunOptions) -> Outcome:
    import torch

    torch.set_num_threads(1)
    if reproduced.is_computed(case):
        from . import reproduction

        return reproduction.run("computed", case)
    if case.key["part"] == "trained":
        return Outcome((networks(), statistics()))
    from gpipe_bench.models import MODELS, count_parameters

    model, size = str(case.key["model"]), str(case.key["size"])
    with torch.device("meta"):
        count = count_parameters(MODELS[model](**_zoo()[model, size]))
    return Outcome((Metric("parameters", count, "parameters", "modelled"),))


def cells(records: Sequence[Record]) -> list[Result]:
    """Results for the two sentences, the sizes, and the stride control."""
    found = [
        Result(
            table=SENTENCES, row=metric.name, column=str(metric.key["column"]), metric=metric, record=record,
            note=metric.note,
        )
        for record in of_case(records, "done", part="trained")
        for metric in record.metrics
    ]  # fmt: skip
    for record in of_case(records, "done", part="size"):
        size, table = str(record.case["size"]).replace(", ", ","), SIZES[str(record.case["model"])][0]
        row, column = ("parameters", "v5") if size.startswith("(") else (size, "parameters")  # v5 states it
        answer = partial(Result, question="as published", metric=record.metric("parameters"), record=record)
        found.append(answer(table=table, row=row, column=column))
    return [*found, *reproduced.answers(records)]


# Two sentences about what GPipe takes and keeps, tested on small networks. "Any network that can
# be expressed as a sequence of layers": every network of the zoo trains a few steps on several stages, and
# its weights are compared with those of one stage, bit by bit. "The moving average of the sufficient
# statistics using the entire mini-batch": running statistics of a batch normalization after a step in
# micro-batches are divided by those of the same layer after the whole mini-batch.

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
"""Every network of the zoo, small, with dropout and batch normalization if it has them."""
STAGES = (2, 4)
NUM_MICROBATCHES, EXAMPLES, NUM_STEPS = 4, 8, 3


def networks() -> Metric:
    """The share of networks whose weights are equal for all numbers of stages: bit by bit, or to rounding if
    stages share a weight, as each stage first sums its own gradients.
    """
    from gpipe_bench.models import MODELS
    from gpipe_bench.pipeline.memory.workers import shared_weights

    tied = [name for name in MODELS if shared_weights(list(MODELS[name](**NETWORKS[name])))]
    failed = [name for name in MODELS if not _trains_the_same(name, TIED_TOLERANCE if name in tied else 0.0)]
    count = len(MODELS) - len(failed)
    what = f"{count} of {len(MODELS)} small networks, {NUM_STEPS} steps on 1, 2 and 4 stages, every bit"
    what += f"; tied weights to rounding ({', '.join(tied)})" if tied else ""
    what += f"; not {', '.join(failed)}" if failed else ""
    row, at = "networks that train to the same weights whatever K is", {"column": "share of the zoo"}
    return Metric(row, count / len(MODELS), "ratio", "measured", key=at, note=what)


def _trains_the_same(name: str, tolerance: float) -> bool:
    """Whether any number of stages ends at the same weights: exactly, or in float64 within `tolerance`."""
    import torch

    first, *others = [_weights(name, k, torch.float64 if tolerance else torch.float32) for k in (1, *STAGES)]
    return all(
        each.keys() == first.keys()
        and all(torch.allclose(each[key], first[key], rtol=tolerance, atol=tolerance) for key in first)
        for each in others
    )


def _weights(name: str, num_stages: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights and buffers after a few steps from a fixed seed."""
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


def statistics() -> Metric:
    """Running mean and variance after one step in micro-batches over those of the mini-batch."""
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
    low, high, mean = min(ratios), max(ratios), sum(ratios) / len(ratios)
    at = {"column": f"M={NUM_MICROBATCHES}"}
    return Metric(row, mean, "ratio", "measured", key=at, low=low, high=high, note=what)


EXPERIMENT = Experiment(
    name="computed",
    title="What needs no accelerator: stride control, sizes, small networks",
    source="arXiv v1, section 5",
    describe=(
        "Activations and parameters of v1's stride control as declared, parameters of models that no "
        "other experiment counts, and whether every network of the zoo trains the same on several stages."
    ),
    profiles={
        "smoke": "all but the stride control",
        "short": "everything; no device is needed",
        "full": "the same as short",
    },
    cases=cases,
    run=run,
    cells=cells,
    reproduction=reproduced.text,
    paper_tables=("control-stride",),
    untimed=True,
)
