"""What each process of a case does in which engines take turns: build all, check all, time, check again.

All work on the very same layers and the same mini-batch, cut at the same places where they have as many
stages, so that nothing but the engine differs. What an engine's own cost is measured against, the bare layers
and the plain model, are also engines here: any factory by its name (`setup.resolve`). And there are layers
that wait instead of computing, so that what is left of a step is the schedule and the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.beyond.side_by_side import Found, take_turns
from gpipe_bench.experiments.beyond.trainings import Job
from gpipe_bench.experiments.engines.checks import named_parameters, reference, verify
from gpipe_bench.experiments.engines.known import Ours
from gpipe_bench.experiments.engines.setup import LossFn, Setup, clear, placement_of
from gpipe_bench.experiments.engines.trials import Fault, IsolatedError, Tell, built, run_isolated
from gpipe_bench.experiments.paper.results import samples_of
from gpipe_bench.experiments.paper.steps import layer_seconds
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.memory.tracker import LiveMemory
from gpipe_bench.pipeline.plan.partition import partition

WIDTH = 8  # of a layer that computes next to nothing
PARTITION_MICROBATCHES = 4  # of the step that times single layers
TRIAL_S = 60.0  # after which a step of the user's engine counts as hung
PATIENCE = 10.0  # times the estimate, after which a case with the user's engines is given up
NO_LIMIT_S = 1e6


def work(tell: Tell, job: Job, rounds: int) -> Found:
    """Runs in each process of a case. RuntimeError where an engine does something else than it should."""
    layers, batch, target, loss = trained(job)
    layers_s = _seconds(job, layers, loss)
    setups = {name: setup_of(job, layers, layers_s, name) for name in job.engines}
    made = {name: built(engine, setups[name]) for name, (engine, _) in job.engines.items()}
    refused = {name: each for name, each in made.items() if isinstance(each, str)}
    engines = {name: each for name, each in made.items() if not isinstance(each, str)}
    first = next(iter(job.engines))
    ours = engines[first]
    assert isinstance(ours, Ours)
    # The reference needs all layers, since engines may have other stages here. Layers that wait would wait
    # for all stages in turn, so they have no reference.
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
    checked()  # still right after all rounds
    peaks = {}
    for name, step in steps.items() if job.work.real else ():  # behind the timing, which it must not disturb
        dist.barrier()  # of those that wait, too
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
    """What an engine of the user does wrong, or refuses, in a round beside the first of ours alone, before
    the others depend on it.
    """
    pair = without(job, {*job.engines} - {next(iter(job.engines)), name})
    try:
        (one, *_) = isolated(pair, 1, TRIAL_S)
    except IsolatedError as error:
        return error.fault
    reason = one.details["refused"].get(name)
    return None if reason is None else Fault(reason, refused=True)


def taken(job: Job, rounds: int, estimate_s: float) -> tuple[list[Found], dict[str, Fault]]:
    """Findings of a case's processes, and the faults of the user's engines: where a run with them fails
    after all, the others are measured once more without any of them.
    """
    try:
        return isolated(job, rounds, TRIAL_S + PATIENCE * estimate_s if job.own else NO_LIMIT_S), {}
    except IsolatedError as error:
        if not job.own:
            raise
        fault = error.fault._replace(reason=f"beside the others: {error.fault.reason}", refused=False)
        return taken(without(job, job.own), rounds, estimate_s)[0], dict.fromkeys(job.own, fault)


def isolated(job: Job, rounds: int, timeout_s: float) -> list[Found]:
    """What `work` finds in each process of a case. IsolatedError where it fails, or takes too long."""
    return run_isolated(work, job.num_processes, job, rounds, timeout_s=timeout_s, device=job.chosen.device)


def trained(job: Job) -> tuple[list[nn.Module], Any, Any, LossFn]:
    """Layers, mini-batch, targets and loss; the same in every process."""
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
    """Setup of a variant in this process: as many stages as the case has, or as its engine is made for."""
    engine, remat = job.engines[name]
    place = () if job.chosen.in_process else placement_of(engine)
    return Setup(
        layers, partition(layers_s, len(place) or job.chosen.num_stages), job.chosen.num_microbatches, remat,
        devices.current(job.chosen.device), None if job.chosen.in_process else dist.group.WORLD, place,
    )  # fmt: skip


def _seconds(job: Job, layers: Sequence[nn.Module], loss: LossFn) -> Sequence[float]:
    """Seconds or equal weights of the layers, by which they are cut."""
    if not (job.work.real and job.chosen.device == "cpu"):
        return [1.0] * len(layers)
    count, (_, remat) = PARTITION_MICROBATCHES, next(iter(job.engines.values()))
    example = example_batch(job.work.model, job.work.microbatch_size * count, **job.options)
    return layer_seconds(layers, count, loss, *example, remat=remat)


def peak_bytes(step: Callable[[], object], setup: Setup) -> int | None:
    """Most bytes that a step's operations have alive at a time in this process. None where that is less than
    the gradients, which it surely makes: then the operations run in threads of its own.
    """
    clear(setup.layers)
    with LiveMemory() as memory:
        step()
    gradients = [p.grad for p in named_parameters(setup).values() if p.grad is not None]
    least = sum(gradient.nbytes for gradient in gradients)
    clear(setup.layers)
    peak = memory.peak_bytes[""]
    return peak if peak >= least else None


# Baselines for an engine's own cost


class Plain:
    """The plain model in this process, micro-batch by micro-batch. The mini-batch is divided once, since
    steps alone are timed.
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
    """The plain model in the first process, while the others wait."""


def is_idle(engine: object) -> bool:
    return isinstance(engine, PlainAlone) and dist.get_rank() > 0


class Bare(Plain):
    """Runs this process's layers alone: the same micro-batches and recomputations, no engine, no messages.
    Where they are one stage of several, that stage's inputs and gradients are made up.
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


# Layers that wait. On two cores four workers cannot compute side by side, but they can wait side by side. A
# waiting layer takes a fixed time forward and back, each gradient is there when its layer's time is over. A
# step should then take what the replay of the same slots says; what it takes more is the engine's.

# A sleep ends up to so much later than asked for; the last bit is waited for awake.
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
    """Multiplies by its one parameter, and takes as long, forward and back."""

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
"""Models that compute next to nothing: builders of their layers."""
