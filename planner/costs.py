"""Costs that a prediction adds up: seconds and bytes of every layer, and what a step takes beyond them.

Measured on this machine or following from an accelerator's peaks, costs have one form. A layer's seconds are
by the kind of the action and the size of the micro-batch:

    F   forward without a graph, whose micro-batch is recomputed     R   the recomputation
    G   forward that keeps its graph                                 B   backward; I and W its two halves

The first B or W of a step makes the gradients that the later ones add to, so it has seconds of its own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Any

import msgspec

from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule

from .candidate import REMATS, WRAPPED

FIRST = " first"
"""Suffix of B or W for the first one of a step."""
ONCE = "once"

Run = tuple[tuple[float, ...], ...]
"""For each process, the seconds of the actions of one step, each divided by the median of its kind."""


def inside(kind: str, remat: str) -> str:
    """The kind of cost of an action on a stage that recomputes `remat` inside of its backward."""
    plain = kind.removesuffix(FIRST)
    return f"{plain} {remat}" if remat in WRAPPED and plain in ("B", "I") else kind


@dataclass(frozen=True, kw_only=True)
class SizeCosts:
    """Costs of the layers for one micro-batch of one size; ValueError for negative or infinite ones.

    Args:
        layers_s: by kind, seconds of each layer; "B first" and "W first" where they differ, and as `inside`
            has it B and I with what blocks recompute inside
        action_s: by kind, seconds of an action whatever the number of its layers
        whole_s: by kind, seconds of an action on a stage of all layers, where one was timed
        shards_s: by fsdp's level, the same where every process holds a part of all parameters, and as ONCE
            what a step of it takes once: gathers and sums that are in no single action
        activation_bytes: over a cut behind each layer but the last, forward
        gradient_bytes: the same for the way back
        ring_bytes: by layer, what goes once round the ranks that compute it together, ahead and back: a sum
            goes round twice, a gather once; two sums of the activations of every layer if not given
    """

    layers_s: Mapping[str, Sequence[float]]
    action_s: Mapping[str, float] = field(default_factory=dict)
    whole_s: Mapping[str, float] = field(default_factory=dict)
    shards_s: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    activation_bytes: Sequence[float] = ()
    gradient_bytes: Sequence[float] = ()
    ring_bytes: Sequence[tuple[Sequence[float], Sequence[float]]] = ()

    def __post_init__(self) -> None:
        named: dict[str, Sequence[float]] = {
            **self.layers_s,
            **{name: list(getattr(self, name).values()) for name in ("action_s", "whole_s")},
            **{f"shards_s[{level}]": list(each.values()) for level, each in self.shards_s.items()},
            **{name: getattr(self, name) for name in ("activation_bytes", "gradient_bytes")},
        }
        for name, values in named.items():
            for index, value in enumerate(values):
                if not 0 <= value < inf:
                    raise ValueError(f"{name}[{index}] is {value}; it must be finite and not negative")

    @property
    def num_layers(self) -> int:
        return len(next(iter(self.layers_s.values())))

    def with_blocks(self, blocks: Container[int]) -> SizeCosts:
        """Adds the costs of B and I in blocks that run their forward once more inside."""
        again, layers_s = self.layers_s.get("R", self.layers_s.get("F", ())), dict(self.layers_s)
        for kind in filter(self.layers_s.__contains__, ("B", "I")):
            both = enumerate(zip(layers_s[kind], again, strict=True))
            layers_s[inside(kind, "blocks")] = [own + more * (n in blocks) for n, (own, more) in both]
        return replace(self, layers_s=layers_s)

    @property
    def remats(self) -> tuple[str, ...]:
        """Names of the recomputations whose seconds are known."""
        return tuple(r for r in REMATS if r not in WRAPPED or inside("B", r) in self.layers_s)

    @cached_property
    def _sums(self) -> dict[str, list[float]]:
        return {kind: list(accumulate(seconds, initial=0.0)) for kind, seconds in self.layers_s.items()}

    def seconds(self, kind: str, span: range) -> float:
        """Seconds of an action on a stage of these layers; ValueError for a kind that was not timed."""
        plain = kind.removesuffix(FIRST)
        bare, _, remat = plain.partition(" ")
        if len(span) == self.num_layers and bare in self.whole_s:
            more_s = self._sums[plain][-1] - self._sums[bare][-1] if remat else 0.0
            return self.whole_s.get(kind, self.whole_s[bare]) + more_s
        known = kind if kind in self._sums else plain
        if known not in self._sums:
            raise ValueError(f"no seconds of {plain}; there are those of {', '.join(sorted(self._sums))}")
        sums = self._sums[known]
        return sums[span.stop] - sums[span.start] + self.action_s.get(bare, 0.0)


@dataclass(frozen=True)
class ShardCosts:
    """Measured costs that sharded parameters (fsdp) add to a stage that is replicated.

    Args:
        more_s: by kind, of each layer, what a pass takes more; less than nothing where the clock says so
        once_s: of each layer, in a step
        update_s: of the optimizer, of each layer's parts
    """

    more_s: Mapping[str, Sequence[float]]
    once_s: Sequence[float]
    update_s: Sequence[float]

    def more(self, kind: str, span: range) -> float:
        """Seconds that sharding adds to an action of that kind on a stage of these layers."""
        plain = kind.removesuffix(FIRST)
        like = {"F": "G", "R": "G", "I": "B"}.get(plain, plain)  # a W gathers nothing
        each = self.more_s.get(kind, self.more_s.get(like, ()))
        return sum(each[span.start : span.stop])


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a model on one kind of device.

    Args:
        sizes: by the size of the micro-batch
        update_s: of the optimizer, of each layer
        parameter_bytes: of each parameter that is trained, of each layer
        shard_update_s: of the optimizer, of each layer's part where `timed_shards` processes hold one each
        timed_shards: processes that held parts; 0 where none were timed
        gap_s: between two actions of a worker: the engine, and messages that it hands over
        step_s: of a step on the first worker, before its first action: dividing the mini-batch, agreeing
        link: between two processes as it was measured; None where nothing was
        sum_link: of sums over processes, likewise, on processors: they take the cores that compute
        jitter: of steps that were timed, how single actions differed from their median
        low, high: factors between which all seconds may lie for what is not known
        provenance: by "layers", "links" and others: how it was found, and on what
        profiles: (micro-batch size, and as `Model.profile_of`) -> profiles of what a rank has of the layers
            and of the loss, for the memory model; not part of a file
        variants: (size, tp, sharded) -> costs of a rank of several; None, as where nothing is given, for an
            equal share of the layers'
    """

    sizes: Mapping[int, SizeCosts]
    update_s: Sequence[float] = ()
    parameter_bytes: Sequence[Sequence[int]] = ()
    shard_update_s: Sequence[float] = ()
    timed_shards: int = 0
    gap_s: float = 0.0
    step_s: float = 0.0
    link: Link | None = None
    sum_link: Link | None = None
    jitter: Sequence[Run] = ()
    low: float = 1.0
    high: float = 1.0
    provenance: Mapping[str, str] = field(default_factory=dict)
    profiles: Any = field(default=None, repr=False, compare=False)
    variants: Any = field(default=None, repr=False, compare=False)

    @property
    def num_layers(self) -> int:
        return next(iter(self.sizes.values())).num_layers

    def at(self, microbatch_size: int) -> SizeCosts:
        """Returns the costs at one micro-batch size. ValueError for a size that was not timed."""
        if microbatch_size not in self.sizes:
            raise ValueError(f"no costs of micro-batches of {microbatch_size}, but of {sorted(self.sizes)}")
        return self.sizes[microbatch_size]

    def on(self, microbatch_size: int, tp: int, *, sharded: bool) -> Costs:
        """The costs on each of `tp` accelerators; `sharded` where parameters are gathered."""
        size = self.variants(microbatch_size, tp, sharded) if self.variants is not None else None
        if tp == 1:
            return replace(self, sizes={**self.sizes, microbatch_size: size or self.at(microbatch_size)})
        if size is None:
            whole = self.at(microbatch_size)
            layers_s = {kind: [each / tp for each in seconds] for kind, seconds in whole.layers_s.items()}
            size = replace(whole, layers_s=layers_s, whole_s={}, shards_s={})
        update_s = [each / tp for each in self.update_s]
        parts = [[each // tp for each in layer] for layer in self.parameter_bytes]
        return replace(self, sizes={microbatch_size: size}, update_s=update_s, parameter_bytes=parts)

    def shards(self, microbatch_size: int, shards: int, level: int, link: Link) -> ShardCosts | None:
        """Returns the costs of `shards` shards at that ZeRO level over `link`; None for one shard, or what
        was not timed. For another number n of shards than the timed one, sent bytes follow the ring, (n - 1)
        / n of all parameters, and the optimizer's step shrinks with the shards.
        """
        size = self.at(microbatch_size)
        timed, total = size.shards_s.get(level), sum(map(sum, self.parameter_bytes))
        if shards == 1 or timed is None or link != self.link or not total:
            return None
        ring = (1 - 1 / shards) / (1 - 1 / self.timed_shards)
        share = [ring * sum(each) / total for each in self.parameter_bytes]
        every = range(self.num_layers)
        more = {kind: timed[kind] - size.seconds(kind, every) for kind in timed if kind != ONCE}
        return ShardCosts(
            {kind: [seconds * part for part in share] for kind, seconds in more.items()},
            [timed[ONCE] * part for part in share],
            [each * min(1.0, self.timed_shards / shards) for each in self.shard_update_s],
        )

    def to_data(self) -> dict[str, Any]:
        """Returns the costs as plain data, without the profiles."""
        alone = replace(self, profiles=None, variants=None)
        return dict(msgspec.to_builtins(alone, str_keys=True))


def kinds_of(schedule: Schedule) -> dict[Action, str]:
    """Returns the kind of cost of each action of a schedule: "F" or "G", "B" or "B first" and so on."""
    again = {(action.stage, action.microbatch) for action in schedule if action.kind is Kind.R}
    found = {}
    for row in schedule.actions:
        begun: set[int] = set()  # stages whose gradients have been made
        for action in row:
            kind = action.kind.value
            if action.kind is Kind.F:
                kind = "F" if (action.stage, action.microbatch) in again else "G"
            elif action.kind in (Kind.B, Kind.W) and action.stage not in begun:
                begun.add(action.stage)
                kind += FIRST
            found[action] = kind
    return found
