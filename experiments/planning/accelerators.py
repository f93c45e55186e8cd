"""Accelerators that people train on, by their data sheets.

Products of float32 tensors are those of the vector units, as torch has it unless TF32 is allowed; half
precision is dense, with sums in float32.
"""

from __future__ import annotations

from gpipe_bench.experiments.published.accelerator_steps.accelerators import P100_12, P100_16, Accelerator


def _nvidia(name: str, sheet: str, float32: float, half: float, terabytes: float) -> Accelerator:
    return Accelerator(
        name=name,
        flops_per_s=float32 * 1e12,
        half_flops_per_s=half * 1e12,
        bytes_per_s=terabytes * 1e12,
        source=f"NVIDIA's data sheet of {sheet}: {float32:g} TFLOP/s in float32, {half:g} in 16 bits, dense, "
        f"{terabytes:g} TB/s",
    )


ACCELERATORS: dict[str, Accelerator] = {
    "p100-12": P100_12,
    "p100": P100_16,
    "v100": _nvidia("V100 SXM2", "V100", 15.7, 125, 0.9),
    "a10": _nvidia("A10", "A10", 31.2, 125, 0.6),
    "a100-40": _nvidia("A100 SXM4, 40 GB", "A100", 19.5, 312, 1.555),
    "a100": _nvidia("A100 SXM4, 80 GB", "A100", 19.5, 312, 2.039),
    "l40s": _nvidia("L40S", "L40S", 91.6, 362, 0.864),
    "rtx3090": _nvidia("GeForce RTX 3090", "the GA102 architecture", 35.6, 71, 0.936),
    "rtx4090": _nvidia("GeForce RTX 4090", "the Ada architecture", 82.6, 165.2, 1.008),
    "h100": _nvidia("H100 SXM5", "H100", 67, 989, 3.35),
    "h200": _nvidia("H200 SXM", "H200", 67, 989, 4.8),
    "b200": _nvidia("B200 SXM", "HGX B200", 75, 2250, 8),
}
"""By the name that `--device-type` takes."""


def accelerator(name: str) -> Accelerator:
    """`ValueError` for a name that is not known."""
    key = name.lower().replace(" ", "-")
    if key not in ACCELERATORS:
        raise ValueError(
            f"unknown accelerator {name!r}; known: {', '.join(ACCELERATORS)}, and measured for this machine's"
        )
    return ACCELERATORS[key]
