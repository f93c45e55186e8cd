"""Which engines take turns on what: the configurations of `engines`, and what was asked of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpipe_bench.experiments.beyond.side_by_side import Sign
from gpipe_bench.harness.record import Scalar

KNOWN = "all"  # the engines that are always there; others are added to them
ALWAYS = "ours, recomputing all"  # as others do, to tell apart what comes from recomputing less
GLOO, BARE = "ours over gloo", "bare layers"
ALONE, ALL_CORES = "sequential", "sequential on every core"
_KNOWN, _TURNS = "gpipe_bench.experiments.engines.known", "gpipe_bench.experiments.beyond.engine_turns"
FACTORIES = {
    ALWAYS: "ours", GLOO: f"{_KNOWN}:OverNetwork", BARE: f"{_TURNS}:Bare", ALONE: f"{_TURNS}:PlainAlone",
    ALL_CORES: f"{_TURNS}:Plain", "zb-h1": f"{_KNOWN}:OursZBH1",
    "interleaved": f"{_KNOWN}:OursInterleaved", "zb-v": f"{_KNOWN}:OursZBV",
    "torch-interleaved": f"{_KNOWN}:TorchInterleaved", "torch-zb-v": f"{_KNOWN}:TorchZBV",
}  # fmt: skip
"""Engines by what results call them; all others have the names of the command line."""


class Workload(NamedTuple):
    """A training for engines: a model with its options, examples of a micro-batch, and a description.

    `real`: layers are cut by measured seconds and memory is counted; the others compute next to nothing.
    """

    model: str
    options: Mapping[str, Any]
    microbatch_size: int
    words: str
    real: bool = True


def _transformer(num_layers: int, width: int, heads: int, vocab_size: int = 64, seq_len: int = 64) -> Any:
    return {
        "num_layers": num_layers, "vocab_size": vocab_size, "d_model": width, "ffn_dim": 4 * width,
        "num_heads": heads, "seq_len": seq_len,
    }  # fmt: skip


WAIT_S = 0.02  # of a waiting stage, per action
WORKLOADS = {
    "amoebanet": Workload(
        "amoebanet-d",
        {
            "num_layers": 3, "num_filters": 64, "image_size": 64, "num_classes": 10, "dropout": 0.0,
            "aux_head": False,
        },
        4, "AmoebaNet-D (3, 64), 64 x 64 pixels, 4 images per micro-batch",
    ),
    "transformer": Workload(
        "transformer-lm", _transformer(6, 256, 4), 2,
        "Transformer-6, width 256, 2 sequences of 64 tokens per micro-batch",
    ),
    "transformer-8": Workload(
        "transformer-lm", _transformer(8, 256, 4), 2,
        "Transformer-8, width 256, 2 sequences of 64 tokens per micro-batch",
    ),
    "transformer-8, wide": Workload(
        "transformer-lm", _transformer(8, 384, 6), 2,
        "Transformer-8, width 384, 2 sequences of 64 tokens per micro-batch",
    ),
    "transformer-8, large": Workload(
        "transformer-lm", _transformer(8, 2048, 32, 32_000, 512), 2,
        "Transformer-8, width 2048, 2 sequences of 512 tokens each micro-batch",
    ),
    "waiting": Workload("waiting", {"wait_s": WAIT_S}, 1, "stages that wait 20 ms an action", real=False),
    "small": Workload("linear", {}, 1, "layers of 8 x 8 numbers, an example per micro-batch", real=False),
}  # fmt: skip


class Target(NamedTuple):
    """A bound on a number of a case: at least or at most `bound`, in its unit."""

    name: str
    engine: str
    sign: Sign
    bound: float
    against: str = ""

    @property
    def key(self) -> dict[str, Scalar]:
        return {"engine": self.engine, **({"against": self.against} if self.against else {})}


SPEED, SHARE, COST = "speed", "share of the ideal step", "over the bare layers"


def _faster(bound: float, *pairs: tuple[str, str]) -> tuple[Target, ...]:
    return tuple(Target(SPEED, engine, ">=", bound, against) for engine, against in pairs)


@dataclass(frozen=True)
class Configuration:
    """One case: who takes turns on what, the first one the control; rounds by profile, 0 for no such case."""

    workload: str
    num_stages: int
    num_microbatches: int
    remat: str
    engines: tuple[str, ...]
    rounds: tuple[int, int, int]
    round_s: float
    targets: tuple[Target, ...] = ()
    in_process: bool = False
    device: str = "cpu"

    @property
    def key(self) -> dict[str, Scalar]:
        key: dict[str, Scalar] = {
            "workload": self.workload, "where": "one process" if self.in_process else "processes",
            "num_stages": self.num_stages, "num_microbatches": self.num_microbatches, "remat": self.remat,
        }  # fmt: skip
        return (
            key
            | ({"over": "gloo"} if GLOO in self.engines else {})
            | ({"device": self.device} if self.device != "cpu" else {})
        )


def _on_cpus() -> list[Configuration]:
    of_torch = ("torch-gpipe", "torch-1f1b")
    found = []
    for name in ("amoebanet", "transformer"):
        pairs = [("ours", each) for each in of_torch]
        smoke = {"amoebanet": (2, 0, 0), "transformer": (0, 2, 2)}[name]
        found += [
            Configuration(name, 2, 8, "never", ("ours", *of_torch, "ours-1f1b"), (smoke[0], 12, 40), 2.3,
                 _faster(1.0, ("ours", "torch-gpipe"), ("ours-1f1b", "torch-1f1b"))),
            Configuration(name, 2, 4, "except_last", ("ours", *of_torch, ALWAYS), (smoke[1], 12, 40), 1.3,
                 _faster(1.12, *pairs)),
            Configuration(name, 2, 16, "except_last", ("ours", *of_torch, ALWAYS), (0, 5, 25), 4.3,
                 _faster(1.04, *pairs)),
            Configuration(name, 2, 4, "never", ("ours", "torchgpipe"), (smoke[2], 8, 30), 0.7,
                 _faster(1.0, ("ours", "torchgpipe")), in_process=True),
            Configuration(name, 2, 4, "except_last", ("ours", "torchgpipe"), (0, 8, 30), 0.7,
                 _faster(1.0, ("ours", "torchgpipe")), in_process=True),
        ]  # fmt: skip
    found += [
        Configuration("waiting", k, m, remat, ("ours", BARE), (1 if (k, remat) == (4, "never") else 0, 4, 10),
             0.15 * (m + k), (Target(SHARE, "ours", ">=", bound),) if bound else ())
        for k, m, remat, bound in ((8, 32, "never", 0.97), (4, 8, "never", 0.95), (4, 8, "except_last", 0.0))
    ]  # fmt: skip
    found.append(
        Configuration("transformer-8", 2, 16, "never", ("ours", "torch-gpipe", ALONE, ALL_CORES),
             (0, 8, 40), 8.0, (Target(SHARE, "ours", ">=", 0.88), *_faster(1.0, ("ours", "torch-gpipe"))))
    )  # fmt: skip
    found += [
        Configuration("small", 2, 64, "never", (ours, "torch-gpipe", BARE),
             (2 if ours == GLOO else 0, 16, 60), 0.5,
             (Target(COST, ours, "<=", 100.0), *_faster(2.0, (ours, "torch-gpipe"))))
        for ours in (GLOO, "ours")
    ]  # fmt: skip
    found += [
        Configuration("small", 4, 8, remat, ("ours", BARE, "torchgpipe"),
             (2 if remat == "never" else 0, 16, 60), 0.6,
             (Target(COST, "ours", "<=", 60.0), *_faster(1.0, ("ours", "torchgpipe"))), in_process=True)
        for remat in ("never", "except_last")
    ]  # fmt: skip
    of_schedules = (
        "ours-1f1b",
        "torch-1f1b",
        "zb-h1",
        "interleaved",
        "torch-interleaved",
        "zb-v",
        "torch-zb-v",
    )
    wanted = {2: (1.11, 1.11, 1.13), 4: (1.05, 1.05, 1.05), 8: (1.0, 1.02, 1.0)}
    for number, rounds in ((2, (1, 10, 40)), (4, (0, 6, 30)), (8, (0, 5, 20))):
        targets = [
            target
            for name, bound in zip(("zb-h1", "interleaved", "zb-v"), wanted[number], strict=True)
            for target in _faster(bound, (name, "ours-1f1b"))
        ]
        same = (("ours-1f1b", "torch-1f1b"), ("interleaved", "torch-interleaved"), ("zb-v", "torch-zb-v"))
        found.append(
            Configuration("transformer-8, wide", 2, number, "never", of_schedules, rounds, 2.0 + number,
                 (*targets, *_faster(1.0, *same)))
        )  # fmt: skip
    return found


def _on_gpus() -> list[Configuration]:
    """Configurations for GPUs, without layers that wait instead of computing: the host runs those anyway."""
    large, rounds = "transformer-8, large", (1, 8, 40)
    pair = ("ours", "torch-gpipe")
    return [
        *(Configuration("small", 4, 8, remat, ("ours", BARE, "torchgpipe"), (2, 16, 60), 0.4, in_process=True,
               device="cuda") for remat in ("never", "except_last")),
        *(Configuration(large, 2, m, "always", pair, rounds, 0.5, device="cuda") for m in (1, 4, 16)),
        Configuration(large, 2, 16, "never", (*pair, ALONE, ALL_CORES), rounds, 0.5, device="cuda"),
        Configuration("small", 2, 64, "never", (*pair, BARE), (2, 16, 60), 0.5, device="cuda"),
    ]  # fmt: skip


CONFIGURATIONS, ON_GPUS = _on_cpus(), _on_gpus()
PROFILES = ("smoke", "short", "full")


def configuration_of(key: Mapping[str, Any]) -> Configuration | None:
    return next((each for each in (*CONFIGURATIONS, *ON_GPUS) if each.key == dict(key)), None)
