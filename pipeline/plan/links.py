"""What carries messages between two stages, and what stages send beside their messages.

How long a message takes and what holds the next one up is a `Link`; a `Bucket` of gradients and a `Gather` of
parameters go over a link between replicas, which the replay lays out beside the actions.

A replay is only as honest as its link, so each preset says where its two numbers come from. Bandwidths are
nominal, per direction, between two neighbouring devices; a real link gives less, so measure it where the
answer depends on it.

Activations may wait in the memory of the host: copies out and in are actions beside those of a worker. A copy
engine moves bytes while its worker computes: one copy after another, each not before the worker comes
to a place in its row. The graph of a micro-batch takes no memory from the end of its copy out to the begin of
its copy in, and its backward waits for the end of that. Two rules say which copies there are and when:

    at once     out behind F, in from the backward before on, each way on an engine of its own
    in slots    one engine, out and in by turns; of the slots the first behind F, and the last before the
                backward

The first is what Megatron's fine-grained offloading does with the inputs of modules, here with whole stages.
The second is PipeOffload's (arXiv 2503.01328, section 4.2), which moves what waits longest. What would
have to come back before it is gone stays. None of this is run: steps are replayed (`simulate`) and memory
is modelled (`memory.workers`). Only the standard library is imported.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from typing import NamedTuple

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.timeline import Timeline


@dataclass(frozen=True)
class Link:
    """A connection between neighbouring stages, one for every boundary.

    A message occupies the link for bytes / bandwidth and arrives `latency_s` after it has left it. Messages
    of one direction queue up; with `shares_directions` both directions wait in the same queue. `source` says
    where the numbers come from.
    """

    name: str
    latency_s: float = 0
    bandwidth_bytes_per_s: float = inf
    shares_directions: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if not (isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"link {self.name!r}: latency_s is {self.latency_s}; give seconds, 0 or more")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(
                f"link {self.name!r}: bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; give bytes per "
                "second above 0, or infinity"
            )

    def occupied_s(self, num_bytes: float) -> float:
        """Seconds for which a message of `num_bytes` keeps the next one waiting."""
        return 0 if self.bandwidth_bytes_per_s == inf else num_bytes / self.bandwidth_bytes_per_s


FREE = Link("free", source="by definition: messages take no time")

Between = Link | Callable[[int, int], Link]
"""What lies between workers: the same between any two, or what the function says of one and another."""

_NVLINK = (
    "NVIDIA's architecture whitepapers: {links} links of {rate} GB/s per direction between two devices "
    "through a switch; latency: NCCL's tuning table, ring, simple protocol, NVLink"
)
_NVLINK_1 = (
    "NVIDIA's Pascal whitepaper: 4 links of 20 GB/s per direction, of which a pair in a DGX-1 has one; "
    "latency: NCCL's tuning table, ring, simple protocol, NVLink"
)
_PCIE = (
    "PCI-SIG: 16 lanes of {rate} GT/s, 128b/130b coding, {bandwidth} GB/s per direction; a message goes up "
    "to the host's memory and then down, hence half; latency: twice NCCL's tuning table, ring, simple "
    "protocol, PCI"
)
_INFINIBAND = (
    "InfiniBand Trade Association's roadmap: {name} 4x is {rate} Gb/s per direction; "
    "latency: NCCL's tuning table, ring, simple protocol, network"
)
_ETHERNET = (
    "IEEE 802.3: {rate} Gb/s per direction, full duplex, before the headers of TCP/IP (about 5 %); "
    "latency: the usual one way between two hosts through one switch and the kernel's TCP"
)

LINKS: dict[str, Link] = {
    "free": FREE,
    "nvlink1": Link("nvlink1", 3.4e-6, 20e9, source=_NVLINK_1),
    "nvlink2": Link("nvlink2", 3.4e-6, 150e9, source=_NVLINK.format(links=6, rate=25)),
    "nvlink3": Link("nvlink3", 3.4e-6, 300e9, source=_NVLINK.format(links=12, rate=25)),
    "nvlink4": Link("nvlink4", 3.4e-6, 450e9, source=_NVLINK.format(links=18, rate=25)),
    "nvlink5": Link("nvlink5", 3.4e-6, 900e9, source=_NVLINK.format(links=18, rate=50)),
    "pcie3-host": Link("pcie3-host", 11.4e-6, 7.877e9, source=_PCIE.format(rate=8, bandwidth=15.75)),
    "pcie4-host": Link("pcie4-host", 11.4e-6, 15.754e9, source=_PCIE.format(rate=16, bandwidth=31.51)),
    "pcie5-host": Link("pcie5-host", 11.4e-6, 31.508e9, source=_PCIE.format(rate=32, bandwidth=63.02)),
    "infiniband-edr": Link("infiniband-edr", 14e-6, 12.5e9, source=_INFINIBAND.format(name="EDR", rate=100)),
    "infiniband-hdr": Link("infiniband-hdr", 14e-6, 25e9, source=_INFINIBAND.format(name="HDR", rate=200)),
    "infiniband-ndr": Link("infiniband-ndr", 14e-6, 50e9, source=_INFINIBAND.format(name="NDR", rate=400)),
    "ethernet-1g": Link("ethernet-1g", 50e-6, 0.125e9, source=_ETHERNET.format(rate=1)),
    "ethernet-10g": Link("ethernet-10g", 50e-6, 1.25e9, source=_ETHERNET.format(rate=10)),
    "ethernet-25g": Link("ethernet-25g", 50e-6, 3.125e9, source=_ETHERNET.format(rate=25)),
    "ethernet-100g": Link("ethernet-100g", 50e-6, 12.5e9, source=_ETHERNET.format(rate=100)),
    "loopback": Link(
        "loopback", 50e-6, 1.5e9, shares_directions=True,
        source="measured on two laptop cores with gloo over the loopback device: 64 MiB in 44 ms, the two "
        "messages of a micro-batch 0.05 to 0.15 ms; both directions are copied by the same cores",
    ),
}  # fmt: skip
"""Presets by name. `pcieN-host` is the paper's case without a fast interconnect (section 3.1, Table 3)."""


