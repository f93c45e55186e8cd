"""What a step of `.ci/gpu` found, in words: a pure function of its records.

Each line says a number of ours and the paper's beside it; what did not run says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from gpipe_bench.experiments.registry import load
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.store import Store, latest
from gpipe_bench.models.paper import GIB, HALVES


def of_step(arguments: Sequence[str], records: Path) -> list[str]:
    """The lines about the records that `run` with these arguments leaves in a folder."""
    name, *options = arguments
    only: dict[str, tuple[str, ...]] = {}
    for text in options:
        key, equals, value = text.partition("=")
        if equals:
            only[key] = (*only.get(key, ()), value)
    found = [
        record
        for record in latest(Store(records).load(name).records).values()
        if all(str(record.case.get(key)) in wanted for key, wanted in only.items())
    ]
    return list(sentences(found)) if found else ["no case has ended"]


def sentences(records: Sequence[Record]) -> Iterator[str]:
    """What the records of one step say."""
    for record in records:
        if record.status != "done":
            yield f"{record.label}: {record.status.replace('_', ' ')}: {record.reason.splitlines()[0]}"
    about = {"device": _fits}
    done: dict[Callable[[Sequence[Record]], Iterator[str]], list[Record]] = {}
    for record in records:
        if record.status == "done":
            done.setdefault(about.get(str(record.case.get("part")), _beside), []).append(record)
    for say, of_part in done.items():
        yield from say(of_part)


def _fits(records: Sequence[Record]) -> Iterator[str]:
    for (half, precision), group in groupby(records, key=lambda r: (r.case["half"], r.case["precision"])):
        said = []
        for record in group:
            peaks = {name: record.metric(f"{name} peak") for name in ("measured", "modelled")}
            how = "measured" if record.details["fits"] else "modelled"
            gib = (getattr(peaks[how], "value", None) or 0) / GIB
            fits = "fits" if record.details["fits"] else "does not fit"
            said.append(f"{record.case['column']} {fits} ({gib:.2f} GiB {how})")
        cap = HALVES[str(half)].cap_gib
        yield f"{half} in {precision} under {cap:g} GiB: {', '.join(said)}; the paper: all of these fit"


def _beside(records: Sequence[Record]) -> Iterator[str]:
    """How the numbers stand to the paper's, where these records answer any, and what found no room."""
    for record in records:
        yield from _without_room(record)
    experiment = load(records[0].experiment)
    cells = [] if experiment.cells is None else compare(experiment.cells(records), whole=())
    pairs = [
        (each.ours, each.paper)
        for each in cells
        if each.ours is not None and each.paper and each.question == "here"
    ]
    yield f"{len(records)} {'case is' if len(records) == 1 else 'cases are'} done"
    if pairs:
        far = median(abs(ours / paper - 1) for ours, paper in pairs)
        yield f"{len(pairs)} numbers stand beside the paper's, half of them within {100 * far:.0f} % of it"


def _without_room(record: Record) -> Iterator[str]:
    for name, facts in record.details.get("cells", {}).items():
        if facts.get("out_of_memory"):
            yield f"{record.label}: {name} did not run: {facts['out_of_memory']}"
