"""Table 3: a P100 by its peaks, the slowed link, and what the experiment makes of records."""

from __future__ import annotations

import numpy as np
import pytest
from made_up_steps import found, job_of, timed, value
from records import record

from gpipe_bench.experiments.paper.links import PCIE, replayed
from gpipe_bench.experiments.paper.predicted.sizes import FullSize, Seconds
from gpipe_bench.experiments.paper.table3 import EXPERIMENT
from gpipe_bench.experiments.paper.timed.results import Steps
from gpipe_bench.experiments.paper.timed.workloads import TABLE3, Configuration
from gpipe_bench.harness.experiment import RunOptions


class Paper(FullSize):
    """Eight equal layers of a millisecond at half the peak, and messages of 4 MB."""

    def seconds(self, accelerator, activation_format, examples, shares_of_peak):
        (share,) = shares_of_peak
        return (Seconds(np.array([0.5e-3 / share]), np.array([1e-3 / share])),) * 8

    def sent_bytes(self, layer, examples, activation_format):
        return 4_000_000


def steps_record(profile="short", without=()):
    """One machine that is ten times as slow as the paper's at 0.374 of its peak, with messages of a fifth."""
    job = job_of(*(Configuration(k, 8, 8) for k in (2, 4, 8)))
    each = []
    for k in (2, 4, 8):
        bytes_sent = (800_000,) * (k - 1)
        unit_s = 10 * 0.5e-3 / 0.374 * 8 / k
        turn = timed(k, 8, unit_s=unit_s, activation_bytes=bytes_sent, gradient_bytes=bytes_sent)
        each.append(Steps(out_of_memory="no room") if k in without else Steps(turns=[turn] * 3))
    metrics, details = replayed(job.configurations, [found(*each)] * 2, Paper("a model", {}), 128)
    return record(
        experiment="table3", profile=profile, case={"part": "steps", "model": "amoebanet"},
        metrics=tuple(metrics), details={**job.facts(), "timed_microbatches": 8, **details},
    )  # fmt: skip


@pytest.mark.parametrize("without", [(4,), (2,), (2, 4)])
def test_stages_that_found_no_room_leave_the_others_their_numbers(without):
    """Relative to K = 2 only where K = 2 ran."""
    whole, part = steps_record(), steps_record(without=without)
    assert set(part.details["out_of_memory"]) == {f"K={k}" for k in without}
    for name in ("throughput", "normalised throughput"):
        kept = {q.label for q in part.metrics if q.name == name}
        wanted = {q.label for q in whole.metrics if q.name == name and q.key["K"] not in without}
        assert kept == (set() if name.startswith("normalised") and 2 in without else wanted)
    cells = EXPERIMENT.cells([part])
    assert {cell.column for cell in cells} <= {cell.column for cell in EXPERIMENT.cells([whole])}
    assert "K=8" in EXPERIMENT.tables([part])
    with pytest.raises(MemoryError, match="no room"):
        steps_record(without=(2, 4, 8))


def test_the_link_is_slowed_as_much_as_the_actions_are_per_byte():
    scaled = steps_record()
    slowed = scaled.details["slowed_link"]["bandwidth_bytes_per_s"]
    assert slowed == pytest.approx(PCIE.bandwidth_bytes_per_s / 5 / 10, rel=1e-3)
    for k in (2, 4, 8):
        ours = value(scaled.metrics, "normalised throughput", link="PCIe, same share", K=k)
        fast = value(scaled.metrics, "normalised throughput", link="PCIe", K=k)
        assert fast >= ours * (1 - 1e-9) or k == 2
        assert value(scaled.metrics, "share of the balanced step", K=k) <= 1
        assert value(scaled.metrics, "hidden from", K=k) > 0
        low, high = scaled.details["share_of_peak"][f"K={k}"]
        assert low <= 1 <= high
    assert {q.provenance for q in scaled.metrics} == {"replayed"}


@pytest.mark.parametrize("profile", ["smoke", "short", "full"])
def test_cases_of_every_profile(profile):
    wanted = [f"part={part} model={m}" for part in ("steps",) for m in TABLE3]
    wanted += [f"part={part} model={m}" for part in ("replay error",) for m in TABLE3]
    if profile != "smoke":
        wanted += [f"part=reproduction model={m}" for m in TABLE3]
    assert [case.label for case in EXPERIMENT.cases(RunOptions(profile=profile))] == wanted