BUCKET_BYTES = 25 * 2**20
"""A bucket leaves as soon as it holds so much: what torch's DistributedDataParallel has as its default."""

_FEWEST_BUCKETS = 4
_LEAST_BYTES = 2**20


def bucket_bytes_of(gradient_bytes: float) -> float:
    """What a bucket holds if nobody says: `BUCKET_BYTES`, or less for a stage that has not several times as
    much, so that most of its gradients leave before its last backward is over.
    """
    return min(BUCKET_BYTES, max(_LEAST_BYTES, gradient_bytes / _FEWEST_BUCKETS))


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
        _check("a bucket is ready", self.ready, "last backward", self.takes_s)


@dataclass(frozen=True, slots=True)
class Gather:
    """Parameters that are fetched together for a step.

    Args:
        needed: share of the stage's first forward at which they are, 0 to 1
        takes_s: the all-gather, once it has the link for itself

    Raises:
        ValueError: a share outside 0 to 1, or seconds that are negative.
    """

    needed: float
    takes_s: float

    def __post_init__(self) -> None:
        _check("a gather is needed", self.needed, "first forward", self.takes_s)


def _check(what: str, share: float, action: str, takes_s: float) -> None:
    """`what` says of whom, and what it is after that share of the action: "a bucket is ready"."""
    if not 0 <= share <= 1:
        raise ValueError(f"{what} after {share} of the {action}; give 0 to 1")
    if not takes_s >= 0:
        raise ValueError(f"{what.partition(' is ')[0]} takes {takes_s} s; give seconds, 0 or more")


BACKWARD = (Kind.B, Kind.I)


class Copy(NamedTuple):
    """The graph of a micro-batch on its way out to the host, or `back`."""

    stage: int
    microbatch: int
    back: bool
    place: int
    """In its worker's row: it begins when all actions before are done, or later."""

    def __str__(self) -> str:
        return f"{'in' if self.back else 'out'} {self.stage}F{self.microbatch}"


@dataclass(frozen=True)
class Offload:
    """What is copied in a step.

    Args:
        copies: of each worker, in the order in which its engines take them.
        copy_s: by stage, seconds of a micro-batch's graph one way.
        engines: of each worker: one for both ways, or two.

    Raises:
        ValueError: other numbers of engines, or seconds that cannot be.
    """

    copies: tuple[tuple[Copy, ...], ...]
    copy_s: tuple[float, ...]
    engines: int

    def __post_init__(self) -> None:
        if self.engines not in (1, 2):
            raise ValueError(f"engines is {self.engines}; a worker has 1 for both ways, or 2")
        for stage, seconds in enumerate(self.copy_s):
            if not 0 <= seconds < inf:
                raise ValueError(f"copy_s[{stage}] is {seconds}; it must be finite and not negative")

    def check(self, schedule: Schedule) -> None:
        """ValueError unless each graph goes out behind its forward and then in, and no backward waits for a
        copy behind it.
        """
        if len(self.copies) != schedule.num_workers:
            raise ValueError(
                f"copies of {len(self.copies)} workers for {schedule.num_workers}; give a row each"
            )
        for worker, copies in enumerate(self.copies):
            waits = {row[0]: row[1:] for row in _waits(schedule, worker, schedule.stages_of(worker))}
            latest = 0
            gone: set[tuple[int, int]] = set()
            for copy in copies:
                graph, latest = copy[:2], max(latest, copy.place)
                if graph not in waits or copy.back != (graph in gone):
                    raise ValueError(f"{copy}: a graph that a worker keeps goes out once and then in once")
                first, last = waits[graph]
                if copy.place <= first or (copy.back and latest > last):
                    raise ValueError(
                        f"{copy} at place {copy.place}: it begins behind its forward, at {first}, and all "
                        f"up to it before its backward, at {last}"
                    )
                (gone.remove if copy.back else gone.add)(graph)
                if copy.back:
                    del waits[graph]
            if gone:
                raise ValueError(f"the graph of {min(gone)} goes out and does not come in again")


