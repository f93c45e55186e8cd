"""Every verdict on the reference records: it says which printed numbers it would have rejected, and does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_bench.experiments.registry import EXPERIMENTS, load
from gpipe_bench.experiments.report.readings import select_records, shown_of
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.compare import admitted, judge
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.unknowns import words
from gpipe_bench.harness.verdict import DIFFERS, JUDGED

PUBLISHED = {(cell.source, *cell.key): cell for cell in load_paper()}


def shown(name):
    experiment = load(name)
    records = select_records(Store(REFERENCE / "cpu-2-cores").load(name).records, experiment, None)
    return shown_of(experiment, records) if records else None


def moved(cell, entry, to):
    """The same as if the paper had printed another number, words that name a limit moved along."""
    by, off = to - cell.target, cell.target_rounding
    said = entry.allowed or (admitted(cell) if cell.row in words() else None)
    if said is not None:
        said = replace(
            said, low=said.low + by, high=said.high + by,
            possible_low=said.possible_low + by, possible_high=said.possible_high + by,
        )  # fmt: skip
    shifted = replace(
        cell, value=to, printed=f"{to!r}", corrected_printed="", exact=not off, error=off or None,
        form="read off" if off else "",
    )  # fmt: skip
    return judge(shifted, replace(entry, allowed=said)).verdict


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_number_just_beyond_what_a_verdict_names_would_have_changed_it(name):
    found = shown(name)
    if found is None:
        pytest.skip(f"{name} has no reference records")
    for comparison in found.comparisons:
        entry = comparison.entry
        if comparison.verdict not in JUDGED or comparison.ours is None:
            continue
        cell = PUBLISHED[entry.source, *entry.place]
        edges = [(comparison.fails_below, -1, "above"), (comparison.fails_above, 1, "below")]
        assert any(edge is not None for edge, _, _ in edges), f"{entry.place} could not have failed"
        for edge, sign, verdict in edges:
            if edge is None:
                continue
            step = 1e-6 * max(abs(edge), abs(cell.target), 1e-6)
            assert moved(cell, entry, edge + sign * step) == verdict, entry.place
            assert moved(cell, entry, edge - sign * step) != verdict, entry.place
        slack = 1e-9 * max(abs(cell.target), 1e-6)
        inside = (comparison.fails_below is None or cell.target >= comparison.fails_below - slack) and (
            comparison.fails_above is None or cell.target <= comparison.fails_above + slack
        )
        assert inside == (comparison.verdict not in DIFFERS), entry.place
