"""What a collective of several ranks takes and what it sends, by the ring.

A grid's replicas sum their gradients, sharded parameters are gathered, tensor-parallel layers sum inside
every action. NCCL and gloo do each of these over a ring where the tensors are large: all ranks send to their
next one at the same time, a piece of 1/n at a time, so that a hop lasts `latency + bytes / n / bandwidth`.

    collective       hops         sent by each rank      here
    all-gather       n - 1        (n - 1) / n x bytes    bytes of the whole tensor, gathered
    reduce-scatter   n - 1        (n - 1) / n x bytes    bytes of the whole tensor, before it is scattered
    all-reduce       2 (n - 1)    2 (n - 1) / n x bytes  a reduce-scatter, then an all-gather

Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009 (the ring, and
that nobody can send less); NVIDIA, nccl-tests, PERFORMANCE.md (the same factors as "bus bandwidth").

What it leaves out: trees, which NCCL prefers for small tensors on many hosts, sums inside a switch, the sum's
own arithmetic, and whatever else uses the link at the same time. One rank alone sends nothing and waits for
nobody. Fractions give exact results. Only the standard library is imported.
"""

from __future__ import annotations

from math import inf

from gpipe_bench.pipeline.plan.links import Link


def all_reduce_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Seconds until every one of `ranks` has the sum of their tensors of `num_bytes`.

    Raises:
        ValueError: no ranks, or bytes that are negative or not finite.
    """
    return 2 * _round_s(num_bytes, ranks, link)


def all_gather_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Seconds until every one of `ranks`, each with its share, has the whole tensor of `num_bytes`.

    Raises:
        ValueError: no ranks, or bytes that are negative or not finite.
    """
    return _round_s(num_bytes, ranks, link)


def reduce_scatter_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Seconds until every one of `ranks` has its share of the sum of their tensors of `num_bytes`.

    Raises:
        ValueError: no ranks, or bytes that are negative or not finite.
    """
    return _round_s(num_bytes, ranks, link)


def all_reduce_sent_bytes(num_bytes: float, ranks: int) -> float:
    """What each rank sends for one all-reduce of `num_bytes`."""
    return 2 * all_gather_sent_bytes(num_bytes, ranks)


def all_gather_sent_bytes(num_bytes: float, ranks: int) -> float:
    """What each rank sends for one all-gather to `num_bytes`, or one reduce-scatter of them."""
    _check(num_bytes, ranks)
    return num_bytes * (ranks - 1) / ranks


def _round_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Once round the ring less one hop. A ring of two goes there and back between the same two ranks, so a
    link whose directions share it carries two pieces at a time.
    """
    _check(num_bytes, ranks)
    at_once = 2 if ranks == 2 and link.shares_directions else 1
    return (ranks - 1) * (link.latency_s + at_once * link.occupied_s(num_bytes) / ranks)


def _check(num_bytes: float, ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"a collective of {ranks} ranks; give 1 or more")
    if not 0 <= num_bytes < inf:
        raise ValueError(f"a collective of {num_bytes} bytes; they must be finite and not negative")
