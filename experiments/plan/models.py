"""The models that are planned and run, by profile; two of them are one's own (`own_model`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        scale: in words
        optimizer: as `Request` has it
        batch_size: N
        numbers: M that the plan may choose, divisors of N
        rounds: of the probes
        turns: rounds in which the candidates are run
        chosen, others: how many are run
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
    def subject(self) -> Subject:
        """What its processes build."""
        from gpipe_bench.planner.model import OfTheZoo, OneOfYours

        return OneOfYours(self.model) if ":" in self.model else OfTheZoo(self.model, self.options)


_OWN = "gpipe_bench.experiments.plan.own_model"
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
    # Chosen before anything of them was timed: nothing is tuned to them. With Adam, as most train.
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
    "Transformer",
    "transformer-lm",
    {"num_layers": 3, "vocab_size": 32, "d_model": 32, "ffn_dim": 64, "num_heads": 2, "seq_len": 16},
    "3 layers, width 32, 16 tokens",
    batch_size=4,
    numbers=(2, 4),
    rounds=2,
    turns=1,
    chosen=2,
    others=1,
)
MODELS: dict[str, dict[str, Planned]] = {
    "smoke": {"transformer": _SMOKE},
    "short": _SHORT,
    "full": {
        name: replace(each, rounds=2 * each.rounds, turns=3 * each.turns) for name, each in _SHORT.items()
    },
}
