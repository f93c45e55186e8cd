"""`check FILE`: whether a file of records is what it says, as a maintainer asks before taking it in.

A digest says that nothing was edited afterwards, not that it was ever measured. What can be computed again is
computed again: the median of the samples, what needs no machine, how often a step runs forward and backward.
What makes a number weak, but not wrong, is said and refuses nothing.

Exit status 0: nothing speaks against it; 1: it is foreign, truncated, altered or implausible; 2: there is no
such file.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpipe_bench.experiments.commands.output import DONE, VERDICT_FAILED, tell
from gpipe_bench.experiments.registry import EXPERIMENTS, load
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.bundle import records_of, unpack
from gpipe_bench.harness.record import Metric, Record
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.units import UNITS
from gpipe_bench.pipeline.plan.remat import REMAT_MODES, recomputes

_SLACK = 1e-6  # relative; a median of the same samples differs by rounding alone
_EXACT = 1e-9
_DIFFERENCES = ("per action", "per micro-batch")
"""Metrics that are differences of two times, over the bare layers' own: a short one may be negative."""
_NEEDED = ("cpu_model", "python", "versions", "code_sha256")


def options(verb: argparse.ArgumentParser) -> None:
    """Of the verb."""
    verb.add_argument("file", type=Path, metavar="FILE", help="what export wrote")


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError for a file that can't be read."""
    path = arguments.file
    try:
        found = remarks({name: records_of(name, content) for name, content in unpack(path).items()})
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; give a file that export wrote") from error
    except ValueError as error:
        found = [Remark("refused", str(error))]
    refused = any(remark.weight == "refused" for remark in found)
    lines = [
        f"{each.weight}: {each.text}" for each in sorted(found, key=lambda each: each.weight != "refused")
    ]
    lines += [f"check: {path}: {'not to be taken in' if refused else 'nothing speaks against it'}"]
    tell(
        arguments,
        [*(each._asdict() for each in found), {"file": str(path), "refused": refused}],
        lambda: "\n".join(lines),
    )
    return VERDICT_FAILED if refused else DONE


class Remark(NamedTuple):
    """What there is to say. `weight`: "refused" where it can't be true, "note" where it makes it weak."""

    weight: str
    text: str


def remarks(given: Mapping[str, Sequence[Record]]) -> list[Remark]:
    """All that speaks against the records of each experiment, and what a reader should know."""
    every = [record for records in given.values() for record in records]
    found = [] if every else [Remark("refused", "it holds no records")]
    for name, records in given.items() if every else ():
        if name not in EXPERIMENTS:
            found.append(Remark("refused", f"{name}.jsonl: no experiment of that name is known here"))
            continue
        revision, exact = load(name).revision, _exact_numbers(name)
        for record in records:
            said: Iterable[Remark] = _of_record(record, exact)
            if record.revision != revision:
                said = [Remark("note", f"of revision {record.revision}, while {revision} is read here")]
            place = f"{name} {record.label} ({record.profile})"
            found += [each._replace(text=f"{place}: {each.text}") for each in said]
    smoke = sum(record.profile == "smoke" for record in every)
    dirty = sum(bool(record.environment.get("git_dirty")) for record in every)
    weak = ((smoke, "are smoke runs, which prove the path alone"),
            (dirty, "come from code with uncommitted changes"))  # fmt: skip
    return found + [Remark("note", f"{n} of {len(every)} records {what}") for n, what in weak if n]


def _of_record(record: Record, exact: Mapping[tuple[str, str], Metric]) -> Iterator[Remark]:
    missing = [name for name in _NEEDED if not record.environment.get(name)]
    if missing:
        yield Remark("refused", f"its environment lacks {', '.join(missing)}")
    if record.duration_s < 0:
        yield Remark("refused", f"it took {record.duration_s:g} s")
    for metric in record.metrics:
        text = _implausible(metric, record.duration_s if record.duration_s >= 0 else math.inf)
        known = exact.get((record.identity, metric.label))
        if not text and known is not None and not _near(metric.value, known.value, _EXACT):
            text = f"is {metric.value}; the committed records have {known.value}, and no machine matters"
        if text:
            yield Remark("refused", f"{metric.label} {text}")
    control = record.metric("control")
    if control is not None and control.low is not None and control.high is not None:
        off = not control.low <= 1 <= control.high
        ends = f"{control.low:.3f} to {control.high:.3f}"
        if off and not record.details.get("void"):
            yield Remark("refused", f"the control is {ends}, but not void")
        elif off:
            yield Remark("note", f"void, by its control of {ends}")
    yield from _counts(record)
    if record.status not in ("done", "skipped"):
        yield Remark("note", f"{record.status}: {record.reason}")


def _implausible(metric: Metric, duration_s: float) -> str:
    """Why the number can't be what it says in a case that took so long, or nothing."""
    value, samples, is_measured = metric.value, metric.samples, metric.provenance == "measured"
    kind, scale = UNITS.get(metric.unit, ("", 1.0))
    numbers = [each for each in (value, *samples) if each is not None]
    if kind in ("time", "memory", "parameters", "throughput", "bandwidth") and any(n < 0 for n in numbers):
        return "" if metric.name.startswith(_DIFFERENCES) else "is negative"
    longest_s = max(map(abs, numbers), default=0.0) * scale
    if kind == "time" and is_measured and longest_s > duration_s * (1 + _SLACK):
        return f"took {longest_s:g} s, and the whole case {duration_s:g} s"
    if value is None or not samples or not is_measured or metric.low is None:
        return ""
    if not min(samples) <= metric.low <= (metric.high or 0.0) <= max(samples):
        return "has an interval outside its samples"
    middle = statistics.median(samples)
    near = _near(value, middle, _SLACK)
    return "" if near else f"is {value:g}, but the median of its samples is {middle:g}"


def _near(a: float | None, b: float | None, slack: float) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) <= slack * max(abs(a), abs(b)))


def _exact_numbers(name: str) -> dict[tuple[str, str], Metric]:
    """What the committed records have by computation alone, by case and label."""
    return {
        (record.identity, metric.label): metric
        for folder in (sorted(REFERENCE.iterdir()) if REFERENCE.is_dir() else ())
        for record in Store(folder).load(name).records
        if all(each.provenance == "modelled" for each in record.metrics)
        for metric in record.metrics
    }


def _counts(record: Record) -> Iterator[Remark]:
    """How often the stages of the engines ran forward and backward, which follows from M and `remat`."""
    count, remat = record.case.get("num_microbatches"), record.case.get("remat")
    checks, engines = (record.details.get(name) for name in ("checks", "engines"))
    if not isinstance(count, int) or remat not in REMAT_MODES or not isinstance(checks, list):
        return
    for arm, found in [pair for each in checks if isinstance(each, dict) for pair in each.items()]:
        asked = engines.get(arm, {}).get("remat", remat) if isinstance(engines, dict) else remat
        modes = ("except_last", "always") if asked == "except_last" else (asked,)
        allowed = {count + sum(recomputes(mode, m, count) for m in range(count)) for mode in modes}
        got = (found.get("forwards"), found.get("backwards")) if isinstance(found, dict) else (None, None)
        if got[0] not in allowed or got[1] != count:
            text = f"{arm} ran {got[0]} forwards and {got[1]} backwards for M = {count}, remat {asked}"
            yield Remark("refused", text)
