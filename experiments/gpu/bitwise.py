"""Whether the number of stages shows in the weights, to the bit, on this device.

    python -m gpipe_bench.experiments.gpu.bitwise --device cuda

A tiny AmoebaNet-D (batch normalization, dropout) and a tiny Transformer (dropout) take optimizer steps as 1,
2 and 4 stages, in float32 and under autocast to bfloat16, recomputing or not. At the same micro-batches all
weights must be the same bits. Operations whose result depends on the order in which a GPU's threads arrive
are replaced by their deterministic forms, where torch has one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline, devices

STAGES = (1, 2, 4)
NUM_STEPS, NUM_MICROBATCHES, BATCH_SIZE = 3, 4, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "amoebanet-d": {
        "num_layers": 3, "num_filters": 16, "num_classes": 10, "image_size": 67, "aux_head": True,
        "dropout": 0.2,
    },
    "transformer-lm": {
        "num_layers": 4, "d_model": 32, "ffn_dim": 64, "num_heads": 4, "vocab_size": 100, "seq_len": 16,
        "dropout": 0.1,
    },
}  # fmt: skip


def digest(model: nn.Module) -> str:
    """SHA-256 of everything that `state_dict` has, in its order."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(name: str, num_stages: int, remat: str, device: torch.device, dtype: torch.dtype) -> str:
    """The digest of the weights after a few steps."""
    options = OPTIONS[name]
    torch.manual_seed(0)
    model = MODELS[name](**options).to(device)
    pipeline = Pipeline(model, num_stages=num_stages, num_microbatches=NUM_MICROBATCHES, remat=remat)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    compute_loss = loss_fn(name, **options)
    for _ in range(NUM_STEPS):
        batch, target = example_batch(name, BATCH_SIZE, generator=generator, **options)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = pipeline.step(_to(batch, device), _to(target, device), compute_loss)
        optimizer.step()
        optimizer.zero_grad()
    if not torch.isfinite(loss):
        raise RuntimeError(f"{name}: the loss is {float(loss)}, so equal weights would say nothing")
    return digest(model)


def _to(tree: Any, device: torch.device) -> Any:
    return tree.to(device) if isinstance(tree, torch.Tensor) else tuple(each.to(device) for each in tree)


def check(
    device: torch.device, names: Sequence[str] = tuple(OPTIONS), stages: Sequence[int] = STAGES
) -> list[str]:
    """One line for each model, precision and way to recompute whose weights depend on the stages."""
    wrong = []
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            for remat in ("always", "never"):
                found = {k: train(name, k, remat, device, dtype) for k in stages}
                same = len(set(found.values())) == 1
                what = f"{name}, {str(dtype).removeprefix('torch.')}, remat {remat}, K = {list(found)}"
                print(f"{what}: {'the same bits' if same else 'DIFFERENT'}", flush=True)
                if not same:
                    wrong.append(what)
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if weights differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    device = devices.current(parser.parse_args(arguments).device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    return 1 if check(device) else 0


if __name__ == "__main__":
    sys.exit(main())
