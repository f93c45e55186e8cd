"""Processes in which schedules take turns: ours and torch's, on the same layers, all gradients checked.

The records' cases are in `beside`. By hand, one line per schedule and M:

    python -m gpipe_bench.experiments.schedules.turns --workers 2 --microbatches 2 4 8 --slot-ms 20
    python -m gpipe_bench.experiments.schedules.turns --workers 2 --microbatches 2 4 8 --width 256

With `--slot-ms` the stages wait instead of computing (`waiting_stages`), and a step is set against the replay
of its slots; else they are Transformer layers, and a step is set against our own 1F1B. A line ends with the
control, a schedule against itself, and the largest error of a gradient.

Stages and layers that wait instead of computing: what is left of a step is the schedule and the engine.

On two cores four workers cannot compute side by side, but they can wait side by side. So every action of a
stage takes a fixed time from its beginning, in which its tiny layers are computed and the rest is slept. A
step should then take what the replay of the same slots says; what it takes more is the engine's, be it ours
or torch's. A waiting layer takes a fixed time forward and back, each gradient is there when its layer's time
is over, and a sum over replicas ends when a link that carries one after the other would have carried it: so
the replay says, too, what a step takes with and without an overlap of the sums with the backward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from threading import Timer
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.checks import gradient_error, reference
from gpipe_bench.experiments.engines.known import CLASSES, TorchRuntime
from gpipe_bench.experiments.engines.setup import LossFn, Setup, clear
from gpipe_bench.experiments.side_by_side import Found, measured, take_turns
from gpipe_bench.experiments.timed.results import samples_of
from gpipe_bench.experiments.timed.steps import layer_seconds, run_processes
from gpipe_bench.harness.rounds import against_itself, ratios, slowest
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.mesh.collectives import Collectives
from gpipe_bench.pipeline.plan.files import to_csv
from gpipe_bench.pipeline.plan.generate import generate
from gpipe_bench.pipeline.plan.named import NAMED, named
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.remat import from_text
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.vee import vee
from gpipe_bench.pipeline.ranks.wire import Transit
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.planner.timing import CPU

MODEL = "transformer-lm"
TIMED_STEPS = 4  # of which the first does not count
TORCHS = "torch's "
BORROWED = "interleaved zero bubble"  # the rows are read from torch: they have no name here
# A sleep ends up to so much later than asked for; the last bit is waited for awake.
_LATE_S = 0.3e-3


class Job(NamedTuple):
    """One run as its processes see it.

    `variants` are names of schedules, torch's own after "torch's "; "gpipe, W put off" and what ends with
    "generated" are made here. With " remat" behind the name all is recomputed, with " remat=0-2,never" what
    that says, else what `remat` says. `options` are those of the Transformer; with a `slot_s` tiny stages
    wait instead.
    """

    variants: tuple[str, ...]
    options: dict[str, Any]
    microbatch_size: int
    num_microbatches: int
    remat: str = "never"
    slot_s: float | None = None
    share_memory: bool = True
    seed: int = 1811


def work(job: Job, rounds: int) -> Found:
    """What one process does: all gradients are checked before and after the schedules took turns."""
    with nullcontext() if job.slot_s is None else waiting_stages(job.slot_s):
        bench = Bench(job)
        alone = Setup(bench.layers, (range(len(bench.layers)),), bench.number, "never", CPU)
        expected = reference(alone, bench.batch, bench.target, bench.loss)
        errors = bench.check(expected)
        found = take_turns(bench.steps, bench.layers, rounds, job.seed)
        bench.check(expected)
    details = {
        "errors": errors,  # of each variant's gradients, relative to the plain model's
        "refused": bench.refused,  # why a variant can't be run
        **bench.made,
    }
    if job.slot_s is not None:
        details["slots"] = {name: float(replay(each, SLOTS).makespan_s) for name, each in bench.rows.items()}
    return found._replace(details=details)


class Bench:
    """The layers, the batch, and a step by every schedule that trains them.

    `rows` are the schedules of our variants; `made` holds what the generator went by and what it made.
    """

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)  # the same weights in every process
        self.job, self.number, self.num_workers = job, job.num_microbatches, dist.get_world_size()
        size = job.microbatch_size * self.number
        if job.slot_s is None:
            self.layers = list(MODELS[MODEL](**job.options))
            self.batch, self.target = example_batch(MODEL, size, **job.options)
            self.loss: LossFn = loss_fn(MODEL, **job.options)
            self.by_layer: Sequence[float] = layer_seconds(
                self.layers, self.number, self.loss, self.batch, self.target, "never"
            )
        else:
            self.layers = [nn.Linear(8, 8) for _ in range(2 * self.num_workers)]
            self.batch, self.target = torch.randn(size, 8), torch.randn(size, 8)
            self.loss, self.by_layer = nn.functional.mse_loss, [1.0] * len(self.layers)
        self.refused: dict[str, str] = {}
        self.made: dict[str, Any] = {}
        self.rows: dict[str, Schedule] = {}
        self.steps: dict[str, Callable[[], object] | None] = {}
        theirs: dict[str, TorchRuntime] = {}
        for variant in (each for each in job.variants if each.startswith(TORCHS)):
            name = variant.removeprefix(TORCHS)
            try:
                theirs[name] = self.torchs(name)
            except ValueError as error:  # on all ranks alike
                self.refused[variant] = str(error)
        generated = self.generated() if any(each.endswith("generated") for each in job.variants) else None
        for variant in job.variants:
            name = variant.removeprefix(TORCHS)
            if name != variant:
                if name in theirs:
                    self.steps[variant] = partial(theirs[name].step, self.batch, self.target, self.loss)
                continue
            try:
                if name == BORROWED and name not in theirs:
                    raise ValueError("torch, whose rows it would run, refuses them")
                rows = theirs[name].rows(name) if name == BORROWED else self.schedule_of(name, generated)
                pipeline = self.ours(rows)
            except ValueError as error:
                self.refused[variant] = str(error)
                continue
            self.rows[variant] = rows
            self.steps[variant] = partial(pipeline.step, self.batch, self.target, self.loss)

    def schedule_of(self, variant: str, generated: Schedule | None) -> Schedule:
        """What a variant of ours runs. ValueError where there is no such schedule."""
        if generated is not None and variant.endswith("generated"):
            return generated
        if variant == "gpipe, W put off":
            return put_off(self.number)
        name, recomputed, choice = variant.partition(" remat")
        remat = from_text(choice.removeprefix("=") or "always") if recomputed else self.job.remat
        return named(name, self.num_workers, self.number, remat=remat)

    def generated(self) -> Schedule:
        """By what the actions of all stages take, those of the other processes too: medians of some steps."""
        keep = self.job.remat == "never"
        place = vee(self.num_workers) if keep else tuple(range(self.num_workers))
        pipeline, timelines = self.ours(self.schedule_of("zb-v" if keep else "zb-h1", None)), []
        for _ in range(TIMED_STEPS):
            clear(self.layers)
            pipeline.step(self.batch, self.target, self.loss)
            timelines.append(pipeline.timeline)
        times = gathered({key: median(samples) for key, samples in samples_of(timelines[1:]).items()})
        rows = generate(
            place, self.number, times, remat=self.job.remat, most_alive=len(place), name="generated"
        )
        ms = {f"{stage}{kind.value}": 1e3 * s for (stage, kind), s in sorted(times.items())}
        self.made = {"actions_ms": ms, "generated": to_csv(rows)}
        return rows

    def cut(self, num_stages: int) -> Partition:
        return partition(self.by_layer, num_stages)

    def ours(self, schedule: Schedule) -> Pipeline:
        return Pipeline(
            self.layers,
            partition=self.cut(schedule.num_stages),
            num_microbatches=self.number,
            schedule=schedule,
            group=dist.group.WORLD,
            share_memory=self.job.share_memory,
        )

    def torchs(self, name: str) -> TorchRuntime:
        per_worker = (NAMED[name].stages_per_worker or 2) if name in NAMED else 2
        stages = [[self.layers[index] for index in span] for span in self.cut(per_worker * self.num_workers)]
        group = dist.group.WORLD
        assert group is not None, "the processes form one"
        return TorchRuntime(name, stages, self.number, group, CPU)

    def check(self, expected: Mapping[str, Tensor]) -> dict[str, float]:
        """How far each variant's gradients are off. RuntimeError where it is more than rounding, or where no
        process has one.
        """
        errors = {}
        for name, step in self.steps.items():
            assert step is not None, "every process has a part in every schedule"
            for _ in range(2):  # the first agrees on shapes
                clear(self.layers)
                step()
            found = {
                f"{index}.{each}": parameter.grad.clone()
                for index, layer in enumerate(self.layers)
                for each, parameter in layer.named_parameters()
                if parameter.grad is not None
            }
            errors[name] = gradient_error(found, {key: expected[key] for key in found}, name)
            if missing := expected.keys() - gathered(dict.fromkeys(found)):
                raise RuntimeError(f"{name} left no gradient of {min(missing)} in any process")
            clear(self.layers)
        return errors


def gathered(mine: dict[Any, Any]) -> dict[Any, Any]:
    """What all processes have."""
    everyone: list[dict[Any, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {key: value for each in everyone for key, value in each.items()}


def put_off(number: int) -> Schedule:
    """GPipe on two workers with every micro-batch recomputed and W where it delays nobody, for two graphs
    alive on each. M = 2, every action one slot:

        stage 0 | F0 F1 R1 R0 .  I1 W1 I0 W0
        stage 1 | .  F0 F1 R1 I1 R0 I0 W1 W0
    """
    order = list(reversed(range(number)))
    first = [Action(0, Kind.F, m) for m in range(number)]
    first += [Action(0, Kind.R, m) for m in order[:2]]
    last = [Action(1, Kind.F, m) for m in range(number)]
    for place, m in enumerate(order):
        first += [Action(0, Kind.R, m)] if place > 1 else []
        first += [Action(0, Kind.I, m), Action(0, Kind.W, m)]
        last += [Action(1, Kind.R, m), Action(1, Kind.I, m)]
        last += [Action(1, Kind.W, order[place - 1])] if place else []
    last.append(Action(1, Kind.W, order[-1]))
    return Schedule("gpipe, W put off", 2, number, "always", (tuple(first), tuple(last)))


def lines(job: Job, found: Sequence[Found]) -> list[str]:
    """The table of one run by hand."""
    times, details, shown = slowest([each.times for each in found]), found[0].details, []

    def ratio(what: str, values: Sequence[float]) -> str:
        return f"{what} {measured(from_samples(what, values, 'ratio'))}"

    for name in job.variants:
        words = [f"{name:24} M={job.num_microbatches}"]
        if name not in times:
            shown.append("  ".join([*words, details["refused"][name]]))
            continue
        words.append(f"{median(times[name]) * 1e3:9.2f} ms")
        ours, base = name.removeprefix(TORCHS), "gpipe remat" if " remat" in name else "1f1b"
        if job.slot_s is None:
            if base in times:
                words.append(ratio(f"to {base}", ratios(times, name, base)))
        elif name in details["slots"]:
            replayed_s = details["slots"][name] * job.slot_s
            least_s = [min(times[name][i : i + 2]) for i in range(0, len(times[name]), 2)]
            words.append(f"{replayed_s * 1e3:9.2f} ms replayed")
            words.append(ratio("ratio", [seconds / replayed_s for seconds in least_s]))
        elif ours in times:
            words.append(ratio("ours / torch", ratios(times, ours, name)))
        words.append(ratio("control", against_itself(times, name)))
        words.append(f"gradients {max(each.details['errors'][name] for each in found):.0e}")
        shown.append("  ".join(words))
    return shown


@contextmanager
def waiting_stages(slot_s: float) -> Iterator[None]:
    """Within it, each action of our stages and of torch's takes `slot_s` for each of its slots."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    def of(kind: Kind) -> Callable[..., Kind]:
        return lambda *_, **__: kind

    def torchs_backward(*_: Any, full_backward: bool = True, **__: Any) -> Kind:
        return Kind.B if full_backward else Kind.I

    methods: list[tuple[type, str, Callable[..., Kind]]] = [
        (Stage, "forward", of(Kind.F)),
        (Stage, "recompute", of(Kind.R)),
        (Stage, "backward", of(Kind.B)),
        (Stage, "backward_inputs", of(Kind.I)),
        (Stage, "backward_weights", of(Kind.W)),
        (_PipelineStageBase, "forward_one_chunk", of(Kind.F)),
        (_PipelineStageBase, "backward_one_chunk", torchs_backward),
        (_PipelineStageBase, "backward_weight_one_chunk", of(Kind.W)),
    ]
    with ExitStack() as stack:
        for owner, name, kind_of in methods:
            slow = _slow(getattr(owner, name), kind_of, slot_s)
            stack.enter_context(mock.patch.object(owner, name, slow))
        yield


