"""Facts that no comparison holds: sums over computed tables, same seeds, the schedule's formula, hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpipe_bench.experiments.paper.consistency.judging import exact
from gpipe_bench.experiments.paper.consistency.tables import beyond_the_margin, spreads
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.reproduction import summed

RECOMPUTED = 3, 4
"""Slots of F, R and B, of which the recomputation of the last stages starts while they would wait: a bubble
has F and B alone, and a micro-batch all of them (`table2-bound` of results/paper.csv)."""


def speed(num_stages: int, num_microbatches: int) -> float:
    """Speed of even stages over one device, with F : R : B = 1 : 1 : 2, a free link, early recomputation."""
    idle, work = RECOMPUTED
    return num_microbatches * num_stages * work / (work * num_microbatches + idle * (num_stages - 1))


def idle_share(num_stages: int, num_microbatches: int) -> float:
    """The share of their time that such stages wait."""
    return 1 - speed(num_stages, num_microbatches) / num_stages


def summaries_of(records: Mapping[str, Sequence[Record]]) -> list[tuple[str, ...]]:
    """For each table of the paper, the four numbers that sum up what was computed of it."""
    lines = []
    for name in reproduced.SECONDS:
        of_tables = reproduced.cells(records.get(name, ()))
        for (table, unit), (cells, fixed) in of_tables.items():
            found = summed(cells, fixed)
            several = sum(other == table for other, _ in of_tables) > 1
            lines.append(
                (
                    f"{table}, {unit}" if several else table,
                    *(f"{found.counts[each]}" for each in ("agrees", "differs", "no test")),
                    "-" if found.off is None else f"{100 * found.off:.0f} %",
                    "-" if found.rank is None else f"{found.rank:.2f}",
                    f"{found.directions} of {found.pairs}" if found.pairs else "-",
                )
            )
    return lines


def facts_of(records: Mapping[str, Sequence[Record]]) -> dict[str, str]:
    """Facts in words, by name; those whose records are missing are left out.

    Args:
        records: by experiment, finished or not
    """
    found = {
        "even_speed_up": f"{speed(8, 32) / speed(2, 32):.2f}",
        "even_idle": f"{100 * idle_share(2, 8):.1f} to {100 * idle_share(8, 32):.1f} %",
    }
    answers = [
        cell.answer
        for name in reproduced.SECONDS
        for cells, _ in reproduced.cells(records.get(name, ())).values()
        for cell in cells
    ]
    if answers:
        known = reproduced.errors()
        found |= {f"computed.{each}": f"{answers.count(each)}" for each in ("agrees", "differs", "no test")}
        found["computed.tested"] = f"{len(answers) - answers.count('no test')}"
        found["error.ratios"] = f"{100 * known['ratios of speeds'].error:.0f} %"
        found["error.bytes"] = f"{100 * known['bytes'].error:.0f} %"
    trained = records.get("consistency", ())
    same = of_case(trained, "done", part="same seed")
    if same:
        spread = spreads(trained, "images")
        widest = max(spread, key=spread.__getitem__, default=0)
        unsure = beyond_the_margin(trained, "images")
        found |= {
            "same_runs": f"{sum(exact(record) == 'identical' for record in same)} of {len(same)}",
            "own_runs": f"{len(of_case(trained, 'done', part='own seeds'))}",
            "unsure": " and ".join(map(str, unsure)) or "none",
            "widest": f"K = {widest}", "widest.times": f"{spread.get(widest, 0):.1f}",
        }  # fmt: skip
    environments = [
        record.environment
        for several in records.values()
        for record in several
        if any(metric.provenance != "modelled" for metric in record.metrics)
    ]
    if environments:
        found["cores"] = _cores(environments)
    return found


def _cores(environments: Sequence[Mapping[str, object]]) -> str:
    """Machines that timed or trained anything, in words."""
    cores = sorted({int(str(each.get("cores_logical") or 0)) for each in environments})
    gpus = any(each.get("gpus") for each in environments)
    counts = " or ".join(map(str, cores))
    return f"{counts} processor cores, {'and some of it on GPUs' if gpus else 'nothing on a GPU or TPU'}"
