"""Table 2: normalised throughput of AmoebaNet-D (18, 256) and Transformer-48 over K and M.

Expected: throughput grows with M until the bubble is gone, and with K almost linearly for the Transformer,
whose layers are alike; AmoebaNet's cells are not, so its stages cannot be even.

    python -m experiments run table2

Every action is measured in whole steps, with all stages in one process, and laid out on K devices
(`replayed`); where there are as many devices as stages the step is also run on them (`measured`), and the
difference is the replay's error. K = 4 runs for real too, in four processes that share the cores: that proves
order and memory, and no time. One table at a fixed mini-batch, so that only K and M differ, and one with
the mini-batch fitted to a memory cap, as the paper did; they are not mixed. All cells of a model take turns
in one run.

A case of its own predicts the paper's table for the paper's accelerators and sizes (`as published`), over
everything that the paper leaves open (experiments/predicted).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.experiments.paper import on_gpus
from gpipe_bench.experiments.paper.predicted import SENTENCES
from gpipe_bench.experiments.paper.table2_shown import (
    BATCHES,
    SHARED_CORES,
    TABLES,
    facts_of,
    figures,
    of_models,
    places_of,
    tables,
)
from gpipe_bench.experiments.paper.timed import claims, layers
from gpipe_bench.experiments.paper.timed.workloads import (
    CUTS_ESTIMATE_S,
    PROFILES,
    SEED,
    TABLE2,
    Configuration,
    Job,
    Workload,
    real_cases,
)
from gpipe_bench.experiments.registry import ENGINES
from gpipe_bench.harness import reproduced
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Metric, Provenance, Record, from_samples
from gpipe_bench.harness.verdict import Result
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import partition

if TYPE_CHECKING:
    from gpipe_bench.pipeline.memory.profile import ModelProfile

STAGES = {"smoke": (2, 4), "short": (2, 4, 8), "full": (2, 4, 8)}
MICROBATCHES = {"smoke": (1, 4), "short": (1, 4, 32), "full": (1, 4, 32)}
ROUNDS = {
    "smoke": {"fixed": 1, "fitted": 1},
    "short": {"fixed": 1, "fitted": 2},
    "full": {"fixed": 2, "fitted": 2},
}
"""There and back: every configuration takes two turns in a round, and each is a sample."""
ESTIMATE_S = {"smoke": (8.0, 8.0), "short": (95.0, 75.0), "full": (150.0, 150.0)}
JUDGED = "fixed"  # of the sentences, which are about the same model
AS_THE_PAPER = "fitted"  # of the cells: the mini-batch as the paper chose it
REAL_ESTIMATES_S = (195.0, 175.0)  # of AmoebaNet-D and Transformer
FITTED_MICROBATCHES = 2  # that are run where the mini-batch is fitted
LARGEST_MICROBATCH = 32
SHARED_ESTIMATE_S = 20.0
SHARED_STAGES = SHARED_MICROBATCHES = 4  # run for real whatever the cores


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    steps = [
        Case({"model": name, "batch": batch}, estimate_s + CUTS_ESTIMATE_S * (batch == JUDGED))
        for batch, estimate_s in zip(BATCHES, ESTIMATE_S[options.profile], strict=True)
        for name in TABLE2
        if not smoke or (batch, name) != ("fitted", "amoebanet")  # ten seconds of profiling
    ]
    shared = [Case({"model": name, "batch": SHARED_CORES}, SHARED_ESTIMATE_S) for name in TABLE2]
    if smoke or options.engine not in (None, "ours"):
        shared = []
    others = real_cases(TABLE2, REAL_ESTIMATES_S, options)
    return _on_gpus(options) + steps + shared + others + reproduced.cases("table2", options)


def _on_gpus(options: RunOptions) -> list[Case]:
    """What only GPUs run: pipelines over as many as there are, then what a micro-batch's size is worth."""
    if options.device != "cuda":
        return []
    models = ("transformer", "amoebanet")  # the more even one first
    several = [k for k in STAGES[options.profile] if k <= options.gpus]
    of_layers = layers.cases("amoebanet") if options.profile == "full" else []
    return on_gpus.cases(models, several, MICROBATCHES[options.profile], options.profile) + of_layers


