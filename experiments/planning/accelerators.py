"""Accelerators that people train on, by their data sheets.

Products of float32 tensors are those of the vector units, as torch has it unless TF32 is allowed; half
precision is dense, with sums in float32. Data sheets that print it with sparsity have twice as much: 1979
TFLOP/s of an H100 are 989.5 here, 4.5 PFLOP/s of a B200 2250. Bandwidths are those of the sheets, which count
in powers of ten.
"""

from __future__ import annotations

from gpipe_bench.experiments.published.accelerator_steps.accelerators import (
    P100_12,
    P100_16,
    TPU_V3,
    Accelerator,
)


def _nvidia(name: str, sheet: str, float32: float, half: float, terabytes: float) -> Accelerator:
    return Accelerator(
        name=name,
        flops_per_s=float32 * 1e12,
        half_flops_per_s=half * 1e12,
        bytes_per_s=terabytes * 1e12,
        source=f"{float32:g} TFLOP/s in float32, {half:g} in 16 bits, dense, {terabytes:g} TB/s: {sheet}",
    )


_PAGES = "https://www.nvidia.com"
_IMAGES = "https://images.nvidia.com"
_V100 = f"{_IMAGES}/content/technologies/volta/pdf/tesla-volta-v100-datasheet-letter-fnl-web.pdf"
_A10 = f"{_PAGES}/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
_A100 = (
    f"{_PAGES}/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_A100_40 = f"{_IMAGES}/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
_GA102 = f"{_PAGES}/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
_ADA = f"{_IMAGES}/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = "NVIDIA's data sheet of GB200 NVL72 and HGX B200, one GPU of HGX B200"

ACCELERATORS: dict[str, Accelerator] = {
    "p100-12": P100_12,
    "p100": P100_16,
    "v100": _nvidia("V100 SXM2", _V100, 15.7, 125, 0.9),
    "a10": _nvidia("A10", _A10, 31.2, 125, 0.6),
    "a100-40": _nvidia("A100 SXM4, 40 GB", _A100_40, 19.5, 312, 1.555),
    "a100": _nvidia("A100 SXM4, 80 GB", _A100, 19.5, 312, 2.039),
    "l40s": _nvidia("L40S", f"{_PAGES}/en-us/data-center/l40s/", 91.6, 362.05, 0.864),
    "rtx3090": _nvidia("GeForce RTX 3090", _GA102, 35.6, 71, 0.936),
    "rtx4090": _nvidia("GeForce RTX 4090", _ADA, 82.6, 165.2, 1.008),
    "h100": _nvidia("H100 SXM5", f"{_PAGES}/en-us/data-center/h100/", 67, 989.5, 3.35),
    "h200": _nvidia("H200 SXM", f"{_PAGES}/en-us/data-center/h200/", 67, 989.5, 4.8),
    "tpuv3": TPU_V3,
    "b200": _nvidia("B200 SXM", _BLACKWELL, 75, 2250, 7.7),
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
