"""What the records of the schedules say, in tables of words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpipe_bench.experiments.measuring.speed_models import SUBJECTS
from gpipe_bench.experiments.schedules import recomputing_text
from gpipe_bench.experiments.schedules.at_costs import PART
from gpipe_bench.experiments.schedules.beside import side_by_side_text
from gpipe_bench.experiments.schedules.grid import GRID, NAMES, REMATS
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Record, Scalar, find, of_case
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.table import text_table
from gpipe_bench.harness.verdict import Comparison

HOW = {"never": "without re-materialization", "always": "every micro-batch recomputed"}


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """The published numbers first, then ours."""
    parts = [text_table(comparisons)] if comparisons else []
    parts += side_by_side_text.tables(records)
    for record in of_case(records, "done", part=GRID):
        parts += [_grid(record, remat) for remat in REMATS]
    for record in of_case(records, "done", part=PART):
        parts += [_at_costs(record, remat) for remat in REMATS]
    for model in SUBJECTS:
        parts += _table2(records, model)
    parts += recomputing_text.tables(records)
    return "\n\n".join(parts)


def _value(record: Record, name: str, **key: Scalar) -> float | None:
    quantity = record.quantity(name, **key)
    return None if quantity is None else quantity.value


def _grid(record: Record, remat: str) -> str:
    counts = sorted({int(str(quantity.key["M"])) for quantity in record.quantities})
    lines = []
    for name in NAMES:
        line = [name]
        for count in counts:
            found = [
                _value(record, what, schedule=name, M=count, remat=remat)
                for what in ("step in slots", "bubble", "graphs alive")
            ]
            slots, bubble, alive = [each for each in found if each is not None]
            line.append(f"{slots:g}, {100 * bubble:.1f} %, {alive:g}")
        lines.append(line)
    headers = ["", *(f"M={count}" for count in counts)]
    return Grid(
        title=(
            f"K = {record.case['num_workers']}, {HOW[remat]}\n"
            "  slots of a step, bubble, graphs alive (replayed)"
        ),
        columns=headers,
        lines=lines,
        right=numbers(headers),
    ).text()


def _at_costs(record: Record, remat: str) -> str:
    count = int(str(record.case["num_microbatches"]))
    workers = sorted({int(str(each.key["K"])) for each in record.quantities if each.name == "step"})
    lines = []
    for name in NAMES:
        line = [name]
        for worker in workers:
            key: dict[str, Scalar] = {"schedule": name, "K": worker, "M": count, "remat": remat}
            step, bubble = _value(record, "step", **key), _value(record, "bubble", **key)
            memory = _value(record, "peak memory", **key)
            if step is None or bubble is None:
                line.append("-")
                continue
            line.append(f"{step:.4g} ms, {100 * bubble:.0f} %, {'-' if memory is None else f'{memory:.3g}'}")
        lines.append(line)
    headers = ["", *(f"K={worker}" for worker in workers)]
    split = [quantity.value or 0.0 for quantity in record.quantities if quantity.name == "(I + W) / B"]
    return Grid(
        title=(
            f"{record.details['title']} ({record.details['scale'] or 'full size'}), M = {count}\n"
            f"  {HOW[remat]}; step and bubble replayed with the stages' measured times,\n"
            "  MiB of the fullest worker modelled;\n"
            f"  a split backward takes {min(split):.2f} to {max(split):.2f} times a whole one (measured)"
        ),
        columns=headers,
        lines=lines,
        right=numbers(headers),
    ).text()


def _table2(records: Sequence[Record], model: str) -> Iterator[str]:
    """The paper's Table 2 with GPipe's schedule and with the shortest one."""
    cases = {
        int(str(record.case["num_microbatches"])): record
        for record in of_case(records, "done", part=PART)
        if record.case["model"] == model
    }
    base = find(records, "done", part=PART, model=model, num_microbatches=1)
    unit = None if base is None else _value(base, "step", schedule="gpipe", K=2, M=1, remat="always")
    if unit is None:
        return
    printed = {
        cell.key: cell.printed for cell in load_paper() if cell.source == "paper" and "table2" in cell.table
    }
    lines = []
    for count, record in sorted(cases.items()):
        steps = {
            (int(str(each.key["K"])), str(each.key["remat"]), str(each.key["schedule"])): each.value or 0.0
            for each in record.quantities
            if each.name == "step"
        }
        for worker in sorted({worker for worker, _, _ in steps}):
            gpipe = steps[worker, "always", "gpipe"]
            line = [
                f"K={worker}, M={count}",
                printed.get((f"table2-{model}", f"M={count}", f"K={worker}"), "-"),
                f"{unit / gpipe:.2f}",
            ]
            for remat in ("always", "never"):
                name, best = _shortest(steps, worker, remat)
                line += [f"{unit / best:.2f}", f"x{gpipe / best:.2f}", name]
            lines.append(line)
    headers = ["", "paper", "gpipe", "best, recomputed", "gain", "schedule", "best, kept", "gain", "schedule"]
    yield Grid(
        title=(
            f"Table 2 with the best schedule, {SUBJECTS[model].title}: throughput over GPipe's at K=2, M=1\n"
            "  (replayed with the stages' measured times; gains over GPipe with every micro-batch recomputed)"
        ),
        columns=headers,
        lines=lines,
        right=numbers(headers),
    ).text()


def _shortest(steps: Mapping[tuple[int, str, str], float], worker: int, remat: str) -> tuple[str, float]:
    found = {name: step for (k, how, name), step in steps.items() if (k, how) == (worker, remat)}
    name = min(found, key=found.__getitem__)
    return name, found[name]
