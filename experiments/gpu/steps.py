"""The steps of a machine with a GPU, the most valuable first: each fits into ten minutes and stands alone.

Such a machine is mostly lent for minutes, so what comes first must be what is worth most if nothing follows:
that the engine runs and computes the right thing, then the measurements that need a device of the paper's
size. Needs the standard library alone, since the first thing to find out is what a machine lacks.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

PYTEST = ("pytest", "hypothesis", "pytest-benchmark")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to run.

    Args:
        name: of the step, on the command line and of its files.
        gives: what one knows afterwards.
        command: arguments of Python; `{results}` is the folder of the records.
        rehearsal: the same, small and on a CPU.
        minutes: from and to, as they are expected of an H100. Modelled: by operations, steps and what a
            start takes, from 0.2 to 0.7 of the peak.
        memory_gib: of the GPU, by the memory model.
        packages: that must be there besides what the project needs.
        goes_on: whether a second call goes on where the first was ended, because every case is a record.
    """

    name: str
    gives: str
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    minutes: tuple[float, float]
    memory_gib: float
    packages: tuple[str, ...] = ()
    goes_on: bool = False
    gpus: int = 1


def _experiment(
    name: str, gives: str, minutes: tuple[float, float], memory_gib: float, experiment: str,
    only: dict[str, str], rehearsed: dict[str, str],
) -> Step:  # fmt: skip
    def run(profile: str, device: str, cases: dict[str, str]) -> tuple[str, ...]:
        chosen = [word for key, value in cases.items() for word in ("--only", f"{key}={value}")]
        return (
            "-m", "experiments", "run", experiment, "--profile", profile, "--device", device,
            "--results", "{results}", *chosen,
        )  # fmt: skip

    full, small = run("full", "cuda", only), run("smoke", "cpu", rehearsed)
    return Step(name, gives, full, small, minutes, memory_gib, goes_on=True)


def _script(name: str, gives: str, minutes: tuple[float, float], memory_gib: float, module: str) -> Step:
    command = ("-m", f"gpipe_bench.experiments.gpu.{module}", "--device")
    return Step(name, gives, (*command, "cuda"), (*command, "cpu"), minutes, memory_gib)


STEPS: tuple[Step, ...] = (
    Step(
        "doctor", "what this machine has and lacks, and which steps it can take",
        ("-m", "experiments", "doctor", "--device", "cuda", "--results", "{results}"),
        ("-m", "experiments", "doctor", "--results", "{results}"),
        (0.1, 0.5), 0.1,
    ),
    Step(
        "tests", "the tests marked gpu: gradients, masks, waits, memory and timelines on the device",
        ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-q"),
        ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-q", "tests/test_stage_alone.py"),
        (1.5, 4.0), 2.0, PYTEST,
    ),
    _script(
        "nccl", "whether NCCL takes the engine's options, grouped messages and an abort; one GPU suffices",
        (0.2, 1.0), 1.0, "nccl_alone",
    ),
    _script(
        "bitwise", "whether 1, 2 and 4 stages end with the same weights to the bit, float32 and bfloat16",
        (0.5, 2.0), 2.0, "bitwise",
    ),
    _experiment(
        "table1-amoebanet", "Table 1's AmoebaNet columns: every distinct stage under the paper's 8 GiB",
        (1.5, 5.0), 8.0, "table1", {"part": "device", "half": "amoebanet"},
        {"part": "verify", "model": "amoebanet-d"},
    ),
    _experiment(
        "table1-transformer", "Table 1's Transformer columns: every distinct stage under the paper's 16 GiB",
        (1.5, 5.0), 16.0, "table1", {"part": "device", "half": "transformer"},
        {"part": "verify", "model": "transformer-lm"},
    ),
    _experiment(
        "table4-resnet101", "where the time of ResNet-101 goes",
        (1.5, 4.0), 8.0, "table4", {"model": "resnet101"}, {"model": "resnet101"},
    ),
    _experiment(
        "table4-amoebanet", "where the time of AmoebaNet-D (4, 512) goes",
        (2.0, 6.0), 32.0, "table4", {"model": "amoebanet"}, {"model": "amoebanet"},
    ),
    _experiment(
        "table2-transformer", "Table 2's Transformer-48, its mini-batch fitted to the memory of a stage",
        (4.0, 9.0), 54.0, "table2", {"model": "transformer", "batch": "fitted"},
        {"model": "transformer", "batch": "fitted"},
    ),
    _experiment(
        "table2-amoebanet", "Table 2's AmoebaNet-D (18, 256), its mini-batch fitted to the memory of a stage",
        (4.0, 9.0), 10.0, "table2", {"model": "amoebanet", "batch": "fitted"},
        {"model": "amoebanet", "batch": "fixed"},
    ),
    _experiment(
        "table3-amoebanet", "Table 3's AmoebaNet-D (18, 128): actions for the replay over slow links",
        (1.0, 3.0), 2.0, "table3", {"part": "steps", "model": "amoebanet"},
        {"part": "steps", "model": "amoebanet"},
    ),
    _experiment(
        "table3-transformer", "Table 3's Transformer-24: actions for the replay over slow links",
        (1.5, 4.0), 25.0, "table3", {"part": "steps", "model": "transformer"},
        {"part": "steps", "model": "transformer"},
    ),
    _experiment(
        "table2-transformer-fixed", "Table 2's Transformer-48 at one mini-batch; K=2, M=1 may find no room",
        (3.0, 9.0), 71.0, "table2", {"model": "transformer", "batch": "fixed"},
        {"model": "transformer", "batch": "fixed"},
    ),
    _experiment(
        "table2-amoebanet-fixed", "Table 2's AmoebaNet-D (18, 256) at one mini-batch",
        (4.0, 9.0), 36.0, "table2", {"model": "amoebanet", "batch": "fixed"},
        {"model": "amoebanet", "batch": "fixed"},
    ),
    _experiment(
        "figure3-resnet101", "v1's Figure 3, ResNet-101",
        (2.0, 5.0), 26.0, "figure3", {"model": "resnet101"}, {"model": "resnet101"},
    ),
)  # fmt: skip


def find(name: str) -> Step:
    """The step of that name. `ValueError` names those there are."""
    for step in STEPS:
        if step.name == name:
            return step
    names = [step.name for step in STEPS]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"unknown step {name!r}{hint}; known: {', '.join(names)}")
