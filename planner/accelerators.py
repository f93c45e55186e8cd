"""Published peaks of accelerators: those of the paper, and current ones.

What share of its peak arithmetic a program reaches on the paper's is unknown and stands in
results/unknowns.toml, not here.

Products of float32 tensors are those of the vector units, as torch has it unless TF32 is allowed; half
precision is dense, with sums in float32: of data sheets that print it with sparsity half, so 1979 TFLOP/s of
an H100 are 989.5 here. Bandwidths count in powers of ten, as in the sheets.

`REACHED` is the share of its peak that a card reaches in the best of many single products of bfloat16; a card
that is not in it gets the least share of those that are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpipe_bench.pipeline.plan.named import suggestion


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
        attention: the kernels of scaled dot-product attention, as `pipeline.memory.profile` has them
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
TPU_V3 = replace(
    TPU_V2,
    name="TPUv3 core",
    flops_per_s=61.5e12,
    half_flops_per_s=61.5e12,
    bytes_per_s=450e9,
    source=_JOUPPI.format(chip="123 TFLOP/s, 900 GB/s, two cores with two 128 x 128 matrix units each"),
)
P40 = Accelerator(
    name="P40",
    flops_per_s=12e12,
    half_flops_per_s=0.19e12,
    bytes_per_s=346e9,
    source="NVIDIA's Tesla P40 data sheet: 12 TFLOP/s in float32, 346 GB/s, 24 GB",
)

UPDATE_BYTES = {"rmsprop": 28, "momentum": 20, "sgd": 12, "adam": 28}
"""Bytes that an optimizer moves for each float32 parameter where one kernel does all, as TensorFlow's
`training_ops` and torch's `fused=True`; torch's default moves two to three times as much."""

TPUS = {each.name: each for each in (TPU_V2, TPU_V3)}

MEASURED_BY = "stas00/ml-engineering, compute/accelerator, maximum achievable matmul FLOPS, revision 744d01e"
REACHED = {"A100": 0.869, "H100": 0.803, "H200": 0.803, "B200": 0.776}
"""Shares measured by MEASURED_BY: 271.2 of 312, 794.5 of 989 (H200 the same), 1745 of 2250 TFLOP/s."""

IN_TRAINING = {"H100": 0.781, "H200": 0.781}
"""Share of `REACHED` that training reaches, relative to an A100. Fitted so that predictions of MosaicML's
MPT-7B and 13B (2048 tokens, eight cards, nothing recomputed; llm-foundry, scripts/train/benchmarking,
revision 061f2c7) have the same error on both cards; the steps of torchtitan test it."""


def _gpu(
    name: str, sheet: str, float32: float, half: float, terabytes: float, *, since_ampere: bool = True
) -> Accelerator:
    """A card by its TFLOP/s in float32 and in 16 bits, and its memory's TB/s."""
    chip = name.split()[0]
    return Accelerator(
        name=name,
        flops_per_s=float32 * 1e12,
        half_flops_per_s=half * 1e12,
        bytes_per_s=terabytes * 1e12,
        attention="flash" if since_ampere else "efficient",
        bfloat16=since_ampere,
        reached=REACHED.get(chip, min(REACHED.values())) * IN_TRAINING.get(chip, 1.0),
        source=f"{float32:g} TFLOP/s in float32, {half:g} in 16 bits, dense, {terabytes:g} TB/s: {sheet}; "
        + (f"share by {MEASURED_BY}" if chip in REACHED else f"share not known, the least of {MEASURED_BY}"),
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
_H100_500W = (
    "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: between an H100 SXM and an NVL, whose data "
    "sheets have 989.5 and 835 TFLOP/s; the middle of the two"
)
_BLACKWELL = "NVIDIA's data sheet of GB200 NVL72 and HGX B200, one GPU of HGX B200"

P100_16 = _gpu("P100 for PCIe, 16 GB", "NVIDIA's Tesla P100 data sheet", 9.3, 18.7, 0.732, since_ampere=False)
P100_12 = replace(
    P100_16,
    name="P100 for PCIe, 12 GB",
    bytes_per_s=549e9,
    source=P100_16.source.replace("0.732", "0.549"),
)

ACCELERATORS: dict[str, Accelerator] = {
    "p100-12": P100_12,
    "p100": P100_16,
    "v100": _gpu("V100 SXM2", _V100, 15.7, 125, 0.9, since_ampere=False),
    "a10": _gpu("A10", _A10, 31.2, 125, 0.6),
    "a100-40": _gpu("A100 SXM4, 40 GB", _A100_40, 19.5, 312, 1.555),
    "a100": _gpu("A100 SXM4, 80 GB", _A100, 19.5, 312, 2.039),
    "l40s": _gpu("L40S", f"{_PAGES}/en-us/data-center/l40s/", 91.6, 362.05, 0.864),
    "rtx3090": _gpu("GeForce RTX 3090", _GA102, 35.6, 71, 0.936),
    "rtx4090": _gpu("GeForce RTX 4090", _ADA, 82.6, 165.2, 1.008),
    "h100": _gpu("H100 SXM5", f"{_PAGES}/en-us/data-center/h100/", 67, 989.5, 3.35),
    "h100-500w": _gpu("H100 SXM5, HBM2e, 500 W", _H100_500W, 67, 912, 2.4),
    "h200": _gpu("H200 SXM", f"{_PAGES}/en-us/data-center/h200/", 67, 989.5, 4.8),
    "gb200": _gpu("GB200, one GPU", _BLACKWELL, 80, 2500, 8),
    "t4": _gpu("T4", f"{_PAGES}/en-us/data-center/tesla-t4/", 8.1, 65, 0.32, since_ampere=False),
    "l4": _gpu("L4", f"{_PAGES}/en-us/data-center/l4/", 30.3, 121, 0.3),
    "a6000": _gpu("RTX A6000", f"{_PAGES}/en-us/design-visualization/rtx-a6000/", 38.7, 154.8, 0.768),
    "mi300x": _gpu("MI300X", "AMD's Instinct MI300X data sheet", 163.4, 1307.4, 5.3),
    "tpuv3": TPU_V3,
    "b200": _gpu("B200 SXM", _BLACKWELL, 75, 2250, 7.7),
}
"""Accelerators by the name that `--device-type` takes."""


def _card(text: str) -> Accelerator:
    """Returns an unlisted accelerator, given its TFLOP/s in 16 bits, and its memory's GiB and GB/s."""
    try:
        tflops, gib, gb_per_s = map(float, text.split(","))
    except ValueError:
        tflops = gib = gb_per_s = 0.0
    if min(tflops, gib, gb_per_s) <= 0:
        raise ValueError(f"--card {text}: give TFLOP/s, GiB and GB/s above 0, such as 155,48,768")
    return Accelerator(
        name=f"card of {tflops:g} TFLOP/s and {gb_per_s:g} GB/s", attention="flash",
        flops_per_s=tflops * 1e12, half_flops_per_s=tflops * 1e12, bytes_per_s=gb_per_s * 1e9,
        source="as it was given",
    )  # fmt: skip


def accelerator(name: str, precision: str = "float32") -> Accelerator:
    """The accelerator with this name. `ValueError` if it is unknown or lacks units for the precision."""
    if "," in name:
        return _card(name)
    key = name.lower().replace(" ", "-")
    if key not in ACCELERATORS:
        raise ValueError(
            f"unknown accelerator {name!r}{suggestion(name, ACCELERATORS)}; known: "
            f"{', '.join(ACCELERATORS)}, and measured for this machine's"
        )
    found = ACCELERATORS[key]
    if precision.startswith("bfloat16") and not found.bfloat16:
        raise ValueError(
            f"precision is bfloat16, for which a {found.name} has no units; use float32, or an accelerator "
            "that has them, such as a100"
        )
    return found
