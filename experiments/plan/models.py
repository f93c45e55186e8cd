"""The models that are planned and run, by profile, and one that is nobody's but this experiment's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_bench.planner.model import Subject


@dataclass(frozen=True)
class Planned:
    """A model at one size.

    Args:
        title: for tables
        model: of the zoo, or `module:function`
        options: of the zoo's model
        batch_size: N
        numbers: M that the plan may choose, divisors of N
        rounds: of the probes
        turns: rounds in which the candidates are run
        chosen, others: how many are run
        scale: in words
        optimizer: as `Request` has it
    """

    title: str
    model: str
    options: dict[str, Any]
    batch_size: int
    numbers: tuple[int, ...]
    rounds: int
    turns: int
    chosen: int
    others: int
    scale: str
    optimizer: str = "sgd"

    @property
    def subject(self) -> Subject:
        """What its processes build."""
        from gpipe_bench.planner.model import OfTheZoo, OneOfYours

        return OneOfYours(self.model) if ":" in self.model else OfTheZoo(self.model, self.options)


_TRANSFORMER: dict[str, Any] = {
    "num_layers": 8, "vocab_size": 64, "d_model": 192, "ffn_dim": 768, "num_heads": 3, "seq_len": 32,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "num_layers": 6, "d_model": 192, "num_heads": 3, "vocab_size": 1000, "seq_len": 32, "tied": False,
}  # fmt: skip
_AMOEBANET: dict[str, Any] = {
    "num_layers": 6, "num_filters": 16, "image_size": 48, "num_classes": 10, "aux_head": False,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "num_layers": 6, "d_model": 192, "ffn_dim": 512, "num_heads": 6, "num_kv_heads": 2, "vocab_size": 1000,
    "seq_len": 32,
}  # fmt: skip

_RUN: dict[str, Any] = {
    "batch_size": 16,
    "numbers": (2, 4, 8),
    "rounds": 12,
    "turns": 8,
    "chosen": 5,
    "others": 5,
}

MODELS: dict[str, dict[str, Planned]] = {
    "smoke": {
        "transformer": Planned(
            "Transformer", "transformer-lm",
            {"num_layers": 3, "vocab_size": 32, "d_model": 32, "ffn_dim": 64, "num_heads": 2, "seq_len": 16},
            4, (2, 4), 2, 1, 2, 1, "3 layers, width 32, 16 tokens",
        ),
    },
    "short": {
        "transformer": Planned(
            "Transformer", "transformer-lm", _TRANSFORMER, **_RUN, scale="8 layers, width 192, 32 tokens"
        ),
        "gpt2": Planned("GPT-2", "gpt2", _GPT2, **_RUN, scale="6 blocks, width 192, 32 tokens"),
        "amoebanet": Planned(
            "AmoebaNet-D", "amoebanet-d", _AMOEBANET, **_RUN, scale="6 cells, 16 filters, 48 x 48 pixels"
        ),
        "own": Planned(
            "one's own", "gpipe_bench.experiments.plan.own_model:mixer", {}, **_RUN,
            scale="a convolution, 10 mixing blocks of different widths, a head",
        ),
        # Chosen before anything of them was timed: nothing is tuned to them. With Adam, as most train.
        "llama": Planned(
            "Llama", "llama", _LLAMA, **_RUN, scale="6 blocks, width 192, 32 tokens, Adam", optimizer="adam"
        ),
        "attending": Planned(
            "torch's attention", "gpipe_bench.experiments.plan.own_model:attending", {}, **_RUN,
            scale="9 blocks, width 192, 32 tokens, Adam", optimizer="adam",
        ),
    },
}  # fmt: skip
MODELS["full"] = {
    name: Planned(
        each.title, each.model, each.options, each.batch_size, each.numbers, 2 * each.rounds, 3 * each.turns,
        each.chosen, each.others, each.scale, each.optimizer,
    )
    for name, each in MODELS["short"].items()
}  # fmt: skip