def at_once(
    schedule: Schedule, stages: Collection[int], copy_s: Sequence[float], engines: int = 2
) -> Offload:
    """Each graph of these stages out as soon as it is there, and in from the worker's backward before on.

    What is recomputed stays. ValueError as of `Offload`.
    """
    found = []
    for worker, row in enumerate(schedule.actions):
        backwards = [place for place, action in enumerate(row) if action.kind in BACKWARD]
        copies = []
        for graph, first, last in _waits(schedule, worker, stages):
            earlier = bisect_left(backwards, last)
            back = max(first + 1, backwards[earlier - 1] if earlier else last - 1)
            if back < last:
                copies += [Copy(*graph, False, first + 1), Copy(*graph, True, back)]
        found.append(tuple(sorted(copies, key=lambda copy: (copy.place, copy.back))))
    return Offload(tuple(found), tuple(copy_s), engines)


def in_slots(
    schedule: Schedule, stages: Collection[int], copy_s: Sequence[float], timeline: Timeline
) -> Offload:
    """One copy out and one in by turns, at times of `timeline`, which is `schedule` replayed without copies.

    A slot has room for the largest of `copy_s`. ValueError as of `at_once`.
    """
    slot_s = max((copy_s[stage] for stage in stages), default=0) or 1e-12
    found = []
    for worker in range(schedule.num_workers):
        events = timeline.of_worker(worker)
        starts_s = [event.start_s for event in events]
        waits = [
            (graph, first, last) for graph, first, last in _waits(schedule, worker, stages)
            if events[last].start_s - events[first].end_s >= 2 * slot_s
        ]  # fmt: skip
        # Turn n has the time from 2n slots on: the first half for a copy out, the second for one in.
        out, turn = {}, 0
        for _, first, last in waits:
            turn = max(turn, ceil(events[first].end_s / (2 * slot_s)))
            out[last], turn = turn, turn + 1
        back: dict[int, int] = {}
        turn = ceil(timeline.makespan_s / slot_s)
        for *_, last in sorted(waits, key=lambda each: -each[2]):
            turn = min(turn - 1, int(events[last].start_s // (2 * slot_s)) - 1)
            back[last] = turn
        timed = []
        for graph, first, last in waits:
            if out[last] <= back[last]:
                timed += [(2 * out[last], graph, False, first), (2 * back[last] + 1, graph, True, first)]
        copies = []
        for half, graph, is_back, first in sorted(timed):
            # Not before the begin of the action that is under way in its slot.
            place = bisect_right(starts_s, half * slot_s) - 1 if is_back else first + 1
            copies.append(Copy(*graph, is_back, max(place, first + 1)))
        found.append(tuple(copies))
    return Offload(tuple(found), tuple(copy_s), 1)


def longest(timeline: Timeline, count: int) -> tuple[int, ...]:
    """Of each worker the `count` stages whose micro-batches wait longest between forward and backward."""
    waits_s = dict.fromkeys(range(timeline.num_stages), 0.0)
    for event in timeline.events:
        if event.action.kind is Kind.F:
            waits_s[event.action.stage] -= event.end_s
        elif event.action.kind in BACKWARD:
            waits_s[event.action.stage] += event.start_s
    found = []
    for worker in range(timeline.num_workers):
        found += sorted(timeline.stages_of(worker), key=lambda stage: (-waits_s[stage], stage))[:count]
    return tuple(sorted(found))


def away(timeline: Timeline) -> dict[Action, dict[int, int]]:
    """By action, how many graphs of each stage of its worker are with the host from its begin to its end."""
    found: dict[Action, dict[int, int]] = {}
    for worker in range(timeline.num_workers):
        mine = set(timeline.stages_of(worker))
        copies = [span for span in timeline.copies if span.stage in mine]
        left_s = {
            span.name.removeprefix("out "): span.end_s for span in copies if span.name.startswith("out")
        }
        gone = [
            (span.stage, left_s[span.name.removeprefix("in ")], span.start_s)
            for span in copies
            if span.name.startswith("in")
        ]
        for event in timeline.of_worker(worker):
            of_stage = found[event.action] = {}
            for stage, from_s, to_s in gone:
                if from_s <= event.start_s and event.end_s <= to_s:
                    of_stage[stage] = of_stage.get(stage, 0) + 1
    return found


def _waits(
    schedule: Schedule, worker: int, stages: Collection[int]
) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Graphs that these stages of the worker keep from F on, with the places of F and of the backward."""
    row = schedule.actions[worker]
    ends = {(a.stage, a.microbatch): place for place, a in enumerate(row) if a.kind in BACKWARD}
    for place, (stage, kind, microbatch) in enumerate(row):
        if kind is Kind.F and stage in stages and not schedule.recomputes(microbatch, stage):
            yield (stage, microbatch), place, ends[stage, microbatch]
