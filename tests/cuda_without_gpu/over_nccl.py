"""What the processes of the tests do; a module of its own, so that they can import it."""

from __future__ import annotations

import torch
from counting import counting, counts
from torch import distributed, nn

from gpipe_bench.pipeline import Pipeline


def steady_step(schedule: str, remat: str) -> tuple[dict[str, int], int]:
    """What a step over NCCL asks for when two have been taken; and the queues of the device."""
    device, size = torch.device("cuda", distributed.get_rank()), distributed.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1)) for _ in range(2 * size)]
    data = torch.randn(64, 64)
    with Pipeline(
        layers, num_stages=size, num_microbatches=8, schedule=schedule, remat=remat, devices=device,
        group=distributed.group.WORLD,
    ) as pipeline:  # fmt: skip
        for _ in range(3):
            pipeline.step(data, data.to(device), nn.functional.mse_loss)
        data_there = data.to(device)
        with counting() as found:
            pipeline.step(data, data_there, nn.functional.mse_loss)
        return found, counts()["connections"]


MESSAGES, KERNELS = 300, 20


def far_ahead(in_order: bool) -> float:
    """Rank 1 gives its device hundreds of messages, of sizes that follow no power of two, before rank 0 asks
    for any, and the last when rank 0 has given its own device all it has. What rank 0's device takes for the
    kernels behind the messages, in ms; `in_order` or it asks for the last two the other way round.
    """
    rank, device = distributed.get_rank(), torch.device("cuda", distributed.get_rank())
    tensors = [torch.zeros(1 + number % 7, device=device) for number in range(MESSAGES)]
    if rank == 0 and not in_order:
        tensors[-2:] = reversed(tensors[-2:])
    move = distributed.irecv if rank == 0 else distributed.isend

    def moved(those: slice) -> list[distributed.Work | None]:
        return [move(tensor, 1 - rank) for tensor in tensors[those]]

    def met() -> None:
        distributed.all_reduce(torch.zeros(1))  # of the hosts

    works = moved(slice(1))  # when the first is given, both are there
    if rank == 1:
        works += moved(slice(1, -1))
        met()
        met()
        works += moved(slice(-1, None))
    else:
        met()
        works += moved(slice(1, None))
    for work in works:
        assert work is not None
        work.wait()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(KERNELS):
        tensors[0].add_(1)
    last.record()
    if rank == 0:
        met()
    last.synchronize()
    return first.elapsed_time(last)
