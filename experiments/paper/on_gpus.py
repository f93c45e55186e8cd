"""One pipeline over several GPUs for real: a process and a GPU for each stage, at the paper's size.

Every number of stages that there are GPUs for is a case of its own for every M, and so a record: what is done
stays done when a run is cut. The engine under test takes turns with torch's ScheduleGPipe on the very same
layers, cut at the same places by measured seconds; the links between the GPUs are measured before, and the
step is laid out over them from its own actions, which says what of a step the replay explains.

A process has memory for its own stage alone: the others' layers stay on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from gpipe_bench.experiments.paper.timed import claims, layers, views
from gpipe_bench.experiments.paper.timed.replay import TimedActions, lay_out
from gpipe_bench.experiments.paper.timed.results import MOST_DRAWN, samples_of
from gpipe_bench.experiments.paper.timed.side_by_side import (
    Found,
    lacks_gpus,
    measured,
    side_by_side,
    steps_of,
)
from gpipe_bench.experiments.paper.timed.workloads import SEED, Workload, materialized
from gpipe_bench.harness.experiment import Case, Outcome, RunOptions
from gpipe_bench.harness.record import Metric, Record, find, from_samples, of_case
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.grid import numbers as number_columns
from gpipe_bench.harness.rounds import Times, ratios
from gpipe_bench.harness.verdict import Result
from gpipe_bench.harness.workers import memory_error
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.timeline import Timeline

PART = "on GPUs"
THEIRS = "torch-gpipe"
REMAT = "always"
MODELS = ("transformer", "amoebanet")  # the more even one first
ROUNDS = {"smoke": 1, "short": 3, "full": 3}
UPDATES = 3  # of the optimizer, the first of which makes its state
ESTIMATES_S = {"smoke": 30.0, "short": 60.0, "full": 90.0}
CONTEXT = (
    "measured on as many GPUs as stages, at one mini-batch of {}; the paper fitted its own to memory, so the "
    "cell is not judged"
)


class Job(NamedTuple):
    """One case as its processes see it. The first engine is the one under test."""

    workload: Workload
    num_stages: int
    num_microbatches: int
    engines: tuple[str, ...]
    device: str

    @property
    def names(self) -> dict[str, str]:
        """Engines by what results call them."""
        return {"ours" if place == 0 else "ScheduleGPipe": name for place, name in enumerate(self.engines)}


def cases(stages: Iterable[int], microbatches: Iterable[int], options: RunOptions) -> list[Case]:
    """Cases for GPUs only: pipelines over as many as there are, all of one model before the next, whose first
    is what its others are relative to; then what a micro-batch's size is worth.
    """
    if options.device != "cuda":
        return []
    several = [k for k in stages if k <= options.gpus]
    of_layers = layers.cases("amoebanet") if options.profile == "full" else []
    return [
        Case({"part": PART, "model": model, "K": k, "M": m}, ESTIMATES_S[options.profile])
        for model, k, m in product(MODELS, several, microbatches)
    ] + of_layers


def run(workload: Workload, case: Case, options: RunOptions) -> Outcome:
    """One of them."""
    if case.key["part"] == layers.PART:
        return layers.run(workload, int(str(case.key["examples"])), options.device)
    return pipeline(workload, case.key, options.engine or "ours", options.profile, options.device)


def pipeline(workload: Workload, key: Mapping[str, Any], engine: str, profile: str, device: str) -> Outcome:
    """Skipped where there are fewer devices than stages. Where the engines together fail, the one under test
    is run by itself, and why is in the record.
    """
    from gpipe_bench.experiments.paper.timed.steps import run_processes

    k, m = int(key["K"]), int(key["M"])
    if reason := lacks_gpus(device, k):
        return Outcome(status="skipped", reason=reason)
    job = Job(workload, k, m, tuple(dict.fromkeys((engine, THEIRS))), device)

    def outcome(job: Job) -> Outcome:
        return side_by_side(
            partial(run_processes, work, k, job, device=device), partial(numbers, job), ROUNDS[profile],
            again=profile != "smoke",
        )  # fmt: skip

    try:
        return outcome(job)
    except RuntimeError as error:
        if len(job.engines) == 1:
            raise
        alone = outcome(job._replace(engines=(engine,)))
        why = memory_error(error) or error
        refused = {**alone.details["refused"], "ScheduleGPipe": f"beside ours: {str(why).splitlines()[0]}"}
        return Outcome(alone.metrics, {**alone.details, "refused": refused})


def work(job: Job, rounds: int) -> Found:
    """Runs in each process: its stage of the model, the engines in turns on it. RuntimeError where one does
    something else than it should.
    """
    from torch import distributed as dist

    from gpipe_bench.experiments.engines.checks import verify
    from gpipe_bench.experiments.engines.setup import Setup
    from gpipe_bench.experiments.paper.timed.engine_turns import all_built
    from gpipe_bench.experiments.paper.timed.layers import alone
    from gpipe_bench.experiments.paper.timed.side_by_side import take_turns
    from gpipe_bench.experiments.paper.timed.steps import mean_over_processes, measured_link, sent_bytes
    from gpipe_bench.pipeline import devices
    from gpipe_bench.pipeline.stage.trees import change, split

    device, workload, loss = devices.current(job.device), job.workload, job.workload.loss()
    joined = measured_link(device)
    layers = list(workload.build("meta"))
    num_parameters = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    batch, target = workload.example(workload.batch_size, device)
    first, wanted = (split(each, job.num_microbatches)[0] for each in (batch, target))
    seconds = alone(layers, loss, first, wanted, device)
    layers_s = mean_over_processes([sum(each.values()) for each in seconds])
    stages = partition(layers_s, job.num_stages)
    sent, returned = sent_bytes(
        layers, stages, change(first, lambda tensor: tensor.to("meta"), "the mini-batch")
    )
    for layer in stages[dist.get_rank()]:
        materialized(layers[layer], device)
    own = [layers[layer] for layer in stages[dist.get_rank()]]
    setup = Setup(layers, stages, job.num_microbatches, REMAT, device, dist.group.WORLD)
    engines, refused = all_built(job.names, dict.fromkeys(job.names, setup))
    checks = {name: verify(name, each, setup, batch, target, loss, {}) for name, each in engines.items()}
    if "ours" not in engines:
        raise ValueError(f"engine {job.engines[0]}: {refused['ours']}")
    steps = {name: partial(engine.step, batch, target, loss) for name, engine in engines.items()}
    found = take_turns(steps, own, rounds, SEED, device)
    peaks = {name: _peak(step, own, device) for name, step in reversed(steps.items())}  # ours is the latest
    pipeline = getattr(engines["ours"], "pipeline", None)
    timeline = None if pipeline is None else pipeline.gather_timeline()
    details = {
        "link": joined, "partition": stages, "refused": refused, "checks": checks, "peaks": peaks,
        "timeline": timeline, "layers_s": layers_s, "num_parameters": num_parameters,
        "sent": sent, "returned": returned,
        "update_s": _update_s(own, device), "device": devices.name(device),
    }  # fmt: skip
    return found._replace(details=details)


def _peak(step: Any, layers: Sequence[Any], device: Any) -> tuple[int, int]:
    """Most bytes of tensors in a step, and most that the allocator took from the device for them."""
    import torch

    from gpipe_bench.experiments.engines.setup import clear
    from gpipe_bench.pipeline import devices

    clear(layers)
    devices.synchronize(device)
    devices.reset_peak(device)
    step()
    devices.synchronize(device)
    reserved = torch.accelerator.max_memory_reserved(device) if devices.is_accelerator(device) else 0
    return devices.peak_bytes(device), reserved


def _update_s(layers: Sequence[Any], device: Any) -> float:
    """Seconds of the optimizer's step on this stage, whose gradients are there: RMSProp, as in the paper."""
    from gpipe_bench.experiments.paper.timed.steps import optimizer_of
    from gpipe_bench.pipeline import devices

    optimizers = [each for each in map(optimizer_of, layers) if each is not None]
    samples = []
    for _ in range(UPDATES):
        devices.synchronize(device)
        start_s = perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        devices.synchronize(device)
        samples.append(perf_counter() - start_s)
    return median(samples[1:])


