"""Random models, schedules and options of a step, over processes and in one: losses, gradients, norms and
outputs are the plain model's. EXAMPLES=1000 asks for more, SEED for others.

Several stages per worker, random rows, pytrees, tied weights, changes in place, dropout, scaled gradients;
and from step to step other sizes and layers (`change_of`), weights that moved, and evaluation between them.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from case_runner import watched
from random_schedules import random_placement, random_schedule
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline import NAMED, Pipeline, Schedule, named, run_plain
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.stage.trees import Tree, sizes

NUMBER, SEED = int(os.environ.get("EXAMPLES", "12")), int(os.environ.get("SEED", "0"))
TIMEOUT_S = 30.0
NUM_STEPS = 4
WIDTH = 4
SCALE = 8.0
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
mse_loss = nn.functional.mse_loss


# Layers: each takes and gives a tensor, a tuple of tensors or a dict, sometimes with integers


def parts(value: Tree) -> tuple[Tensor, ...]:
    if isinstance(value, dict):  # of a layer that packs
        return (value["x"] * value["scale"], *value["others"])
    return value if isinstance(value, tuple) else (value,)


def joined(values: tuple[Tensor, ...]) -> Tree:
    return values if len(values) > 1 else values[0]


def flat(tensor: Tensor) -> Tensor:
    """As rows of `WIDTH` numbers: of an example, or of each place of its sequence."""
    shape = tensor.shape[:-1] if tensor.shape[-1] == WIDTH else tensor.shape[:1]
    return tensor.reshape(*shape, WIDTH)


DENSE = ("dense", "dense", "same", "same", "choosing", "dropping", "normed", "skip")
GROWING = ("skip", "twice", "counted")  # which pass on one tensor more
KINDS = (*DENSE, "twice", "turn", "join", "counted", "packed", "packed")


class Layer(nn.Module):
    """Works on the first tensor and passes the others on as they are; what else it does is its kind."""

    def __init__(self, kind: str, other: Layer | None = None) -> None:
        super().__init__()
        self.kind = kind
        if kind in DENSE:
            self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        if other is not None:
            self.up.weight = other.up.weight
        more = {
            "choosing": nn.Linear(WIDTH, WIDTH),
            "dropping": nn.Dropout(0.3),
            "normed": nn.LayerNorm(WIDTH),
        }
        self.more = more.get(kind)

    def change(self, x: Tensor) -> Tensor:
        x = flat(x)
        if self.kind == "choosing" and float(x.detach().sum()) > 0:  # one of two ways, by the data
            return self.more(x)
        y = torch.tanh(self.up(self.down(x))) + 0.5 * x
        if self.kind == "normed":  # whose gradients I computes
            return self.more(y + x)
        return self.more(y) if self.kind == "dropping" else y

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        second = others[0] if others and others[0].is_floating_point() else None
        if self.kind in ("turn", "join") and second is None:
            return value
        match self.kind:
            case "skip":
                return (self.change(first), first, *others)
            case "twice":
                return (first, first, *others)
            case "turn":
                return joined((*others, first))
            case "join":
                return joined((flat(first) + flat(second), *others[1:]))
            case "counted":
                return (first, *others, (first > 0).flatten(1).sum(1))
            case "packed":  # a dict, whose numbers and keys depend on x
                positive = bool(first.detach().sum() > 0)
                extra = {"nothing": None} if positive else {}
                return {"x": first, "scale": 2 if positive else 0.5, "others": others, "name": "it", **extra}
        return joined((self.change(first), *others))


class InPlace(nn.Module):
    """Changes in place what the layer before has just made."""

    def __init__(self, clamps: bool) -> None:
        super().__init__()
        self.clamps, self.active = clamps, True

    def forward(self, value: Tree) -> Tree:
        if not self.active:
            return value
        first, *others = value if isinstance(value, tuple) else (value,)
        return joined((first.relu_() if self.clamps else first.mul_(0.9).add_(0.01), *others))


class Head(nn.Module):
    """Everything that arrives, in one number per example."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, value: Tree) -> Tensor:
        total = 0.0
        for i, tensor in enumerate(parts(value)):
            if tensor.is_floating_point():
                total = total + self.linear(flat(tensor)).flatten(1).mean(1, keepdim=True) * (1 + i)
            else:
                total = total + 0.1 * tensor.double()[:, None]
        return total


