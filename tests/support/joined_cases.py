"""Random models, schedules and options of a step, over processes and in one: losses, gradients, norms and
outputs are the plain model's.

Several stages per worker, named schedules and random rows, pytrees, tied weights, changes in place, dropout,
scaled gradients; and from step to step other batch sizes and shapes, other layers
(`joined_models.change_of`), weights that an optimizer moved, and evaluation between them.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import torch
from joined_models import Change, change_of, joined_layers
from random_schedules import random_placement, random_schedule
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline import NAMED, Pipeline, Schedule, named, run_plain
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.stage.trees import sizes

TIMEOUT_S = 30.0
NUM_STEPS = 4
WIDTH = 4
SCALE = 8.0
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
mse_loss = nn.functional.mse_loss


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
        self.layers = joined_layers(generator, generator.randint(self.num_stages, self.num_stages + 5), WIDTH)
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
