"""How to train a model of one's own on four GPUs: a plan, and the script that trains as planned.

    python examples/own_model_plan.py

The command line asks the same: cd examples && gpipe-bench plan own_model_plan:build --accelerators 4
--memory-gib 24 --batch-size 64 --device-type a10 --precision bf16 --script train.py
"""

from pathlib import Path

import torch
from torch import nn

from gpipe_bench.planner import Request, link_within, model_of, plan


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed_forward(x)


def loss_fn(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def build(blocks=24, width=2048, heads=16, vocabulary=50257, length=1024):
    """Layers, an example of inputs and targets, and the loss; called on torch's meta device."""
    blocks = [Block(width, heads) for _ in range(blocks)]
    layers = [nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary, bias=False)]
    tokens = torch.zeros(8, length, dtype=torch.int64)
    return layers, tokens, tokens, loss_fn


if __name__ == "__main__":
    model = model_of("own_model_plan:build", batch_size=64)
    machines = {"accelerators": 4, "memory_bytes": 24 * 2**30, "device_type": "a10"}
    training = {"batch_size": 64, "precision": "bfloat16"}
    found = plan(model, Request(**machines, link=link_within("a10"), **training))
    for each in found.predictions:
        way = f"{each.candidate.grid}, {each.candidate.schedule}, M = {each.candidate.num_microbatches}"
        print(f"{way}: {each.step_s:.2f} s, {each.peak / 2**30:.1f} GiB")
    Path("train.py").write_text(found.script(), encoding="utf-8")
    print(f"the first as a script: {found.command('train.py')}")
