"""Accelerators by their published peaks.

A peak is what the arithmetic or the memory can do at most; no program reaches both. What share of the
arithmetic a program reaches is unknown and stands in results/unknowns.toml, not here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One accelerator core, as a partition of a model has it.

    Args:
        name: as in results/unknowns.toml, where it stands there
        flops_per_s: the peak of matrix products of float32 tensors
        half_flops_per_s: of tensors of 16 bits
        bytes_per_s: of its memory
        matrix_unit: side of a systolic array, whose products are padded to it; 0 where there is none
        fuses: operations that work element by element are compiled into their neighbours and move nothing
        attention: the kernels of scaled dot-product attention, as `pipeline.memory.attention` has them
        bfloat16: whether it has units for products of bfloat16
        reached: share of the peak that single large products reach, the best of many shapes
        source: where the numbers come from
    """

    name: str
    flops_per_s: float
    half_flops_per_s: float
    bytes_per_s: float
    matrix_unit: int = 0
    fuses: bool = False
    attention: str = "math"
    bfloat16: bool = True
    reached: float = 0.776
    source: str = ""

    def rate(self, activation_format: str) -> float:
        """Floating-point operations per second at the peak for a format of the activations."""
        return self.flops_per_s if activation_format == "float32" else self.half_flops_per_s


_JOUPPI = (
    "Jouppi et al., A domain-specific supercomputer for training deep neural networks, 2020: {chip}; a core "
    "is half a chip; products are of bfloat16 whichever way the tensors are kept; compiled by XLA"
)

TPU_V2 = Accelerator(
    name="TPUv2 core",
    flops_per_s=23e12,
    half_flops_per_s=23e12,
    bytes_per_s=350e9,
    matrix_unit=128,
    fuses=True,
    source=_JOUPPI.format(chip="46 TFLOP/s, 700 GB/s, two cores with one 128 x 128 matrix unit each"),
)
TPU_V3 = Accelerator(
    name="TPUv3 core",
    flops_per_s=61.5e12,
    half_flops_per_s=61.5e12,
    bytes_per_s=450e9,
    matrix_unit=128,
    fuses=True,
    source=_JOUPPI.format(chip="123 TFLOP/s, 900 GB/s, two cores with two 128 x 128 matrix units each"),
)
P100_16 = Accelerator(
    name="P100 for PCIe, 16 GB",
    attention="efficient",
    bfloat16=False,
    flops_per_s=9.3e12,
    half_flops_per_s=18.7e12,
    bytes_per_s=732e9,
    source="NVIDIA's Tesla P100 data sheet: 9.3 TFLOP/s in float32, 18.7 in float16, 732 GB/s",
)
P100_12 = Accelerator(
    name="P100 for PCIe, 12 GB",
    attention="efficient",
    bfloat16=False,
    flops_per_s=9.3e12,
    half_flops_per_s=18.7e12,
    bytes_per_s=549e9,
    source="NVIDIA's Tesla P100 data sheet: 9.3 TFLOP/s in float32, 18.7 in float16, 549 GB/s",
)
P40 = Accelerator(
    name="P40",
    flops_per_s=12e12,
    half_flops_per_s=0.19e12,
    bytes_per_s=346e9,
    source="NVIDIA's Tesla P40 data sheet: 12 TFLOP/s in float32, 346 GB/s, 24 GB",
)

UPDATE_BYTES = {"rmsprop": 28, "momentum": 20, "sgd": 12, "adam": 28}
"""Bytes that an optimizer moves for each float32 parameter where one kernel reads the value, the gradient and
its own state once and writes value and state once, as TensorFlow's `training_ops` and torch's `fused=True`
do. Kernels that take one operation after the other, such as torch's default, move two to three times as
much."""

TPUS = {each.name: each for each in (TPU_V2, TPU_V3)}

HOST_BYTES_PER_S = 15.75e9
"""From a host to its accelerator: 16 lanes of PCI Express 3, PCI-SIG's nominal rate. Only inputs that the
host prepares take this way."""
