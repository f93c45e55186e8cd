"""Steps that others published, predicted on paper: the file, the predictions, the record and its table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records import ran

from gpipe_bench.experiments.beyond.plan import published_steps
from gpipe_bench.experiments.beyond.plan.experiment import EXPERIMENT, figures, tables
from gpipe_bench.harness.experiment import RunOptions


def test_every_published_step_says_what_it_was() -> None:
    found = published_steps.steps()
    assert len({step.name for step in found}) == len(found) >= 8
    for step in found:
        assert step.source
        assert step.differs
        assert step.pp * step.dp * step.fsdp * step.tp == step.accelerators
        assert step.batch_size % (step.dp * step.fsdp * step.num_microbatches) == 0
        assert bool(step.speed) != bool(step.step_s)


@pytest.mark.parametrize(
    ("name", "measured_s", "step_s"),
    [
        ("Llama 3 8B, 8 H100, FSDP", 2.843, 2.98),
        ("Llama 2 13B, 64 A100, FSDP", 3.789, 3.74),
        ("GPT-3 22B, 8 A100, TP", 1.42, 1.47),
    ],
)
def test_a_published_step_is_predicted(name: str, measured_s: float, step_s: float) -> None:
    (step,) = (each for each in published_steps.steps() if each.name == name)
    middle_s, low_s, high_s = step.predicted()
    assert step.measured_s == pytest.approx(measured_s, rel=1e-3)
    assert middle_s == pytest.approx(step_s, rel=0.02)
    assert low_s < step.measured_s < high_s < 1.6 * low_s


def test_published_steps_are_recorded_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    few = published_steps.steps()[:2]
    monkeypatch.setattr(published_steps, "steps", lambda: few)
    ranges = iter([(few[0].measured_s, 2.0, 3.0), (9.0, 8.0, 12.0)])
    monkeypatch.setattr(published_steps.Step, "predicted", lambda step: next(ranges))
    found = ran(EXPERIMENT, {"part": published_steps.PART})
    assert [each.value for each in found.metrics] == [few[0].measured_s, 9.0]
    text = tables([found])
    assert "1 of 2 inside, the widest range a factor of 1.50; asked: 75% of them, and at most 1.6: NO" in text
    assert figures([found]) == []


def test_a_sweep_is_judged_by_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the third way there is twice the mini-batch, so that it is the fastest that was measured; the second
    one is predicted to be.
    """
    step = published_steps.steps()[0]
    ways = tuple(
        replace(
            step,
            name="a sweep",
            num_microbatches=number,
            batch_size=size,
            step_s=measured_s,
            speed=0.0,
            memory_gib=0.0,
        )
        for number, size, measured_s in ((1, 8, 4.0), (2, 8, 3.0), (4, 16, 5.0))
    )
    monkeypatch.setattr(published_steps, "sweeps", lambda: {"a sweep": ways})
    assert EXPERIMENT.cases(RunOptions(profile="short"))[-1].key == {"part": published_steps.SWEEPS}
    ranges = iter([(4.0, 3.5, 4.5), (2.0, 1.5, 2.5), (6.0, 4.0, 7.0)])
    monkeypatch.setattr(published_steps.Step, "predicted", lambda step: next(ranges))
    found = ran(EXPERIMENT, {"part": published_steps.SWEEPS})
    assert len({str(each.key["name"]) for each in found.metrics}) == 3
    line = next(line for line in tables([found]).splitlines() if line.startswith("a sweep"))
    assert line.split()[2:] == ["3", "2", "0.50", "20.0", "%"]
