"""What a grid's collectives take: when each can begin beside a step's actions, and how long it takes.

Three kinds of a grid's dimensions cost three kinds of time:

    data parallel   a stage's gradients leave in buckets inside its last backward, in a fixed order, and the
                    end of the step waits for them; if the link keeps up, the last bucket alone is seen
    sharded         parameters are fetched from the beginning of the step on (ZeRO-2), or waited for in every
                    pass (ZeRO-3); gradients leave as above, scattered
    tensor parallel sums inside every action, which nothing hides

        worker 1   .........[1F0] ... [1B0      ]     the last backward, from its last layer to its first
        its link   [g0][g1]           .[b0][b1] [b2]  a bucket leaves when its gradients are there
                                                ^^^^  the end of the step waits

Gathers and buckets are what stands beside the actions (`replay(..., gathers=..., reductions=...)`), seconds
of an action what makes it longer (`replay(..., collective_s=...)`).

NCCL and gloo do each collective over a ring where the tensors are large: all ranks send to their next one at
the same time, a piece of 1/n at a time, so that a hop lasts `latency + bytes / n / bandwidth`.

    collective       hops         sent by each rank      here
    all-gather       n - 1        (n - 1) / n x bytes    bytes of the whole tensor, gathered
    reduce-scatter   n - 1        (n - 1) / n x bytes    bytes of the whole tensor, before it is scattered
    all-reduce       2 (n - 1)    2 (n - 1) / n x bytes  a reduce-scatter, then an all-gather

Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009 (the ring, and
that nobody can send less); NVIDIA, nccl-tests, PERFORMANCE.md (the same factors as "bus bandwidth").

What it leaves out: trees, which NCCL prefers for small tensors on many hosts, sums inside a switch, the sum's
own arithmetic, and whatever else uses the link at the same time. One rank alone sends nothing and waits for
nobody. Fractions give exact results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import inf

from gpipe_bench.pipeline.plan.links import Bucket, Gather, Link, bucket_bytes_of
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


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


def data_parallel(
    gradient_bytes: Sequence[Sequence[float]],
    replicas: int,
    link: Link,
    *,
    backward_s: Sequence[float] = (),
    bucket_bytes: float | None = None,
) -> tuple[Bucket, ...]:
    """The buckets of one stage whose replicas sum whole gradients by all-reduce.

    Args:
        gradient_bytes: of each layer in the order of the forward pass, of each of its parameters.
        replicas: ranks that hold the stage.
        link: between neighbours among them.
        backward_s: of each layer, which says when its gradients are there; by their bytes if not given.
        bucket_bytes: a bucket is closed when it holds as much; `bucket_bytes_of` the stage if not given.

    Raises:
        ValueError: other numbers of layers, or what a collective or a `Bucket` refuses.
    """
    if replicas == 1:
        return ()
    enough_bytes = bucket_bytes_of(sum(map(sum, gradient_bytes))) if bucket_bytes is None else bucket_bytes
    found, size = [], 0.0
    for layer, ready in _drained(gradient_bytes, backward_s):
        for tensor_bytes in reversed(layer):
            size += tensor_bytes
            if size >= enough_bytes:
                found.append(Bucket(ready, all_reduce_s(size, replicas, link)))
                size = 0
    if size:
        found.append(Bucket(1, all_reduce_s(size, replicas, link)))
    return tuple(found)


def sharded(
    gradient_bytes: Sequence[Sequence[float]],
    shards: int,
    link: Link,
    *,
    replicas: int = 1,
    replica_link: Link | None = None,
    backward_s: Sequence[float] = (),
    split: bool = False,
) -> tuple[Bucket, ...]:
    """The buckets of one stage whose parameters are sharded (ZeRO-2): each layer's gradients are scattered
    over `shards`, and each shard is then summed over `replicas` on `replica_link` (as `link`, if not given).
    Where backwards are `split` they leave behind the last W, all together.

    Arguments and errors are otherwise those of `data_parallel`.
    """
    if shards == 1:
        return data_parallel(gradient_bytes, replicas, replica_link or link, backward_s=backward_s)
    return tuple(
        Bucket(
            1 if split else ready,
            reduce_scatter_s(sum(layer), shards, link)
            + all_reduce_s(sum(layer) / shards, replicas, replica_link or link),
        )
        for layer, ready in _drained(gradient_bytes, backward_s)
        if layer
    )


def fetched(
    parameter_bytes: Sequence[float], shards: int, link: Link, *, forward_s: Sequence[float] = ()
) -> tuple[Gather, ...]:
    """What one stage of sharded parameters gathers once for a step, layer by layer (ZeRO-2).

    Args:
        parameter_bytes: of each layer, in the order of the forward pass.
        shards: ranks that hold a part of each.
        link: between neighbours among them.
        forward_s: of each layer, which says when it is needed; by the parameters' bytes if not given.

    Raises:
        ValueError: other numbers of layers, or what a collective refuses.
    """
    if shards == 1:
        return ()
    weights = _weights(parameter_bytes, forward_s)
    total = sum(weights)
    begins = accumulate(weights[:-1], initial=0)
    return tuple(
        Gather(min(begin / total, 1) if total else 0, all_gather_s(size, shards, link))
        for size, begin in zip(parameter_bytes, begins, strict=False)
        if size
    )


def pass_s(
    parameter_bytes: Sequence[float],
    compute_s: Sequence[float],
    shards: int,
    link: Link,
    *,
    ahead: bool,
    scattered: bool = False,
) -> float:
    """Seconds that one pass over a stage's layers is longer because each gathers its parameters (ZeRO-3).

    Args:
        parameter_bytes: of each layer, in the order in which the pass takes them.
        compute_s: of each layer.
        shards: ranks that hold a part of each.
        link: between neighbours among them.
        ahead: a layer's parameters are gathered while the one before computes, as on a GPU; otherwise every
            layer waits for its own, as on a CPU.
        scattered: the pass goes back, and each layer's gradients are scattered: while the next one computes,
            or waiting for it, likewise.

    Raises:
        ValueError: other numbers of layers, or what a collective refuses.
    """
    if len(parameter_bytes) != len(compute_s):
        raise ValueError(f"{len(compute_s)} layers take time and {len(parameter_bytes)} have parameters")
    gathers = [all_gather_s(size, shards, link) if size else 0 for size in parameter_bytes]
    scatters = gathers if scattered else [0] * len(gathers)  # by the ring they take the same time
    if not ahead:
        return sum(gathers) + sum(scatters)
    # One link carries both: a layer's gather goes before the gradients of the layer that was taken before.
    link_s = there_s = sum(gathers[:1])
    now_s: float = 0
    for seconds, following, scatter in zip(compute_s, [*gathers[1:], 0], scatters, strict=False):
        now_s = max(now_s, there_s)
        if following:
            link_s = there_s = max(link_s, now_s) + following
        now_s += seconds
        if scatter:
            link_s = max(link_s, now_s) + scatter
    return max(now_s, link_s) - sum(compute_s)


def every_pass_s(
    schedule: Schedule, forward_s: Sequence[float], backward_s: Sequence[float]
) -> Callable[[Action], float]:
    """Seconds that each action waits where every pass gathers its parameters (ZeRO-3).

    Args:
        schedule: whose actions they are.
        forward_s: of a pass forward by stage, as `pass_s` says; a recomputation is one, too.
        backward_s: of a pass back.

    Raises:
        ValueError: backwards are split, and W has no layer to gather for.
    """
    if any(action.kind in (Kind.I, Kind.W) for action in schedule):
        raise ValueError(
            f"schedule {schedule.name!r} splits backwards, and its W would find its parameters sharded: "
            "gather once in a step (ZeRO-2)"
        )
    return lambda action: (backward_s if action.kind is Kind.B else forward_s)[action.stage]


def tensor_parallel_s(
    forward_bytes: Sequence[Iterable[float]],
    ranks: int,
    link: Link,
    *,
    backward_bytes: Sequence[Iterable[float]] = (),
) -> Callable[[Action], float]:
    """Seconds that each action waits for the sums of its tensor-parallel layers.

    Args:
        forward_bytes: by stage, of each all-reduce in the forward pass of one micro-batch (two in a layer of
            a Transformer, each of the activations that pass between layers). With sequence parallelism an
            all-gather and a reduce-scatter take the place of each, which the ring does in the same time.
        ranks: that share a layer.
        link: between neighbours among them.
        backward_bytes: on the way back, where the inputs' gradients are summed; as many if not given.
    """
    ahead = [sum(all_reduce_s(size, ranks, link) for size in sizes) for sizes in forward_bytes]
    back = [sum(all_reduce_s(size, ranks, link) for size in sizes) for sizes in backward_bytes] or ahead

    def seconds(action: Action) -> float:
        match action.kind:
            case Kind.F | Kind.R:
                return ahead[action.stage]
            case Kind.B | Kind.I:
                return back[action.stage]
        return 0

    return seconds


def _drained(
    gradient_bytes: Sequence[Sequence[float]], backward_s: Sequence[float]
) -> list[tuple[Sequence[float], float]]:
    """The layers as the backward takes them, each with the share after which its gradients are there."""
    weights = _weights([sum(layer) for layer in gradient_bytes], backward_s)
    total = sum(weights)
    ends = accumulate(reversed(weights))
    # Rounding must not take a share beyond the whole.
    return [
        (layer, min(end / total, 1) if total else 1)
        for layer, end in zip(reversed(gradient_bytes), ends, strict=True)
    ]


def _weights(sizes: Sequence[float], seconds: Sequence[float]) -> Sequence[float]:
    if seconds and len(seconds) != len(sizes):
        raise ValueError(f"{len(seconds)} layers take time and {len(sizes)} have parameters")
    return seconds or sizes
