"""A first real run: AmoebaNet-D on handwritten digits, two stages in two processes.

    python -m gpipe_bench.experiments.first_run

or with as many stages as processes, on one host or several, started by torchrun (docs/running.md):

    torchrun --nproc-per-node 2 -m gpipe_bench.experiments.first_run

About half a minute on two cores; where there are GPUs it runs on the CPU too, because it is about processes.
It shows the engine as a user meets it (five lines in `train`), trains on real images (scikit-learn's bundled
digits: nothing is downloaded) and fails if the loss does not halve.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, distributed

from gpipe_bench.models import MODELS, loss_fn
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.ranks.launch import launch, start_process

MODEL = {"num_layers": 3, "num_filters": 16, "num_classes": 10, "image_size": 32, "aux_head": False}
BATCH_SIZE, NUM_MICROBATCHES, NUM_STAGES = 64, 4, 2
LEARNING_RATE = 0.05


def digits() -> tuple[Tensor, Tensor]:
    """1,797 digits as images (N, 3, 32, 32) in [-1, 1], and their classes (N,)."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    images = torch.nn.functional.interpolate(images, size=32, mode="bilinear", align_corners=False)
    return images.expand(-1, 3, -1, -1).contiguous(), torch.tensor(found.target)


def train(num_steps: int, seed: int = 0) -> list[float]:
    """One process: builds its stage of the model and takes part in every step. Returns the losses."""
    torch.manual_seed(seed)
    images, classes = digits()
    model, compute_loss = MODELS["amoebanet-d"](**MODEL), loss_fn("amoebanet-d", **MODEL)
    pipeline = Pipeline(
        model,
        num_stages=distributed.get_world_size(),
        num_microbatches=NUM_MICROBATCHES,
        group=distributed.group.WORLD,
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=LEARNING_RATE, momentum=0.9)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    losses = []
    for step in range(num_steps):
        chosen = order[torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE) % len(order)]
        losses.append(pipeline.step(images[chosen], classes[chosen], compute_loss).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if the loss has not halved."""
    parser = argparse.ArgumentParser(prog="python -m gpipe_bench.experiments.first_run", description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    num_steps = parser.parse_args(arguments).steps
    if num_steps < 2:
        parser.error(f"--steps {num_steps}: at least 2 are needed to see the loss fall")
    if distributed.is_torchelastic_launched():
        with start_process(device="cpu"):
            losses = train(num_steps)
            num_stages = distributed.get_world_size()
            if distributed.get_rank() > 0:  # every process knows the loss; one reports it
                return 0
    else:
        per_process, num_stages = launch(train, NUM_STAGES, num_steps, device="cpu"), NUM_STAGES
        losses = per_process[0]
        if any(each != losses for each in per_process):
            print("error: the processes disagree about the loss", file=sys.stderr)
            return 1
    for step in range(0, num_steps, max(1, num_steps // 10)):
        print(f"step {step:4d}  loss {losses[step]:.3f}")
    tail = losses[-max(1, num_steps // 10) :]
    final = sum(tail) / len(tail)
    print(f"AmoebaNet-D (3, 16), {num_stages} processes, {NUM_MICROBATCHES} micro-batches: ", end="")
    print(f"loss {losses[0]:.3f} -> {final:.3f}")
    return 0 if final < losses[0] / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
