"""Two sentences about what GPipe takes and keeps, put to the engine on small networks.

"Any network that can be expressed as a sequence of layers": every network of the zoo trains a few steps on
several stages, and its weights are compared with those of one stage, bit by bit. "The moving average of the
sufficient statistics using the entire mini-batch": what a batch normalization has kept after a step in
micro-batches, over what the same layer keeps that sees the mini-batch whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpipe_bench.experiments.computed.answer import Computed, over
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline

_AMOEBANET = {"num_layers": 3, "num_filters": 16, "num_classes": 10, "image_size": 32, "aux_head": False}
_TEXT = {"d_model": 32, "num_heads": 2, "vocab_size": 100, "seq_len": 16}
NETWORKS: dict[str, dict[str, Any]] = {
    **{f"amoebanet-{kind}": _AMOEBANET for kind in "abcd"},
    "transformer-lm": {**_TEXT, "num_layers": 4, "ffn_dim": 64, "dropout": 0.1},
    "transformer-seq2seq": {**_TEXT, "num_layers": 2, "ffn_dim": 64, "head_dim": 16, "dropout": 0.1},
    "resnet101": {"num_classes": 10, "image_size": 32, "num_blocks": (1, 1, 2, 1), "num_filters": 8},
    "gpt2": {**_TEXT, "num_layers": 4},
    "llama": {**_TEXT, "num_layers": 4, "ffn_dim": 64},
    "unet": {"num_convs": 1, "num_filters": 4, "depth": 2, "image_size": 16},
}
"""Every network of the zoo, small; dropout and batch normalization are on where it has them."""
STAGES = (2, 4)
NUM_MICROBATCHES, BATCH_SIZE, NUM_STEPS = 4, 8, 3


def trained() -> list[Computed]:
    """Both sentences."""
    return [networks(), statistics()]


def networks() -> Computed:
    """The share of the networks whose weights are the same bits with every number of stages."""
    same = [name for name in MODELS if len({_weights(name, count) for count in (1, *STAGES)}) == 1]
    others = [name for name in MODELS if name not in same]
    return Computed(
        row="networks that train to the same weights whatever K is",
        column="share of the zoo",
        value=len(same) / len(MODELS),
        unit="ratio",
        what=f"{len(same)} of {len(MODELS)} small networks, {NUM_STEPS} steps on 1, 2 and 4 stages, every bit"
        + (f"; not {', '.join(others)}" if others else ""),
        provenance="measured",
    )


def _weights(name: str, num_stages: int) -> bytes:
    """All weights and buffers after a few steps from one seed."""
    torch.manual_seed(0)
    options = NETWORKS[name]
    pipeline = Pipeline(MODELS[name](**options), num_stages=num_stages, num_microbatches=NUM_MICROBATCHES)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    compute_loss, draws = loss_fn(name, **options), torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        inputs, target = example_batch(name, BATCH_SIZE, generator=draws, **options)
        pipeline.step(inputs, target, compute_loss)
        optimizer.step()
        optimizer.zero_grad()
    values = sorted(pipeline.state_dict().items())
    return b"".join(value.detach().contiguous().numpy().tobytes() for _, value in values)


def statistics() -> Computed:
    """Running mean and variance after one step of several micro-batches over those of the mini-batch."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 10)]
    model = nn.Sequential(*layers).double()
    images, classes = torch.randn(BATCH_SIZE, 3, 8, 8).double(), torch.randint(10, (BATCH_SIZE,))
    whole = nn.BatchNorm2d(8).double()
    whole(model[0](images))
    pipeline = Pipeline(model, num_stages=2, num_microbatches=NUM_MICROBATCHES)
    pipeline.step(images, classes, nn.functional.cross_entropy)
    kept = pipeline.state_dict()
    ratios = [
        float(ratio)
        for name in ("running_mean", "running_var")
        for ratio in kept[f"1.{name}"] / whole.state_dict()[name]
    ]
    return Computed(
        row="batch normalization's running statistics over the mini-batch's",
        column=f"M={NUM_MICROBATCHES}",
        value=sum(ratios) / len(ratios),
        unit="ratio",
        what=f"means and variances of {len(ratios) // 2} channels after one step, float64",
        provenance="measured",
        spread=over("which channel", ratios),
    )
