"""Consistent training: the same network, whatever the partition (v1, section 4.3.1).

Expected: held-out accuracy of AmoebaNet-D on digits of at least 97 % for sequential runs and every number of
stages; with 1, 2, 4 and 8 stages equal to sequential runs within two standard deviations, the paper's margin,
by a test whose seeds and numbers of runs were frozen beforehand (results/consistency-protocol.toml); and,
stronger, from the same seed not one bit of any weight different. Beside it what does change results
(micro-batches under batch normalization) and what an asynchronous pipeline does.

    python -m experiments run consistency
    python -m experiments run consistency --profile full --device cuda --data /data/imagenet --text corpus.txt

Every case is one training. A training that is killed goes on from its last checkpoint.
"""

from __future__ import annotations

from typing import Any

from gpipe_bench.experiments.consistency.cells import cells
from gpipe_bench.experiments.consistency.figures import figures
from gpipe_bench.experiments.consistency.protocol import load_protocol
from gpipe_bench.experiments.consistency.run import run, task_of
from gpipe_bench.experiments.consistency.tables import tables
from gpipe_bench.experiments.consistency.tasks.recipe import image_layout, subject_of
from gpipe_bench.harness.experiment import Case, Experiment, RunOptions
from gpipe_bench.harness.shown import PaperTable

MODELS = ("images", "text")
DEEP_RATES = (0.01, 0.1)

SECONDS = {"images": 32.0, "text": 13.0}
"""Of a training, while another one runs beside it."""


def cases(options: RunOptions) -> list[Case]:
    """Raises ValueError for data that is missing or can't be trained on, before anything is run."""
    _check_data(options)
    found = []
    for model in MODELS:
        found += _training_cases(model, options)
    for model in MODELS:
        found += _asynchronous_cases(model, smoke=options.profile == "smoke")
    for rate in DEEP_RATES[:1] if options.profile == "smoke" else DEEP_RATES:
        for deep_init in (False, True):
            for clip in (False, True):
                key = {"part": "trainability", "deep_init": deep_init, "logit_clip": clip, "rate": rate}
                found.append(Case(dict(key), 2.5))
    return found


def _training_cases(model: str, options: RunOptions) -> list[Case]:
    """The protocol's runs; of a smoke test, which judges nothing, the first of them."""
    smoke = options.profile == "smoke"
    recipe = subject_of(model, options).recipe
    count = recipe.num_microbatches
    seconds = SECONDS[model] / (10 if smoke else 1)
    protocol = load_protocol()
    plan = protocol.plans[model]

    def case(part: str, num_stages: int, num_microbatches: int, run: int, seed: int, **more: Any) -> Case:
        key = {
            "part": part, "model": model, "engine": more.pop("engine", "pipeline"), "num_stages": num_stages,
            "num_microbatches": num_microbatches, "seed": seed, "initial_seed": plan.initial[run],
            "processes": more.pop("processes", 1), "protocol": protocol.digest,
        }  # fmt: skip
        return Case(key, seconds)

    sequential = plan.sequential[:2] if smoke else plan.sequential
    found = [case("baseline", 1, count, run, seed) for run, seed in enumerate(sequential)]
    stages = dict(list(plan.stages.items())[:2]) if smoke else plan.stages
    found += [
        case("own seeds", num_stages, count, run, seed)
        for num_stages, seeds in stages.items()
        for run, seed in enumerate(seeds[:1] if smoke else seeds)
    ]
    # Weights are compared with those of the first run with one stage.
    shared = plan.stages[1][0]
    found += [case("same seed", num_stages, count, 0, shared) for num_stages in stages if num_stages > 1]
    if model == "images" or not smoke:
        found.append(case("same seed", 2, count, 0, shared, processes=2))
    if not smoke:
        found.append(case("micro-batches", 1, 2 * count, 0, shared))
    found.append(case("micro-batches", 1, 1, 0, shared))
    found.append(case("micro-batches", 1, 1, 0, shared, engine="sequential"))
    return found


def _asynchronous_cases(model: str, *, smoke: bool) -> list[Case]:
    """At the recipe's rate, and divided by K, where a single stage shows what the slower rate alone does."""
    if smoke and model == "images":
        return []

    protocol = load_protocol()
    plan = protocol.plans[model]

    def case(num_stages: int, stash: bool, rate: float) -> Case:
        key: dict[str, Any] = {"part": "asynchronous", "model": model, "num_stages": num_stages}
        key |= {"stash": stash, "rate": rate, "seed": plan.stages[1][0], "initial_seed": plan.initial[0]}
        return Case(key | {"protocol": protocol.digest}, SECONDS[model] / (10 if smoke else 1))

    most = max(plan.stages)
    found = [case(most, stash, 1.0) for stash in (True, False)]
    if not smoke:
        found += [case(most, stash, 1 / most) for stash in (True, False)]
        found.append(case(1, True, 1 / most))
    return found


def _check_data(options: RunOptions) -> None:
    if options.parallel_text is not None and options.text is None:
        raise ValueError(
            f"--parallel-text {options.parallel_text}: give the source, which it translates, with --text"
        )
    if options.data is not None:
        image_layout(options.data)
    if options.text is not None:
        task_of(subject_of("text", options))


PAPER_TABLES = {
    "consistency": PaperTable(
        title="Consistent training, section 4.3.1 of the first version",
        short="Consistent training",
        about="Whether the final accuracy depends on the number of partitions.",
    ),
}


EXPERIMENT = Experiment(
    name="consistency",
    title="Consistent training: the same network, whatever the partition",
    source="arXiv v1, section 4.3.1",
    describe=(
        "AmoebaNet-D on images and a Transformer on text, trained with 1, 2, 4 and 8 stages: final quality "
        "against sequential runs, weights bit by bit, the effect of micro-batches, and an asynchronous "
        "pipeline for contrast."
    ),
    profiles={
        "smoke": "a few steps of each, too few to learn",
        "short": "digits and Python's help texts, or a sample of your own data by --data and --text",
        "full": "the paper's recipe at its size on images by --data and text by --text; for GPUs",
    },
    cases=cases,
    run=run,
    cells=cells,
    paper_tables=PAPER_TABLES,
    tables=tables,
    figures=figures,
    docs="docs/consistency.md",
    options=("device", "seed", "data", "text", "parallel_text"),
    untimed=True,
)
