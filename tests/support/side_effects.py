"""Random programs whose layers do more than map their input to their output, and what becomes of each.

    python tests/support/side_effects.py --count 400               in one process
    python tests/support/side_effects.py --count 60 --processes 2  over two, or 4 for dp x pp
    python tests/support/side_effects.py --first 17 --count 1      one of them, with all that is known of it

A program is trained for three steps as the plain model, micro-batch by micro-batch, and as a pipeline. It is
*right* where the loss, every gradient, every buffer and what layers count agree in each step; *refused* where
the pipeline raises; *found* where it is neither, and `verify` raises before the first step or before the one
that goes wrong; *warned* where a warning names what layers count otherwise. What remains is *wrong*, of which
there must be none. Of right ones `verify` must say so before each step, and change nothing. Programs that the
plain model cannot train are left out.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tiny_models import mlp_batch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from gpipe_bench.pipeline import Pipeline, VerifyError, launch
from gpipe_bench.pipeline.stage.layers import Generators, stream_key
from gpipe_bench.pipeline.stage.trees import sizes

WIDTH = 6
TIMEOUT_S = 30.0
mse_loss = nn.functional.mse_loss
NUM_STEPS = 3


class Dense(nn.Module):
    """A linear layer whose subclasses do something beside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


# State of their own


class Counts(Dense):
    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return super().forward(x) * (1 + 0.1 * self.n)


class CountsUnread(Dense):
    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return super().forward(x)


class Logs(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1.0)
        return super().forward(x)


