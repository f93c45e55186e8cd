"""What was predicted beside what was measured, what that comes to, and what was asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpipe_bench.experiments.plan import elsewhere, exact, on_paper, steps
from gpipe_bench.experiments.plan.rules import (
    EXACT_WITHIN,
    INSIDE_SHARE,
    MOST_WIDTH,
    RULES,
    by_model,
    found,
    order_of,
    regret,
)
from gpipe_bench.experiments.side_by_side import measured
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.verdict import Comparison

GIB = 2**30


def tables(records: Sequence[Record], comparisons: Sequence[Comparison]) -> str:
    """The rules, a block for each model, the peaks, what waits, and what is on paper."""
    done = {
        part: of_case(records, "done", part=part)
        for part in (steps.PART, exact.PEAKS, exact.WAITING, elsewhere.PART)
    }
    grids = [
        *_rules(done[steps.PART], done[exact.PEAKS]),
        *map(_model, done[steps.PART]),
        *_peaks(done[exact.PEAKS]),
        *map(_waiting, done[exact.WAITING]),
        *_elsewhere(done[elsewhere.PART]),
        *map(_at_scale, of_case(records, "done", part=on_paper.AT_SCALE)),
        *map(_published, of_case(records, "done", part=on_paper.PUBLISHED_STEPS)),
    ]
    return "\n\n".join(grid.text() for grid in grids) or "Plans against what ran: nothing on record"


def _rules(ran: Sequence[Record], counted: Sequence[Record]) -> list[Grid]:
    """Over everything that is not void."""
    configurations = [each for record in ran for each in steps.compared(record)]
    if not configurations:
        return []
    numbers = found(configurations, [each for record in counted for each in exact.peaks(record)])
    lines = []
    for rule in RULES:
        show = "{:.0f}".format if rule.bound >= 1 else "{:.2f}".format if rule.at_least else _percent
        value = numbers.get(rule.number)
        lines.append(
            [
                rule.what,
                f"{'>=' if rule.at_least else '<='} {show(rule.bound)}",
                "-" if value is None else show(value),
                "not run" if value is None else "yes" if rule.holds(value) else "NO",
            ]
        )
    return [
        Grid(
            title="Plans against what ran: what was asked, and what was found",
            columns=["", "asked", "found", "holds?"],
            lines=lines,
            notes=[
                "Errors are of the step's median at the speed that the machine had when the layers were "
                "timed; by the clock they are in the tables below."
            ],
        )
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _model(record: Record) -> Grid:
    details = record.details
    places, ranking, costs = details["plan"]["places"], details["plan"]["ranking"], details["costs"]
    known: dict[Any, Any] = {(each.name, *each.key.values()): each for each in record.quantities}
    lines = []
    for place, number in enumerate(places):
        name = ranking[number]["name"]
        predicted, step, clock = (
            known[what, name] for what in (steps.PREDICTED, steps.STEP, steps.BY_THE_CLOCK)
        )
        lines.append(
            [
                f"{number + 1}{'' if place < details['chosen'] else ' (other)'}",
                name,
                f"{predicted.value:.1f} [{predicted.low:.0f}, {predicted.high:.0f}]",
                measured(step),
                *(f"{100 * (predicted.value / each.value - 1):+.1f} %" for each in (step, clock)),
            ]
        )
    own = steps.compared(record)
    summary = f"{order_of(own):.2f}, regret {_percent(regret(own))}" if len(own) > 1 else ""
    drift = ", ".join(f"{each.value:.2f}" for each in record.quantities if each.name == "drift")
    others = [
        f"{what} {measured(known[what,])}" for what in ("control", "used by others") if (what,) in known
    ]
    return Grid(
        title=f"{details['title']}, {details['scale']}, mini-batch of {details['batch_size']}, two processes",
        columns=["rank", "configuration", "predicted (ms)", "measured (ms) [95 %]", "error", "by the clock"],
        lines=lines,
        notes=[
            f"{len(ranking)} planned in {costs['plan_s']:.1f} s after {costs['probes_s']:.0f} s of probes; "
            + (f"rank correlation {summary}" if summary else "nothing to compare"),
            "; ".join([*others, f"drift {drift}"]),
            *([f"void: {details['void']}; measure again"] if details.get("void") else []),
        ],
    )


def _peaks(records: Sequence[Record]) -> list[Grid]:
    models = by_model([each for record in records for each in exact.peaks(record)])
    lines = [
        [
            model,
            str(len(own)),
            *(
                f"{100 * max(errors, key=abs):+.2f} %"
                for errors in zip(*((e.error, e.of_any) for e in own), strict=True)
            ),
        ]
        for model, own in models.items()
    ]
    return [
        Grid(
            title="Peak bytes, predicted against counted over two processes: the largest error",
            columns=["model", "configurations", "of the fullest worker", "of any worker"],
            lines=lines,
            notes=[
                "Both are what a worker's device would hold: storages, and the buffers that messages come "
                "into, which lie here in memory that two processes map. What ranks tell one another beside "
                "them, a few hundred bytes, is counted and not predicted."
            ],
        )
    ][: bool(lines)]


def _waiting(record: Record) -> Grid:
    lines = []
    for quantity in record.quantities:
        step: Any = record.quantity(exact.STEP, **quantity.key)
        if quantity.name == exact.PREDICTED and quantity.value:
            error = quantity.value / step.value - 1
            again = ", recomputed" if quantity.key["remat"] == "always" else ""
            lines.append(
                [
                    f"{quantity.key['schedule']}, M = {quantity.key['M']}{again}",
                    f"{quantity.value:.1f}",
                    measured(step),
                    f"{100 * error:+.2f} %",
                    "yes" if abs(error) <= EXACT_WITHIN else "NO",
                ]
            )
    return Grid(
        title=f"Stages that wait {record.details['slot_ms']:.0f} ms per slot: times that are known exactly",
        columns=["schedule", "predicted (ms)", "measured (ms) [95 %]", "error", f"<= {EXACT_WITHIN:.0%}"],
        lines=lines,
    )


def _elsewhere(records: Sequence[Record]) -> list[Grid]:
    lines = []
    for each in (order for record in records for order in record.details["orders"]):
        orders = (zip(each[what], each["names"], strict=True) for what in ("speeds", "predicted"))
        lines.append(
            [
                each["group"],
                *(" > ".join(name for _, name in sorted(order, key=lambda one: -one[0])) for order in orders),
                f"{each['correlation']:.2f}",
                _percent(each["regret"]),
            ]
        )
    return [
        Grid(
            title="What others measured, in the order of our predictions (modelled), the fastest first",
            columns=["source", "measured there", "predicted here", "rank correlation", "regret"],
            lines=lines,
            notes=[
                "Regret: how much longer a step of what we would have chosen took there than of the best."
            ],
        )
    ][: bool(lines)]


def _at_scale(record: Record) -> Grid:
    """Of one model: what others did first, then the fastest first."""
    details = record.details
    lines = [
        [
            row["name"] or "planned", row["K"],
            f"{row['dp']}, {row['fsdp']} of them ZeRO-{row['fsdp_level']}" if row["fsdp"] > 1 else row["dp"],
            row["tp"], row["schedule"], row["M"], f"{row['recomputed']}/{row['stages']}",
            f"{row['step_s']:.1f} [{row['low_s']:.1f}, {row['high_s']:.1f}]",
            f"{row['measured_s']:.1f}" if row.get("measured_s") else "-",
            f"{row['peak_bytes'] / GIB:.1f}" + ("" if row["fits"] else " (too much)"),
        ]
        for row in (*details["done"], *sorted(details["grids"], key=lambda row: row["step_s"]))
    ]  # fmt: skip
    words = ["K", "dp", "tp", "schedule", "M", "recomputed"]
    return Grid(
        title=f"{details['title']}, mini-batch of {details['batch_size']}, on paper (modelled)",
        columns=["", *words, "step (s) [range]", "measured (s)", "GiB"],
        lines=lines,
        notes=[
            f"{details['num_parameters']:,} parameters; {details['tried']} ways laid out, "
            f"{details['skipped']} left out by their bounds; recomputed: stages of all",
            *(f"{row['name']}: {row['source']}" for row in details["done"]),
        ],
        right=frozenset({1, 3, 5}),
    )


def _published(record: Record) -> Grid:
    """Published steps beside the range that is predicted of each."""
    rows = record.details["steps"]
    inside = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows]
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
    )  # fmt: skip
