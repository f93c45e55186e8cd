"""Schedules side by side in the same processes: ours, and torch's of the same name, in turns.

    python -m gpipe_bench.experiments.measuring.schedule_turns --workers 2 --microbatches 2 4 8 --slot-ms 20
    python -m gpipe_bench.experiments.measuring.schedule_turns --workers 2 --microbatches 2 4 8 --width 256

With `--slot-ms` the stages wait instead of computing (`waiting_stages`), and a step is set against the replay
of its slots; else they are Transformer layers, and a step is set against our own 1F1B. One line per schedule
and M: the median over paired rounds with its 95 % interval, and the control, a schedule against itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.torch_runtime import CLASSES, TorchRuntime
from gpipe_bench.experiments.measuring.processes import run_processes
from gpipe_bench.experiments.measuring.waiting_stages import waiting_stages
from gpipe_bench.harness.rounds import against_itself, ratios, slowest, turns
from gpipe_bench.harness.stats import median_interval
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.remat import from_text
from gpipe_bench.pipeline.plan.replay import SLOTS, replay
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.schedules.calibration import TIMED_STEPS, WARM_UP_STEPS
from gpipe_bench.pipeline.plan.schedules.known import NAMED
from gpipe_bench.planner.timing import CPU, settle, time_step

TORCH = "torch "
STEPS_BEFORE = 3  # connections are made, caches are warm
CALIBRATION_STEPS = WARM_UP_STEPS + 2 * TIMED_STEPS


class TurnsJob(NamedTuple):
    """One run as its processes see it. `arms` are names of schedules, "auto" (two stages per worker), "line"
    (the same with one), and torch's after "torch "; with " remat" behind the name all is recomputed, with
    " remat=0-2,never" what that says. Without
    a `slot_s` the stages compute.
    """

    arms: tuple[str, ...]
    num_workers: int
    num_microbatches: int
    num_rounds: int
    slot_s: float | None
    width: int
    share_memory: bool = True
    seed: int = 0


class TurnsResult(NamedTuple):
    """What one process found: seconds per step by arm, two samples per round, and why arms are missing."""

    times: dict[str, list[float]]
    refused: dict[str, str]
    schedules: dict[str, Schedule]  # of ours
    differences: dict[str, float]  # the largest of any gradient to that of the first arm, relative


def work(job: TurnsJob) -> TurnsResult:
    """What one process does."""
    torch.manual_seed(0)
    layers = _layers(job)
    batch, target = _batch(job)
    steps: dict[str, Callable[[], object]] = {}
    refused: dict[str, str] = {}
    pipelines: dict[str, Pipeline] = {}
    for arm in job.arms:
        try:
            steps[arm] = _step(job, arm, layers, batch, target, pipelines)
        except ValueError as error:  # on all ranks alike
            refused[arm] = str(error)
    differences: dict[str, float] = {}
    wanted: dict[str, Tensor] = {}
    with waiting_stages(job.slot_s) if job.slot_s is not None else nullcontext():
        for arm, step in steps.items():
            calibrated = arm in pipelines and pipelines[arm].schedule.name == "auto"
            for _ in range(STEPS_BEFORE + CALIBRATION_STEPS * calibrated):
                step()
            _clear(layers)
            step()
            differences[arm] = _difference(layers, wanted)
        settle()
        times: dict[str, list[float]] = {arm: [] for arm in steps}
        for arm in turns(list(steps), job.num_rounds, job.seed):
            times[arm].append(time_step(steps[arm], layers))
    schedules = {arm: pipeline.schedule for arm, pipeline in pipelines.items()}
    return TurnsResult(times, refused, schedules, differences)


def _layers(job: TurnsJob) -> list[nn.Module]:
    if job.slot_s is not None:
        return [nn.Linear(8, 8) for _ in range(2 * job.num_workers)]
    heads = max(1, job.width // 64)
    make = partial(nn.TransformerEncoderLayer, job.width, heads, 4 * job.width, 0.0, batch_first=True)
    return [make() for _ in range(4 * job.num_workers)]


def _batch(job: TurnsJob) -> tuple[Tensor, Tensor]:
    shape = (job.num_microbatches, 8) if job.slot_s is not None else (4 * job.num_microbatches, 64, job.width)
    return torch.randn(shape), torch.randn(shape)


def _step(
    job: TurnsJob,
    arm: str,
    layers: Sequence[nn.Module],
    batch: Tensor,
    target: Tensor,
    pipelines: dict[str, Pipeline],
) -> Callable[[], object]:
    loss_fn = nn.functional.mse_loss
    group = dist.group.WORLD
    assert group is not None
    name, recomputed, choice = arm.partition(" remat")
    remat = from_text(choice.removeprefix("=") or "always") if recomputed else "never"
    name = name.removeprefix(TORCH)
    per_worker = 1 if name == "line" else _stages_per_worker(name)
    num_stages = per_worker * job.num_workers
    even = [1.0] * len(layers)
    if arm.startswith(TORCH):
        stages = [layers[span.start : span.stop] for span in partition(even, num_stages)]
        runtime = TorchRuntime(name, stages, job.num_microbatches, loss_fn, group, CPU)
        return partial(runtime.step, batch, target)
    pipeline = pipelines[arm] = Pipeline(
        layers, num_stages=num_stages, num_microbatches=job.num_microbatches,
        schedule="auto" if name == "line" else name,
        num_workers=job.num_workers, remat=remat, cost=even, group=group, share_memory=job.share_memory,
    )  # fmt: skip
    return partial(pipeline.step, batch, target, loss_fn)


def _stages_per_worker(name: str) -> int:
    return (NAMED[name].stages_per_worker or 2) if name in NAMED else 2


def _clear(layers: Sequence[nn.Module]) -> None:
    for layer in layers:
        layer.zero_grad()


def _difference(layers: Sequence[nn.Module], wanted: dict[str, Tensor]) -> float:
    """The largest difference to the gradients of an earlier arm that this process has, relative to them."""
    largest = 0.0
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if parameter.grad is None:
                continue
            first = wanted.setdefault(f"{index}.{name}", parameter.grad.clone())
            scale = float(first.abs().max()) or 1.0
            largest = max(largest, float((parameter.grad - first).abs().max()) / scale)
    return largest


def lines(job: TurnsJob, found: Sequence[TurnsResult]) -> list[str]:
    """The table of one run."""
    times = slowest([result.times for result in found])
    shown = []
    for arm in job.arms:
        if arm not in times:
            shown.append(f"{arm:24} M={job.num_microbatches}  {found[0].refused[arm]}")
            continue
        step_s = median(times[arm])
        text = f"{arm:24} M={job.num_microbatches}  {step_s * 1e3:9.2f} ms"
        if job.slot_s is not None and arm.startswith(TORCH):
            ours = arm.removeprefix(TORCH)
            text += _ratio("ours / torch", ratios(times, ours, arm)) if ours in times else ""
        elif job.slot_s is not None:
            schedule = found[0].schedules[arm]
            slots = replay(schedule, SLOTS).makespan_s
            slot_s = job.slot_s
            least_s = [min(times[arm][i : i + 2]) for i in range(0, len(times[arm]), 2)]
            text += f"  {slots * slot_s * 1e3:9.2f} ms replayed"
            text += _ratio("ratio", [seconds / (slots * slot_s) for seconds in least_s])
        else:
            base = "1f1b" if " remat" not in arm else "gpipe remat"
            if base in times:
                text += _ratio(f"to {base}", ratios(times, arm, base))
        text += _ratio("control", against_itself(times, arm))
        text += f"  gradients {max(result.differences[arm] for result in found):.0e}"
        shown.append(text)
    return shown


def _ratio(what: str, values: Sequence[float]) -> str:
    interval = median_interval(values)
    shown = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"  {what} {median(values):.3f}{shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slot-ms", type=float, help="stages wait; without, they compute")
    parser.add_argument("--width", type=int, default=256, help="of the Transformer layers that compute")
    parser.add_argument("--network", action="store_true", help="no messages through shared memory")
    parser.add_argument("--arms", nargs="+", default=[*NAMED, *(TORCH + name for name in CLASSES)])
    options = parser.parse_args()
    slot_s = None if options.slot_ms is None else options.slot_ms / 1e3
    for num_microbatches in options.microbatches:
        job = TurnsJob(
            tuple(options.arms), options.workers, num_microbatches, options.rounds, slot_s, options.width,
            not options.network,
        )  # fmt: skip
        print("\n".join(lines(job, run_processes(work, options.workers, job))), flush=True)


if __name__ == "__main__":
    main()
