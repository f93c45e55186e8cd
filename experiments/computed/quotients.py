"""Numbers of the paper that follow from other numbers of the paper, or from counting a model.

They confirm arithmetic and no more, so all of them are identities; a wrong one would be an erratum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gpipe_bench.experiments.computed.answer import Answer
from gpipe_bench.harness.paper import PaperCell, load_paper
from gpipe_bench.harness.verdict import Part, Spread
from gpipe_bench.models.paper import HALVES, column

ROUNDING = "rounding of the printed numbers"

_CLAIMS = (
    ("AmoebaNet: largest on 8 accelerators over naive-1", "amoebanet", "pipeline-8", "naive-1"),
    ("Transformer: largest on 128 partitions over naive-1", "transformer", "pipeline-128", "naive-1"),
    ("Transformer: larger by re-materialization alone", "transformer", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger on one accelerator", "amoebanet", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger from 1 to 8 accelerators", "amoebanet", "pipeline-8", "pipeline-1"),
)
"""Sentence, half of Table 1, and the two columns whose models are divided."""


def printed(table: str, row: str, name: str) -> PaperCell:
    """A number that stands in the paper, or that it quotes."""
    return next(
        cell for cell in load_paper() if cell.key == (table, row, name) and cell.source != "torchgpipe"
    )


def growth() -> list[Answer]:
    """How much the best ImageNet model grew in three years."""
    later = printed("growth", "SENet 2017", "parameters")
    earlier = printed("growth", "GoogLeNet 2014", "parameters")
    low = (later.target - later.target_rounding) / (earlier.target + earlier.target_rounding)
    high = (later.target + later.target_rounding) / (earlier.target - earlier.target_rounding)
    return [
        Answer(
            row="parameters of the best model, 2017 over 2014",
            column="v1",
            value=later.target / earlier.target,
            unit="ratio",
            what=f"{later.printed} over {earlier.printed}",
            spread=Spread(low=low, high=high, parts=(Part(what=ROUNDING, low=low, high=high),)),
        )
    ]


def error_rates() -> list[Answer]:
    """What the printed accuracies leave to 100 %."""
    found = []
    for name in ("CIFAR-10", "CIFAR-100"):
        accuracy = printed("transfer", name, "top-1")
        error, off = 100 - accuracy.target, accuracy.target_rounding
        part = Part(what=ROUNDING, low=error - off, high=error + off)
        found.append(
            Answer(
                row=name,
                column="error rate",
                value=error,
                unit="%",
                what=f"100 - {accuracy.printed}",
                spread=Spread(low=part.low, high=part.high, parts=(part,)),
            )
        )
    return found


def claims() -> list[Answer]:
    """Quotients of exact counts of the models of Table 1."""
    return [
        Answer(
            row=f"quotient of the printed counts, {sentence}",
            column=f"{over} / {under}",
            value=parameters_of(half, over) / parameters_of(half, under),
            unit="ratio",
            what="the quotient of the two exact counts",
        )
        for sentence, half, over, under in _CLAIMS
    ]


def parameters_of(half: str, name: str) -> int:
    """Trained parameters of the model in a column of Table 1."""
    model, options = HALVES[half].model, dict(HALVES[half].options)
    size = column(half, name)
    if size.num_filters:
        options |= {"num_layers": size.num_layers, "num_filters": size.num_filters}
        return parameters(model, options)
    # Every layer of the Transformer is like every other one.
    one, two = (parameters(model, options | {"num_layers": layers}) for layers in (1, 2))
    return one + (size.num_layers - 1) * (two - one)


def parameters(name: str, options: dict[str, Any]) -> int:
    """Trained parameters of a model of the zoo, built without memory."""
    import torch

    from gpipe_bench.models import MODELS

    with torch.device("meta"):
        model = MODELS[name](**options)
    return sum(math.prod(p.shape) for p in model.parameters() if p.requires_grad)


QUOTIENTS: dict[str, Callable[[], list[Answer]]] = {
    "claims": claims,
    "growth": growth,
    "transfer": error_rates,
}
"""By the table that they answer."""
