"""Costs of a grid's collectives: when each can begin beside a step's actions, and how long it takes.

    data parallel    a stage's gradients leave in buckets inside its last backward, in a fixed order, and the
                     end of the step waits for them; if the link keeps up, the last bucket alone is seen
    sharded          parameters are fetched from the beginning of the step on (ZeRO-2), or waited for in every
                     pass (ZeRO-3); gradients leave as above, scattered
    tensor parallel  sums inside every action, which nothing hides

NCCL and gloo send large tensors over a ring: each of n ranks sends 1/n at a time to its next one, so that a
hop lasts `latency + bytes / n / bandwidth`, `bytes` those of the whole tensor. An all-gather or a
reduce-scatter takes n - 1 hops, an all-reduce is both. (Patarasuk and Yuan, Bandwidth optimal all-reduce
algorithms for clusters of workstations, 2009; NVIDIA, nccl-tests, PERFORMANCE.md.) Left out are trees, which
NCCL prefers for small tensors on many hosts, sums inside a switch, the sum's own arithmetic, and other use of
the link. Fractions give exact results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from gpipe_bench.pipeline.plan.links import Bucket, Gather, Link, bucket_bytes_of

from .candidate import WRAPPED, Grid
from .costs import Costs, inside
from .request import Request, Topology


def all_reduce_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Seconds until every one of `ranks` has the sum of their tensors of `num_bytes`."""
    return 2 * all_gather_s(num_bytes, ranks, link)


