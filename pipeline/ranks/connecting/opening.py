"""All connections of a rank, opened before the first step, in the same order on every rank.

Tensors, the loss and what the host reads go by ways of their own, so that none queues behind another; which
ones there are depends on the schedule and on whether messages go from device to device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.ranks.connecting.introduction import meet
from gpipe_bench.pipeline.ranks.connecting.ties import Ties
from gpipe_bench.pipeline.ranks.connecting.warm_up import warm_up
from gpipe_bench.pipeline.ranks.routes import Way, names_of_ways, peers
from gpipe_bench.pipeline.ranks.shared_memory import Neighbour
from gpipe_bench.pipeline.ranks.together import Together
from gpipe_bench.pipeline.ranks.wire import Connection


class Opened(NamedTuple):
    """The connections of a rank.

    Args:
        control: headers and outlines, which the host reads
        together: what all ranks exchange outside of steps, by `control`
        ways: activations and gradients, by the way that they take
        loss: the loss on its way from the last stage
        portals: what goes past stages, by the line and whether it is gradients
    """

    control: Connection
    together: Together
    ways: dict[Way, Connection]
    loss: Connection
    portals: dict[tuple[int, bool], Connection]


def open_connections(
    ties: Ties, schedule: Schedule, portals: Sequence[Edge] = (), *, share_memory: bool
) -> Opened:
    """Connects the rank of `ties` with all others, which must call too, and watches them from then on.

    `PeerError` or `StoreError` for a rank that does not come within the timeout; `ValueError`, on every rank
    alike, where two ranks use one GPU.
    """
    network, accelerated = ties.network, ties.is_accelerated
    ties.store.connect(ties.timeout_s)
    near: dict[int, Neighbour] = {}
    if not accelerated:
        near = meet(
            ties.store,
            network.rank,
            peers(schedule, network.rank, portals),
            willing=share_memory,
            timeout_s=ties.timeout_s,
        )
    # Headers and outlines are read by the host, so they never go through NCCL.
    control = ties.connect("control", near)
    together = Together(control, network.rank, network.size)
    if accelerated:
        _refuse_shared_devices(together.gather((network.identity(ties.device), str(ties.device))))
    ways = {
        way: ties.connect(name, near, accelerated=accelerated)
        for way, name in names_of_ways(schedule).items()
    }
    # Where hosts wait for messages it goes by `control`; with the gradients where these go the same way.
    loss = ways[True, False]
    if accelerated and schedule.placement:
        loss = ties.connect("loss", near, accelerated=accelerated)
    of_portals = _of_portals(ties, schedule, portals, near)
    ties.look_out()
    if accelerated:
        warm_up(ties, schedule, ways, loss, portals, of_portals)
    return Opened(control, together, ways, loss, of_portals)


def _of_portals(
    ties: Ties, schedule: Schedule, portals: Sequence[Edge], near: dict[int, Neighbour]
) -> dict[tuple[int, bool], Connection]:
    """One for all lines where tags tell their messages apart, else one for each that joins two ranks, and one
    back.
    """
    keys = [(line.number, gradients) for line in portals for gradients in (False, True)]
    if not ties.is_accelerated:
        return dict.fromkeys(keys, ties.connect("portals", near)) if keys else {}
    between = {
        line.number for line in portals if schedule.worker(line.source) != schedule.worker(line.target)
    }
    return {
        (number, gradients): ties.connect(f"portal {number}{' back' * gradients}", near, accelerated=True)
        for number, gradients in keys
        if number in between
    }


def _refuse_shared_devices(found: Sequence[tuple[str, str]]) -> None:
    """`ValueError`, on every rank alike, if two ranks use one device; `found` is what it is and what the
    rank calls it.
    """
    first: dict[str, int] = {}
    for rank, (identity, name) in enumerate(found):
        other = first.setdefault(identity, rank)
        if other != rank:
            raise ValueError(
                f"ranks {other} and {rank} both use one GPU ({identity}; {found[other][1]} on rank {other}, "
                f"{name} on rank {rank}), and NCCL connects no two ranks on one; start no more processes on "
                "a host than it has GPUs, give each a device of its own (`devices=`, LOCAL_RANK, "
                'CUDA_VISIBLE_DEVICES), or run on CPUs with devices="cpu"'
            )