def run(case: Case, options: RunOptions) -> Outcome:
    if reproduced.is_computed(case):
        from gpipe_bench.experiments.paper import reproduction

        return reproduction.run("table2", case)
    model, stages = str(case.key["model"]), STAGES[options.profile]
    sizes = TABLE2[model]
    workload = sizes[options.profile]
    match case.key.get("part"):
        case on_gpus.PART:
            return on_gpus.run(workload, case.key, options.engine or "ours", options.profile, options.device)
        case layers.PART:
            return layers.run(workload, int(str(case.key["examples"])), options.device)
        case "replay error":
            from gpipe_bench.experiments.paper.timed.steps import run_real

            return run_real(workload, MICROBATCHES[options.profile], options)
    batch = str(case.key["batch"])
    if batch == SHARED_CORES:  # of four processes on a few cores, which the paper's size would keep for hours
        return run_on_shared_cores(sizes["short"])
    from gpipe_bench.experiments.paper.predicted.sizes import cuts_of_the_paper, paper_size
    from gpipe_bench.experiments.paper.timed.results import results
    from gpipe_bench.experiments.paper.timed.steps import measure

    configurations, facts = _configurations(workload, batch, options)
    rounds = ROUNDS[options.profile][batch]
    job = Job(workload, configurations, rounds, options.engine or "ours", options.device)
    metrics, details = results(job, measure(job))
    if batch == JUDGED:
        cuts_of_the_paper(TABLES[model], workload, paper_size("table2", model, options), stages).add_to(
            details
        )
    return Outcome(tuple(metrics), {"model": workload.model, **facts, **details})


def _configurations(
    workload: Workload, batch: str, options: RunOptions
) -> tuple[tuple[Configuration, ...], dict[str, Any]]:
    """What is run, and facts for the record."""
    from gpipe_bench.experiments.paper.timed.steps import num_devices

    cells = [(k, m) for k in STAGES[options.profile] for m in MICROBATCHES[options.profile]]
    if batch == "fixed":
        real, size = num_devices(options.device), workload.batch_size
        return tuple(Configuration(k, m, size, runs_for_real=k == real) for k, m in cells), {
            "batch_size": size
        }
    counts: dict[tuple[int, int], tuple[int, ...]] = {}
    peaks: dict[str, int] = {}
    for k, m in cells:
        examples, peaks[f"K={k} M={m}"] = fitted_microbatch(workload, k, m, workload.cap_bytes)
        counts[k, examples] = (*counts.get((k, examples), ()), m)
    ran = FITTED_MICROBATCHES
    return tuple(
        Configuration(k, ran, ran * examples, counts=several) for (k, examples), several in counts.items()
    ), {"cap_bytes": workload.cap_bytes, "modelled_peak_bytes": peaks}


def fitted_microbatch(
    workload: Workload, num_stages: int, num_microbatches: int, cap_bytes: int
) -> tuple[int, int]:
    """Examples of the largest micro-batch, a power of two, whose stages stay under a memory cap, as the paper
    chose its own (section 3: "adjusted to fit memory"), and the peak bytes of the fullest stage. ValueError
    if none fits.
    """
    found, size = None, 1
    while size <= LARGEST_MICROBATCH:
        peak = peak_bytes(workload, num_stages, num_microbatches, size)
        if peak > cap_bytes:
            break
        found, size = (size, peak), 2 * size
    if found is None:
        raise ValueError(
            f"{workload.model} on {num_stages} stages with {num_microbatches} micro-batches of one example "
            f"needs {peak:,} bytes on one stage; the cap is {cap_bytes:,}: raise it or take more stages"
        )
    return found


def peak_bytes(workload: Workload, num_stages: int, num_microbatches: int, microbatch_size: int) -> int:
    """Peak bytes of the fullest stage under gpipe with re-materialization and RMSProp (modelled). The cut is
    by the estimated cost of the layers, since nothing has been timed yet.
    """
    from gpipe_bench.pipeline.memory.workers import pipeline_memory

    stages = partition(_layer_costs(workload), num_stages)
    schedule = gpipe(num_stages, num_microbatches, "always")
    memory = pipeline_memory(*_profile(workload, microbatch_size), stages, schedule, receive_ahead=1)
    return max(stage.peak for stage in memory)


@cache
def _profile(workload: Workload, microbatch_size: int) -> ModelProfile:
    from gpipe_bench.pipeline.memory.profile import Profiler

    return workload.profile(microbatch_size, Profiler(None))


@cache
def _layer_costs(workload: Workload) -> tuple[float, ...]:
    from gpipe_bench.pipeline.memory.profile import layer_costs

    return layer_costs(list(workload.build("meta")), workload.example(1, "meta")[0])


# K = 4 for real on fewer cores


class Ran(NamedTuple):
    """What one process found: its actions by kind and micro-batch in their order, its peak, and the loss,
    which is None but on the last stage.
    """

    actions: tuple[tuple[str, int], ...]
    peak_bytes: int
    loss: float | None


