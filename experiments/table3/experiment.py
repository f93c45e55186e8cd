"""Table 3: throughput without a fast interconnect, AmoebaNet-D (18, 128) and Transformer-24 with M = 32.

Expected: the Transformer does not notice (a message takes a hundredth of an action), AmoebaNet does with many
stages, whose messages take as long as their actions.

    python -m experiments run table3

Three kinds of cases, each saying which it is. `steps`: actions measured in whole steps on this machine and
laid out on K devices over PCIe through the host (`replayed`), as it is and slowed down with the model, so
that a message takes the share of the time that it takes on the paper's P100. `paper size`: the paper's own
models, every operation at the speed a P100 allows it (`modelled`). `link`: the model on two processes that a
link of limited rate joins, step times beside the replay over the same link (`measured`); it needs root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.measuring.speed_models import Size, Subject
from gpipe_bench.experiments.published import cases as predictions
from gpipe_bench.experiments.published.hypotheses import hypotheses_of
from gpipe_bench.experiments.table3.figures import figures
from gpipe_bench.experiments.table3.tables import cells, tables
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, PaperTable, RunOptions

if TYPE_CHECKING:
    from gpipe_bench.experiments.published.estimate import Estimate

STAGES = (2, 4, 8)
NUM_MICROBATCHES = 32
TIMED_MICROBATCHES = 8  # that really run; the step is laid out with 32
ROUNDS = {"smoke": 1, "short": 2, "full": 3}  # there and back, two samples each
ESTIMATE_S = {"smoke": 7.0, "short": 40.0, "full": 90.0}
LINK_ROUNDS = {"smoke": 1, "short": 2, "full": 4}
MULTIPLES = {"smoke": (None, 1.0), "short": (None, 8.0, 2.0, 1.0, 0.5, 0.25)}
SMOKE_LINK = "transformer"
LINK_ESTIMATE_S = {"smoke": 9.0, "short": 45.0, "full": 80.0}


def _amoebanet(
    layers: int, filters: int, image_size: int, num_classes: int, aux_head: bool
) -> dict[str, Any]:
    return {
        "num_layers": layers, "num_filters": filters, "image_size": image_size, "num_classes": num_classes,
        "aux_head": aux_head,
    }  # fmt: skip


def _transformer(layers: int, d_model: int, heads: int, seq_len: int, vocab_size: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "d_model": d_model, "ffn_dim": 4 * d_model, "num_heads": heads,
        "seq_len": seq_len, "vocab_size": vocab_size, "cut": "sublayer", "attention": "explicit",
    }  # fmt: skip


SUBJECTS: dict[str, Subject] = {
    "amoebanet": Subject(
        "AmoebaNet-D (18, 128)",
        "amoebanet-d",
        {
            "smoke": Size(_amoebanet(6, 16, 32, 10, False), 8, 0, "6 cells, 16 filters, 32 x 32 pixels"),
            "short": Size(
                _amoebanet(18, 32, 144, 100, True), 32, 0, "filters / 4, 144 x 144 pixels, 100 classes"
            ),
            "full": Size(_amoebanet(18, 128, 224, 1001, True), 128, 0),
        },
    ),
    "transformer": Subject(
        "Transformer-24",
        "transformer-lm",
        {
            "smoke": Size(_transformer(8, 32, 2, 16, 500), 8, 0, "8 layers, width 32, 16 tokens, 500 words"),
            "short": Size(
                _transformer(24, 192, 8, 96, 2000), 32, 0, "width 192 of 2048, 96 tokens, 2,000 words"
            ),
            "full": Size(_transformer(24, 2048, 32, 1024, 32_000), 32, 0),
        },
    ),
}
"""Table 3's models, named as in results/paper.csv. The paper gives neither mini-batch nor sequence length;
128 images and 32 sequences of 1024 tokens (Table 1's) are taken.
"""


def cases(options: RunOptions) -> list[Case]:
    parts = {
        "paper size": 3.0, "steps": ESTIMATE_S[options.profile], "link": LINK_ESTIMATE_S[options.profile],
    }  # fmt: skip
    return [
        Case({"part": part, "model": name}, estimate_s)
        for part, estimate_s in parts.items()
        for name in SUBJECTS
        if options.profile != "smoke" or part != "link" or name == SMOKE_LINK
    ] + predictions.cases("table3", options)


def run(case: Case, options: RunOptions) -> Outcome:
    if predictions.is_prediction(case):
        from gpipe_bench.experiments.table3.predicted import predict

        return predictions.run(predict, case, options)
    subject = SUBJECTS[str(case.key["model"])]
    match case.key["part"]:
        case "paper size":
            return _run_paper_size(subject)
        case "steps":
            return _run_steps(subject, options)
    return _run_link(subject, options)


def _paper_size(subject: Subject) -> Estimate:
    """One micro-batch of the paper's model at a P100's peaks."""
    from gpipe_bench.experiments.published.accelerator_steps.full_size import FullSize
    from gpipe_bench.experiments.published.estimate import estimate
    from gpipe_bench.planner.accelerators import P100_16

    size = subject.sizes["full"]
    return estimate(FullSize(subject.model, size.options), size.batch_size // NUM_MICROBATCHES, P100_16)


def _run_paper_size(subject: Subject) -> Outcome:
    from gpipe_bench.experiments.table3.results import modelled

    quantities, details = modelled(
        _paper_size(subject), STAGES, NUM_MICROBATCHES, subject.sizes["full"].batch_size
    )
    return Outcome(
        tuple(quantities), {"title": subject.title, "options": subject.sizes["full"].options, **details}
    )


def _run_steps(subject: Subject, options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.measuring.configuration import Configuration
    from gpipe_bench.experiments.measuring.step_results import measure
    from gpipe_bench.experiments.measuring.step_timing import StepJob
    from gpipe_bench.experiments.table3.results import replayed

    size = subject.sizes[options.profile]
    count = min(TIMED_MICROBATCHES, size.batch_size)
    examples = count * max(1, size.batch_size // NUM_MICROBATCHES)
    stages = STAGES[:2] if options.profile == "smoke" else STAGES
    plan = tuple(Configuration(k, count, examples) for k in stages)
    job = StepJob(subject.model, size.options, plan, ROUNDS[options.profile], device=options.device)
    found = measure(job)
    quantities, details = replayed(plan, found, NUM_MICROBATCHES, _paper_size(subject))
    facts = {
        "title": subject.title, "scale": size.scale, "options": size.options, "rounds": job.rounds,
        "timed_microbatches": count,
    }  # fmt: skip
    return Outcome(tuple(quantities), {**facts, **details})


def _run_link(subject: Subject, options: RunOptions) -> Outcome:
    """The network is the host's, so a GPU's machine measures the model of the short profile too."""
    from gpipe_bench.experiments.table3.results import over_link
    from gpipe_bench.experiments.table3.slow_link import BURST_S, QUEUE_BYTES, UnavailableError, slow_link
    from gpipe_bench.experiments.table3.slow_link_steps import LinkJob, steps_at_rates

    profile = "smoke" if options.profile == "smoke" else "short"
    size = subject.sizes[profile]
    job = LinkJob(
        subject.model,
        size.options,
        TIMED_MICROBATCHES,
        TIMED_MICROBATCHES,
        LINK_ROUNDS[options.profile],
        MULTIPLES[profile],
    )
    try:
        with slow_link() as link:
            found = link.run(steps_at_rates, job)
    except UnavailableError as reason:
        return Outcome(status="skipped", reason=f"a link of a limited rate {reason}")
    quantities, details = over_link(job.multiples, found)
    facts = {
        "title": subject.title, "scale": size.scale, "options": size.options, "rounds": job.rounds,
        "num_microbatches": job.num_microbatches, "burst_s": BURST_S, "queue_bytes": QUEUE_BYTES,
    }  # fmt: skip
    return Outcome(tuple(quantities), {**facts, **details})


PAPER_TABLES = {
    "table3-amoebanet": PaperTable(
        title="Table 3, AmoebaNet-D (18, 128): throughput over a slow link",
        short="Table 3, AmoebaNet-D",
        about="Throughput without a fast interconnect (PCIe), M=32, relative to K=2.",
    ),
    "table3-transformer": PaperTable(
        title="Table 3, Transformer-24: throughput over a slow link",
        short="Table 3, Transformer",
        about="Throughput without a fast interconnect (PCIe), M=32, relative to K=2.",
    ),
}


EXPERIMENT = Experiment(
    name="table3",
    title="Table 3: throughput without a fast interconnect",
    source="arXiv v5, Table 3",
    describe=(
        "AmoebaNet-D (18, 128) and Transformer-24 with 32 micro-batches on 2, 4 and 8 stages over PCIe, over "
        "links of any bandwidth, and for real over a rate-limited link between two processes."
    ),
    profiles={
        "smoke": "tiny models, K up to 4, two rates",
        "short": "models scaled to two cores, with the paper's numbers of layers; six rates",
        "full": "the paper's models, for a GPU",
    },
    cases=cases,
    run=run,
    cells=cells,
    paper_tables=PAPER_TABLES,
    tables=tables,
    figures=figures,
    hypotheses=hypotheses_of,
    options=("device",),
)