def joined_layers(generator: random.Random, num_layers: int) -> list[nn.Module]:
    """Layers with parameters that depend on the generator alone."""
    torch.manual_seed(generator.randrange(2**32))
    layers: list[nn.Module] = []
    count = 1
    while len(layers) < num_layers - 1:
        kind = generator.choice(KINDS)
        if kind in GROWING and count == 4:
            continue
        count += kind in GROWING
        others = [layer for layer in layers if isinstance(layer, Layer) and layer.kind in DENSE]
        layers.append(Layer(kind, generator.choice(others) if kind == "same" and others else None))
        # A fresh result that no other tensor shares memory with.
        if kind in DENSE and generator.random() < 0.35 and len(layers) < num_layers - 1:
            layers.append(InPlace(generator.random() < 0.5))
    for layer in layers[: generator.choice([0, 0, 0, num_layers // 2])]:
        layer.requires_grad_(False)
    return [layer.double() for layer in (*layers, Head())]


Change = Callable[[Sequence[nn.Module]], None]


def change_of(generator: random.Random, layers: Sequence[nn.Module]) -> tuple[Change, bool]:
    """Something that is done to the layers, or to equal ones, between two steps; and whether a pipeline over
    processes has to be told, by `refresh`.
    """
    index = generator.randrange(len(layers) - 1)  # the last one is trained in any case
    switch, number = generator.random() < 0.5, generator.choice([0.0, 0.1, 0.6])

    def probability(found: Sequence[nn.Module]) -> None:
        for module in found[index].modules():
            if isinstance(module, nn.Dropout):
                module.p = number

    def trained(found: Sequence[nn.Module]) -> None:
        found[index].requires_grad_(switch)

    def mode(found: Sequence[nn.Module]) -> None:
        found[index].train(switch)

    def in_place(found: Sequence[nn.Module]) -> None:
        for each in found:
            if isinstance(each, InPlace):
                each.active = switch

    def values(found: Sequence[nn.Module]) -> None:
        with torch.no_grad():
            for parameter in found[index].parameters():
                parameter.mul_(0.9)

    def hook(found: Sequence[nn.Module]) -> None:
        for module in _linear(found[index]):
            handle = module.__dict__.pop("hooked", None)
            if handle is None:
                module.__dict__["hooked"] = module.register_forward_hook(_noise if switch else _less)
            else:
                handle.remove()

    ways: list[tuple[Change, bool]] = [
        (mode, False), (values, False), (in_place, True), (trained, True), (hook, False),
        (probability, False),
    ]  # fmt: skip
    return generator.choice(ways)


def _linear(layer: nn.Module) -> list[nn.Linear]:
    return [module for module in layer.modules() if isinstance(module, nn.Linear)][:1]


def _less(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output * 0.8


def _noise(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output + torch.rand_like(output) if module.training else output


# Examples


@dataclass(frozen=True)
class Step:
    """What one step is given, and what happens before it and behind it."""

    batch_size: int
    length: int | None  # of a sequence
    zeroed: bool
    changes: tuple[Change, ...]
    refreshed: bool
    evaluated: int  # examples of a forward-only pass behind it
    inference: bool

    @classmethod
    def of(cls, generator: random.Random, layers: list[nn.Module], fewest: int, most: int) -> Step:
        changes = []
        while generator.random() < 0.6:
            changes.append(change_of(generator, layers))
        return cls(
            generator.randint(fewest, most),
            generator.choice([None, None, 1, 3, 5]),
            generator.random() < 0.6,
            tuple(change for change, _ in changes),
            any(tells for _, tells in changes),
            generator.randint(fewest, most) if generator.random() < 0.3 else 0,
            generator.random() < 0.5,
        )

    def batch(self, examples: int, generator: torch.Generator) -> Tensor:
        shape = (examples, WIDTH) if self.length is None else (examples, self.length, WIDTH)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


class Example:
    """Everything about example number `number`, the same in every process."""

    def __init__(self, seed: int, number: int) -> None:
        generator = random.Random(f"joined {seed} {number}")
        self.num_workers = generator.choice([2, 3])
        self.num_microbatches = generator.randint(1, 6)
        self.remat = generator.choice(REMAT_MODES)
        self.schedule = self._schedule(generator)
        self.layers = joined_layers(generator, generator.randint(self.num_stages, self.num_stages + 5))
        self.cost = [generator.choice([1, 3]) for _ in self.layers]
        self.share_memory = generator.random() < 0.5
        self.scaled = generator.random() < 0.4
        self.clips = generator.random() < 0.5
        self.seed = generator.randrange(2**32)
        is_own = isinstance(self.schedule, Schedule)  # which has an example for each micro-batch
        examples = (self.num_microbatches if is_own else 1, 2 * self.num_microbatches + 1)
        self.steps = [Step.of(generator, self.layers, *examples) for _ in range(NUM_STEPS)]

    def _schedule(self, generator: random.Random) -> Schedule | str:
        if generator.random() < 0.6:
            name = generator.choice(sorted(NAMED))
            made = named(name, self.num_workers, self.num_microbatches, remat=self.remat)
            self.num_stages = made.num_stages
            return name
        self.num_stages = self.num_workers * generator.choice([1, 2])
        placement: tuple[int, ...] = ()
        while not placement or max(placement) + 1 != self.num_workers:
            placement = random_placement(generator, self.num_stages)
        return random_schedule(generator, self.num_stages, self.num_microbatches, self.remat, placement)

    def __str__(self) -> str:
        said = {name: value for name, value in vars(self).items() if name not in ("layers", "steps")}
        return f"{said}, {[type(layer).__name__ for layer in self.layers]}, {self.steps}"

    def check(self, group: dist.ProcessGroup | None) -> None:
        """Raises where something is wrong in this process."""
        plain, layers = copy.deepcopy(self.layers), self.layers
        pipeline = Pipeline(
            layers, num_stages=self.num_stages, num_microbatches=self.num_microbatches,
            num_workers=self.num_workers if isinstance(self.schedule, str) else None,
            schedule=self.schedule, remat=self.remat, cost=self.cost, group=group, timeout_s=TIMEOUT_S,
            share_memory=self.share_memory,
        )  # fmt: skip
        held = {stage.index for stage in pipeline.stages}
        is_first, is_last = 0 in held, self.num_stages - 1 in held
        scaler = pipeline.scaler(init_scale=SCALE) if self.scaled else None
        generator = torch.Generator().manual_seed(self.seed)
        model = nn.Sequential(*plain)
        both: tuple[nn.Module, nn.Module] = (model, pipeline)
        optimizers = [torch.optim.SGD([{"params": list(each.parameters())}], lr=0.05) for each in both]
        for number, step in enumerate(self.steps):
            for change in step.changes:
                change(plain)
                change(layers)
            if step.refreshed:
                pipeline.refresh()
            if step.zeroed:
                pipeline.zero_grad()
                model.zero_grad()
            batch = step.batch(step.batch_size, generator)
            target = torch.randn(step.batch_size, 1, generator=generator, dtype=torch.float64)
            wanted = self._plain_step(number, plain, batch, target)
            own = (batch.clone() if is_first else None, target if is_last else None)
            loss = pipeline.step(*own, mse_loss, scaler=scaler)
            torch.testing.assert_close(loss, wanted, **CLOSE)
            self._assert_gradients(pipeline, model)
            if self.clips:
                norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
                norm = torch.linalg.vector_norm(torch.stack(norms)) * (SCALE if self.scaled else 1)
                torch.testing.assert_close(pipeline.clip_grad_norm_(float("inf")), norm, **CLOSE)
            if not self.scaled:
                for optimizer in optimizers:
                    optimizer.step()
            if step.evaluated:
                model.eval(), pipeline.eval()
                batch = step.batch(step.evaluated, generator)
                with torch.inference_mode(step.inference):
                    output = pipeline(batch.clone() if is_first else None)
                with torch.no_grad():
                    expected = torch.cat([self._run(plain, x.clone()) for x in self._split(batch)])
                if is_last:
                    torch.testing.assert_close(output, expected, **CLOSE)
                model.train(), pipeline.train()
        pipeline.close()

    def _run(self, layers: list[nn.Module], batch: Tensor, step: int = 0, m: int = 0) -> Tensor:
        return run_plain(layers, batch, seed=0, step=step, microbatch=m)

    def _split(self, batch: Tensor) -> tuple[Tensor, ...]:
        return batch.split(sizes(len(batch), min(len(batch), self.num_microbatches)))

    def _plain_step(self, step: int, layers: list[nn.Module], batch: Tensor, target: Tensor) -> Tensor:
        """Sums gradients outside of autograd, whose own sum goes wrong where two share memory."""
        parameters = [p for p in nn.Sequential(*layers).parameters() if p.requires_grad]
        total = torch.zeros((), dtype=torch.float64)
        for m, (x, y) in enumerate(zip(self._split(batch), self._split(target), strict=True)):
            loss = mse_loss(self._run(layers, x.clone(), step, m), y) * (len(x) / len(batch))
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    before = parameter.grad
                    parameter.grad = gradient.clone() if before is None else before + gradient
            total += loss.detach()
        return total

    def _assert_gradients(self, pipeline: Pipeline, plain: nn.Module) -> None:
        wanted = dict(plain.named_parameters(remove_duplicate=False))
        largest = max(float(p.grad.abs().max()) for p in wanted.values() if p.grad is not None)
        for name, parameter in pipeline.named_parameters(remove_duplicate=False):
            gradient, ours = wanted[name].grad, parameter.grad
            assert (gradient is None) == (ours is None), f"{name}: {gradient}, {ours}"
            if ours is not None:
                scale = SCALE if self.scaled else 1
                tolerance = {"rtol": 1e-11, "atol": 1e-12 * max(largest, 1.0)}
                torch.testing.assert_close(
                    ours / scale, gradient, **tolerance, msg=lambda t, n=name: f"{n}: {t}"
                )


def wrong(example: Example, name: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """The first thing that is wrong with an example in this process, if any."""
    try:
        example.check(group)
    except Exception as error:
        return [f"{name} ({example}): {type(error).__name__}: {error}"]
    return []


def over_processes() -> list[str]:
    """What is wrong in this one of three."""
    groups = {3: dist.group.WORLD, 2: dist.new_group([0, 1])}
    found: list[str] = []
    for number in range(NUMBER):
        example = Example(SEED, number)
        if dist.get_rank() < example.num_workers:
            name = f"example {number}, rank {dist.get_rank()}"
            found += wrong(example, name, groups[example.num_workers])
    return found


def test_over_processes_every_number_is_the_plain_models() -> None:
    assert not [text for of_rank in watched(over_processes, 3) for text in of_rank]


def test_in_one_process_too() -> None:
    examples = [Example(SEED + 1, number) for number in range(NUMBER)]
    assert not [text for number, each in enumerate(examples) for text in wrong(each, f"example {number}")]
