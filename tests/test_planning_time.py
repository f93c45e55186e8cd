"""Where the seconds for timing go, and what is kept of them: made-up probes and clocks, nothing is timed."""

from __future__ import annotations

import gc
import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning_models import costs_of, planned

from gpipe_bench.pipeline import Link
from gpipe_bench.planner import Costs, Request, link_named
from gpipe_bench.planner.answer import worth
from gpipe_bench.planner.costs import About
from gpipe_bench.planner.measured import MONTH_S, facts_of, measured, read_kept, sizes_worth, write_kept
from gpipe_bench.planner.model import Subject
from gpipe_bench.planner.probes import Bench, Probed, ProbeJob, affordable, print_progress, probe

LOOPBACK = link_named("loopback")
REQUEST = Request(accelerators=2, memory_bytes=2**40, batch_size=16, link=LOOPBACK)


def test_sizes_that_there_is_no_time_for_are_left_out() -> None:
    # A size of s takes 2 x 9 x 3 x s x 0.01 s and 8 references: 0.54 s x s + 0.8 s.
    assert affordable([8, 1, 4, 2], 0.01, 0.1, 60.0) == [1, 2, 4, 8]
    assert affordable([8, 1, 4, 2], 0.01, 0.1, 6.6) == [1, 2, 4]
    assert affordable([8, 4], 0.01, 0.1, 0.1) == [4]  # one in any case
    assert sizes_worth([1, 2, 4, 8, 16], REQUEST) == [1, 2, 4, 8]
    assert sizes_worth([16], REQUEST) == [16]
    assert sizes_worth([1, 16], replace(REQUEST, accelerators=1)) == [1, 16]


def test_what_the_fastest_ways_depend_on_is_timed_again() -> None:
    costs = replace(costs_of(planned("plain")), link=LOOPBACK, timed_shards=2, shard_update_s=[0.001] * 6)
    at = costs.sizes[4]

    def sharing(factor: float) -> Costs:
        whole = {kind: factor * at.seconds(kind, range(6)) for kind in ("G", "B")}
        shared = replace(at, shards_s={2: {**whole, "once": 0.0}})
        return replace(costs, sizes={**costs.sizes, 4: shared})

    slow, fast = worth(REQUEST, sharing(3.0)), worth(REQUEST, sharing(0.3))
    assert About(4, 2) not in slow
    assert About(8, 0) in slow  # replicas, whose sums take no time over this link
    assert not any(about.kind == "layers" for about in slow)  # two workers wait for each other
    assert fast == {About(4, 2)}
    sums = worth(REQUEST, replace(sharing(3.0), sum_link=Link("slow sums", 0.0, 1e3)))
    assert {about.kind for about in sums} == {"layers"}
    assert About(16, "layers") not in sums  # one worker after the other


def probed(*sizes: int, **more: Any) -> Probed:
    """Of six layers in this process."""
    job = ProbeJob(Subject("planning_models:plain"), sizes, **more)
    try:
        return probe(Bench(job))
    finally:
        gc.unfreeze()


def test_each_size_is_timed_in_every_way_as_often_as_there_are_rounds() -> None:
    found = probed(2, 1, rounds=2)
    counts = Counter((run.size, run.way) for run in found.runs)
    assert counts == {(size, way): 4 for size in (1, 2) for way in ("fine", "coarse")}
    assert found.activation_bytes == found.gradient_bytes == {size: (64.0 * size,) * 5 for size in (1, 2)}
    assert found.parameter_bytes == ((4 * 16 * 16, 4 * 16),) * 6
    fine = next(run for run in found.runs if run.way == "fine")
    assert {action.stage for action in fine.actions} == {layer for layer, _ in fine.update_s} == set(range(6))
    assert measured([found]).at(2).seconds("G", range(6)) > 0


def test_with_a_budget_all_is_timed_once_and_then_what_matters() -> None:
    late = probed(1, 2, rounds=3, budget_s=1e9, matters=lambda found: {About(2, "layers")})
    assert Counter(run.size for run in late.runs) == {1: 4, 2: 3 * 4}
    spent = probed(1, 2, rounds=3, budget_s=1e-3)
    assert Counter(run.size for run in spent.runs) == {1: 4}, "the smallest, once"
    assert list(spent.activation_bytes) == [1]


def test_how_far_it_is_is_said_in_lines_or_over_one_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    print_progress("round 2", 24.0, 60.0)
    assert out.getvalue() == "timing layers: round 2, 24 s, at most 36 s to go\n"
    out.isatty = lambda: True  # type: ignore[method-assign]
    print_progress("round 3", 61.0, 60.0)
    assert out.getvalue().endswith(f"\r{'timing layers: round 3, 61 s, at most 0 s to go':<70}")


@pytest.fixture(name="asked")
def of_a_model() -> tuple[dict[str, Any], Costs]:
    model = planned("plain")
    facts = facts_of(model, REQUEST, sizes=[1, 2], processes=2, seconds=60.0, sharded=True)
    return facts, replace(costs_of(model), profiles=None)


def test_costs_are_kept_and_only_what_is_the_same_is_given_back(
    tmp_path: Path, asked: tuple[dict[str, Any], Costs], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, costs = asked
    folder = tmp_path / "costs"
    assert read_kept(folder, facts) is None
    write_kept(folder, facts, costs)
    found = read_kept(folder, facts)
    assert found is not None
    assert found[0].to_data() == json.loads(json.dumps(costs.to_data()))
    (path,) = folder.iterdir()
    whole = path.read_text()
    for key, other in (("torch", "0"), ("sizes", [1]), ("files", {}), ("cores", [9]), ("optimizer", "sgd")):
        assert read_kept(folder, {**facts, key: other}) is None
    # Under another's name, cut off, with a number changed, of the future, and too old.
    data = json.loads(whole)
    data["facts"]["torch"] = "0"
    for damaged in (json.dumps(data), whole[:-100], whole.replace("0.001", "0.002", 1), "[]", "{}"):
        path.write_text(damaged)
        assert read_kept(folder, facts) is None
    path.write_text(whole)
    monkeypatch.setattr("gpipe_bench.planner.measured.time", lambda: found[1] + MONTH_S + 1)
    assert read_kept(folder, facts) is None
    monkeypatch.setattr("gpipe_bench.planner.measured.time", lambda: found[1] - 1)
    assert read_kept(folder, facts) is None


def test_a_model_s_own_files_and_shapes_are_among_the_facts(asked: tuple[dict[str, Any], Costs]) -> None:
    facts = asked[0]
    assert any(name.endswith("planning_models.py") for name in facts["files"])
    other = facts_of(planned("tied"), REQUEST, sizes=[1, 2], processes=2, seconds=60.0, sharded=True)
    assert other["layers"] != facts["layers"]


def test_a_folder_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, asked: tuple[dict[str, Any], Costs]
) -> None:
    (tmp_path / "file").write_text("")
    write_kept(tmp_path / "file", *asked)
    assert read_kept(tmp_path / "file", asked[0]) is None
    write_kept(tmp_path / "folder", *asked)
    (written,) = (tmp_path / "folder").iterdir()
    written.unlink()
    written.mkdir()
    write_kept(tmp_path / "folder", *asked)
    assert [*(tmp_path / "folder").iterdir()] == [written], "nothing half written is left"
