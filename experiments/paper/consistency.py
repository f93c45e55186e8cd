"""Consistent training: the partition does not change the trained network (v1, section 4.3.1).

Expected: held-out accuracy of AmoebaNet-D on digits of at least 97 %; with 1, 2, 4 and 8 stages equal to
sequential runs within two standard deviations, the paper's margin; and, stronger, from the same seed not one
bit of any weight different. Also shown: what micro-batches change, and what an asynchronous pipeline does.

    python -m experiments run consistency
    python -m experiments run consistency --profile full --device cuda --data /data/imagenet/train
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Metric

from .consistency_judging import cells, figures, tables
from .consistency_protocol import Subject, check_folders, load_protocol, subject_of

if TYPE_CHECKING:
    from .consistency_tasks import Task
    from .consistency_training import Setting, Trained

SECONDS = {"images": 32.0, "text": 13.0}  # seconds of a training while another one runs


def cases(options: RunOptions) -> list[Case]:
    """The protocol's runs, and runs of an asynchronous pipeline; a smoke run has the first of each kind.

    Raises ValueError, before anything runs, for data that is missing or can't be trained on.
    """
    if options.data is not None:
        check_folders(options.data)
    return [
        case
        for cases_of in (_training_cases, _asynchronous_cases)
        for model in SECONDS
        for case in cases_of(model, options)
    ]


def _training_cases(model: str, options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    count, protocol = subject_of(model, options).recipe.num_microbatches, load_protocol()
    plan = protocol.plans[model]

    def case(
        part: str, num_stages: int, m: int, run: int, seed: int, how: str = "pipeline", processes: int = 1
    ) -> Case:
        key: dict[str, Any] = {
            "part": part, "model": model, "engine": how, "num_stages": num_stages, "num_microbatches": m,
            "seed": seed, "initial_seed": plan.initial[run], "processes": processes,
            "protocol": protocol.digest,
        }  # fmt: skip
        has_reference = part in ("same seed", "micro-batches")  # one for all of them
        return Case(key, _seconds(model, options), group=f"{model}, one seed" if has_reference else "")

    sequential = plan.sequential[:2] if smoke else plan.sequential
    found = [case("baseline", 1, count, run, seed) for run, seed in enumerate(sequential)]
    stages = dict(list(plan.stages.items())[:2]) if smoke else plan.stages
    found += [
        case("own seeds", num_stages, count, run, seed)
        for num_stages, seeds in stages.items()
        for run, seed in enumerate(seeds[:1] if smoke else seeds)
    ]
    shared = plan.stages[1][0]
    found += [case("same seed", num_stages, count, 0, shared) for num_stages in stages if num_stages > 1]
    if model == "images" or not smoke:
        found.append(case("same seed", 2, count, 0, shared, processes=2))
    found += [case("micro-batches", 1, m, 0, shared) for m in ([1] if smoke else [2 * count, 1])]
    found.append(case("micro-batches", 1, 1, 0, shared, "sequential"))
    return found


def _seconds(model: str, options: RunOptions) -> float:
    return SECONDS[model] / (10 if options.profile == "smoke" else 1)


def _asynchronous_cases(model: str, options: RunOptions) -> list[Case]:
    """Cases at the recipe's learning rate and at 1/K of it; one stage shows the lower rate alone."""
    smoke, protocol = options.profile == "smoke", load_protocol()
    if smoke and model == "images":
        return []
    plan = protocol.plans[model]
    most = max(plan.stages)
    runs = [(most, True, 1.0), (most, False, 1.0)]
    if not smoke:
        runs += [(most, True, 1 / most), (most, False, 1 / most), (1, True, 1 / most)]
    key: dict[str, Any] = {"seed": plan.stages[1][0], "initial_seed": plan.initial[0]}
    key |= {"part": "asynchronous", "model": model, "protocol": protocol.digest}
    return [
        Case({**key, "num_stages": k, "stash": stash, "rate": rate}, _seconds(model, options))
        for k, stash, rate in runs
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    """Trains, and compares the weights with a reference's if the case has one."""
    import torch

    from .consistency_tasks import task_of

    torch.set_num_threads(1)
    key: dict[str, Any] = case.key
    if options.profile == "full" and key["model"] == "images" and options.data is None:
        needs = "--data PATH: the recipe at the paper's size is for ImageNet or another folder of images"
        return Outcome(status="skipped", reason=f"needs {needs}")
    subject = subject_of(key["model"], options)
    task = task_of(subject)
    train = _run_asynchronous if key["part"] == "asynchronous" else _run_training
    found, metrics, details = train(key, subject, task, options)
    return Outcome(
        (_score_metric(task, found.score), *metrics), _details(task, subject, found.curve) | details
    )


Result = tuple["Trained", list[Metric], dict[str, Any]]
"""A training, its metrics except the score, and its details."""


def _run_training(key: dict[str, Any], subject: Subject, task: Task, options: RunOptions) -> Result:
    from .consistency_training import Setting, trained

    setting = Setting(
        key["engine"], key["num_stages"], key["num_microbatches"], key["seed"], options.device,
        key["initial_seed"],
    )  # fmt: skip
    found = trained(subject, setting, key["processes"])
    metrics = [_measured("training loss", found.curve[-1][1], "nats")]
    if key["part"] in ("same seed", "micro-batches"):
        count = subject.recipe.num_microbatches
        reference = _reference(
            subject, replace(setting, engine="pipeline", num_stages=1, num_microbatches=count)
        )
        metrics += [*_differences(found, reference), _score_metric(task, reference.score, "reference ")]
    return found, metrics, {
        "layers_per_stage": list(found.layers_per_stage), "weights_sha256": found.digest
    }  # fmt: skip


@cache
def _reference(subject: Subject, setting: Setting) -> Trained:
    """The training that others with its seed are compared with; cases of one group share it."""
    from .consistency_training import trained

    return trained(subject, setting)


def _run_asynchronous(key: dict[str, Any], subject: Subject, task: Task, options: RunOptions) -> Result:
    from .consistency_training import train_asynchronously

    how = {name: key[name] for name in ("stash", "rate", "initial_seed")}
    found = train_asynchronously(task, key["num_stages"], key["seed"], **how)
    model_bytes = sum(p.numel() * p.element_size() for p in task.build().parameters())
    metrics = [
        _measured("largest staleness", max(found.staleness), "updates"),
        _measured("most versions on a stage", max(found.versions), "versions"),
        _measured("weights kept", sum(found.weight_bytes), "bytes"),
        _measured("weights of the model", model_bytes, "bytes"),
    ]
    return found, metrics, {"staleness": list(found.staleness), "versions": list(found.versions)}


def _differences(trained: Trained, reference: Trained) -> list[Metric]:
    """Differences of the weights, and of weights and running statistics together."""
    from .consistency_training import is_statistic

    largest = squares = total = 0.0
    different = number = 0
    for name, wanted in reference.weights.items():
        gap = (trained.weights[name].double() - wanted.double()).abs()
        if not gap.isfinite().all():
            raise ValueError(f"{name} is not finite; the training has diverged")
        different += int((gap > 0).sum())
        number += gap.numel()
        if not is_statistic(name):
            largest = max(largest, float(gap.max()))
            squares += float(gap.square().sum())
            total += float(wanted.double().square().sum())
    return [
        _measured("largest weight difference", largest, "number"),
        _measured("relative weight difference", (squares / total) ** 0.5, "ratio"),
        _measured("numbers that differ", different, "parameters"),
        _measured("numbers compared", number, "parameters"),
    ]


def _score_metric(task: Task, score: float, prefix: str = "") -> Metric:
    finite = math.isfinite(score)
    return Metric(
        prefix + task.metric, score if finite else None, task.unit, "measured",
        note="" if finite else "not finite: the training diverged",
    )  # fmt: skip


_measured = partial(Metric, provenance="measured")


def _details(task: Task, subject: Subject, curve: tuple[tuple[int, float, float], ...]) -> dict[str, Any]:
    """Facts that tables and verdicts need. NaN and infinity become None, as JSON has neither."""
    return {
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "requirement": task.requirement,
        "required": task.required,
        "floor": task.floor,
        "protocol_sha256": load_protocol().sha256,
        "unigram_perplexity": getattr(task, "unigram", None),
        "batch_size": task.batch_size,
        "steps": task.num_steps,
        "recipe": asdict(subject.recipe),
        "curve": [[number if math.isfinite(number) else None for number in point] for point in curve],
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
        "short": "digits and Python's help texts, or a sample of your own images by --data",
        "full": "the paper's recipe at its size on images by --data; for GPUs",
    },
    cases=cases,
    run=run,
    cells=cells,
    paper_tables=("consistency",),
    tables=tables,
    figures=figures,
    docs="docs/consistency.md",
    options=("device", "seed", "data"),
    untimed=True,
)
