"""What somebody who plans has: machines and what is between them, and how the model is to be trained.

Nothing here is searched for. Whatever a plan may choose stands in `candidate`; whatever it costs in
`prediction`. Only the standard library and `pipeline.plan` are imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_bench.pipeline.plan.links import Link

OPTIMIZERS = ("sgd", "rmsprop", "adam")
PRECISIONS = ("float32", "bfloat16")

MEASURED = "measured"
"""The device type of a plan for the device that this machine has, on which the layers are timed."""

RESERVED_BYTES = 3 * 2**29
"""Of an accelerator, 1.5 GiB, for what a process holds beside tensors: the device's context and the kernels
that are loaded (1 to 2 GB, 1.3 of them measured on a V100: Hugging Face, "Model training anatomy"),
workspaces of products (32 MiB a stream on an H100) and buffers of collectives. Fragments of an allocator may
be more.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Machines and a way to train.

    Args:
        accelerators: all of them, on all hosts
        memory_bytes: of one accelerator
        reserve_bytes: of these, held back for what is no tensor; None for RESERVED_BYTES of an accelerator
            that is named, none where the layers are timed here
        batch_size: examples of a mini-batch, over all replicas
        link: between two accelerators of one host
        between: between two accelerators of different hosts; None where there is one host
        hosts: a divisor of the accelerators, which are spread evenly
        optimizer: one of OPTIMIZERS
        precision: one of PRECISIONS; of the activations, parameters stay float32
        device_type: MEASURED, or the name of an accelerator whose peaks are known
        compiled: each layer runs under `torch.compile`

    Raises:
        ValueError: a number below 1, hosts that do not divide the accelerators or have nothing between them,
            an unknown optimizer or precision, or
            as much held back as there is.
    """

    accelerators: int
    memory_bytes: int
    batch_size: int
    link: Link
    between: Link | None = None
    hosts: int = 1
    optimizer: str = "adam"
    precision: str = "float32"
    device_type: str = MEASURED
    compiled: bool = False
    reserve_bytes: int | None = None

    def __post_init__(self) -> None:
        counts = {
            "accelerators": self.accelerators,
            "memory_bytes": self.memory_bytes,
            "batch_size": self.batch_size,
            "hosts": self.hosts,
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}; give 1 or more")
        if self.accelerators % self.hosts:
            raise ValueError(
                f"{self.accelerators} accelerators cannot be spread evenly over {self.hosts} hosts; give a "
                "number of hosts that divides them"
            )
        if self.hosts > 1 and self.between is None:
            raise ValueError(f"{self.hosts} hosts have no link between them; give one, such as infiniband")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}; choose one of {', '.join(OPTIMIZERS)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; choose one of {', '.join(PRECISIONS)}")
        if not 0 <= self.held_back_bytes < self.memory_bytes:
            raise ValueError(
                f"{self.held_back_bytes / 2**30:g} GiB are held back of {self.memory_bytes / 2**30:g}"
                ", for what is no tensor: give more memory, or hold back less (--reserve-gib)"
            )

    @property
    def held_back_bytes(self) -> int:
        """Of each accelerator, for what is no tensor."""
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return RESERVED_BYTES if self.accelerated else 0

    @property
    def usable_bytes(self) -> int:
        """Of each accelerator, for tensors."""
        return self.memory_bytes - self.held_back_bytes

    @property
    def accelerated(self) -> bool:
        """Whether messages go from device to device; what is timed here are processes of this host."""
        return self.device_type != MEASURED

    @property
    def per_host(self) -> int:
        """Accelerators of one host."""
        return self.accelerators // self.hosts
