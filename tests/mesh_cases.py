"""What four processes do together on grids of replicas and pipelines; `test_mesh` starts them once and
reports each case as a test.

Every replica gets a share of the batch of its own, and only the first stage's batch and the last stage's
target count.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable

import torch
from mesh_grids import CLOSE, assert_gradients, joint_step, mesh_of, on_grid, own_part
from ranks import raises
from tiny_models import everything, everything_batch, mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench import models

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss
AMOEBANET = {
    "num_layers": 3, "num_filters": 8, "num_classes": 10, "image_size": 67, "aux_head": True, "dropout": 0.2,
}  # fmt: skip
TRANSFORMER = {
    "num_layers": 4, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "vocab_size": 50, "seq_len": 6,
    "dropout": 0.2,
}  # fmt: skip
UNEVEN = (7, 4, 5, 6)
HOWS = (
    ("gpipe", "always"), ("gpipe", "never"), ("1f1b", "always"), ("1f1b", "never"), ("zb-h1", "never"),
    ("zb-h1", "always"), ("interleaved", "never"), ("zb-v", "always"),
)  # fmt: skip


def transparency(dp: int, pp: int) -> None:
    """The first step's buckets leave after the last backward, the second step's within it."""
    parts = [everything_batch(UNEVEN[r], seed=r) for r in range(dp)]
    model = seeded(everything)
    plain = []
    for step in range(2):
        plain.append(joint_step(model, parts, cross_entropy, 3, step=step))
        model.zero_grad()
    for schedule, remat in HOWS:
        pipeline = on_grid(dp, pp, seeded(everything), 3, schedule=schedule, remat=remat)
        for step in range(2):
            loss = pipeline.step(*own_part(pipeline, parts), cross_entropy)
            torch.testing.assert_close(loss, plain[step].loss, **CLOSE)
            assert_gradients(pipeline, plain[step])
            pipeline.zero_grad()
        pipeline.close()


def transparency_2_1() -> None:
    transparency(2, 1)


def transparency_1_2() -> None:
    transparency(1, 2)


def transparency_2_2() -> None:
    transparency(2, 2)


def transparency_4_1() -> None:
    transparency(4, 1)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case for case in (transparency_2_1, transparency_1_2, transparency_2_2, transparency_4_1)
}


def run_all(names: list[str]) -> dict[str, tuple[str | None, float]]:
    """Runs cases one after the other; gives each one's traceback, or None, and its seconds."""
    outcomes: dict[str, tuple[str | None, float]] = {}
    for name in names:
        start = time.monotonic()
        try:
            CASES[name]()
            trace = None
        except Exception:
            trace = traceback.format_exc()
        outcomes[name] = (trace, time.monotonic() - start)
        dist.barrier()
    return outcomes