def run_on_shared_cores(workload: Workload) -> Outcome:
    """Whether the order of actions and the memory of a stage are what is claimed. Four processes that share
    two cores say nothing about time, but they do run the real transport between four stages: each must take
    its schedule's actions in their order, hold what the memory model says, and the last one must end with the
    loss that one process gets.

    Raises RuntimeError where a stage took other actions than its schedule's, or took them in another order.
    """
    from gpipe_bench.experiments.paper.timed.steps import run_processes
    from gpipe_bench.pipeline.memory.profile import Profiler
    from gpipe_bench.pipeline.memory.workers import pipeline_memory

    num_stages, num_microbatches = SHARED_STAGES, SHARED_MICROBATCHES
    found: list[Ran] = run_processes(work_on_shared_cores, num_stages, workload, num_stages)
    schedule = gpipe(num_stages, num_microbatches, "always")
    for stage, ran in enumerate(found):
        wanted = tuple((action.kind.name, action.microbatch) for action in schedule.actions[stage])
        if ran.actions != wanted:
            raise RuntimeError(
                f"stage {stage} of {workload.model} took {ran.actions}, its schedule has {wanted}"
            )
    layers, loss = workload.profile(2, Profiler())
    stages = partition([1.0] * len(layers), num_stages)
    # Nothing is updated, so there is no optimizer's state.
    modelled = pipeline_memory(layers, loss, stages, schedule, "sgd")
    hows: dict[str, Provenance] = {"counted": "measured", "modelled": "modelled"}
    peaks = [
        Metric(name="peak", key={"stage": stage, "how": how}, value=peak, unit="bytes", provenance=hows[how])
        for stage in range(num_stages)
        for how, peak in (("counted", found[stage].peak_bytes), ("modelled", modelled[stage].peak))
    ]
    losses = [
        Metric(name="loss", key={"stages": k}, value=ran.loss, unit="number", provenance="measured")
        for k, ran in ((num_stages, found[-1]), (1, work_on_shared_cores(workload, 1)))
    ]
    facts = {
        "num_stages": num_stages, "num_microbatches": num_microbatches, "batch_size": 2 * num_microbatches,
        "actions": [len(ran.actions) for ran in found],
    }  # fmt: skip
    return Outcome((*peaks, *losses), {"title": workload.title, "scale": workload.scale, **facts})


def work_on_shared_cores(workload: Workload, num_stages: int) -> Ran:
    """Two steps of one stage: the first makes the gradients and the receive buffers, the second counts."""
    from torch import distributed as dist

    from gpipe_bench.pipeline import Pipeline
    from gpipe_bench.pipeline.memory.tracker import LiveMemory, tensors_behind

    layers = workload.build()
    pipeline = Pipeline(
        layers,
        num_stages=num_stages,
        num_microbatches=SHARED_MICROBATCHES,
        cost=[1.0] * len(layers),
        group=dist.group.WORLD if num_stages > 1 else None,
        seed=SEED,
    )
    batch, target = workload.example(2 * SHARED_MICROBATCHES)
    pipeline.step(batch, target, workload.loss())
    pipeline.zero_grad()
    memory = LiveMemory()
    with memory:
        memory.watch(tensors_behind(pipeline))
        memory.reset_peaks()
        loss = pipeline.step(batch, target, workload.loss())
    events = sorted(pipeline.timeline.events, key=lambda event: event.start_s)
    return Ran(
        tuple((event.action.kind.name, event.action.microbatch) for event in events),
        sum(memory.peak_bytes.values()),
        float(loss) if pipeline.stages[0].index == num_stages - 1 else None,
    )


# Entries and sentences


def cells(records: Sequence[Record]) -> list[Result]:
    """An entry for each (K, M) of each model on record, and for the sentences about them."""
    fitted, fixed = (of_models(records, batch) for batch in (AS_THE_PAPER, JUDGED))
    found = [cell for model, record in fitted.items() for cell in _cells(records, model, record)]
    for model, table in TABLES.items():
        if model not in fitted:
            found += on_gpus.answers(records, table, model)
    for model, record in fixed.items():
        found += _speed_ups(records, model, record, fitted.get(model))
    return [
        *found,
        *_more_microbatches(records, fixed, fitted),
        *_bubble(records, fixed),
        *reproduced.answers(records),
    ]


def _at(record: Record, num_stages: int, num_microbatches: int) -> Metric | None:
    return record.metric("normalised throughput", K=num_stages, M=num_microbatches)


def _cells(records: Sequence[Record], model: str, record: Record) -> Iterator[Result]:
    scale = record.details["scale"]
    note = "Cut by measured seconds, early recomputation, the mini-batch fitted to a memory cap." + (
        f" A scaled model: {scale}." if scale else ""
    )
    for name, place in places_of(model, record).items():
        metric = record.metric("normalised throughput", **record.details["cells"][name]["key"])
        made = claims.made_of(record, name)
        yield claims.entry(records, record, place, metric, note, moves="as the step grows", context=made)


