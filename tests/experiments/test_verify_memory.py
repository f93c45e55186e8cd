"""The check of the memory model by real steps counts all that lives from one step to the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpipe_bench.experiments.paper.table1 import real_steps
from gpipe_bench.experiments.paper.table1.real_steps import verify
from gpipe_bench.pipeline import Pipeline

NAME = "transformer-lm"


def test_the_model_meets_real_steps() -> None:
    found = verify(NAME, 2, "always", 4)
    assert len(found.tracked) == 2
    assert found.largest_error < 1e-4


@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_stage_keeps_from_the_first_step_is_counted(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = verify(NAME, 2, "always", 4).tracked

    class Hoarding(Pipeline):
        def step(self, *arguments: Any, **options: Any) -> Any:
            result = super().step(*arguments, **options)
            kept = self.stages[stage].__dict__.setdefault("kept", {})
            kept.setdefault("first", [torch.zeros(2500)])  # 10,000 bytes, deep inside
            return result

    monkeypatch.setattr(real_steps, "Pipeline", Hoarding)
    after = verify(NAME, 2, "always", 4).tracked
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        10_000 * (index == stage) for index in range(2)
    ]
