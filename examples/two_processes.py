"""Trains a small Llama as a pipeline, one stage in each process, on GPUs where there are any.

torchrun --nproc-per-node 2 examples/two_processes.py CHECKPOINT    # again: goes on where it was ended
"""

import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from gpipe_bench.models import MODELS
from gpipe_bench.pipeline import Pipeline, checkpoint, start_process

EPOCHS = 3


def build():
    torch.manual_seed(0)  # the same weights in every process
    return MODELS["llama"](num_layers=4, d_model=64, ffn_dim=128, num_heads=4, vocab_size=256)


def next_byte(logits, text):
    return cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def train(folder, device):
    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 32, 16)  # 32 bytes in each row
    training, held_out = text[:-16], text[-16:].to(device)
    layers, group = build(), dist.group.WORLD
    pipeline = Pipeline(layers, num_microbatches=4, schedule="1f1b", devices=device, group=group)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    if (folder / ".metadata").exists():
        checkpoint.load(folder, pipeline, optimizer)  # weights, the optimizer's state, the number of steps
        scheduler.load_state_dict(torch.load(folder.with_suffix(f".{pipeline.num_steps}")))
    for epoch in range(scheduler.last_epoch, EPOCHS):
        order = torch.Generator().manual_seed(epoch)  # the same in every process
        for batch in DataLoader(training, batch_size=16, shuffle=True, generator=order):
            loss = pipeline.step(batch.to(device), batch.to(device), next_byte)
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        logits = pipeline.eval()(held_out)  # in the process of the last stage; None in the others
        pipeline.train()
        if logits is not None:
            print(f"epoch {epoch + 1}: {loss:.6f}, held out {next_byte(logits, held_out):.6f}", flush=True)
            torch.save(scheduler.state_dict(), folder.with_suffix(f".{pipeline.num_steps}"))
        checkpoint.save(folder, pipeline, optimizer)
    pipeline.close()


if __name__ == "__main__":
    with start_process() as device:
        train(Path(sys.argv[1]), device)
