"""What refused calls say: `refusals.txt` holds the wording, call by call, and no other test needs to.

    python -m tests.test_refusals       writes what they say now; the diff is what changed for users

A call stands at the beginning of a line and may use the public names of `pipeline` and `models` and those
below. What it raises stands under it. Sections say what is called.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_bench import models, pipeline
from gpipe_bench.models.amoebanet.modules import DropPath, SamePool2d
from gpipe_bench.models.transformer.blocks import to_cut
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.remat import from_text

PAGE = Path(__file__).with_name("refusals.txt")
SMALL = {
    "amoebanet-d": {"num_layers": 3, "num_filters": 8},
    "resnet101": {"num_filters": 8, "num_classes": 3, "image_size": 32},
    "transformer-lm": {"vocab_size": 11, "d_model": 8, "ffn_dim": 12, "num_heads": 2, "seq_len": 6},
}
SMALL["transformer-seq2seq"] = {**SMALL["transformer-lm"], "head_dim": 3}


def rows(*lines: str, remat: Any = "never", **changes: Any) -> pipeline.Schedule:
    """A schedule of the actions of each worker."""
    schedule = pipeline.from_csv("\n".join(line.replace(" ", ",") for line in lines), remat=remat)
    return dataclasses.replace(schedule, **changes)


def built(name: str, **options: Any) -> nn.Module:
    """A model, on the meta device."""
    with torch.device("meta"):
        return models.MODELS[name](**{**SMALL[name], **options})


def auto(**options: Any) -> pipeline.Pipeline:
    """Four layers on as many stages."""
    layers = [nn.Linear(1, 1) for _ in range(4)]
    options = {"num_stages": 4, "num_microbatches": 4, "schedule": "auto", "remat": "never", **options}
    return pipeline.Pipeline(layers, **options)


NAMES = {
    **{name: getattr(pipeline, name) for name in pipeline.__all__},
    **{name: getattr(models, name) for name in models.__all__},
    **{each.__name__: each for each in (rows, built, auto, from_text, to_cut, DropPath, SamePool2d, Edge)},
    "changed": dataclasses.replace, "nan": float("nan"), "F": pipeline.Kind.F, "B": pipeline.Kind.B,
    "I": pipeline.Kind.I, "skip": Edge(0, 0, 3, ("a",)),
}  # fmt: skip


def sections() -> dict[str, dict[str, str]]:
    """What each call of each section is to say."""
    found: dict[str, dict[str, str]] = {}
    calls, call = dict[str, str](), ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            calls = found.setdefault(line.strip("[]"), {})
        elif line.startswith("    "):
            calls[call] += f"\n{line.strip()}" if calls[call] else line.strip()
        elif line and not line.startswith("#"):
            call = line
            calls[call] = ""
    return found


def said(call: str) -> str:
    """By a call."""
    try:
        eval(call, dict(NAMES))
    except Exception as error:
        lines = (line.strip() for line in f"{type(error).__name__}: {error}".splitlines())
        return "\n".join(line for line in lines if line)
    return "nothing"


@pytest.mark.parametrize("section", sections())
def test_what_is_refused_says_what_is_wrong_and_what_would_do(section: str) -> None:
    wanted = sections()[section]
    assert "nothing" not in wanted.values()
    assert {call: said(call) for call in wanted} == wanted


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    parts = [line for line in text.partition("[")[0].splitlines() if line]
    for section, calls in sections().items():
        parts.append(f"\n[{section}]")
        for call in calls:
            parts += [call, *(f"    {line}" for line in said(call).splitlines())]
    PAGE.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
