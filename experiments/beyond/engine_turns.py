"""Times variants in turns, and runs a process of a case in which engines are the variants.

Processes live through all rounds, so that neither start-up nor a cold allocator is measured. Every round runs
all variants there and back in a new random order (`harness/rounds.py`); only numbers of the same round are
compared. A case that its control voids is measured once more with more rounds.

All engines train the same layers on the same mini-batch, and are checked before and after. The bare layers
and the plain model are engines, too. With layers that wait instead of computing, what remains of a step is
the schedule's and the engine's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Metric, from_samples
from gpipe_bench.harness.rounds import (
    MORE_ROUNDS,
    Times,
    Usage,
    against_itself,
    repeats_for,
    slowest,
    turns,
    used_by_others,
    void_by,
)
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.clock import conditions
from gpipe_bench.pipeline.memory.tracker import LiveMemory
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.planner.probes import settle, time_step

from ..engines.checks import named_parameters, reference, verify
from ..engines.known import Ours
from ..engines.setup import LossFn, Setup, clear, placement_of
from ..engines.trials import Fault, IsolatedError, Tell, built, run_isolated
from ..paper.results import samples_of
from ..paper.steps import layer_seconds
from .trainings import Job

WIDTH = 8  # width of layers that compute almost nothing
PARTITION_MICROBATCHES = 4  # in the step that times single layers
TRIAL_S = 60.0  # seconds after which a step of the user's engine counts as hung
PATIENCE = 10.0  # times the estimated seconds, after which a case with the user's engines ends
NO_LIMIT_S = 1e6
CALIBRATION_STEPS = 2

Steps = Mapping[str, Callable[[], object] | None]
"""One training step of each variant; None in a process that has no part in it."""


class Found(NamedTuple):
    """Findings of one process of a case: seconds per step by variant, two samples per round; its CPU usage
    and settings; and further details.
    """

    times: dict[str, list[float]]
    usage: Usage
    conditions: dict[str, str]
    details: dict[str, Any]


def take_turns(
    steps: Steps, layers: Sequence[nn.Module], num_rounds: int, seed: int, device: torch.device
) -> Found:
    """Times all variants, which train the same `layers` on `device`, in each process of a case.

    All processes must call. Each begins every turn with the others and keeps its own times; those of the
    slowest process count. Every variant has been warmed up.
    """
    timed = partial(time_step, layers=layers, device=device)

    def repeats(step: Callable[[], object] | None) -> int:
        """Steps per sample, in every process as many as the slowest process needs."""
        step_s = torch.tensor([timed(step, repeats=CALIBRATION_STEPS)], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(step_s, dist.ReduceOp.MAX)
        return repeats_for([float(step_s)])

    num_steps = {variant: repeats(step) for variant, step in steps.items()}
    settle()
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    start = Usage.now()
    for variant in turns(list(steps), num_rounds, seed):
        times[variant].append(timed(steps[variant], repeats=num_steps[variant]))
    return Found(times, Usage.now().since(start), conditions(), {})


def side_by_side(
    take: Callable[[int], Sequence[Found]],
    numbers: Callable[[Times, Sequence[Found]], Outcome],
    rounds: int,
    *,
    control: str = "ours",
    again: bool = True,
) -> Outcome:
    """The outcome of a case in which variants take turns.

    Args:
        take: runs so many rounds and returns the processes' findings (`take_turns`)
        numbers: makes an outcome from the slowest process's seconds and the findings
        rounds: rounds, of two samples of every variant
        control: the variant that is compared with itself
        again: whether to measure once more, with `MORE_ROUNDS` times the rounds, if the control voids the
            case. The second outcome is kept in any case; `details["before"]` says what voided the first
    """

    def measured(rounds: int) -> Outcome:
        found = take(rounds)
        times = slowest([each.times for each in found])
        outcome = numbers(times, found)
        note = "our first sample of a round / second"
        trust, facts = conditions_of(found, against_itself(times, control), note)
        facts = {"rounds": rounds, **outcome.details, **facts, "cpu_s": [each.usage.cpu_s for each in found]}
        return replace(outcome, metrics=(*outcome.metrics, *trust), details=facts)

    first = measured(rounds)
    if not again or first.status != "done" or "void" not in first.details:
        return first
    second = measured(MORE_ROUNDS * rounds)
    return replace(second, details={**second.details, "before": first.details["void"]})


def conditions_of(
    found: Sequence[Found], ratios: Sequence[float], note: str
) -> tuple[list[Metric], dict[str, Any]]:
    """Evidence of a case's validity. Metrics: the control's ratios, CPU time of other programs. Facts: the
    processes' settings, and `void`, why nothing may be judged, if the control says so.
    """
    control = from_samples("control", ratios, "ratio", note=note)
    others = used_by_others([each.usage for each in found])
    note = "share of the machine's cores that other programs used meanwhile"
    facts: dict[str, Any] = {
        name: [each.conditions[name] for each in found] for name in ("pinned_cores", "threads")
    }
    if void := void_by(control):
        facts["void"] = void
    return [control, Metric("used by others", others, "ratio", "measured", note=note)], facts


def work(tell: Tell, job: Job, rounds: int) -> Found:
    """Runs a case in each of its processes. RuntimeError if an engine computes something wrong."""
    layers, batch, target, loss = trained(job)
    layers_s = _seconds(job, layers, loss)
    setups = {name: setup_of(job, layers, layers_s, name) for name in job.engines}
    made = {name: built(engine, setups[name]) for name, (engine, _) in job.engines.items()}
    refused = {name: each for name, each in made.items() if isinstance(each, str)}
    engines = {name: each for name, each in made.items() if not isinstance(each, str)}
    first = next(iter(job.engines))
    ours = engines[first]
    assert isinstance(ours, Ours)
    # The reference needs all layers: engines may have other stages here. Layers that wait would wait one
    # after another, so they have no reference.
    whole = replace(setups[first], group=None)
    expected = {} if job.chosen.workload == "waiting" else reference(whole, batch, target, loss)

    def checked() -> dict[str, dict[str, Any]]:
        found = {}
        for name, engine in engines.items():
            tell(f"{name} is next")
            if not is_idle(engine):
                made_up = isinstance(engine, Bare) and engine.stage is not None
                own = {} if made_up or not expected else named_parameters(setups[name])
                wanted = {each: expected[each] for each in own}
                found[name] = verify(name, engine, setups[name], batch, target, loss, wanted)
        return found

    checks = checked()
    steps: dict[str, Callable[[], object] | None] = {
        name: None if is_idle(engine) else partial(engine.step, batch, target, loss)
        for name, engine in engines.items()
    }
    measured = take_turns(steps, layers, rounds, job.seed, devices.current(job.chosen.device))
    actions_s = {
        f"{stage}{kind.value}": mean(samples)
        for (stage, kind), samples in samples_of([ours.timeline]).items()
    }
    checked()  # still right after all rounds?
    peaks = {}
    for name, step in steps.items() if job.work.real else ():  # after the timing, to not disturb it
        dist.barrier()  # also for idle processes
        if step is not None:
            peaks[name] = peak_bytes(step, setups[name])
    details = {
        "checks": checks, "refused": refused, "partition": setups[first].partition, "actions_s": actions_s,
        "peak_bytes": peaks,
    }  # fmt: skip
    return measured._replace(details=details)


# The user's engines, which may raise, hang or be wrong


def without(job: Job, names: Container[str]) -> Job:
    return job._replace(engines={name: each for name, each in job.engines.items() if name not in names})


def fault_in(job: Job, name: str) -> Fault | None:
    """The fault of a user's engine, or its refusal, in a round beside our first engine alone, so that the
    other engines are not affected.
    """
    pair = without(job, {*job.engines} - {next(iter(job.engines)), name})
    try:
        (one, *_) = isolated(pair, 1, TRIAL_S)
    except IsolatedError as error:
        return error.fault
    reason = one.details["refused"].get(name)
    return None if reason is None else Fault(reason, refused=True)


def taken(job: Job, rounds: int, estimate_s: float) -> tuple[list[Found], dict[str, Fault]]:
    """The findings of a case's processes, and faults of the user's engines. If a run with them fails, the
    others are measured again without them.
    """
    try:
        return isolated(job, rounds, TRIAL_S + PATIENCE * estimate_s if job.own else NO_LIMIT_S), {}
    except IsolatedError as error:
        if not job.own:
            raise
        fault = error.fault._replace(reason=f"beside the others: {error.fault.reason}", refused=False)
        return taken(without(job, job.own), rounds, estimate_s)[0], dict.fromkeys(job.own, fault)


def isolated(job: Job, rounds: int, timeout_s: float) -> list[Found]:
    """The findings of `work` in each process. IsolatedError if it fails or takes too long."""
    return run_isolated(work, job.num_processes, job, rounds, timeout_s=timeout_s, device=job.chosen.device)


def trained(job: Job) -> tuple[list[nn.Module], Any, Any, LossFn]:
    """Layers, mini-batch, targets and loss, equal in all processes."""
    torch.manual_seed(job.seed)
    size, device = job.work.microbatch_size * job.chosen.num_microbatches, devices.current(job.chosen.device)
    name, loss = job.work.model, cast(LossFn, nn.functional.mse_loss)
    if name in MADE_UP:
        layers = MADE_UP[name](**job.options)
        batch, target = torch.randn(size, WIDTH), torch.randn(size, WIDTH)
    else:
        layers, loss = [*MODELS[name](**job.options)], loss_fn(name, **job.options)
        batch, target = example_batch(name, size, **job.options)
    return [layer.to(device) for layer in layers], batch.to(device), target.to(device), loss


def setup_of(job: Job, layers: Sequence[nn.Module], layers_s: Sequence[float], name: str) -> Setup:
    """The setup of a variant in this process, with the case's number of stages or the engine's own."""
    engine, remat = job.engines[name]
    place = () if job.chosen.in_process else placement_of(engine)
    return Setup(
        layers, partition(layers_s, len(place) or job.chosen.num_stages), job.chosen.num_microbatches, remat,
        devices.current(job.chosen.device), None if job.chosen.in_process else dist.group.WORLD, place,
    )  # fmt: skip


def _seconds(job: Job, layers: Sequence[nn.Module], loss: LossFn) -> Sequence[float]:
    """The layers' costs for the partition: seconds, or equal weights."""
    if not (job.work.real and job.chosen.device == "cpu"):
        return [1.0] * len(layers)
    count, (_, remat) = PARTITION_MICROBATCHES, next(iter(job.engines.values()))
    example = example_batch(job.work.model, job.work.microbatch_size * count, **job.options)
    return layer_seconds(layers, count, loss, *example, remat=remat)


