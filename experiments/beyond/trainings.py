"""The trainings that `engines` and `plan` run, as data: models scaled to two cores, or for a few GPUs.
Importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.harness.record import Scalar

if TYPE_CHECKING:
    from gpipe_bench.pipeline.memory.profile import ModelProfile
    from gpipe_bench.planner.model import Source

# Engines side by side

ALL = "all"  # the built-in engines; the user's are added to them
ALWAYS = "ours, recomputing all"  # like other engines, to separate the gain by recomputing less
GLOO, BARE = "ours over gloo", "bare layers"
ALONE, ALL_CORES = "sequential", "sequential on every core"
_KNOWN, _TURNS = "gpipe_bench.experiments.engines.known", "gpipe_bench.experiments.beyond.engine_turns"
FACTORIES = {
    ALWAYS: "ours", GLOO: f"{_KNOWN}:OverNetwork", BARE: f"{_TURNS}:Bare", ALONE: f"{_TURNS}:PlainAlone",
    ALL_CORES: f"{_TURNS}:Plain", "zb-h1": f"{_KNOWN}:OursZBH1",
    "interleaved": f"{_KNOWN}:OursInterleaved", "zb-v": f"{_KNOWN}:OursZBV",
    "torch-interleaved": f"{_KNOWN}:TorchInterleaved", "torch-zb-v": f"{_KNOWN}:TorchZBV",
}  # fmt: skip
"""Engines by their names in results; others are named as on the command line."""


class Workload(NamedTuple):
    """A training for engines: a model with options, examples per micro-batch, and a description.

    `real`: layers are partitioned by seconds and memory is measured; others compute almost nothing.
    """

    model: str
    options: Mapping[str, Any]
    microbatch_size: int
    words: str
    real: bool = True


def _transformer(num_layers: int, width: int, heads: int, vocab: int = 64, tokens: int = 64) -> Workload:
    options = {
        "num_layers": num_layers, "vocab_size": vocab, "d_model": width, "ffn_dim": 4 * width,
        "num_heads": heads, "seq_len": tokens,
    }  # fmt: skip
    words = f"Transformer-{num_layers}, width {width}, 2 sequences of {tokens} tokens per micro-batch"
    return Workload("transformer-lm", options, 2, words)


WAIT_S = 0.02  # seconds per action of a waiting stage
WORKLOADS = {
    "amoebanet": Workload(
        "amoebanet-d",
        {
            "num_layers": 3, "num_filters": 64, "image_size": 64, "num_classes": 10, "dropout": 0.0,
            "aux_head": False,
        },
        4, "AmoebaNet-D (3, 64), 64 x 64 pixels, 4 images per micro-batch",
    ),
    "transformer": _transformer(6, 256, 4),
    "transformer-8": _transformer(8, 256, 4),
    "transformer-8, wide": _transformer(8, 384, 6),
    "transformer-8, large": _transformer(8, 2048, 32, 32_000, 512),
    "waiting": Workload("waiting", {"wait_s": WAIT_S}, 1, "stages that wait 20 ms an action", real=False),
    "small": Workload("linear", {}, 1, "layers of 8 x 8 numbers, an example per micro-batch", real=False),
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """One case: a workload and engines that take turns, the control first; rounds per profile, 0: none."""

    workload: str
    num_stages: int
    num_microbatches: int
    remat: str
    engines: tuple[str, ...]
    rounds: tuple[int, int, int]
    round_s: float
    in_process: bool = False
    device: str = "cpu"

    @property
    def key(self) -> dict[str, Scalar]:
        key: dict[str, Scalar] = {
            "workload": self.workload, "where": "one process" if self.in_process else "processes",
            "num_stages": self.num_stages, "num_microbatches": self.num_microbatches, "remat": self.remat,
        }  # fmt: skip
        if GLOO in self.engines:
            key["over"] = "gloo"
        return key if self.device == "cpu" else key | {"device": self.device}


def _on_cpus() -> list[Configuration]:
    of_torch, torchgpipe = ("ours", "torch-gpipe", "torch-1f1b"), ("ours", "torchgpipe")
    of_schedules = (
        "ours-1f1b", "torch-1f1b", "zb-h1", "interleaved", "torch-interleaved", "zb-v", "torch-zb-v",
    )  # fmt: skip
    found, make = [], Configuration
    for name, smoke in (("amoebanet", (2, 0, 0)), ("transformer", (0, 2, 2))):
        found += [
            make(name, 2, 8, "never", (*of_torch, "ours-1f1b"), (smoke[0], 12, 40), 2.3),
            make(name, 2, 4, "except_last", (*of_torch, ALWAYS), (smoke[1], 12, 40), 1.3),
            make(name, 2, 16, "except_last", (*of_torch, ALWAYS), (0, 5, 25), 4.3),
            make(name, 2, 4, "never", torchgpipe, (smoke[2], 8, 30), 0.7, in_process=True),
            make(name, 2, 4, "except_last", torchgpipe, (0, 8, 30), 0.7, in_process=True),
        ]
    wait, small = ("ours", BARE), ("ours", BARE, "torchgpipe")
    found += [
        make("waiting", 8, 32, "never", wait, (0, 4, 10), 6.0),
        make("waiting", 4, 8, "never", wait, (1, 4, 10), 1.8),
        make("waiting", 4, 8, "except_last", wait, (0, 4, 10), 1.8),
        make("transformer-8", 2, 16, "never", ("ours", "torch-gpipe", ALONE, ALL_CORES), (0, 8, 40), 8.0),
        make("small", 2, 64, "never", (GLOO, "torch-gpipe", BARE), (2, 16, 60), 0.5),
        make("small", 2, 64, "never", ("ours", "torch-gpipe", BARE), (0, 16, 60), 0.5),
        make("small", 4, 8, "never", small, (2, 16, 60), 0.6, in_process=True),
        make("small", 4, 8, "except_last", small, (0, 16, 60), 0.6, in_process=True),
    ]
    return found + [
        make("transformer-8, wide", 2, number, "never", of_schedules, rounds, 2.0 + number)
        for number, rounds in ((2, (1, 10, 40)), (4, (0, 6, 30)), (8, (0, 5, 20)))
    ]


def _on_gpus() -> list[Configuration]:
    """Configurations for GPUs, without waiting layers, which run on the host in any case."""
    make, large, rounds = partial(Configuration, device="cuda"), "transformer-8, large", (1, 8, 40)
    pair, short = ("ours", "torch-gpipe"), (2, 16, 60)
    return [
        *(make("small", 4, 8, remat, ("ours", BARE, "torchgpipe"), short, 0.4, in_process=True)
          for remat in ("never", "except_last")),
        *(make(large, 2, number, "always", pair, rounds, 0.5) for number in (1, 4, 16)),
        make(large, 2, 16, "never", (*pair, ALONE, ALL_CORES), rounds, 0.5),
        make("small", 2, 64, "never", (*pair, BARE), short, 0.5),
    ]  # fmt: skip


CONFIGURATIONS, ON_GPUS = _on_cpus(), _on_gpus()


def configuration_of(key: Mapping[str, Any]) -> Configuration | None:
    return next((each for each in (*CONFIGURATIONS, *ON_GPUS) if each.key == dict(key)), None)


class Job(NamedTuple):
    """A case as its processes get it: the configuration, and by name each variant's engine and `remat`; the
    first is one of ours.
    """

    chosen: Configuration
    engines: dict[str, tuple[str, str]]
    seed: int = 1811

    @property
    def work(self) -> Workload:
        return WORKLOADS[self.chosen.workload]

    @property
    def options(self) -> dict[str, Any]:
        each = {"small": 2 if self.chosen.in_process else 1, "waiting": 1}.get(self.chosen.workload)
        layers = {"num_layers": each * self.chosen.num_stages} if each else {}
        return {**self.work.options, **layers}

    @property
    def num_processes(self) -> int:
        return 1 if self.chosen.in_process else self.chosen.num_stages

    @property
    def own(self) -> list[str]:
        return [name for name in self.engines if name not in self.chosen.engines]


def job_of(chosen: Configuration, extra: str | None) -> Job:
    """The job of a case. The user's engines are named without the digests of their files, and only run real
    models.
    """
    engines = {}
    for name in chosen.engines:
        plain = name in (ALONE, ALL_CORES) or (name == BARE and not chosen.in_process)
        remat = "never" if plain else "always" if name == ALWAYS else chosen.remat
        engines[name] = (FACTORIES.get(name, name), remat)
    if extra not in (None, ALL) and WORKLOADS[chosen.workload].real:
        engines |= {name.partition("@")[0]: (name, chosen.remat) for name in str(extra).split(",")}
    return Job(chosen, engines)


# Plans

PART, STEP, BY_THE_CLOCK, PREDICTED = "steps", "step", "step by the clock", "predicted step"


@dataclass(frozen=True)
class Planned:
    """A model and the settings of its plan.

    Args:
        title, scale: descriptions for tables
        model: a name in the zoo, or `module:function`
        options: options of a model in the zoo
        optimizer: as in `Request`
        batch_size: N
        numbers: values of M to choose from, divisors of N
        rounds, turns: rounds of the probes, and of the steps
        chosen, others: how many of the plan's best, and of the rest, are run
    """

    title: str
    model: str
    options: dict[str, Any]
    scale: str
    optimizer: str = "sgd"
    batch_size: int = 16
    numbers: tuple[int, ...] = (2, 4, 8)
    rounds: int = 12
    turns: int = 8
    chosen: int = 5
    others: int = 5

    @property
    def source(self) -> Source:
        from gpipe_bench.planner.model import Source

        return Source(self.model, None if ":" in self.model else self.options)

    @property
    def profiles(self) -> Callable[..., ModelProfile]:
        """Memory profiles of its layers, for `Costs`."""
        from gpipe_bench.planner.model import built, model_of

        if ":" in self.model:
            model = model_of(self.model, self.batch_size)
        else:
            model = built(self.title, self.model, self.options, self.batch_size)
        return partial(model.profile_of, precision="float32")


_OWN = "gpipe_bench.experiments.beyond.plan_steps"
_SHORT = {
    "transformer": Planned(
        "Transformer", "transformer-lm",
        {"num_layers": 8, "vocab_size": 64, "d_model": 192, "ffn_dim": 768, "num_heads": 3, "seq_len": 32},
        "8 layers, width 192, 32 tokens",
    ),
    "gpt2": Planned(
        "GPT-2", "gpt2",
        {"num_layers": 6, "d_model": 192, "num_heads": 3, "vocab_size": 1000, "seq_len": 32, "tied": False},
        "6 blocks, width 192, 32 tokens",
    ),
    "amoebanet": Planned(
        "AmoebaNet-D", "amoebanet-d",
        {"num_layers": 6, "num_filters": 16, "image_size": 48, "num_classes": 10, "aux_head": False},
        "6 cells, 16 filters, 48 x 48 pixels",
    ),
    "own": Planned(
        "one's own", f"{_OWN}:mixer", {}, "a convolution, 10 mixing blocks of different widths, a head"
    ),
    # Chosen before they were timed; nothing is tuned to them. With Adam, as is usual.
    "llama": Planned(
        "Llama", "llama",
        {
            "num_layers": 6, "d_model": 192, "ffn_dim": 512, "num_heads": 6, "num_kv_heads": 2,
            "vocab_size": 1000, "seq_len": 32,
        },
        "6 blocks, width 192, 32 tokens, Adam", "adam",
    ),
    "attending": Planned(
        "torch's attention", f"{_OWN}:attending", {}, "9 blocks, width 192, 32 tokens, Adam", "adam"
    ),
}  # fmt: skip
_SMOKE = Planned(
    "Transformer", "transformer-lm",
    {"num_layers": 3, "vocab_size": 32, "d_model": 32, "ffn_dim": 64, "num_heads": 2, "seq_len": 16},
    "3 layers, width 32, 16 tokens",
    batch_size=4, numbers=(2, 4), rounds=2, turns=1, chosen=2, others=1,
)  # fmt: skip
_FULL = {name: replace(each, rounds=2 * each.rounds, turns=3 * each.turns) for name, each in _SHORT.items()}
MODELS = {"smoke": {"transformer": _SMOKE}, "short": _SHORT, "full": _FULL}
