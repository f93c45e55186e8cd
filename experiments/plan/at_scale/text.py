"""The largest grids on paper, as a table: the best way of each K and tp, and what others did."""

from __future__ import annotations

from typing import Any

from gpipe_bench.experiments.plan.at_scale.steps import is_inside
from gpipe_bench.experiments.plan.rules import INSIDE_SHARE, MOST_WIDTH
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.grid import Grid

GIB = 2**30


def block(record: Record) -> str:
    """Of one model: what others did first, then the fastest first."""
    details = record.details
    rows = [*details["done"], *sorted(details["grids"], key=lambda row: row["step_s"])]
    lines = [
        [
            row["name"] or "planned", row["K"], grid_of(row), row["tp"], row["schedule"], row["M"],
            f"{row['recomputed']}/{row['stages']}",
            f"{row['step_s']:.1f} [{row['low_s']:.1f}, {row['high_s']:.1f}]",
            f"{row['measured_s']:.1f}" if row.get("measured_s") else "-",
            f"{row['peak_bytes'] / GIB:.1f}" + ("" if row["fits"] else " (too much)"),
        ]
        for row in rows
    ]  # fmt: skip
    return Grid(
        title=f"{details['title']}, mini-batch of {details['batch_size']}, on paper (modelled)",
        columns=[
            "",
            "K",
            "dp",
            "tp",
            "schedule",
            "M",
            "recomputed",
            "step (s) [range]",
            "measured (s)",
            "GiB",
        ],
        lines=lines,
        notes=[
            f"{details['num_parameters']:,} parameters; {details['tried']} ways laid out, "
            f"{details['skipped']} left out by their bounds; recomputed: stages of all",
            *(f"{row['name']}: {row['source']}" for row in details["done"]),
        ],
        right=frozenset({1, 3, 5}),
    ).text()


def published(record: Record) -> str:
    """Published steps beside the range that is predicted of each."""
    rows = record.details["steps"]
    inside = [is_inside(row) for row in rows]
    widest = max(row["high_s"] / row["low_s"] for row in rows)
    enough = "yes" if sum(inside) >= INSIDE_SHARE * len(rows) and widest <= MOST_WIDTH else "NO"
    return Grid(
        title="Published steps of the largest models, on paper (modelled)",
        columns=["", "measured (s)", "predicted (s) [range]", "inside"],
        lines=[
            [
                row["name"], f"{row['measured_s']:.2f}",
                f"{row['step_s']:.2f} [{row['low_s']:.2f}, {row['high_s']:.2f}]", "yes" if each else "NO",
            ]
            for row, each in zip(rows, inside, strict=True)
        ],
        notes=[
            f"{sum(inside)} of {len(rows)} inside, the widest range a factor of {widest:.2f}; asked: "
            f"{INSIDE_SHARE:.0%} of them, and at most {MOST_WIDTH:g}: {enough}",
            *(f"{row['name']}: {row['source']}; not in the prediction: {row['differs']}" for row in rows),
        ],
        right=frozenset({1}),
    ).text()  # fmt: skip


def grid_of(row: dict[str, Any]) -> str:
    """Replicas, and how many of them share parameters at which level."""
    if row["fsdp"] == 1:
        return str(row["dp"])
    return f"{row['dp']}, {row['fsdp']} of them ZeRO-{row['fsdp_level']}"