class ReadsItsLog(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.log.append(y.detach().mean())
        return y + self.log[-min(2, len(self.log))]


class Recurrent(nn.Module):
    """Backpropagation through time, cut off at the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.h = nn.RNN(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        output, h = self.rnn(x[None], self.h)
        self.h = h.detach()
        return output[0]


class Table(Dense):
    """Makes a table in its first call: harmless."""

    table = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, WIDTH, dtype=x.dtype)
        return super().forward(x) * self.table


class FirstSeen(Dense):
    """Goes by the first input that it ever saw."""

    scale = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = 1 + x.detach().mean(0)
        return super().forward(x) * self.scale


class Remembers(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"mean": torch.zeros(WIDTH, dtype=torch.float64)}

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * (1 + self.state["mean"])
        self.state["mean"] = 0.5 * self.state["mean"] + 0.5 * x.detach().mean(0)
        return y


class RemembersInPlace(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        y = Dense.forward(self, x) * (1 + self.state["mean"].clone())
        self.state["mean"].lerp_(x.detach().mean(0), 0.5)
        return y


class Holder:
    n = 0


class InAnObject(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        self.holder.n += 1
        return super().forward(x) * (1 + 0.1 * self.holder.n)


class AsksForGradients(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.1 if torch.is_grad_enabled() else 1.0)


# Buffers


class Buffer(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def update(self, mean: Tensor) -> None:
        self.mean = 0.7 * self.mean + 0.3 * mean

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.update(x.detach().mean(0))
        return super().forward(x) * (1 + self.mean)


class BufferInPlace(Buffer):
    def update(self, mean: Tensor) -> None:
        self.mean.lerp_(mean, 0.3)


class BufferByData(Buffer):
    def update(self, mean: Tensor) -> None:
        self.mean.data.lerp_(mean, 0.3)


class LateByData(Buffer):
    """Changes behind torch's back from a later call on, the buffer of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("late", torch.ones(WIDTH))

    def update(self, mean: Tensor) -> None:
        if int(self.calls) > 5:
            self.inner.late.data.add_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.inner.late


class CountsInIntegers(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


# Parameters, hooks and gradients


class ChangesItsWeight(Dense):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.data.mul_(0.9)
        return super().forward(x)


class Clamps(Dense):
    """Changes nothing after the first time."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


class Probes(Dense):
    """Trains on something else inside of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.linear(torch.ones(1, WIDTH, dtype=x.dtype)).sum().backward()
        return super().forward(x)


class InnerGradient(Dense):
    """A gradient penalty's way: asks autograd for something, and changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(z).square().sum(), z)
        return super().forward(x) + 0.1 * slope.detach()


class HooksItsOutput(Dense):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return y


class HooksWhereItCan(Dense):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return y


def hooked() -> nn.Module:
    """A hook counts in a closure, and scales by that."""
    calls = [0]

    def scale(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * (1 + 0.1 * calls[0])

    layer = Dense()
    layer.register_forward_hook(scale)
    return layer


def hooked_plainly() -> nn.Module:
    layer = Dense()
    layer.register_forward_hook(lambda module, inputs, output: 0.5 * output)
    return layer


def hook_in_backward() -> nn.Module:
    layer = Dense()
    layer.linear.weight.register_hook(lambda gradient: 0.5 * gradient)
    return layer


class Checkpointed(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


# Random numbers


class PythonNoise(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.5 * random.random())


class NumpyNoise(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.5 * np.random.rand())


class DrawsUnread(Dense):
    def forward(self, x: Tensor) -> Tensor:
        np.random.rand()
        return super().forward(x)


class OwnNoise(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.rand((), generator=self.generator, dtype=x.dtype))


# Ways past the layers


class LeavesAux(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.aux: Tensor = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


class LeavesDetached(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.aux: Tensor = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.detach().mean()
        return y


class ReadsAux(Dense):
    """What another layer left; in a list, so that it is no module of this one."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other[0].aux


class HiddenTie(nn.Module):
    """Uses the weight of another layer without having it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.other[0].linear.weight)


class Special(Tensor):
    pass


class MakesSpecial(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).as_subclass(Special)


class AsksForSpecial(Dense):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.as_subclass(Tensor))
        return 2 * y if isinstance(x, Special) else y


class SetsScale(Dense):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.scale = 2.0
        return y


class AsksForScale(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(x, "scale", 1.0)


GLOBAL: dict[str, float] = {"n": 0.0}


class InAGlobal(Dense):
    def forward(self, x: Tensor) -> Tensor:
        GLOBAL["n"] += 1
        return super().forward(x) * (1 + 0.1 * GLOBAL["n"])


# Paths that data decide


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Dense(), Dense()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if float(x.detach()[0, 0]) > 0 else self.b(x)


class SometimesCutOff(Dense):
    """Its output needs a gradient for some micro-batches alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.detach() if float(x.detach()[0, 0]) > 0 else y


class OverwritesIfLarge(Dense):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach()[0, 0]) > 0:
            x = x.mul_(0.5) if not (x.is_leaf and x.requires_grad) else x * 0.5
        return super().forward(x)


ALONE: tuple[Callable[[], nn.Module], ...] = (
    Counts, CountsUnread, Logs, ReadsItsLog, Recurrent, Table, FirstSeen, Remembers, RemembersInPlace,
    InAnObject, AsksForGradients, Buffer, BufferInPlace, BufferByData, LateByData, CountsInIntegers,
    ChangesItsWeight, Clamps, Probes, InnerGradient, HooksItsOutput, HooksWhereItCan, hooked, hooked_plainly,
    hook_in_backward, Checkpointed, PythonNoise, NumpyNoise, DrawsUnread, OwnNoise, InAGlobal, Experts,
    SometimesCutOff, OverwritesIfLarge,
    lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.BatchNorm1d(WIDTH), lambda: nn.Dropout(0.3), lambda: nn.ReLU(inplace=True),
)  # fmt: skip
PAIRS: tuple[tuple[Callable[[], nn.Module], Callable[..., nn.Module], bool], ...] = (
    (LeavesAux, ReadsAux, True), (LeavesDetached, ReadsAux, True), (Dense, HiddenTie, True),
    (MakesSpecial, AsksForSpecial, False), (SetsScale, AsksForScale, False),
)  # fmt: skip


class Program:
    """Everything about program number `number`, the same in every process."""

    def __init__(self, number: int, num_stages: int | None = None) -> None:
        generator = random.Random(f"side effects {number}")
        self.num_stages = num_stages or generator.choice([1, 2, 2, 3])
        self.num_microbatches = generator.choice([1, 2, 3, 4])
        self.remat = generator.choice(["always", "always", "except_last", "never"])
        self.schedule = generator.choice(["gpipe", "gpipe", "1f1b"])
        self.seed = generator.randrange(2**31)
        self.names: list[str] = []
        self.picks = [generator.random() for _ in range(16)]
        self.num_layers = generator.randint(max(3, self.num_stages), 6)
        self.has_aux_loss = generator.random() < 0.1
        self.target_is_input = generator.random() < 0.1
        self.is_cached = generator.random() < 0.05
        self.examples = self.num_microbatches * 2 + generator.randint(0, 1)
        self.loss_of_one = generator.random() < 0.1

    def build(self) -> nn.Sequential:
        """The same layers in each call, with the state of a new model."""
        generator = random.Random(self.seed)
        torch.manual_seed(self.seed)
        GLOBAL["n"] = 0.0
        layers: list[nn.Module] = [LeavesAux()] if self.has_aux_loss else []
        while len(layers) < self.num_layers:
            kind = generator.random()
            if kind < 0.4:
                layers.append(generator.choice(ALONE)())
            elif kind < 0.55:
                first, second, takes = generator.choice(PAIRS)
                layers.append(source := first())
                layers += [Dense() for _ in range(generator.randint(0, 1))]
                layers.append(second(source) if takes else second())
            else:
                layers.append(Dense())
        self.names = ["hooks" if layer._forward_hooks else type(layer).__name__ for layer in layers]
        return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).double()

    def loss_of(self, model: nn.Sequential) -> Callable[[Tensor, Tensor], Tensor]:
        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            loss = mse_loss(output, target)
            if self.has_aux_loss:
                loss = loss + 0.5 * model[0].aux
            return loss[None] if self.loss_of_one else loss

        return loss_fn

    def data(self, step: int, replica: int = 0) -> tuple[Tensor, Tensor]:
        batch, target = mlp_batch(self.examples, seed=self.seed % 1000 + 10 * step + replica)
        return (batch, batch) if self.target_is_input else (batch, target)

    def __str__(self) -> str:
        return (
            f"K={self.num_stages} M={self.num_microbatches} {self.schedule} {self.remat}"
            f"{' aux' * self.has_aux_loss}{' target=input' * self.target_is_input}"
            f"{' cached' * self.is_cached}: {' '.join(self.names)}"
        )

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        if self.is_cached and self.num_microbatches == 1:
            with parametrize.cached():
                yield
        else:
            yield


