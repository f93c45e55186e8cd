"""The collectives of a step's stages, as the replay takes them: when each can begin and how long it takes.

Three kinds of a grid's dimensions cost three kinds of time:

    data parallel   a stage's gradients leave in buckets inside its last backward, in a fixed order, and the
                    end of the step waits for them; a last bucket alone is seen, if the link keeps up
    sharded         what is gathered is waited for inside an action; gradients leave as above, scattered
    tensor parallel sums inside every action, which nothing hides

        worker 1   1B3 1B2 1B1 [1B0      ]          the last backward, from its last layer to its first
        its link               .[b0][b1] [b2]       a bucket leaves when its gradients are there
                                        ^ ^^^ the end of the step waits

`Bucket`s are what the first kind comes to (`replay(..., reductions=...)`), seconds of an action what the
others do (`replay(..., collective_s=...)`). Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gpipe_bench.pipeline.plan.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule

BUCKET_BYTES = 25 * 2**20
"""A bucket leaves as soon as it holds so much: what torch's DistributedDataParallel has as its default."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together.

    Args:
        ready: share of the stage's last backward (its last B or W) after which they are all there, 0 to 1
        takes_s: the reduction, once it has the link for itself

    Raises:
        ValueError: a share outside 0 to 1, or seconds that are negative.
    """

    ready: float
    takes_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.ready <= 1:
            raise ValueError(f"a bucket is ready after {self.ready} of the last backward; give 0 to 1")
        if not self.takes_s >= 0:
            raise ValueError(f"a bucket takes {self.takes_s} s; give seconds, 0 or more")


def data_parallel(
    gradient_bytes: Sequence[Sequence[float]],
    replicas: int,
    link: Link,
    *,
    backward_s: Sequence[float] = (),
    bucket_bytes: float = BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """The buckets of one stage whose replicas sum whole gradients by all-reduce.

    Args:
        gradient_bytes: of each layer in the order of the forward pass, of each of its parameters.
        replicas: ranks that hold the stage.
        link: between neighbours among them.
        backward_s: of each layer, which says when its gradients are there; by their bytes if not given.
        bucket_bytes: a bucket is closed when it holds as much.

    Raises:
        ValueError: other numbers of layers, or what a collective or a `Bucket` refuses.
    """
    if replicas == 1:
        return ()
    found, size = [], 0.0
    for layer, ready in _drained(gradient_bytes, backward_s):
        for tensor_bytes in reversed(layer):
            size += tensor_bytes
            if size >= bucket_bytes:
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
) -> tuple[Bucket, ...]:
    """The buckets of one stage whose parameters are sharded: each layer's gradients are scattered over
    `shards`, and each shard is then summed over `replicas` on `replica_link` (as `link`, if not given).

    Arguments and errors are otherwise those of `data_parallel`.
    """
    if shards == 1:
        return data_parallel(gradient_bytes, replicas, replica_link or link, backward_s=backward_s)
    return tuple(
        Bucket(
            ready,
            reduce_scatter_s(sum(layer), shards, link)
            + all_reduce_s(sum(layer) / shards, replicas, replica_link or link),
        )
        for layer, ready in _drained(gradient_bytes, backward_s)
        if layer
    )


def gathering_s(
    parameter_bytes: Sequence[float], compute_s: Sequence[float], shards: int, link: Link, *, ahead: bool
) -> float:
    """Seconds that one pass over a stage's layers is longer because their parameters are gathered first.

    Args:
        parameter_bytes: of each layer, in the order in which the pass takes them.
        compute_s: of each layer.
        ahead: a layer's parameters are gathered while the one before computes, as on a GPU; otherwise every
            layer waits for its own, as on a CPU.

    Raises:
        ValueError: other numbers of layers, or what a collective refuses.
    """
    if len(parameter_bytes) != len(compute_s):
        raise ValueError(f"{len(parameter_bytes)} layers have parameters and {len(compute_s)} take time")
    gathers = [all_gather_s(size, shards, link) if size else 0 for size in parameter_bytes]
    if not ahead:
        return sum(gathers)
    return sum(gathers[:1]) + sum(
        max(gather - before, 0) for before, gather in zip(compute_s, gathers[1:], strict=False)
    )


def gathered_s(
    schedule: Schedule, level: int, forward_s: Sequence[float], backward_s: Sequence[float] = ()
) -> Callable[[Action], float]:
    """Seconds that each action waits for parameters that are sharded over ranks.

    Args:
        schedule: whose actions they are.
        level: 2, gathered once in a step, by each stage's first forward; or 3, by every pass over the layers.
        forward_s: of one pass forward by stage, as `gathering_s` says; a recomputation is one, too.
        backward_s: of one pass back; as long as forward if not given.

    Raises:
        ValueError: another level; level 3 where backwards are split, because W has no layer to gather for.
    """
    if level not in (2, 3):
        raise ValueError(f"ZeRO level {level}; parameters are gathered at levels 2 and 3")
    if level == 3 and any(action.kind in (Kind.I, Kind.W) for action in schedule):
        raise ValueError(
            f"schedule {schedule.name!r} splits backwards, and its W would find its parameters sharded: "
            "use level 2"
        )
    back = backward_s or forward_s
    first = {
        stage: next(action for action in schedule.row(stage) if action.kind is Kind.F)
        for stage in range(schedule.num_stages)
    }

    def seconds(action: Action) -> float:
        if level == 2:
            return forward_s[action.stage] if action == first[action.stage] else 0
        return back[action.stage] if action.kind is Kind.B else forward_s[action.stage]

    return seconds


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
    weights = [*(backward_s or map(sum, gradient_bytes))]
    if len(weights) != len(gradient_bytes):
        raise ValueError(f"{len(weights)} layers take time and {len(gradient_bytes)} have gradients")
    total = sum(weights)
    ends = accumulate(reversed(weights))
    # Rounding must not take a share beyond the whole.
    return [
        (layer, min(end / total, 1) if total else 1)
        for layer, end in zip(reversed(gradient_bytes), ends, strict=True)
    ]
