"""What was predicted beside what was measured, what that comes to, and what was asked of it."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.plan.at_scale import case as at_scale
from gpipe_bench.experiments.plan.at_scale import steps as published_steps
from gpipe_bench.experiments.plan.at_scale.text import block, published
from gpipe_bench.experiments.plan.elsewhere import case as elsewhere
from gpipe_bench.experiments.plan.measures import Compared, Found, Peaks, found, rank_correlation, regret
from gpipe_bench.experiments.plan.rules import EXACT_WITHIN, RULES
from gpipe_bench.experiments.plan.running import peaks, steps, waiting
from gpipe_bench.experiments.side_by_side.control import measured
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.verdict import Comparison


def tables(records: Sequence[Record], comparisons: Sequence[Comparison]) -> str:
    """A block for each model, then the rules, the peaks, what waits, and what others measured."""
    parts = [
        _rules(records),
        *(_block(record) for record in of_case(records, "done", part=steps.PART)),
        _peaks(of_case(records, "done", part=peaks.PART)),
        *(_waiting(record) for record in of_case(records, "done", part=waiting.PART)),
        _elsewhere(of_case(records, "done", part=elsewhere.PART)),
        *(block(record) for record in of_case(records, "done", part=at_scale.PART)),
        *(published(record) for record in of_case(records, "done", part=published_steps.PART)),
    ]
    return "\n\n".join(filter(None, parts)) or "Plans against what ran: nothing on record"


def all_found(records: Sequence[Record]) -> Found | None:
    """Over everything that is not void; None where nothing ran."""
    configurations = [each for r in of_case(records, "done", part=steps.PART) for each in steps.compared(r)]
    counted = [each for r in of_case(records, "done", part=peaks.PART) for each in peaks.peaks(r)]
    return found(configurations, counted) if configurations else None


def _rules(records: Sequence[Record]) -> str:
    numbers = all_found(records)
    if numbers is None:
        return ""
    lines = []
    for rule in RULES:
        value = getattr(numbers, rule.number)
        whole = rule.bound >= 1
        asked = f"{'>=' if rule.at_least else '<='} " + _shown(rule.bound, whole=whole, ratio=rule.at_least)
        lines.append(
            [
                rule.what,
                asked,
                "-" if value is None else _shown(value, whole=whole, ratio=rule.at_least),
                "not run" if value is None else "yes" if rule.holds(value) else "NO",
            ]
        )
    return Grid(
        title="Plans against what ran: what was asked, and what was found",
        columns=["", "asked", "found", "holds?"],
        lines=lines,
        notes=[
            "Errors are of the step's median at the speed that the machine had when the layers were timed; "
            "by the clock they are in the tables below."
        ],
    ).text()


def _shown(value: float, *, whole: bool, ratio: bool) -> str:
    if whole:
        return f"{value:.0f}"
    return f"{value:.2f}" if ratio else f"{100 * value:.1f} %"


def _block(record: Record) -> str:
    places = record.details["plan"]["places"]
    ranking = record.details["plan"]["ranking"]
    lines = []
    for place, number in enumerate(places):
        name = ranking[number]["name"]
        step = record.quantity(steps.STEP, configuration=name)
        clock = record.quantity(steps.BY_THE_CLOCK, configuration=name)
        predicted = record.quantity(steps.PREDICTED, configuration=name)
        assert step is not None and clock is not None and predicted is not None  # noqa: PT018
        assert step.value and clock.value and predicted.value  # noqa: PT018
        lines.append(
            [
                f"{number + 1}{'' if place < record.details['chosen'] else ' (other)'}",
                name,
                f"{predicted.value:.1f} [{predicted.low:.0f}, {predicted.high:.0f}]",
                measured(step),
                f"{100 * (predicted.value / step.value - 1):+.1f} %",
                f"{100 * (predicted.value / clock.value - 1):+.1f} %",
            ]
        )
    details = record.details
    control, others = record.quantity("control"), record.quantity("used by others")
    drift = [each.value for each in record.quantities if each.name == "drift"]
    notes = [
        f"{len(ranking)} planned in {details['costs']['plan_s']:.1f} s after "
        f"{details['costs']['probes_s']:.0f} s of probes; {_summary(steps.compared(record))}",
        "; ".join(
            [
                *(f"{each.name} {measured(each)}" for each in (control, others) if each is not None),
                "drift " + ", ".join(f"{value:.2f}" for value in drift),
            ]
        ),
        *([f"void: {details['void']}; measure again"] if details.get("void") else []),
    ]
    return Grid(
        title=f"{details['title']}, {details['scale']}, mini-batch of {details['batch_size']}, two processes",
        columns=["rank", "configuration", "predicted (ms)", "measured (ms) [95 %]", "error", "by the clock"],
        lines=lines,
        notes=notes,
    ).text()


def _summary(configurations: Sequence[Compared]) -> str:
    if len(configurations) < 2:
        return "nothing to compare"
    rank = rank_correlation(
        [each.predicted_s for each in configurations], [each.measured_s for each in configurations]
    )
    return f"rank correlation {rank:.2f}, regret {100 * regret(configurations):.1f} %"


def _peaks(records: Sequence[Record]) -> str:
    counted = [each for record in records for each in peaks.peaks(record)]
    if not counted:
        return ""
    lines = [
        [model, str(len(own)), _percent(max((e.error for e in own), key=abs)),
         _percent(max((e.of_any for e in own), key=abs))]
        for model, own in _grouped(counted).items()
    ]  # fmt: skip
    return Grid(
        title="Peak bytes, predicted against counted over two processes: the largest error",
        columns=["model", "configurations", "of the fullest worker", "of any worker"],
        lines=lines,
        notes=[
            "Both are what a worker's device would hold: storages, and the buffers that messages come into, "
            "which lie here in memory that two processes map. What ranks tell one another beside them, a few "
            "hundred bytes, is counted and not predicted."
        ],
    ).text()


def _grouped(counted: Sequence[Peaks]) -> dict[str, list[Peaks]]:
    models: dict[str, list[Peaks]] = {}
    for each in counted:
        models.setdefault(each.model, []).append(each)
    return models


def _percent(value: float) -> str:
    return f"{100 * value:+.2f} %"


def _waiting(record: Record) -> str:
    lines = []
    for quantity in record.quantities:
        if quantity.name != waiting.PREDICTED or not quantity.value:
            continue
        step = record.quantity(waiting.STEP, **quantity.key)
        assert step is not None
        assert step.value
        error = quantity.value / step.value - 1
        lines.append(
            [
                f"{quantity.key['schedule']}, M = {quantity.key['M']}"
                + (", recomputed" if quantity.key["remat"] == "always" else ""),
                f"{quantity.value:.1f}",
                measured(step),
                _percent(error),
                "yes" if abs(error) <= EXACT_WITHIN else "NO",
            ]
        )
    return Grid(
        title=f"Stages that wait {record.details['slot_ms']:.0f} ms per slot: times that are known exactly",
        columns=["schedule", "predicted (ms)", "measured (ms) [95 %]", "error", f"<= {EXACT_WITHIN:.0%}"],
        lines=lines,
    ).text()


def _elsewhere(records: Sequence[Record]) -> str:
    orders = [order for record in records for order in record.details["orders"]]
    if not orders:
        return ""
    lines = [
        [
            each["group"], " > ".join(_by(each, "speeds")), " > ".join(_by(each, "predicted")),
            f"{each['correlation']:.2f}", f"{100 * each['regret']:.1f} %",
        ]
        for each in orders
    ]  # fmt: skip
    return Grid(
        title="What others measured, in the order of our predictions (modelled), the fastest first",
        columns=["source", "measured there", "predicted here", "rank correlation", "regret"],
        lines=lines,
        notes=["Regret: how much longer a step of what we would have chosen took there than of the best."],
    ).text()


def _by(order: dict[str, list[float]], what: str) -> list[str]:
    names = [str(name) for name in order["names"]]
    return sorted(names, key=lambda name: -order[what][names.index(name)])