# Numbers


def numbers(job: Job, times: Times, found: Sequence[Found]) -> Outcome:
    """Outcome of a case from what its processes found."""
    first = found[0].details
    update_s = [each.details["update_s"] for each in found]
    step_s = [each + max(update_s) for each in times["ours"]]
    metrics = [
        *steps_of(times),
        from_samples("real step", [1e3 * each for each in step_s], "ms",
                     note="of ours, with the slowest stage's update"),
        from_samples("throughput", [job.workload.batch_size / each for each in step_s], "samples/s"),
        Metric("update", 1e3 * max(update_s), "ms", "measured"),
        Metric("bandwidth", first["link"].bandwidth_bytes_per_s / 1e9, "GB/s", "measured"),
        Metric("latency", 1e6 * first["link"].latency_s, "us", "measured"),
    ]  # fmt: skip
    if "ScheduleGPipe" in times:
        rate = ratios(times, "ScheduleGPipe", "ours")
        metrics.append(from_samples("rate against ScheduleGPipe", rate, "ratio"))
    for stage, each in enumerate(found):
        for name, peaks in each.details["peaks"].items():
            for what, value in zip(("peak memory", "reserved memory"), peaks, strict=True):
                metrics.append(Metric(what, value, "bytes", "measured", key={"engine": name, "stage": stage}))
    facts = {
        **job.workload.facts(), "engines": job.names, "batch_size": job.workload.batch_size,
        "refused": first["refused"], "checks": [each.details["checks"] for each in found],
        "partition": [[span.start, span.stop] for span in first["partition"]],
        "layers_ms": [1e3 * each for each in first["layers_s"]], "num_parameters": first["num_parameters"],
        "link": {"source": first["link"].source}, "device": first["device"],
    }  # fmt: skip
    if first["timeline"] is not None:
        try:
            more, of_timeline = _of_timeline(job, first, first["timeline"], median(times["ours"]))
            metrics += more
            facts |= of_timeline
        except ValueError as error:  # a clock that went back; what was measured stays
            facts["not laid out"] = str(error)
    return Outcome(tuple(metrics), facts)


