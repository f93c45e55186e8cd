"""Table 3: a P100 by its peaks, the slowed link, and what the experiment makes of records."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_steps import found, job_of, timed, value
from records import record

from gpipe_bench.experiments import table3
from gpipe_bench.experiments.table3 import (
    EXPERIMENT,
    PCIE,
    Estimate,
    modelled,
    over_link,
    replayed,
    shares_of_peak,
)
from gpipe_bench.experiments.timed import slow_link
from gpipe_bench.experiments.timed.replay import lay_out, slowdowns
from gpipe_bench.experiments.timed.results import Steps
from gpipe_bench.experiments.timed.slow_link import LinkFound, Measured
from gpipe_bench.experiments.timed.workloads import TABLE3, Configuration
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.pipeline import Link

PAPER = Estimate(lambda share: [(0.5e-3 / share, 1e-3 / share)] * 8, (4_000_000,) * 8, (4_000_000,) * 8, 1000)
"""Eight equal layers of a millisecond at half the peak, and messages of 4 MB."""


def test_the_papers_amoebanet_waits_for_pcie_and_its_transformer_does_not():
    """Also in the paper: 2.7 of 3.4 and 3.3 of 3.4."""
    shares = {}
    for name, sizes in TABLE3.items():
        actions = table3.estimate_of(sizes["full"]).actions(8, 32, shares_of_peak()[0])
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
    quantities, details = replayed(job.configurations, [found(*each)] * 2, PAPER)
    return record(
        experiment="table3", profile=profile, case={"part": "steps", "model": "amoebanet"},
        quantities=tuple(quantities), details={**job.facts(), "timed_microbatches": 8, **details},
    )  # fmt: skip


def paper_record(model="amoebanet"):
    quantities, details = modelled(PAPER, 128)
    return record(
        experiment="table3", profile="short", case={"part": "paper size", "model": model},
        quantities=tuple(quantities), details={"title": "A model", **details},
    )  # fmt: skip


def link_record():
    """Steps that took 10 % longer than the replay over the measured link."""
    one = timed(2, 8, unit_s=0.02, activation_bytes=(100_000,), gradient_bytes=(100_000,))
    measured = tuple(
        Measured(rate, 1e-4, 1.1 * lay_out(one, Link("", 1e-4, rate)).makespan_s) for rate in (1e9, 4.8e6)
    )
    each = LinkFound((None, 5e6), (one,) * 2, (measured,) * 2, "reno", Usage(1.0, 2.0, 1.0, 2))
    quantities, details = over_link((None, 1.0), [each] * 2)
    facts = {"num_microbatches": 8, "burst_s": 0.002, "queue_bytes": 2**23}
    return record(
        experiment="table3", profile="short", case={"part": "link", "model": "amoebanet"},
        quantities=tuple(quantities), details={**job_of().facts(), **facts, **details},
    )  # fmt: skip


@pytest.mark.parametrize("without", [(4,), (2,), (2, 4)])
def test_stages_that_found_no_room_leave_the_others_their_numbers(without):
    """Relative to K = 2 only where K = 2 ran."""
    whole, part = steps_record(), steps_record(without=without)
    assert set(part.details["out_of_memory"]) == {f"K={k}" for k in without}
    for name in ("throughput", "normalised throughput"):
        kept = {q.label for q in part.quantities if q.name == name}
        wanted = {q.label for q in whole.quantities if q.name == name and q.key["K"] not in without}
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
        ours = value(scaled.quantities, "normalised throughput", link="PCIe, same share", K=k)
        theirs = value(paper.quantities, "normalised throughput", link="PCIe", K=k)
        fast = value(scaled.quantities, "normalised throughput", link="PCIe", K=k)
        assert ours == pytest.approx(theirs)
        assert fast >= ours * (1 - 1e-9) or k == 2
        assert value(scaled.quantities, "share of the balanced step", K=k) <= 1
        least, papers = (value(each.quantities, "hidden from", K=k) for each in (scaled, paper))
        assert least == pytest.approx(papers / 50, rel=0.03)
    assert {q.provenance for q in scaled.quantities} == {"replayed"}
    assert {q.provenance for q in paper.quantities} == {"modelled"}
    low = shares_of_peak()[1]
    assert value(paper.quantities, "normalised throughput", link="PCIe", share_of_peak=low, K=8)


def test_errors_of_the_replay_over_a_link():
    made = link_record()
    for multiple in (None, 1.0):
        error = value(made.quantities, "replay error", messages_per_forward=multiple)
        assert error == pytest.approx(1 / 1.1 - 1)
    assert value(made.quantities, "bandwidth", messages_per_forward=1.0) == pytest.approx(4.8)
    free, slow = made.details["points"]
    assert slow["throughput"] < free["throughput"] < 1
    kinds = {q.name: q.provenance for q in made.quantities}
    assert (kinds["real step"], kinds["bandwidth"], kinds["step"]) == ("measured", "measured", "replayed")


def test_without_a_slow_link_the_case_says_why(monkeypatch):
    monkeypatch.setattr(slow_link.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(slow_link.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(slow_link.sys, "platform", "linux")
    case = Case({"part": "link", "model": "transformer"})
    outcome = EXPERIMENT.run(case, RunOptions(profile="smoke"))
    assert outcome.status == "skipped"
    assert "needs root" in outcome.reason
    skipped = record(
        experiment="table3", case=case.key, status="skipped", reason=outcome.reason, quantities=()
    )
    text = EXPERIMENT.tables([paper_record(), skipped])
    assert f"over a rate-limited link: not run: {outcome.reason}" in text


@pytest.mark.parametrize("profile", ["smoke", "short", "full"])
def test_cases_of_every_profile(profile):
    wanted = [f"part={part} model={m}" for part in ("paper size", "steps", "link") for m in TABLE3]
    if profile == "smoke":
        wanted.remove("part=link model=amoebanet")
    wanted += [f"part={part} model={m}" for part in ("replay error", "as published") for m in TABLE3]
    assert [case.label for case in EXPERIMENT.cases(RunOptions(profile=profile))] == wanted
