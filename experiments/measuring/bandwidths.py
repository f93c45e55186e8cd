"""How fast a link must be before nobody waits for it: a step laid out over one bandwidth after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpipe_bench.experiments.measuring.timed_actions import TimedActions, lay_out
from gpipe_bench.pipeline.plan.links import Link

HIDDEN = 0.05
"""Communication counts as hidden while it makes a step at most this share longer than a free link."""
_LOWEST, _HIGHEST = 1e3, 1e15  # bytes per second between which the answer is looked for


def slowdowns(timed: TimedActions, bandwidths: Sequence[float], latency_s: float = 0.0) -> list[float]:
    """Throughput over each bandwidth (bytes per second, per direction), relative to that over a free link."""
    free_s = lay_out(timed).makespan_s
    return [free_s / lay_out(timed, Link("swept", latency_s, each)).makespan_s for each in bandwidths]


def hidden_from(timed: TimedActions, latency_s: float = 0.0) -> float | None:
    """The least bandwidth in bytes per second over which communication is hidden, to a percent.

    None where the latency alone is too much.
    """

    def hides(bandwidth: float) -> bool:
        return slowdowns(timed, [bandwidth], latency_s)[0] >= 1 / (1 + HIDDEN)

    if not hides(_HIGHEST):
        return None
    low, high = math.log(_LOWEST), math.log(_HIGHEST)
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if hides(math.exp(middle)) else (middle, high)
    return math.exp(high)


def spread_evenly(low: float, high: float, per_decade: int) -> list[float]:
    """Bandwidths from low to high, equally far apart on a logarithmic scale, both ends included."""
    count = max(1, round(per_decade * math.log10(high / low)))
    return [low * (high / low) ** (step / count) for step in range(count + 1)]


def same_share(link: Link, slower: float, larger: float) -> Link:
    """The link over which messages take the share of the time that they take over `link`, for a model whose
    actions take `slower` times as long and whose messages are `larger` times as large.
    """
    return Link(
        f"{link.name}, same share of the time",
        link.latency_s * slower,
        link.bandwidth_bytes_per_s * larger / slower,
        link.shares_directions,
        source=f"{link.name} ({link.source}), slowed down with the computation",
    )