def _slow(method: Callable[..., Any], kind_of: Callable[..., Kind], slot_s: float) -> Callable[..., Any]:
    def take(self: Any, *arguments: Any, **options: Any) -> Any:
        end_s = time.perf_counter() + SLOTS[kind_of(*arguments, **options)] * slot_s
        result = method(self, *arguments, **options)
        wait_until(end_s)
        return result

    return take


def wait_until(end_s: float) -> None:
    """Returns when `time.perf_counter` is there."""
    left_s = end_s - time.perf_counter()
    if left_s > _LATE_S:
        time.sleep(left_s - _LATE_S)
    while time.perf_counter() < end_s:
        pass


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        end_s = time.perf_counter() + forward_s
        ctx.save_for_backward(x, weight)
        ctx.backward_s = backward_s
        scaled = x * weight[0]
        wait_until(end_s)
        return scaled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        end_s = time.perf_counter() + ctx.backward_s
        x, weight = ctx.saved_tensors
        of_weight = torch.zeros_like(weight)
        of_weight[0] = (gradient * x).sum()
        wait_until(end_s)
        return gradient * weight[0], of_weight, None, None


class Waiting(nn.Module):
    """Takes `forward_s` and `backward_s` and has one parameter of `numel` float32 numbers."""

    def __init__(self, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Scaled.apply(x, self.weight, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return found


class _Late:
    """A sum that is not over before the link has carried it."""

    def __init__(self, work: Any, end_s: float) -> None:
        self._work, self._end_s = work, end_s

    def wait(self) -> object:
        self._work.wait()
        wait_until(self._end_s)
        return True

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        Timer(max(0.0, self._end_s - time.perf_counter()), partial(future.set_result, None)).start()
        return future


@contextmanager
def slow_sums(seconds: Callable[[int], float]) -> Iterator[None]:
    """Within it, a sum over replicas takes `seconds` of its bytes on a link that carries one at a time."""
    free_s = 0.0
    at_once = Collectives.sum

    def late(self: Collectives, numbers: Tensor) -> Transit:
        nonlocal free_s
        free_s = max(free_s, time.perf_counter()) + seconds(numbers.nbytes)
        return _Late(at_once(self, numbers), free_s)

    with mock.patch.object(Collectives, "sum", late):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slot-ms", type=float, help="stages wait; without, they compute")
    parser.add_argument("--width", type=int, default=256, help="of the Transformer layers that compute")
    parser.add_argument("--network", action="store_true", help="no messages through shared memory")
    parser.add_argument("--arms", nargs="+", default=[*NAMED, *(TORCHS + name for name in CLASSES)])
    asked = parser.parse_args()
    options = {
        "num_layers": 4 * asked.workers, "vocab_size": 64, "d_model": asked.width,
        "ffn_dim": 4 * asked.width, "num_heads": max(1, asked.width // 64), "seq_len": 64,
    }  # fmt: skip
    slot_s, size = (None, 4) if asked.slot_ms is None else (asked.slot_ms / 1e3, 1)
    for number in asked.microbatches:
        job = Job(tuple(asked.arms), options, size, number, slot_s=slot_s, share_memory=not asked.network)
        found = run_processes(work, asked.workers, job, asked.rounds)
        print("\n".join(lines(job, found)), flush=True)


if __name__ == "__main__":
    main()
