"""Schedules side by side in the same processes: ours, and torch's of the same name, in turns.

    python -m gpipe_bench.experiments.schedules.turns --workers 2 --microbatches 2 4 8 --slot-ms 20
    python -m gpipe_bench.experiments.schedules.turns --workers 2 --microbatches 2 4 8 --width 256

With `--slot-ms` the stages wait instead of computing (`waiting`), and a step is set against the replay of its
slots; else they are Transformer layers, and a step is set against our own 1F1B. One line per schedule and M:
the median over paired rounds with its 95 % interval, and the control, a schedule against itself.
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
from gpipe_bench.experiments.schedules.waiting import waiting_stages
from gpipe_bench.experiments.side_by_side import Found, measured, take_turns
from gpipe_bench.experiments.timed.steps import run_processes
from gpipe_bench.harness.rounds import against_itself, ratios, slowest
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.auto import TIMED_STEPS, WARM_UP_STEPS
from gpipe_bench.pipeline.plan.named import NAMED
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.remat import from_text
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.planner.timing import CPU

TORCH = "torch "
STEPS_BEFORE = 3 + WARM_UP_STEPS + 2 * TIMED_STEPS
"""Connections are made, caches are warm, and "auto" has chosen."""


class Job(NamedTuple):
    """One run as its processes see it. `arms` are names of schedules, "auto" (two stages per worker), "line"
    (the same with one), and torch's after "torch "; with " remat" behind the name all is recomputed, with
    " remat=0-2,never" what that says. Without a `slot_s` the stages compute.
    """

    arms: tuple[str, ...]
    num_workers: int
    num_microbatches: int
    num_rounds: int
    slot_s: float | None
    width: int
    share_memory: bool = True
    seed: int = 0


def work(job: Job) -> Found:
    """What one process does."""
    torch.manual_seed(0)
    if job.slot_s is None:
        block = partial(nn.TransformerEncoderLayer, job.width, max(1, job.width // 64), 4 * job.width, 0.0)
        layers: list[nn.Module] = [block(batch_first=True) for _ in range(4 * job.num_workers)]
        shape: tuple[int, ...] = (4 * job.num_microbatches, 64, job.width)
    else:
        layers = [nn.Linear(8, 8) for _ in range(2 * job.num_workers)]
        shape = (job.num_microbatches, 8)
    batch, target = torch.randn(shape), torch.randn(shape)
    differences: dict[str, float] = {}  # the largest of any gradient to that of the first arm, relative
    refused: dict[str, str] = {}
    steps: dict[str, Callable[[], object]] = {}
    pipelines: dict[str, Pipeline] = {}
    wanted: dict[str, Tensor] = {}
    with waiting_stages(job.slot_s) if job.slot_s is not None else nullcontext():
        for arm in job.arms:
            try:
                engine = _engine(job, arm, layers)
            except ValueError as error:  # on all ranks alike
                refused[arm] = str(error)
                continue
            if isinstance(engine, Pipeline):
                pipelines[arm] = engine
                steps[arm] = partial(engine.step, batch, target, nn.functional.mse_loss)
            else:
                steps[arm] = partial(engine.step, batch, target)
            for _ in range(STEPS_BEFORE):
                steps[arm]()
            for layer in layers:
                layer.zero_grad()
            steps[arm]()
            differences[arm] = _difference(layers, wanted)
        found = take_turns(steps, layers, job.num_rounds, job.seed)
    slots = {arm: float(replay(each.schedule, SLOTS).makespan_s) for arm, each in pipelines.items()}
    return found._replace(details={"slots": slots, "differences": differences, "refused": refused})


def _engine(job: Job, arm: str, layers: Sequence[nn.Module]) -> Pipeline | TorchRuntime:
    group = dist.group.WORLD
    assert group is not None
    name, recomputed, choice = arm.removeprefix(TORCH).partition(" remat")
    per_worker = 1 if name == "line" else (NAMED[name].stages_per_worker or 2) if name in NAMED else 2
    num_stages, even = per_worker * job.num_workers, [1.0] * len(layers)
    if arm.startswith(TORCH):
        stages = [layers[span.start : span.stop] for span in partition(even, num_stages)]
        return TorchRuntime(name, stages, job.num_microbatches, nn.functional.mse_loss, group, CPU)
    return Pipeline(
        layers, num_stages=num_stages, num_microbatches=job.num_microbatches,
        schedule="auto" if name == "line" else name, num_workers=job.num_workers,
        remat=from_text(choice.removeprefix("=") or "always") if recomputed else "never",
        cost=even, group=group, share_memory=job.share_memory,
    )  # fmt: skip


def _difference(layers: Sequence[nn.Module], wanted: dict[str, Tensor]) -> float:
    """The largest difference to the gradients of an earlier arm that this process has, relative to them."""
    largest = 0.0
    for name, parameter in nn.ModuleList(layers).named_parameters():
        if parameter.grad is not None:
            first = wanted.setdefault(name, parameter.grad.clone())
            scale = float(first.abs().max()) or 1.0
            largest = max(largest, float((parameter.grad - first).abs().max()) / scale)
    return largest


def lines(job: Job, found: Sequence[Found]) -> list[str]:
    """The table of one run."""
    times = slowest([result.times for result in found])
    shown = []
    for arm in job.arms:
        words = [f"{arm:24} M={job.num_microbatches}"]
        if arm not in times:
            shown.append("  ".join([*words, found[0].details["refused"][arm]]))
            continue
        words.append(f"{median(times[arm]) * 1e3:9.2f} ms")
        ours, base = arm.removeprefix(TORCH), "gpipe remat" if " remat" in arm else "1f1b"
        if job.slot_s is None:
            if base in times:
                words.append(_ratio(f"to {base}", ratios(times, arm, base)))
        elif arm in (slots := found[0].details["slots"]):
            replayed_s = slots[arm] * job.slot_s
            least_s = [min(times[arm][i : i + 2]) for i in range(0, len(times[arm]), 2)]
            words.append(f"{replayed_s * 1e3:9.2f} ms replayed")
            words.append(_ratio("ratio", [seconds / replayed_s for seconds in least_s]))
        elif ours in times:
            words.append(_ratio("ours / torch", ratios(times, ours, arm)))
        words.append(_ratio("control", against_itself(times, arm)))
        difference = max(each.details["differences"][arm] for each in found)
        words.append(f"gradients {difference:.0e}")
        shown.append("  ".join(words))
    return shown


def _ratio(what: str, values: Sequence[float]) -> str:
    return f"{what} {measured(from_samples(what, values, 'ratio'))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slot-ms", type=float, help="stages wait; without, they compute")
    parser.add_argument("--width", type=int, default=256, help="of the Transformer layers that compute")
    parser.add_argument("--network", action="store_true", help="no messages through shared memory")
    parser.add_argument("--arms", nargs="+", default=[*NAMED, *(TORCH + name for name in CLASSES)])
    asked = parser.parse_args()
    slot_s, arms = None if asked.slot_ms is None else asked.slot_ms / 1e3, tuple(asked.arms)
    for number in asked.microbatches:
        job = Job(arms, asked.workers, number, asked.rounds, slot_s, asked.width, not asked.network)
        print("\n".join(lines(job, run_processes(work, asked.workers, job))), flush=True)


if __name__ == "__main__":
    main()
