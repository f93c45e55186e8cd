"""Costs of a grid's collectives: when each can begin beside a step's actions, and how long it takes.

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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf

from gpipe_bench.pipeline.plan.links import Bucket, Gather, Link, bucket_bytes_of
from gpipe_bench.planner.candidate import WRAPPED, Grid
from gpipe_bench.planner.costs import Costs, ShardCosts, inside
from gpipe_bench.planner.request import Topology


def all_reduce_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Seconds until every one of `ranks` has the sum of their tensors of `num_bytes`. Errors as of
    `all_gather_s`.
    """
    return 2 * all_gather_s(num_bytes, ranks, link)


def all_gather_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Seconds until every one of `ranks`, each with its share, has the whole tensor of `num_bytes`; or until
    each has its share of the sum of such tensors (reduce-scatter).

    That is once round the ring less one hop. A ring of two goes there and back between the same two ranks, so
    a link whose directions share it carries two pieces at a time.

    Raises:
        ValueError: no ranks, or bytes that are negative or not finite.
    """
    if ranks < 1:
        raise ValueError(f"a collective of {ranks} ranks; give 1 or more")
    if not 0 <= num_bytes < inf:
        raise ValueError(f"a collective of {num_bytes} bytes; they must be finite and not negative")
    at_once = 2 if ranks == 2 and link.shares_directions else 1
    return (ranks - 1) * (link.latency_s + at_once * link.occupied_s(num_bytes) / ranks)


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
    return tuple(
        Bucket(
            1 if split else ready,
            all_gather_s(sum(layer), shards, link)
            + all_reduce_s(sum(layer) / shards, replicas, replica_link or link),
        )
        for layer, ready in _drained(gradient_bytes, backward_s)
        if layer
    )


def fetched(
    parameter_bytes: Sequence[float], shards: int, link: Link, *, forward_s: Sequence[float] = ()
) -> tuple[Gather, ...]:
    """Returns the gathers of a stage with sharded parameters, once a step, layer by layer (ZeRO-2).

    Args:
        parameter_bytes: of each layer, in the order of the forward pass.
        shards: ranks that hold a part of each.
        link: between neighbours among them.
        forward_s: of each layer, which says when it is needed; by the parameters' bytes if not given.

    Raises:
        ValueError: other numbers of layers, or what a collective refuses.
    """
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


class Collectives:
    """Costs that the collectives of a grid add to stages of any layers, for the search and for the replay.

    Args:
        grid, near: the sizes of its dimensions, and the links of its rings
        costs: of the layers as one accelerator has them (`divided`)
        microbatch_size: of the actions
        split: whether the schedule has I and W in the place of B
        ahead: whether parameters are fetched while the layer before computes, as on an accelerator
        shards: what parameters in parts were timed to add, in the place of fsdp's collectives
    """

    def __init__(
        self,
        grid: Grid,
        near: Topology,
        costs: Costs,
        microbatch_size: int,
        *,
        split: bool,
        ahead: bool,
        shards: ShardCosts | None = None,
    ) -> None:
        self.grid, self.near, self.shards, self._split, self._ahead = grid, near, shards, split, ahead
        no: list[tuple[float, ...]] = [()] * costs.num_layers
        share = near.request.gathered_share if grid.fsdp > 1 else 1.0  # and so are their gradients
        self._gradients = [[share * size for size in layer] for layer in costs.parameter_bytes or no]
        self.layer_bytes = list(map(sum, self._gradients))
        self._parts = [[size / grid.fsdp for size in layer] for layer in self._gradients]
        self._layers_s = costs.at(microbatch_size).layers_s
        self._rounds_bytes = costs.at(microbatch_size).rounds_bytes

    def buckets(self, span: range) -> tuple[Bucket, ...]:
        """Returns the buckets summed over replicas; ZeRO-3 scatters in the passes and leaves only copies."""
        grid, near, part = self.grid, self.near, slice(span.start, span.stop)
        if grid.replicas == 1:
            return ()
        if self.shards is not None:
            timed = Bucket(1.0, sum(self.shards.once_s[part]))
            found = timed, *data_parallel(self._parts[part], grid.dp, near.ring("dp"))
        else:
            backward_s = self._layers_s["W" if self._split else "B"][part]
            if grid.fsdp_level == 2:
                found = sharded(
                    self._gradients[part], grid.fsdp, near.ring("fsdp"), replicas=grid.dp,
                    replica_link=near.ring("dp"), backward_s=backward_s, split=self._split,
                )  # fmt: skip
            else:
                found = data_parallel(self._parts[part], grid.dp, near.ring("dp"), backward_s=backward_s)
        # Sums that take the cores that compute make the last backward longer by as much as they would take
        # behind it.
        return tuple(replace(each, ready=1.0) for each in found) if near.sums else found

    def gathers(self, span: range) -> tuple[Gather, ...]:
        """Parameters that are fetched once for a step (ZeRO-2)."""
        if self.grid.fsdp_level != 2 or self.shards is not None:
            return ()
        part = slice(span.start, span.stop)
        forward_s = self._layers_s[forward_kind(self._layers_s)][part]
        return fetched(self.layer_bytes[part], self.grid.fsdp, self.near.ring("fsdp"), forward_s=forward_s)

    def passes_s(self, span: range, remat: str = "never") -> tuple[float, float]:
        """Seconds that a pass ahead and one back take longer, since each gathers parameters (ZeRO-3); back
        with what blocks recompute inside.
        """
        if not self.every_pass:
            return 0.0, 0.0

        def longer_s(kind: str, order: slice, *, scattered: bool) -> float:
            return pass_s(
                self.layer_bytes[span.start : span.stop][order],
                self._layers_s[kind][span.start : span.stop][order],
                self.grid.fsdp, self.near.ring("fsdp"), ahead=self._ahead, scattered=scattered,
            )  # fmt: skip

        ahead_s = longer_s(forward_kind(self._layers_s), slice(None), scattered=False)
        return ahead_s, longer_s(inside("B", remat), slice(None, None, -1), scattered=True)

    def rounds_s(self, layer: int) -> tuple[float, float]:
        """Seconds in which the ranks that compute a layer together send, in a pass ahead and one back."""
        ring, ranks = self.near.ring("tp"), self.grid.tp
        if ranks == 1:
            return 0.0, 0.0
        ahead, back = self._rounds_bytes[layer]
        return sum(all_gather_s(e, ranks, ring) for e in ahead), sum(
            all_gather_s(e, ranks, ring) for e in back
        )

    def inside_s(self, span: range, remat: str = "never") -> tuple[float, float]:
        """Seconds that a pass ahead and one back wait for collectives of their own: those of `passes_s`, and
        those of `rounds_s`, which blocks that recompute take again.
        """
        ahead_s, back_s = self.passes_s(span, remat)
        rounds = [self.rounds_s(layer) for layer in span]
        sums_s, back_sums_s = sum(ahead for ahead, _ in rounds), sum(back for _, back in rounds)
        return ahead_s + sums_s, back_s + back_sums_s + sums_s * (remat in WRAPPED)

    @property
    def every_pass(self) -> bool:
        """Whether parameters are gathered in each."""
        return self.grid.fsdp_level == 3 and self.shards is None


def forward_kind(layers_s: Mapping[str, Sequence[float]]) -> str:
    """A forward that keeps its graph, where it was timed apart."""
    return "G" if "G" in layers_s else "F"


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