def all_gather_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Seconds until every one of `ranks`, each with its share, has the whole tensor of `num_bytes`; or until
    each has its share of the sum of such tensors (reduce-scatter). A ring of two goes there and back between
    the same two ranks, so a link whose directions share it carries two pieces at a time.
    """
    at_once = 2 if ranks == 2 and link.shares_directions else 1
    return (ranks - 1) * (link.latency_s + at_once * link.occupied_s(num_bytes) / ranks)


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
        ahead: parameters are gathered while the layer before computes, as on a GPU, and not waited for.
        scattered: the pass goes back, and each layer's gradients are scattered in the same way.
    """
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
        grid, request: the machines, what they do, and the links between them
        costs: of the layers as one accelerator has them (`Costs.on`)
        microbatch_size: of the actions
        split: whether the schedule has I and W in the place of B
    """

    def __init__(
        self, grid: Grid, request: Request, costs: Costs, microbatch_size: int, *, split: bool
    ) -> None:
        self.grid, self._split = grid, split
        self._ahead = request.accelerated  # a CPU gathers and computes in turn
        self.near = Topology(request, grid, costs.sum_link if request.link == costs.link else None)
        # What parameters in parts were timed to add, in the place of fsdp's collectives.
        self.shards = costs.shards(microbatch_size, grid.fsdp, grid.fsdp_level, request.link)
        no: list[tuple[float, ...]] = [()] * costs.num_layers
        share = request.gathered_share if grid.fsdp > 1 else 1.0  # and so are their gradients
        self._gradients = [[share * size for size in layer] for layer in costs.parameter_bytes or no]
        self.layer_bytes, at = list(map(sum, self._gradients)), costs.at(microbatch_size)
        self._layers_s = at.layers_s
        # Without word of rings, two sums of the activations of every layer.
        rings = at.ring_bytes or [([size] * 4,) * 2 for size in (*at.activation_bytes, 0.0)]
        seconds = [[self._rounds_s(sizes) for sizes in layer] for layer in rings] if grid.tp > 1 else []
        self.buckets, self.gathers = cache(self._buckets), cache(self._gathers)
        self._rounds_sums = [list(accumulate(each, initial=0.0)) for each in zip(*seconds, strict=True)]

    def _buckets(self, span: range) -> tuple[Bucket, ...]:
        """Returns the buckets summed over replicas, in the order in which they leave: whole gradients when a
        bucket is full, those of ZeRO-2's shards layer by layer; ZeRO-3 scatters in the passes.
        """
        grid, near, found = self.grid, self.near, list[Bucket]()
        if grid.replicas == 1:
            return ()
        if self.shards is not None:
            found.append(Bucket(1.0, sum(self.shards.once_s[span.start : span.stop])))
        if grid.fsdp_level == 2 and self.shards is None:
            for layer, ready in self._drained(span):
                size = sum(layer)
                takes_s = all_gather_s(size, grid.fsdp, near.ring("fsdp"))
                takes_s += all_reduce_s(size / grid.fsdp, grid.dp, near.ring("dp"))
                found += [Bucket(1 if self._split else ready, takes_s)] * bool(layer)
        elif grid.dp > 1:
            enough_bytes = bucket_bytes_of(sum(self.layer_bytes[span.start : span.stop]) / grid.fsdp)
            held = 0.0
            for layer, ready in self._drained(span):
                for tensor_bytes in reversed(layer):
                    held += tensor_bytes / grid.fsdp
                    if held >= enough_bytes:
                        found.append(Bucket(ready, all_reduce_s(held, grid.dp, near.ring("dp"))))
                        held = 0.0
            if held:
                found.append(Bucket(1, all_reduce_s(held, grid.dp, near.ring("dp"))))
        # Sums on the cores that compute make the last backward as much longer as they would take behind it.
        return tuple(replace(each, ready=1.0) for each in found) if near.sums else tuple(found)

    def _drained(self, span: range) -> list[tuple[Sequence[float], float]]:
        """Gradients of layers in the last backward's order, with the share of it that has passed then."""
        seconds = self._layers_s["W" if self._split else "B"][span.start : span.stop]
        total = sum(seconds)
        layers, ends = self._gradients[span.start : span.stop], accumulate(reversed(seconds))
        shares = (
            min(end / total, 1) if total else 1 for end in ends
        )  # rounding must not go beyond the whole
        return list(zip(reversed(layers), shares, strict=True))

    def _gathers(self, span: range) -> tuple[Gather, ...]:
        """Parameters that are fetched once for a step (ZeRO-2), for when the first forward needs them."""
        if self.grid.fsdp_level != 2 or self.shards is not None:
            return ()
        part, ring = slice(span.start, span.stop), self.near.ring("fsdp")
        seconds = self._layers_s[forward_kind(self._layers_s)][part]
        total, begins = sum(seconds), accumulate(seconds[:-1], initial=0)
        return tuple(
            Gather(min(begin / total, 1) if total else 0, all_gather_s(size, self.grid.fsdp, ring))
            for size, begin in zip(self.layer_bytes[part], begins, strict=True)
            if size
        )

    def waits_s(self, span: range, remat: str = "never") -> tuple[float, float]:
        """Seconds that a pass ahead and one back wait for ZeRO-3's gathers and tensor parallel sums."""
        ahead_s, back_s = self._gathered_s(span, remat) if self.every_pass else (0.0, 0.0)
        if self.grid.tp == 1:
            return ahead_s, back_s
        there_s, returned_s = (sums[span.stop] - sums[span.start] for sums in self._rounds_sums)
        return ahead_s + there_s, back_s + returned_s + there_s * (remat in WRAPPED)

    def _gathered_s(self, span: range, remat: str) -> tuple[float, float]:
        def longer_s(kind: str, order: slice, *, scattered: bool) -> float:
            return pass_s(
                self.layer_bytes[span.start : span.stop][order],
                self._layers_s[kind][span.start : span.stop][order],
                self.grid.fsdp, self.near.ring("fsdp"), ahead=self._ahead, scattered=scattered,
            )  # fmt: skip

        ahead_s = longer_s(forward_kind(self._layers_s), slice(None), scattered=False)
        return ahead_s, longer_s(inside("B", remat), slice(None, None, -1), scattered=True)

    def _rounds_s(self, sizes: Sequence[float]) -> float:
        """Seconds in which the ranks that compute a layer together send these bytes once round."""
        return sum(all_gather_s(size, self.grid.tp, self.near.ring("tp")) for size in sizes)

    @property
    def every_pass(self) -> bool:
        """Whether parameters are gathered in each."""
        return self.grid.fsdp_level == 3 and self.shards is None


def forward_kind(layers_s: Mapping[str, Sequence[float]]) -> str:
    """The kind of a forward that keeps its graph: "G" where it was timed apart, else "F"."""
    return "G" if "G" in layers_s else "F"
