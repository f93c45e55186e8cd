"""Schedules beyond GPipe's: what others published of them, all of them side by side, and timed against torch.

Expected: published bubble rates follow to the last digit from the times that are printed with them; at equal
costs zero bubble in a V needs the least time, V-Min the least memory without recomputation, and
re-materialization with the weights' gradients put off comes near a step without it. The machine should
have nothing else to do:

    python -m experiments run schedules
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpipe_bench.experiments.schedules import beside, laid_out, published, recomputing
from gpipe_bench.experiments.schedules.figures import figures
from gpipe_bench.experiments.schedules.laid_out import NAMES, REMATS
from gpipe_bench.experiments.timed.workloads import TABLE2
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.table import text_table
from gpipe_bench.harness.verdict import Comparison

HOW = {"never": "without re-materialization", "always": "every micro-batch recomputed"}


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    again = [
        Case({"part": recomputing.PART, "model": model}, seconds)
        for model, seconds in recomputing.SECONDS.items()
    ]
    return [
        *published.cases(smoke),
        *laid_out.cases(options.profile),
        *again[: 0 if smoke else None],
        *(Case(key, seconds) for key, seconds in beside.keys(options.profile)),
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    key: dict[str, Any] = case.key
    match key["part"]:
        case published.PART:
            return published.run(key)
        case laid_out.MEASURED:
            return laid_out.run_measured(key["model"], options.profile, key["num_microbatches"])
        case recomputing.PART:
            return recomputing.run(key["model"])
        case beside.PART:
            return beside.run(key, options)
    return laid_out.run_equal(key["num_workers"])


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """The published numbers first, then ours."""
    parts = [text_table(comparisons)] if comparisons else []
    parts += beside.tables(records)
    for of_part, table in ((laid_out.EQUAL, _equal), (laid_out.MEASURED, _measured)):
        parts += [table(r, remat) for r in of_case(records, "done", part=of_part) for remat in REMATS]
    for model in TABLE2:
        parts += _table2(of_case(records, "done", part=laid_out.MEASURED, model=model), model)
    return "\n\n".join(parts + recomputing.tables(records))


def _text(title: str, columns: list[str], lines: list[list[str]]) -> str:
    return Grid(title=title, columns=columns, lines=lines, right=numbers(columns)).text()


def _by_schedule(title: str, record: Record, remat: str, axis: str, words: str) -> str:
    """A line for each schedule, a column for each number on the axis."""
    found: dict[Any, dict[str, Any]] = {}
    for each in record.quantities:
        if each.key.get("remat") == remat:
            value = 100 * (each.value or 0.0) if each.name == "bubble" else each.value
            found.setdefault((each.key["schedule"], each.key[axis]), {})[each.name] = value
    numbers = sorted({number for _, number in found})
    lines = [
        [name, *(words.format_map(found[name, each]) if (name, each) in found else "-" for each in numbers)]
        for name in NAMES
    ]
    return _text(title, ["", *(f"{axis}={each}" for each in numbers)], lines)


def _equal(record: Record, remat: str) -> str:
    title = (
        f"K = {record.case['num_workers']}, {HOW[remat]}\n  slots of a step, bubble, graphs alive (replayed)"
    )
    return _by_schedule(title, record, remat, "M", "{step in slots:g}, {bubble:.1f} %, {graphs alive:g}")


def _measured(record: Record, remat: str) -> str:
    split: list[Any] = [each.value for each in record.quantities if each.name == "(I + W) / B"]
    title = (
        f"{record.details['title']} ({record.details['scale'] or 'full size'}), "
        f"M = {record.case['num_microbatches']}\n"
        f"  {HOW[remat]}; step and bubble replayed with the stages' measured times,\n"
        "  MiB of the fullest worker modelled;\n"
        f"  a split backward takes {min(split):.2f} to {max(split):.2f} times a whole one (measured)"
    )
    return _by_schedule(title, record, remat, "K", "{step:.4g} ms, {bubble:.0f} %, {peak memory:.3g}")


def _table2(records: Sequence[Record], model: str) -> Iterator[str]:
    """The paper's Table 2 with GPipe's schedule and with the shortest one."""
    steps: dict[Any, Any] = {
        tuple(each.key[part] for part in ("M", "K", "remat", "schedule")): each.value
        for record in records
        for each in record.quantities
        if each.name == "step"
    }
    unit = steps.get((1, 2, "always", "gpipe"))
    if unit is None:
        return
    printed = {c.key: c.printed for c in load_paper() if c.source == "paper" and "table2" in c.table}
    lines = []
    for count, worker in sorted({key[:2] for key in steps}):
        gpipe = steps[count, worker, "always", "gpipe"]
        line = [
            f"K={worker}, M={count}",
            printed.get((f"table2-{model}", f"M={count}", f"K={worker}"), "-"),
            f"{unit / gpipe:.2f}",
        ]
        for remat in REMATS[::-1]:
            best, name = min(
                ((step, key[3]) for key, step in steps.items() if key[:3] == (count, worker, remat)),
                key=lambda found: found[0],
            )
            line += [f"{unit / best:.2f}", f"x{gpipe / best:.2f}", name]
        lines.append(line)
    yield _text(
        f"Table 2 with the best schedule, {TABLE2[model]['full'].title}: throughput over GPipe's at K=2, "
        "M=1\n"
        "  (replayed with the stages' measured times; gains over GPipe with every micro-batch recomputed)",
        ["", "paper", "gpipe", "best, recomputed", "gain", "schedule", "best, kept", "gain", "schedule"],
        lines,
    )


EXPERIMENT = Experiment(
    name="schedules",
    title="Schedules beyond GPipe's: published rates, all side by side, against torch's",
    source="beyond the paper; arXiv 2401.10241; OLMo-core, torchtitan, Primus",
    describe=(
        "Published bubble rates replayed; length, bubble and memory of all schedules over K and M, at equal "
        "and at measured costs; our schedules beside torch's; Table 2 with the best schedule; what must be "
        "recomputed under Table 1's memory."
    ),
    profiles={
        "smoke": "published rates of one model, K up to 4",
        "short": "everything, K up to 16",
        "full": "the same with more rounds",
    },
    cases=cases,
    run=run,
    cells=published.cells,
    tables=tables,
    figures=figures,
    paper_tables=published.PAPER_TABLES,
    docs="docs/schedules.md",
    options=("seed",),
)
