"""Random models, schedules and options of a step, over processes and in one: losses, gradients, norms and
outputs are the plain model's.

Beside `property_cases`: several stages per worker, every named schedule, "auto" with its change of rows,
pytrees, tied weights, changes in place, dropout, scaled gradients; and from step to step
other batch sizes and shapes, other layers (`joined_models.change_of`), weights that an optimizer moved, and
evaluation between them.
"""

from __future__ import annotations

import copy
import random

import torch
from joined_models import Change, change_of, joined_layers
from random_schedules import random_placement, random_schedule
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline import NAMED, Pipeline, Schedule, named, run_plain
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.pipeline.stage.trees import sizes

TIMEOUT_S = 30.0
NUM_STEPS = 4
WIDTH = 4
SCALE = 8.0
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


class Step:
    """What one step is given, and what happens before it and behind it."""

    def __init__(self, generator: random.Random, layers: list[nn.Module], fewest: int, most: int) -> None:
        self.batch_size = generator.randint(fewest, most)
        self.length = generator.choice([None, None, 1, 3, 5])  # of a sequence
        self.zeroed = generator.random() < 0.6
        self.changes: list[Change] = []
        self.refreshed = False
        while generator.random() < 0.6:
            change, tells = change_of(generator, layers)
            self.changes.append(change)
            self.refreshed |= tells
        # Examples of a forward-only pass behind it, and whether that is in inference mode.
        self.evaluated = generator.randint(fewest, most) if generator.random() < 0.3 else 0
        self.inference = generator.random() < 0.5

    def __str__(self) -> str:
        what = "+".join(change.__name__ for change in self.changes)
        examples = f"{self.batch_size}x{self.length}" if self.length else f"{self.batch_size}"
        behind = f" evaluates {self.evaluated}{' in inference mode' * self.inference}" * bool(self.evaluated)
        return f"{examples}{' adds' * (not self.zeroed)} {what}{behind}"


class Example:
    """Everything about example number `number`, the same in every process."""

    def __init__(self, seed: int, number: int) -> None:
        self.generator = generator = random.Random(f"joined {seed} {number}")
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
        most = 2 * self.num_microbatches + 1
        self.steps = [Step(generator, self.layers, 1, most) for _ in range(NUM_STEPS)]

    def _schedule(self, generator: random.Random) -> Schedule | str:
        way = generator.choice(["named", "named", "random"])
        if way == "named":
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
        schedule = self.schedule
        name = schedule if isinstance(schedule, str) else f"{schedule.name} {schedule.placement}"
        sizes_of = f"K={self.num_stages} workers={self.num_workers} M={self.num_microbatches}"
        steps = f"scaled={self.scaled} steps: {'; '.join(map(str, self.steps))}"
        layers = " ".join(type(layer).__name__ for layer in self.layers)
        return f"{sizes_of} {name} remat={self.remat} memory={self.share_memory} {steps}: {layers}"

    def problems(self, group: dist.ProcessGroup | None) -> list[str]:
        """What is wrong in this process."""
        plain, layers = copy.deepcopy(self.layers), self.layers
        pipeline = Pipeline(
            layers,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_workers=self.num_workers if isinstance(self.schedule, str) else None,
            schedule=self.schedule,
            remat=self.remat,
            cost=self.cost,
            group=group,
            timeout_s=TIMEOUT_S,
            share_memory=self.share_memory,
        )
        held = {stage.index for stage in pipeline.stages}
        is_first, is_last = 0 in held, self.num_stages - 1 in held
        scaler = pipeline.scaler(init_scale=SCALE) if self.scaled else None
        generator = torch.Generator().manual_seed(self.seed)
        model, found = nn.Sequential(*plain), []
        optimizers = [
            torch.optim.SGD([{"params": list(each.parameters())}], lr=0.05) for each in (model, pipeline)
        ]
        for number, step in enumerate(self.steps):
            for change in step.changes:
                change(plain)
                change(layers)
            if step.refreshed:
                pipeline.refresh()
            batch = _batch(step.batch_size, step.length, generator)
            target = torch.randn(step.batch_size, 1, generator=generator, dtype=torch.float64)
            if step.zeroed:
                pipeline.zero_grad()
                model.zero_grad()
            wanted = self._plain_step(number, plain, batch, target)
            loss = pipeline.step(
                batch.clone() if is_first else None,
                target if is_last else None,
                nn.functional.mse_loss,
                scaler=scaler,
            )
            if not torch.allclose(loss, wanted, **CLOSE):
                found.append(f"step {number}: the loss is {loss}, not {wanted}")
            found += [f"step {number}: {text}" for text in self._differences(pipeline, model)]
            if self.clips:
                norm = torch.linalg.vector_norm(
                    torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
                ) * (SCALE if self.scaled else 1)
                ours = pipeline.clip_grad_norm_(float("inf"))
                if not torch.allclose(ours, norm, **CLOSE):
                    found.append(f"step {number}: the norm is {ours}, not {norm}")
            if not self.scaled:
                for optimizer in optimizers:
                    optimizer.step()
            if step.evaluated:
                model.eval(), pipeline.eval()
                batch = _batch(step.evaluated, step.length, generator)
                with torch.inference_mode(step.inference):
                    output = pipeline(batch.clone() if is_first else None)
                with torch.no_grad():
                    expected = torch.cat([self._run(plain, x.clone()) for x in self._split(batch)])
                if is_last and not torch.allclose(output, expected, **CLOSE):
                    found.append(f"step {number}: an evaluation differs")
                model.train(), pipeline.train()
        pipeline.close()
        return found

    def _run(self, layers: list[nn.Module], batch: Tensor, step: int = 0, m: int = 0) -> Tensor:
        return run_plain(layers, batch, seed=0, step=step, microbatch=m)

    def _split(self, batch: Tensor) -> tuple[Tensor, ...]:
        return batch.split(sizes(len(batch), min(len(batch), self.num_microbatches)))

    def _plain_step(
        self,
        step: int,
        layers: list[nn.Module],
        batch: Tensor,
        target: Tensor,
    ) -> Tensor:
        # Gradients are summed outside of autograd, whose own sum goes wrong where two share memory.
        parameters = [p for p in nn.Sequential(*layers).parameters() if p.requires_grad]
        total = torch.zeros((), dtype=torch.float64)
        for m, (x, y) in enumerate(zip(self._split(batch), self._split(target), strict=True)):
            output = self._run(layers, x.clone(), step, m)
            loss = nn.functional.mse_loss(output, y) * (len(x) / len(batch))
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    before = parameter.grad
                    parameter.grad = gradient.clone() if before is None else before + gradient
            total += loss.detach()
        return total

    def _differences(self, pipeline: Pipeline, plain: nn.Module) -> list[str]:
        found = []
        wanted = dict(plain.named_parameters(remove_duplicate=False))
        largest = max(float(p.grad.abs().max()) for p in wanted.values() if p.grad is not None)
        for name, parameter in pipeline.named_parameters(remove_duplicate=False):
            gradient, ours = wanted[name].grad, parameter.grad
            if gradient is None or ours is None:
                if gradient is not None or ours is not None:
                    found.append(f"{name} has {'no' if ours is None else 'a'} gradient")
                continue
            if self.scaled:
                ours = ours / SCALE
            if not torch.allclose(ours, gradient, rtol=1e-11, atol=1e-12 * max(largest, 1.0)):
                found.append(f"the gradient of {name} is off by {float((ours - gradient).abs().max()):.1e}")
        return found


def _batch(examples: int, length: int | None, generator: torch.Generator) -> Tensor:
    shape = (examples, WIDTH) if length is None else (examples, length, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