def _speed_ups(
    records: Sequence[Record], model: str, record: Record, fitted: Record | None
) -> Iterator[Result]:
    """What the text says of throughput with 8 stages over that with 2."""
    for (row, column), (m, divisor) in SENTENCES[TABLES[model]].items():
        quotient = partial(_quotient, divisor)
        names = [f"K={k} M={m}" for k in (8, 2)]
        pair = [_at(record, k, m) for k in (8, 2)]
        other = [] if fitted is None else [_at(fitted, k, m) for k in (8, 2)]
        note = "Throughput with 8 stages over that with 2 at one mini-batch, a scaled model" + _fitted(
            claims.derived(column, quotient, *other) if other else None
        )
        yield from claims.sentence_over_cuts(records, record, row, column, names, pair, quotient, note)


def _quotient(divisor: float, many: float, few: float) -> float:
    return many / few / divisor


def _fitted(metric: Metric | None) -> str:
    """What the same is where the mini-batch is fitted to memory, as context."""
    return "" if metric is None else f"; with the mini-batch fitted to memory {metric.value:.3g}"


def _more_microbatches(
    records: Sequence[Record], fixed: Mapping[str, Record], fitted: Mapping[str, Record]
) -> Iterator[Result]:
    """The least gain from a number of micro-batches to the next, over both models and all K."""
    least = _least_gain(fixed)
    if least is not None:
        (model, *names), _ = least
        other = _least_gain(fitted)
        note = f"{names[0]} over {names[1]} of {model} at one mini-batch, the least of all" + _fitted(
            None if other is None else other[1]
        )
        row, column = (
            "more micro-batches, more throughput",
            "the smallest quotient of neighbours in M, K fixed",
        )
        record = fixed[model]
        pair = [record.metric("normalised throughput", **record.details["cells"][n]["key"]) for n in names]
        quotient = partial(_quotient, 1.0)
        yield from claims.sentence_over_cuts(records, record, row, column, names, pair, quotient, note)


def _least_gain(of: Mapping[str, Record]) -> tuple[tuple[str, str, str], Metric] | None:
    """The model and the two configurations, more micro-batches first, and what is gained."""
    gains = []
    for model, record in of.items():
        places = sorted((each["num_stages"], each["num_microbatches"]) for each in facts_of(record))
        for (k, fewer), (other, more) in pairwise(places):
            pair = _at(record, k, more), _at(record, k, fewer)
            gain = claims.derived("gain", partial(_quotient, 1.0), *pair)
            if k == other and gain is not None:
                gains.append(((model, f"K={k} M={more}", f"K={k} M={fewer}"), gain))
    return min(gains, key=lambda each: each[1].value or 0.0, default=None)


def _bubble(records: Sequence[Record], of: Mapping[str, Record]) -> Iterator[Result]:
    """The largest bubble of the steps with at least four micro-batches for each stage."""
    bubbles = [
        (100 * facts["as_timed"]["shares"]["bubble"], name, model)
        for model, record in of.items()
        for name, facts in record.details["cells"].items()
        if facts["num_microbatches"] >= 4 * facts["num_stages"] and "as_timed" in facts
    ]
    if bubbles:
        found, name, model = max(bubbles, key=itemgetter(0))
        metric = from_samples(name, [found], "%", provenance="replayed")
        note = f"Share of K x step of {model}, {name}, the largest of {len(bubbles)}"
        yield from claims.sentence_over_cuts(
            records, of[model], "bubble at M >= 4K", "largest over K", [name], [metric],
            lambda bubble: bubble, note, number=lambda cut: 100 * cut["shares"]["bubble"], unit="%",
        )  # fmt: skip


EXPERIMENT = Experiment(
    name="table2",
    title="Table 2: normalised throughput over K and M",
    source="arXiv v5, Table 2",
    describe=(
        "AmoebaNet-D (18, 256) and Transformer-48 on 2, 4 and 8 stages with 1, 4 and 32 micro-batches: "
        "actions measured in one process and laid out on K devices, beside real steps on K = 2."
    ),
    profiles=PROFILES | {"smoke": "tiny models, K up to 4, M up to 4"},
    cases=cases,
    run=run,
    cells=cells,
    reproduction=reproduced.text,
    paper_tables=("table2-amoebanet", "table2-transformer", "table2-bound"),
    tables=tables,
    figures=figures,
    on_gpus=on_gpus.PART,
    options=("device", "engine"),
    engines=tuple(ENGINES),
)
