"""Whatever part of an experiment is on record, its text and figures can be shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gpipe_bench.experiments.readings import shown_of
from gpipe_bench.experiments.registry import EXPERIMENTS, load
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.store import Store

MACHINE = REFERENCE / "cpu-2-cores"


def without_timeline(record: Record) -> Record:
    """The record as an engine leaves it that keeps no timeline."""
    details: dict[str, Any] = dict(record.details)
    known = ("key", "num_stages", "num_microbatches", "batch_size", "out_of_memory")
    if "cells" in details:
        details["cells"] = {
            name: {key: facts[key] for key in known if key in facts}
            | {"counts": {}, "why": "it keeps no timeline"}
            for name, facts in details["cells"].items()
        }
    return replace(record, details=details, metrics=())


def parts(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Records of which some are missing, in a few words and themselves."""
    kinds = {(str(r.case.get("part")), str(r.case.get("model"))): r for r in records}
    for kind in kinds:
        of_kind = [r for r in records if (str(r.case.get("part")), str(r.case.get("model"))) == kind]
        yield f"only {kind}", of_kind
        yield f"one of {kind}", of_kind[-1:]
        yield f"all but {kind}", [each for each in records if each not in of_kind]
    lost = [replace(each, status="failed", reason="lost", metrics=(), details={}) for each in records]
    yield "none that ended", lost
    yield "another engine's", [without_timeline(r) if "cells" in r.details else r for r in records]
    yield "another engine's alone", [without_timeline(r) for r in records if "cells" in r.details]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_any_part_of_an_experiment_has_a_text(name: str) -> None:
    for what, records in parts(Store(MACHINE).load(name).records):
        try:
            shown = shown_of(load(name), records)
        except Exception as error:
            raise AssertionError(f"{name} with {what}") from error
        assert shown.records == tuple(records)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_any_part_of_an_experiment_can_be_drawn(name: str) -> None:
    figures = load(name).figures
    for what, records in parts(Store(MACHINE).load(name).records):
        if figures is not None and what.startswith(("one", "none", "another")):
            try:
                drawn = [(plot.style(), plot) for plot in figures(records)]
                for style, plot in drawn:
                    with style:
                        assert plot.draw()
            except Exception as error:
                raise AssertionError(f"{name} with {what}") from error