def left(model: nn.Module) -> dict[str, Any]:
    """What a step left in a model beside its gradients: buffers, parameters, and what layers count."""
    found: dict[str, Any] = {name: p.detach().clone() for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if not isinstance(module, nn.BatchNorm1d):  # whose averages are the mini-batch's
                found[f"{path}.{name}"] = buffer.clone()
        if hasattr(module, "n"):
            found[f"{path}.n"] = torch.tensor(module.n)
        if hasattr(module, "log"):
            found[f"{path}.log"] = torch.tensor(len(module.log))
    found["numpy's next number"] = torch.tensor(np.random.RandomState(_keys()).rand())
    return found


def _keys() -> np.ndarray:
    return np.append(np.random.get_state()[1], np.random.get_state()[2]).astype(np.uint32)


def differs(found: dict[str, Any], wanted: dict[str, Any], names: set[str] | None = None) -> str:
    """The first name under which they differ."""
    for name in found:
        a, b = found[name], wanted[name]
        if a is None or b is None:
            if a is not b and float((a if b is None else b).abs().max()) > 1e-12:
                return name
        elif not torch.allclose(a.double(), b.double(), rtol=1e-8, atol=1e-10):
            return name
    return ""


def plain_steps(
    program: Program, num_replicas: int = 1
) -> list[tuple[float, dict[str, Any], list[dict[str, Any]]]]:
    """Loss, gradients and what was left, of each replica, after each step."""
    models = [program.build() for _ in range(num_replicas)]
    model = models[0]
    found = []
    generators = Generators(torch.device("cpu"))
    random.seed(0), np.random.seed(0)
    streams = [(random.getstate(), np.random.get_state())] * num_replicas  # each is a process of its own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        sums: dict[str, Tensor | None] = {}
        total, lefts = 0.0, []
        for replica, each in enumerate(models):
            for parameter, of_first in zip(each.parameters(), model.parameters(), strict=True):
                parameter.data.copy_(of_first.data)
            each.zero_grad()
            batch, target = program.data(step, replica)
            if program.target_is_input:
                batch = target = batch.clone()
            lengths = sizes(len(batch), program.num_microbatches)
            loss_fn = program.loss_of(each)
            random.setstate(streams[replica][0]), np.random.set_state(streams[replica][1])
            with program.surroundings():
                for m, (x, y) in enumerate(zip(batch.split(lengths), target.split(lengths), strict=True)):
                    states = generators.save()
                    first = replica * program.num_microbatches
                    for index, layer in enumerate(each):
                        generators.seed(stream_key(0, step, index, first + m))
                        x = layer(x)
                    loss = loss_fn(x, y) * (lengths[m] / len(batch) / num_replicas)
                    generators.restore(states)
                    loss.sum().backward()
                    total += float(loss.detach())
            for name, parameter in each.named_parameters():
                if parameter.grad is not None:
                    before = sums.get(name)
                    sums[name] = parameter.grad.clone() if before is None else before + parameter.grad
                else:
                    sums.setdefault(name, None)
            lefts.append(left(each))
            streams[replica] = random.getstate(), np.random.get_state()
        found.append((total, sums, lefts))
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name]
        optimizer.step()
    return found


