"""Links between workers, with presets, and the collectives that stages run beside their messages.

The replay lays out a `Bucket` of gradients and a `Gather` of parameters on a link between replicas. Each
preset gives the source of its numbers. Bandwidths are nominal, per direction, between two neighbouring
devices; a real link is slower: measure it where the answer depends on it. Only the standard library is
imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite


@dataclass(frozen=True)
class Link:
    """A connection between two workers.

    A message occupies the link for bytes / bandwidth seconds and arrives `latency_s` later. Messages of one
    direction queue up; with `shares_directions` both directions share a queue. `source` says where the
    numbers come from.
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
        """Seconds for which a message of `num_bytes` occupies the link."""
        return 0 if self.bandwidth_bytes_per_s == inf else num_bytes / self.bandwidth_bytes_per_s


FREE = Link("free", source="by definition: messages take no time")

Between = Link | Callable[[int, int], Link]
"""Links between workers: one `Link` for every pair, or a function of two workers that returns a `Link`."""

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
"""A bucket is sent when it holds so many bytes: the default of torch's DistributedDataParallel."""

_FEWEST_BUCKETS = 4
_LEAST_BYTES = 2**20


def bucket_bytes_of(gradient_bytes: float) -> float:
    """Default bytes of a bucket: `BUCKET_BYTES`, or less for a small stage, so that most gradients are sent
    before its last backward ends.
    """
    return min(BUCKET_BYTES, max(_LEAST_BYTES, gradient_bytes / _FEWEST_BUCKETS))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together."""

    ready: float  # share of the stage's last backward (B or W) after which they are computed, 0 to 1
    takes_s: float  # seconds of the reduction on a free link


@dataclass(frozen=True, slots=True)
class Gather:
    """Parameters that are gathered together for a step."""

    needed: float  # share of the stage's first forward after which they are needed, 0 to 1
    takes_s: float  # seconds of the all-gather on a free link
