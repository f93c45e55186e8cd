"""What of NCCL one GPU can show: that it takes the engine's options, sends to itself in a group, and aborts.

    python -m gpipe_bench.experiments.gpu.nccl_alone --device cuda

Two ranks on one GPU are refused by NCCL, but a rank may exchange messages with itself if send and receive are
grouped. That is enough to see whether the options with which the engine makes its connections are accepted by
this build, and whether `abort`, by which a failure ends waits, returns.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.cuda import nccl

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.ranks.messages.connection import backend

SIZES = (1, 1000, 2**20, 2**26)
"""Elements of the messages, to 256 MiB: short ones and such as take many blocks of the network's buffers."""


class Keys:
    """A store for one rank."""

    def under(self, name: str) -> Any:
        return PrefixStore(name, HashStore())


def exchange(connection: Any, device: torch.device, num_elements: int) -> bool:
    """Sends to itself over a backend of one rank; whether what came is what was sent."""
    sent = torch.arange(num_elements, dtype=torch.float32, device=device)
    received = torch.zeros_like(sent)
    connection._start_coalescing()
    connection.recv([received], 0, 0)
    connection.send([sent], 0, 0)
    work = connection._end_coalescing()
    if work is not None:
        work.wait()
    devices.synchronize(device)
    return torch.equal(sent, received)


def check(connection: Any, device: torch.device) -> list[str]:
    """What is wrong, in words."""
    wrong = [f"{n} elements came otherwise than sent" for n in SIZES if not exchange(connection, device, n)]
    if connection.name() != "nccl":  # by which the engine tells how to cut a connection
        wrong.append(f"the backend calls itself {connection.name()!r}, not 'nccl'")
    connection.abort()
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    if parser.parse_args(arguments).device == "cpu":
        print("NCCL needs a GPU; there is nothing to see on a CPU")
        return 0
    device = devices.current("cuda")
    devices.select(device)
    keys: Any = Keys()
    wrong = check(backend(keys, 0, 1, name="alone", accelerated=True, timeout_s=60.0), device)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    version = ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
    print(f"NCCL {version} on {devices.name(device)}: {'not ' * bool(wrong)}as the engine needs it")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
