"""Table 3: a P100 by its peaks, the slowed link, and what the experiment makes of records."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_steps import found, job_of, value
from records import record

from gpipe_bench.experiments.paper.links import (
    PCIE,
    Estimate,
    estimate_of,
    modelled,
    replayed,
    shares_of_peak,
)
from gpipe_bench.experiments.paper.table3 import EXPERIMENT
from gpipe_bench.experiments.paper.timed.replay import slowdowns
from gpipe_bench.experiments.paper.timed.results import Steps
from gpipe_bench.experiments.paper.timed.workloads import TABLE3, Configuration

PAPER = Estimate(lambda share: [(0.5e-3 / share, 1e-3 / share)] * 8, (4_000_000,) * 8, (4_000_000,) * 8, 1000)
"""Eight equal layers of a millisecond at half the peak, and messages of 4 MB."""


def test_the_papers_amoebanet_waits_for_pcie_and_its_transformer_does_not():
    """Also in the paper: 2.7 of 3.4 and 3.3 of 3.4."""
    shares = {}
    for name, sizes in TABLE3.items():
        actions = estimate_of(sizes["full"]).actions(8, 32, shares_of_peak()[0])
        shares[name] = slowdowns(actions, [PCIE.bandwidth_bytes_per_s], PCIE.latency_s)[0]
    assert shares["transformer"] > 0.99
    assert 0.8 < shares["amoebanet"] < 0.97


def steps_record(profile="short", without=()):
    """One machine that is ten times as slow as the estimate's, with messages of a fifth."""
    job = job_of(*(Configuration(k, 8, 8) for k in (2, 4, 8)))
    each = []
    for k in (2, 4, 8):
        actions = PAPER.actions(k, 8, shares_of_peak()[0])
        sizes = tuple(size // 5 for size in actions.activation_bytes)
        slow = {key: (10 * s,) for key, (s,) in actions.samples_s.items()}
        turn = replace(actions, samples_s=slow, activation_bytes=sizes, gradient_bytes=sizes)
        each.append(Steps(out_of_memory="no room") if k in without else Steps(turns=[turn] * 3))
    metrics, details = replayed(job.configurations, [found(*each)] * 2, PAPER)
    return record(
        experiment="table3", profile=profile, case={"part": "steps", "model": "amoebanet"},
        metrics=tuple(metrics), details={**job.facts(), "timed_microbatches": 8, **details},
    )  # fmt: skip


def paper_record(model="amoebanet"):
    metrics, details = modelled(PAPER, 128)
    return record(
        experiment="table3", profile="short", case={"part": "paper size", "model": model},
        metrics=tuple(metrics), details={"title": "A model", **details},
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


def test_the_slowed_link_gives_the_scaled_model_the_papers_numbers():
    """The stand-in differs from the paper's model by two factors alone, so the two must agree."""
    scaled, paper = steps_record(), paper_record()
    slowed = scaled.details["slowed_link"]["bandwidth_bytes_per_s"]
    assert slowed == pytest.approx(PCIE.bandwidth_bytes_per_s / 5 / 10)
    for k in (2, 4, 8):
        ours = value(scaled.metrics, "normalised throughput", link="PCIe, same share", K=k)
        theirs = value(paper.metrics, "normalised throughput", link="PCIe", K=k)
        fast = value(scaled.metrics, "normalised throughput", link="PCIe", K=k)
        assert ours == pytest.approx(theirs)
        assert fast >= ours * (1 - 1e-9) or k == 2
        assert value(scaled.metrics, "share of the balanced step", K=k) <= 1
        least, papers = (value(each.metrics, "hidden from", K=k) for each in (scaled, paper))
        assert least == pytest.approx(papers / 50, rel=0.03)
    assert {q.provenance for q in scaled.metrics} == {"replayed"}
    assert {q.provenance for q in paper.metrics} == {"modelled"}
    low = shares_of_peak()[1]
    assert value(paper.metrics, "normalised throughput", link="PCIe", share_of_peak=low, K=8)
