"""An engine of one's own, complete: all micro-batches forward, then all backward, nothing overlapped.

    cd examples && gpipe-bench check-engine own_engine:FillDrain    # is it right? In seconds

All stages in one process or one in each; it recomputes with torch's checkpoint and sends Python objects.
docs/own-engine.md says what each part is for, and how to set it beside other engines.
"""

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


class FillDrain:
    def __init__(self, setup):
        self.setup, self.count = setup, setup.num_microbatches
        self.stages = [nn.Sequential(*setup.stage_layers(stage)) for stage in setup.local_stages]
        self.first = 0 in setup.local_stages
        self.last = setup.num_stages - 1 in setup.local_stages

    def step(self, batch, target, loss_fn):
        if len(target) % self.count:
            raise ValueError(f"{len(target)} examples do not divide into {self.count} micro-batches")
        kept, losses = [], []
        parts = zip(batch.chunk(self.count), target.chunk(self.count), strict=True)
        for m, (value, wanted) in enumerate(parts):
            arrived = () if self.first else tuple(t.requires_grad_() for t in self.receive(-1))
            if arrived:
                value = arrived if len(arrived) > 1 else arrived[0]
            for stage in self.stages:
                value = self.forward(stage, value, m)
            if self.last:
                value = loss_fn(value, wanted) / self.count
                losses.append(value.detach())
            outputs = value if isinstance(value, tuple) else (value,)
            if not self.last:
                self.send(outputs, +1)
            kept.append((arrived, outputs))
        while kept:
            arrived, outputs = kept.pop()
            torch.autograd.backward(outputs, None if self.last else self.receive(+1))
            if not self.first:
                self.send([leaf.grad for leaf in arrived], -1)
        return sum(losses) if self.last else None

    def forward(self, stage, value, m):
        keep = self.setup.remat == "except_last" and m == self.count - 1
        if self.setup.remat == "never" or keep:
            return stage(value)
        return checkpoint(stage, value, use_reentrant=False)

    def send(self, tensors, direction):
        content = [tensor.detach() for tensor in tensors]
        dist.send_object_list([content], self.setup.group.rank() + direction, self.setup.group)

    def receive(self, direction):
        content = [None]
        dist.recv_object_list(content, self.setup.group.rank() + direction, self.setup.group)
        return content[0]
