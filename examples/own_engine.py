"""An engine of one's own, complete: all micro-batches forward, then all backward, nothing overlapped.

    cd examples && gpipe-bench check-engine own_engine:FillDrain    # is it right? In seconds

All stages in one process or one in each; it recomputes with torch's checkpoint and sends Python objects.
docs/own-engine.md says what each part is for, and how to set it beside other engines.
"""

from contextlib import contextmanager, nullcontext

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
        every = [
            p for k in range(setup.num_stages) for p in nn.Sequential(*setup.stage_layers(k)).parameters()
        ]
        if setup.group is not None and len(set(every)) < len(every):
            raise ValueError("a weight that two processes share is not summed over them")

    def step(self, batch, target, loss_fn):
        if len(target) % self.count:
            raise ValueError(f"{len(target)} examples do not divide into {self.count} micro-batches")
        kept, losses = [], []
        parts = zip(batch.chunk(self.count), target.chunk(self.count), strict=True)
        for m, (value, wanted) in enumerate(parts):
            arrived = () if self.first else self.receive(-1)
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
            kept.append((arrived, [output for output in outputs if output.requires_grad]))
        while kept:
            arrived, outputs = kept.pop()
            gradients = None if self.last else self.receive(+1)
            if outputs:  # masks need no gradient, and neither do layers that are frozen
                torch.autograd.backward(outputs, gradients)
            if not self.first:
                self.send([leaf.grad for leaf in arrived if leaf.requires_grad], -1)
        return sum(losses) if self.last else None

    def forward(self, stage, value, m):
        keep = self.setup.remat == "except_last" and m == self.count - 1
        if self.setup.remat == "never" or keep:
            return stage(value)
        contexts = nullcontext(), as_it_was(stage)
        return checkpoint(stage, value, use_reentrant=False, context_fn=lambda: contexts)

    def send(self, tensors, direction):
        content = [(tensor.detach(), tensor.requires_grad) for tensor in tensors]
        dist.send_object_list([content], self.setup.group.rank() + direction, self.setup.group)

    def receive(self, direction):
        content = [None]
        dist.recv_object_list(content, self.setup.group.rank() + direction, self.setup.group)
        return tuple(tensor.requires_grad_(needs_gradient) for tensor, needs_gradient in content[0])


@contextmanager
def as_it_was(stage):
    """A recomputation moves no averages of batch normalization: the forward has."""
    before = [buffer.clone() for buffer in stage.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(stage.buffers(), before, strict=True):
            buffer.data.copy_(value)