def peak_bytes(step: Callable[[], object], setup: Setup) -> int | None:
    """Peak bytes of a step's operations in this process. None if that is less than the gradients, which must
    exist: then the engine's operations run in other threads and are not seen.
    """
    clear(setup.layers)
    with LiveMemory() as memory:
        step()
    gradients = [p.grad for p in named_parameters(setup).values() if p.grad is not None]
    least = sum(gradient.nbytes for gradient in gradients)
    clear(setup.layers)
    peak = memory.peak_bytes[""]
    return peak if peak >= least else None


# Baselines of an engine's own cost


class Plain:
    """The plain model in this process, micro-batch by micro-batch. The mini-batch is divided once; only steps
    are timed.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.count = setup, setup.num_microbatches
        self.model = nn.Sequential(*setup.layers)
        self.batch: Tensor | None = None
        self.parts: list[tuple[Tensor, Tensor]] = []

    def divide(self, batch: Tensor, target: Tensor) -> None:
        if batch is not self.batch:
            self.batch = batch
            self.parts = list(zip(batch.chunk(self.count), target.chunk(self.count), strict=True))

    def step(self, batch: Tensor, target: Tensor, loss_fn: LossFn) -> None:
        self.divide(batch, target)
        for inputs, wanted in self.parts:
            (loss_fn(self.model(inputs), wanted) / self.count).backward()  # type: ignore[no-untyped-call]


class PlainAlone(Plain):
    """The plain model in the first process; other processes wait."""


def is_idle(engine: object) -> bool:
    return isinstance(engine, PlainAlone) and dist.get_rank() > 0


class Bare(Plain):
    """Runs only this process's layers, with the same micro-batches and recomputations, but no engine and no
    messages. Inputs and gradients of one stage of several are made up.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.stage = None if setup.group is None else setup.group.rank()
        self.is_last = self.stage in (None, setup.num_stages - 1)
        self.model = nn.Sequential(*setup.local_layers)
        self.gradient: Tensor | None = None

    def divide(self, batch: Tensor, target: Tensor) -> None:
        if batch is not self.batch:
            super().divide(batch, target)
            before = [each for k in range(self.stage or 0) for each in self.setup.stage_layers(k)]
            with torch.no_grad():
                arriving = nn.Sequential(*before)
                self.parts = [(arriving(inputs), wanted) for inputs, wanted in self.parts]
                self.gradient = None if self.is_last else torch.ones_like(self.model(self.parts[0][0]))

    def step(self, batch: Tensor, target: Tensor, loss_fn: LossFn) -> None:
        self.divide(batch, target)
        if self.setup.remat == "never":
            outputs = []
            for value, wanted in self.parts:
                own = value if self.stage is None else value.detach().requires_grad_(self.stage > 0)
                output = self.model(own)
                outputs.append(loss_fn(output, wanted) / self.count if self.is_last else output)
            for output in reversed(outputs):
                output.backward(self.gradient)
            return
        again = self.parts if self.setup.remat == "always" else self.parts[:-1]
        with torch.no_grad():
            for inputs, wanted in again:
                loss_fn(self.model(inputs), wanted)
        for inputs, wanted in reversed(self.parts):
            (loss_fn(self.model(inputs), wanted) / self.count).backward()  # type: ignore[no-untyped-call]


# Layers that wait. On two cores four workers cannot compute in parallel, but they can wait in parallel. A
# waiting layer takes a fixed time forward and backward. A step should then take as long as the replay of the
# same slots; the rest is the engine's time.

# A sleep may end so much late; the rest is a busy wait.
_LATE_S = 0.3e-3


def wait_until(end_s: float) -> None:
    left_s = end_s - time.perf_counter()
    if left_s > _LATE_S:
        time.sleep(left_s - _LATE_S)
    while time.perf_counter() < end_s:
        pass


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s
        wait_until(time.perf_counter() + wait_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        wait_until(time.perf_counter() + ctx.wait_s)
        return gradients[0], None


class Waiting(nn.Module):
    """Multiplies by a parameter and waits, forward and backward."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.weight, self.wait_s = nn.Parameter(torch.ones(WIDTH)), wait_s

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Waited.apply(x * self.weight, self.wait_s)  # type: ignore[no-untyped-call]
        return found


MADE_UP: dict[str, Callable[..., list[nn.Module]]] = {
    "waiting": lambda num_layers, wait_s: [Waiting(wait_s) for _ in range(num_layers)],
    "linear": lambda num_layers: [nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)],
}
"""Builders of layers that compute almost nothing."""