def _of_timeline(
    job: Job, first: Mapping[str, Any], timeline: Timeline, step_s: float
) -> tuple[list[Metric], dict[str, Any]]:
    """The bubble of our latest step, and the same actions laid out over the measured link."""
    timed = TimedActions(
        first["partition"], job.num_microbatches, REMAT, samples_of([timeline]), (), 0.0,
        first["sent"], first["returned"],
    )  # fmt: skip
    laid_out = lay_out(timed, first["link"])
    metrics = [
        Metric(
            "idle", timeline.bubble, "ratio", "measured", note="share of K x step in which no action ran"
        ),
        Metric(
            "replayed step", 1e3 * laid_out.makespan_s, "ms", "replayed",
            note="its own actions over the measured link",
        ),
        Metric("replayed over measured", laid_out.makespan_s / step_s, "ratio", "replayed"),
    ]  # fmt: skip
    drawn = timeline.to_data() if len(timeline.events) <= MOST_DRAWN else None
    return metrics, {"actions": timed.to_data(), "timeline": drawn}


# Text and answers


def relative(records: Sequence[Record], record: Record) -> Metric | None:
    """Throughput relative to that of K = 2, M = 1 of the same model, None without that."""
    base = find(records, "done", part=PART, model=record.case["model"], K=2, M=1)
    if base is None:
        return None
    pair = record.metric("throughput"), base.metric("throughput")
    return claims.derived("normalised throughput", lambda ours, one: ours / one, *pair)


def answers(records: Sequence[Record], table: str, model: str) -> list[Result]:
    """Our number beside each of the paper's that ran for real, as context."""
    return [
        Result(
            table=table, row=f"M={record.case['M']}", column=f"K={record.case['K']}", metric=metric,
            record=record, context=CONTEXT.format(record.details["batch_size"]),
        )
        for record in of_case(records, "done", part=PART, model=model)
        if (metric := relative(records, record)) is not None
    ]  # fmt: skip


def text(records: Sequence[Record], tables: Mapping[str, str]) -> str:
    """A table for each model; `tables` are the paper's by model."""
    every = (
        _text(records, of_case(records, part=PART, model=model), table) for model, table in tables.items()
    )
    return "\n\n".join(each for each in every if each)


def _text(records: Sequence[Record], found: Sequence[Record], table: str) -> str:
    lines = []
    done = [record for record in found if record.status == "done"]
    for record in found:
        name = f"K={record.case['K']} M={record.case['M']}"
        paper = claims.published(table).get(("paper", f"M={record.case['M']}", f"K={record.case['K']}"))
        if record.status != "done":
            lines.append([name, "-" if paper is None else paper.printed, record.status, *("",) * 7])
            continue
        steps = [record.metric(f"step of {engine}") for engine in ("ours", "ScheduleGPipe")]
        rate = record.metric("rate against ScheduleGPipe")
        peaks = [
            q.value or 0 for q in record.metrics if (q.name, q.key.get("engine")) == ("peak memory", "ours")
        ]
        ran = record.metric("replayed over measured")
        lines.append(
            [
                name, "-" if paper is None else paper.printed,
                views.interval(relative(records, record), "K=2 M=1 is not on record"),
                *("-" if each is None else f"{each.value:.1f}" for each in steps),
                "-" if rate is None else measured(rate), views.percent(record.metric("idle")),
                "-" if ran is None else f"{ran.value:.2f}",
                f"{max(peaks, default=0) / 2**30:.1f}",
                "void" if "void" in record.details else "",
            ]
        )  # fmt: skip
    if not lines:
        return ""
    columns = [
        "", "paper", "ours", "ours (ms)", "Schedule-\nGPipe (ms)", "ours over\nScheduleGPipe", "idle",
        "replayed /\nmeasured", "GiB", "",
    ]  # fmt: skip
    title = "no case is done"
    if done:
        facts = done[0].details
        rates = [metric.value or 0.0 for record in done if (metric := record.metric("bandwidth"))]
        title = (
            f"{facts['title']} over several GPUs, one for each stage ({facts['device']}; measured)\n"
            f"  mini-batch of {facts['batch_size']}, everything recomputed; paper and ours: throughput, K=2 "
            f"M=1 is 1\n  links of {min(rates):.1f} GB/s or more, measured; replayed: from the step's own "
            "actions over them"
        )
    refused = [
        f"  K={each.case['K']} M={each.case['M']}: {name} did not run: {why}"
        for each in done
        for name, why in each.details["refused"].items()
    ]
    return Grid(
        title=title, columns=columns, lines=lines, notes=refused, right=number_columns(columns)
    ).text()