def run(program: Program, wanted: list[Any], *, verified: bool | int, **options: Any) -> tuple[str, int, str]:
    """Trains; what became of it, in which step, and words. `verified`: before each step, or before one."""
    model = program.build()
    random.seed(0), np.random.seed(0)
    try:
        pipeline = Pipeline(
            model, num_stages=program.num_stages, num_microbatches=program.num_microbatches,
            schedule=program.schedule, remat=program.remat, cost=[1] * len(model), **options,
        )  # fmt: skip
    except Exception as error:
        return "refused", 0, str(error)
    replica = 0 if pipeline.grid is None else pipeline.grid.replica
    with pipeline:
        optimizer = (
            torch.optim.SGD(pipeline.parameters(), lr=0.05)
            if any(True for _ in pipeline.parameters())
            else None
        )
        loss_fn = program.loss_of(model)
        for step in range(NUM_STEPS):
            batch, target = program.data(step, replica)
            loss_before, sums, lefts = wanted[step]
            try:
                with program.surroundings():
                    # Over processes attributes are not sent, so only the first step is compared.
                    before = verified is True and (pipeline.group is None or step == 0)
                    if before or (verified is not True and verified is not False and verified == step):
                        pipeline.verify(batch, target, loss_fn)
                pipeline.zero_grad()
                with program.surroundings():
                    loss = pipeline.step(batch, target, loss_fn)
            except VerifyError as error:
                return "found", step, str(error)
            except Exception as error:
                return "refused", step, str(error)
            if loss.shape != ():
                return "wrong", step, "shape of the loss"
            what = "the loss" if abs(float(loss) - loss_before) > 1e-8 * max(1, abs(loss_before)) else ""
            gradients = {name: p.grad for name, p in pipeline.named_parameters()}
            what = what or differs(gradients, sums)
            own = set(pipeline._layers)
            found = {
                name: value
                for name, value in left(model).items()
                if name.split(".")[0] in own or (" " in name and pipeline.group is None)
            }
            what = what or differs(found, lefts[replica])
            if pipeline.group is not None or pipeline.grid is not None:
                what = next((each for each in pipeline.gather_all(what) if each), "")
            if what:
                return "wrong", step, what
            if optimizer is not None:
                optimizer.step()
    return "right", NUM_STEPS, ""


def judged(number: int, **options: Any) -> tuple[str, str]:
    """What became of a program, and words."""
    num_stages = options.pop("num_stages", None)
    num_replicas = options.pop("num_replicas", 1)
    program = Program(number, num_stages)
    try:
        wanted = plain_steps(program, num_replicas)
    except Exception as error:
        return "left out", f"{error}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome, step, words = run(program, wanted, verified=False, **options)
        said_by = [str(each.message) for each in caught]
    if options:  # each process knows its own stage
        said_by = [each for of_rank in gathered(said_by) for each in of_rank]
    if outcome == "right":
        again, step, words = run(program, wanted, verified=True, **options)
        # What lies outside of the model cannot be put back.
        hooks = (
            options and step and "hooks" in program.names
        )  # whose closures are not sent to other processes
        if again != "right" and "InAGlobal" not in program.names and not hooks:
            return f"right, but with verify {again}", f"{program}: step {step}: {words}"
        return "right", str(program)
    if (
        outcome == "wrong"
        and words.endswith((".n", ".log"))
        and any("changes in each forward" in each for each in said_by)
    ):
        return "warned", f"{program}: {words}"
    if outcome == "wrong":
        for before in sorted({0, step}):
            again, _, said = run(program, wanted, verified=before, **options)
            if again == "found":
                return "found", f"{program}: {words}: {said}"
            if again == "refused":
                return "refused", f"{program}: by verify: {said}"
    return outcome, f"{program}: step {step}: {words}"


def gathered(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def over_processes(first: int, count: int) -> dict[int, tuple[str, str]]:
    torch.set_num_threads(1)
    size = dist.get_world_size()
    found = {}
    for number in range(first, first + count):
        if size == 4:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
            options: dict[str, Any] = {"mesh": mesh, "num_replicas": 2}
        else:
            options = {"group": dist.group.WORLD}
        found[number] = judged(number, num_stages=2, timeout_s=TIMEOUT_S, **options)
        dist.barrier()
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--show", default="wrong", help="kinds of outcomes to print, comma by comma")
    chosen = parser.parse_args(arguments)
    if chosen.processes > 1:
        of_ranks = launch(over_processes, chosen.processes, chosen.first, chosen.count, device="cpu")
        outcomes = of_ranks[0]
        for of_rank in of_ranks:  # what one rank alone sees
            outcomes |= {
                n: o
                for n, o in of_rank.items()
                if o[0] not in ("right", "refused", "found", "warned", "left out")
            }
    else:
        torch.set_num_threads(1)
        outcomes = {n: judged(n) for n in range(chosen.first, chosen.first + chosen.count)}
    for number, (outcome, words) in outcomes.items():
        if outcome in chosen.show.split(",") or outcome.startswith("right, but") or chosen.count == 1:
            print(f"{number}: {outcome}: {words}")
    print(dict(Counter(outcome for outcome, _ in outcomes.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
