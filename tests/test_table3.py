"""Table 3: bandwidths that hide, a P100 by its peaks, and what the experiment makes of records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import record

from gpipe_bench.experiments.measuring.bandwidths import (
    HIDDEN,
    hidden_from,
    same_share,
    slowdowns,
    spread_evenly,
)
from gpipe_bench.experiments.measuring.tables.sentences import TABLE
from gpipe_bench.experiments.measuring.timed_actions import TimedActions, lay_out
from gpipe_bench.experiments.published.estimate import Estimate
from gpipe_bench.experiments.report.figures import draw
from gpipe_bench.experiments.table3 import experiment as table3
from gpipe_bench.experiments.table3 import slow_link
from gpipe_bench.experiments.table3.experiment import EXPERIMENT
from gpipe_bench.experiments.table3.results import PCIE, modelled, over_link, replayed, shares_of_peak
from gpipe_bench.experiments.table3.slow_link_steps import LinkFound, Measured
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.record import Record, Scalar
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.schedule import Kind

MODELS = ("amoebanet", "transformer")


def even(num_stages: int, forward_s: float, num_bytes: int, num_microbatches: int = 32) -> TimedActions:
    """Equal stages, F : R : B = 1 : 1 : 2, the same message over every boundary."""
    slots = {Kind.F: 1, Kind.R: 1, Kind.B: 2}
    return TimedActions(
        tuple(range(stage, stage + 1) for stage in range(num_stages)),
        num_microbatches,
        "always",
        {(stage, kind): (forward_s * slot,) for stage in range(num_stages) for kind, slot in slots.items()},
        (),
        0.0,
        (num_bytes,) * (num_stages - 1),
        (num_bytes,) * (num_stages - 1),
    )


# Bandwidths -------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(2, 5), st.floats(1e-4, 1.0), st.integers(10**6, 10**9))
def test_messages_are_hidden_from_the_found_bandwidth_on(k: int, forward_s: float, num_bytes: int) -> None:
    timed = even(k, forward_s, num_bytes, 8)
    least = hidden_from(timed)
    assert least is not None
    above, below = slowdowns(timed, [least * 1.02, least / 1.02])
    assert below < 1 / (1 + HIDDEN) <= above
    swept = slowdowns(timed, spread_evenly(least / 100, least * 100, 4))
    assert swept == sorted(swept)  # a faster link is never worse
    assert swept[-1] <= 1


def test_a_link_whose_messages_take_longer_than_actions_sets_the_pace() -> None:
    """K = 2, messages of four forwards: M of them forward, and back as long as M backwards with theirs."""
    timed = even(2, 1.0, 100, 16)
    step_s = lay_out(timed, Link("slow", 0.0, 25.0)).makespan_s
    assert step_s == pytest.approx(1 + 16 * 4 + 1 + 1 + 2 + 15 * 4 + 4 + 2, abs=6)
    assert slowdowns(timed, [25.0])[0] == pytest.approx(lay_out(timed).makespan_s / step_s)


def test_latency_alone_may_be_too_much() -> None:
    assert hidden_from(even(2, 1.0, 100), latency_s=100.0) is None


def test_evenly_spread_bandwidths() -> None:
    assert spread_evenly(1.0, 1000.0, 1) == pytest.approx([1, 10, 100, 1000])


@settings(max_examples=25)
@given(st.floats(0.01, 1000), st.floats(0.01, 1000), st.integers(2, 4))
def test_a_slowed_link_keeps_the_share_of_the_messages(slower: float, larger: float, k: int) -> None:
    """Actions `slower` times as long and messages `larger` times as large: the same step, slowed down."""
    timed = even(k, 1e-3, 1_000_000, 6)
    scaled = even(k, 1e-3 * slower, 1, 6)
    scaled = replace(
        scaled, activation_bytes=(1e6 * larger,) * (k - 1), gradient_bytes=(1e6 * larger,) * (k - 1)
    )
    original = lay_out(timed, PCIE).makespan_s
    assert lay_out(scaled, same_share(PCIE, slower, larger)).makespan_s == pytest.approx(original * slower)


# A device by its peaks --------------------------------------------------------------------------------------


def test_the_papers_amoebanet_waits_for_pcie_and_its_transformer_does_not() -> None:
    """Also in the paper: 2.7 of 3.4 and 3.3 of 3.4."""
    shares = {}
    for name in MODELS:
        paper = table3._paper_size(table3.SUBJECTS[name])
        timed = paper.actions(8, 32, shares_of_peak()[0])
        shares[name] = slowdowns(timed, [PCIE.bandwidth_bytes_per_s], PCIE.latency_s)[0]
    assert shares["transformer"] > 0.99
    assert 0.8 < shares["amoebanet"] < 0.97


# Numbers ----------------------------------------------------------------------------------------------------


def paper_estimate() -> Estimate:
    """Eight equal layers of a millisecond at half the peak, and messages of 4 MB."""
    return Estimate(
        lambda share: [(0.5e-3 / share, 1e-3 / share)] * 8, (4_000_000,) * 8, (4_000_000,) * 8, 1000
    )


class FakeConfiguration:
    def __init__(self, num_stages: int) -> None:
        self.num_stages, self.microbatch_size = num_stages, 1


class FakeSteps:
    def __init__(self, timed: TimedActions, turns: int) -> None:
        self.turns, self.counts = (timed,) * turns, {"F": 8}
        self.out_of_memory = "" if turns else "OutOfMemoryError: no room"


class FakeFound:
    """One process that measured the estimate's model ten times as slow with messages of a fifth."""

    conditions: dict[str, str] = {}  # noqa: RUF012  # a stand-in for a named tuple
    usage = Usage(1.0, 2.0, 1.0, 2)

    def __init__(self, stages: tuple[int, ...], without: tuple[int, ...] = ()) -> None:
        self.steps = []
        for k in stages:
            timed = paper_estimate().actions(k, 8, shares_of_peak()[0])
            slow = {key: (10 * s,) for key, (s,) in timed.samples_s.items()}
            sizes = tuple(size // 5 for size in timed.activation_bytes)
            found = replace(timed, samples_s=slow, activation_bytes=sizes, gradient_bytes=sizes)
            self.steps.append(FakeSteps(found, 0 if k in without else 3))


def steps_record(model: str = "amoebanet", profile: str = "short", without: tuple[int, ...] = ()) -> Record:
    plan: Any = [FakeConfiguration(k) for k in (2, 4, 8)]
    found: Any = [FakeFound((2, 4, 8), without)] * 2
    quantities, details = replayed(plan, found, 32, paper_estimate())
    facts = {"title": "A model", "scale": "a tenth", "timed_microbatches": 8}
    return record(
        experiment="table3", profile=profile, case={"part": "steps", "model": model},
        quantities=tuple(quantities), details={**facts, **details},
    )  # fmt: skip


def paper_record(model: str = "amoebanet") -> Record:
    quantities, details = modelled(paper_estimate(), (2, 4, 8), 32, 128)
    return record(
        experiment="table3", profile="short", case={"part": "paper size", "model": model},
        quantities=tuple(quantities), details={"title": "A model", **details},
    )  # fmt: skip


def link_record(model: str = "amoebanet") -> Record:
    """Steps that took 10 % longer than the replay over the measured link."""
    timed = even(2, 0.02, 100_000, 8)
    rates = (None, 5e6)
    measured = tuple(
        Measured(rate, 1e-4, 1.1 * lay_out(timed, Link("", 1e-4, rate)).makespan_s) for rate in (1e9, 4.8e6)
    )
    found = [LinkFound(rates, (timed,) * 2, (measured,) * 2, "reno", Usage(1.0, 2.0, 1.0, 2))] * 2
    quantities, details = over_link((None, 1.0), found)
    facts = {
        "title": "A model",
        "scale": "a tenth",
        "num_microbatches": 8,
        "burst_s": 0.002,
        "queue_bytes": 2**23,
    }
    return record(
        experiment="table3", profile="short", case={"part": "link", "model": model},
        quantities=tuple(quantities), details={**facts, **details},
    )  # fmt: skip


def value(found: Record, name: str, **key: Scalar) -> float:
    quantity = found.quantity(name, **key)
    assert quantity is not None, (name, key)
    assert quantity.value is not None
    return quantity.value


@pytest.mark.parametrize("without", [(4,), (2,), (2, 4)])
def test_stages_that_found_no_room_leave_the_others_their_numbers(without: tuple[int, ...]) -> None:
    """Relative to K = 2 only where K = 2 ran."""
    whole, part = steps_record(), steps_record(without=without)
    assert set(part.details["out_of_memory"]) == {f"K={k}" for k in without}
    for name in ("throughput", "normalised throughput"):
        kept = {q.label: q.value for q in part.quantities if q.name == name}
        wanted = {q.label for q in whole.quantities if q.name == name and q.key["K"] not in without}
        assert set(kept) == (set() if name.startswith("normalised") and 2 in without else wanted)
    cells = EXPERIMENT.cells([part])
    assert {cell.column for cell in cells} <= {cell.column for cell in EXPERIMENT.cells([whole])}
    assert "K=8" in EXPERIMENT.tables([part], compare(cells))
    with pytest.raises(MemoryError, match="no room"):
        steps_record(without=(2, 4, 8))


def test_the_slowed_link_gives_the_scaled_model_the_papers_numbers() -> None:
    """The stand-in differs from the paper's model by two factors alone, so the two must agree."""
    scaled, paper = steps_record(), paper_record()
    assert scaled.details["slowed_link"]["bandwidth_bytes_per_s"] == pytest.approx(
        PCIE.bandwidth_bytes_per_s / 5 / 10
    )
    for k in (2, 4, 8):
        ours = value(scaled, "normalised throughput", link="PCIe, same share", K=k)
        assert ours == pytest.approx(value(paper, "normalised throughput", link="PCIe", K=k))
        assert value(scaled, "normalised throughput", link="PCIe", K=k) >= ours * (1 - 1e-9) or k == 2
        assert value(scaled, "share of the balanced step", K=k) <= 1
        assert value(scaled, "hidden from", K=k) == pytest.approx(
            value(paper, "hidden from", K=k) / 50, rel=0.03
        )
    assert {q.provenance for q in scaled.quantities} == {"replayed"}
    assert {q.provenance for q in paper.quantities} == {"modelled"}
    assert (
        paper.quantity("normalised throughput", link="PCIe", share_of_peak=shares_of_peak()[1], K=8)
        is not None
    )


def test_errors_of_the_replay_over_a_link() -> None:
    found = link_record()
    for multiple in (None, 1.0):
        assert value(found, "replay error", messages_per_forward=multiple) == pytest.approx(1 / 1.1 - 1)
    assert value(found, "bandwidth", messages_per_forward=1.0) == pytest.approx(4.8)
    slow = found.details["points"][1]
    assert slow["throughput"] < found.details["points"][0]["throughput"] < 1
    kinds = {q.name: q.provenance for q in found.quantities}
    assert kinds["real step"] == kinds["bandwidth"] == "measured"
    assert kinds["step"] == "replayed"


def test_the_assumed_speed_and_the_error_over_a_link_are_parts_of_the_range() -> None:
    cells = [c for c in EXPERIMENT.cells([steps_record(), paper_record(), link_record()]) if c.table != TABLE]
    assert [(cell.table, cell.column) for cell in cells] == [
        ("table3-amoebanet", f"K={k}") for k in (2, 4, 8)
    ]
    assert all("a tenth" in cell.note for cell in cells)
    parts = {part.what: part for part in cells[2].spread.parts}
    assert list(parts) == ["95 % interval", "error of the replay", "share_of_peak"]
    ours = cells[2].quantity.value
    assert parts["share_of_peak"].low < ours, "a faster P100 waits longer for its link"
    # both steps over a link took a tenth longer than laid out, so the next one will too
    assert parts["error of the replay"].high == pytest.approx(ours / 1.1)
    unknown = EXPERIMENT.cells([steps_record(), paper_record()])
    assert {c.verdict for c in compare(unknown) if c.ours is not None} == {"not comparable"}
    smoke = compare(EXPERIMENT.cells([steps_record(profile="smoke"), link_record()]))
    assert {c.verdict for c in smoke if c.ours is not None} == {"not comparable"}


def test_tables_and_figures_come_from_records_alone(tmp_path) -> None:
    records = [steps_record(), paper_record(), link_record(), paper_record("transformer")]
    text = EXPERIMENT.tables(records, compare(EXPERIMENT.cells(records)))
    for part in (
        "same share",
        "P100:",
        "a tenth",
        "error of the replay",
        "-9.1 %",
        "TCP reno",
        "hidden from",
    ):
        assert part in text.replace("replay's median absolute error", "error of the replay"), part
    paths = draw(EXPERIMENT, records, tmp_path)
    assert {path.name for path in paths} == {"table3-bandwidth.png", "table3-this-machine.png"}
    assert all(path.stat().st_size > 10_000 for path in paths)
    assert EXPERIMENT.figures([]) == []
    assert EXPERIMENT.tables([], []) == ""
    assert draw(EXPERIMENT, [link_record()], tmp_path)


def test_without_a_slow_link_the_case_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
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
    text = EXPERIMENT.tables([paper_record(), skipped], [])
    assert f"over a rate-limited link: not run: {outcome.reason}" in text


def test_cases_of_every_profile() -> None:
    for profile in EXPERIMENT.profiles:
        wanted = [f"part={part} model={m}" for part in ("paper size", "steps", "link") for m in MODELS]
        if profile == "smoke":
            wanted.remove("part=link model=amoebanet")
        wanted += [f"part=as published model={m}" for m in MODELS]
        assert [case.label for case in EXPERIMENT.cases(RunOptions(profile=profile))] == wanted
