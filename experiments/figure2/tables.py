"""Figure 2 and the formulas from their records alone: the entries that are judged, then all that is printed.

Judged are our numbers for the formulas that the paper's text gives. Behind the comparison the text says what
the figures draw: schedules, bubbles, memory and traffic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from gpipe_bench.experiments.figure2.schedules import VARIANTS
from gpipe_bench.harness.judging.allowed import printed
from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.judging.paper import load_paper
from gpipe_bench.harness.judging.spread import Part, Spread
from gpipe_bench.harness.judging.units import show
from gpipe_bench.harness.judging.unknowns import load_unknowns
from gpipe_bench.harness.records.record import Quantity, Record, Scalar, find, of_case
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.table import text_table

TABLE = "formulas"
MOST_STAGES = 8  # of the paper's Table 2, about which it says that M >= 4K is enough
ENOUGH = (
    "The least whole M / K with which (K-1)/(M+K-1) keeps below a negligible share at K = 8, for the two "
    "ends of what negligible may mean."
)


def of_part(records: Sequence[Record], part: str) -> list[Record]:
    """The finished records of one part, in order; fewer stages first."""
    found = of_case(records, "done", part=part)
    return sorted(found, key=lambda r: (str(r.case.get("model", "")), int(str(r.case.get("num_stages", 0)))))


def cells(records: Sequence[Record]) -> list[Entry]:
    """A cell for every formula that the paper's text gives and we have a record for."""
    return [*_bubbles(records), *_activations(records), *_least_multiple(records), *_sizes(records)]


def _bubbles(records: Sequence[Record]) -> Iterator[Entry]:
    for record in of_part(records, "bubble"):
        if record.case["num_stages"] not in (2, 4, 8):
            continue
        for m in (1, 4, 32):
            yield Entry(
                table=TABLE,
                row=f"bubble (K-1)/(M+K-1) at M={m}",
                column=f"K={record.case['num_stages']}",
                question="as published",
                quantity=record.quantity("bubble", schedule="gpipe", M=m),
                record=record,
                note="GPipe without re-materialization, equal stages, a free link.",
            )


def _activations(records: Sequence[Record]) -> Iterator[Entry]:
    for record in of_part(records, "formula"):
        layers, m = record.case["num_layers"], record.case["num_microbatches"]
        yield Entry(
            table=TABLE,
            row=f"activation memory (N + L/K N/M) / N at L={layers}, M={m}",
            column=f"K={record.case['num_stages']}",
            question="as published",
            quantity=record.quantity("peak activations / N"),
            record=record,
            note="Counted over the schedule's actions, where every layer's activations weigh the same.",
        )


def least_multiple(share: float) -> int:
    """The least whole M / K with which the formula's bubble stays below a share for every K."""
    return next(
        ratio
        for ratio in itertools.count(1)
        if all(Fraction(k - 1, ratio * k + k - 1) < share for k in range(1, MOST_STAGES + 1))
    )


def _sizes(records: Sequence[Record]) -> Iterator[Entry]:
    """The parameters of models whose traffic is on record and that no other table counts."""
    for record in of_part(records, "traffic"):
        parameters = record.quantity("parameters")
        if record.case["model"] == "amoebanet-b":
            yield Entry(
                table="amoebanet-b", row="parameters", column="v5", question="as published",
                quantity=parameters, record=record,
            )  # fmt: skip
        elif record.case["model"] == "transformer-seq2seq":
            name = str(record.case["size"]).replace(", ", ",")
            yield Entry(
                table="nmt-models", row=name, column="parameters", question="as published",
                quantity=parameters, record=record,
            )  # fmt: skip


def _least_multiple(records: Sequence[Record]) -> Iterator[Entry]:
    """How many micro-batches for each stage make the bubble negligible; the paper says that 4 do."""
    negligible = load_unknowns().find("claims", "negligible_share")
    if not of_part(records, "bubble") or negligible.low is None or negligible.high is None:
        return
    fewest, most = least_multiple(negligible.high), least_multiple(negligible.low)
    row = "micro-batches per stage for a negligible bubble"
    cell = next(cell for cell in load_paper() if cell.key == (TABLE, row, "M / K"))
    yield Entry(
        table=TABLE,
        row=row,
        column="M / K",
        question="as published",
        quantity=Quantity(name=row, value=(fewest + most) / 2, unit="ratio", provenance="modelled"),
        spread=Spread(
            low=fewest,
            high=most,
            parts=(Part(what="negligible_share", low=fewest, high=most),),
            combinations=2,
        ),
        allowed=printed(replace(cell, bound="at most")),  # the text says that so many are enough
        note=ENOUGH,
    )


GIB = 2**30
SHOWN_STAGES = 4
SHOWN_MICROBATCHES = (4, 8, 16, 32, 128)


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """Everything that `run` and `compare` print."""
    parts = [text_table(comparisons)] if comparisons else []
    parts += [_steps(records), _fractions(records), _rule(records), _memory(records), _traffic(records)]
    return "\n\n".join(part for part in parts if part)


def value(record: Record | None, name: str, **key: Scalar) -> float | None:
    quantity = record.quantity(name, **key) if record is not None else None
    return quantity.value if quantity is not None else None


def _percent(number: float | None, digits: int = 1) -> str:
    return "-" if number is None else f"{100 * number:.{digits}f} %"


def _steps(records: Sequence[Record]) -> str:
    """The drawn steps: how long, how idle, how much is kept."""
    found = of_part(records, "chart")
    if not found:
        return ""
    counts = list(dict.fromkeys(int(str(record.case["num_microbatches"])) for record in found))
    headers = ["schedule"]
    for count in counts:
        headers += [f"M={count}: step", "idle", "graphs"]
    lines = []
    for name, variant in VARIANTS.items():
        line = [variant.title]
        for count in counts:
            record = find(records, "done", part="chart", schedule=name, num_microbatches=count)
            step, alive = value(record, "step"), value(record, "graphs alive on the first stage")
            line += ["-" if step is None else f"{step:g}", _percent(value(record, "bubble"))]
            line.append("-" if alive is None else f"{alive:g}")
        lines.append(line)
    title = (
        f"The schedules drawn, K = {SHOWN_STAGES} (replayed): step in forwards of one micro-batch on one "
        "stage,\nidle share of the device time, most micro-batches whose graph the first stage keeps"
    )
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _fractions(records: Sequence[Record]) -> str:
    """Closed form and replay as fractions for one K, and whether all others agree."""
    record = find(records, "done", part="bubble", num_stages=SHOWN_STAGES)
    if record is None:
        return ""
    lines = []
    for name, variant in VARIANTS.items():
        found = [record.details["fractions"][f"{name} M={count}"] for count in SHOWN_MICROBATCHES]
        lines += [
            [variant.title, variant.formula, *(each["closed form"] for each in found)],
            ["", "replay", *(each["replay"] for each in found)],
            ["", "", *(_percent(float(Fraction(each["replay"]))) for each in found)],
        ]
    total = sum(len(each.details["fractions"]) for each in of_part(records, "bubble"))
    differing = sum(
        value(each, "fractions that differ from the closed form") or 0 for each in of_part(records, "bubble")
    )
    stages = ", ".join(str(each.case["num_stages"]) for each in of_part(records, "bubble"))
    title = (
        f"Bubble, K = {SHOWN_STAGES}: the closed form above, the replay below it (replayed)\n"
        f"Over K = {stages}, replay and closed form are equal in {total - differing:g} of {total} fractions"
    )
    headers = ["schedule", "closed form", *(f"M={count}" for count in SHOWN_MICROBATCHES)]
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _rule(records: Sequence[Record]) -> str:
    """What M >= 4K buys."""
    found = of_part(records, "bubble")
    if not found:
        return ""
    lines = []
    for name in ("gpipe", "gpipe-early"):
        for ratio in (1, 2, 3, 4, 8):
            bubbles = [
                value(record, "bubble", schedule=name, M=ratio * int(str(record.case["num_stages"])))
                for record in found
            ]
            title = VARIANTS[name].title if ratio == 1 else ""
            lines.append([title, f"M = {ratio}K" if ratio > 1 else "M = K", *map(_percent, bubbles)])
    headers = ["schedule", "micro-batches", *(f"K={record.case['num_stages']}" for record in found)]
    title = "The rule M >= 4K: bubble left (replayed)"
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _memory(records: Sequence[Record]) -> str:
    """Formula and memory model side by side."""
    found = of_part(records, "memory")
    lines = []
    for record in found:
        layers, stages = record.details["num_layers"], int(str(record.case["num_stages"]))
        for count in record.details["num_microbatches"]:
            kept = value(record, "kept without re-materialization", M=count)
            formula, peak = (
                value(record, "formula", M=count),
                value(record, "peak activations", M=count),
            )
            if not kept or formula is None or peak is None:
                continue
            units = (1 + layers / stages / count) / layers
            sizes = record.details["bytes"][f"M={count}"]
            lines.append(
                [
                    record.details["title"], stages, count, _percent(units), _percent(formula / kept),
                    _percent(peak / kept), _gib(formula), _gib(peak), _gib(sizes["transients"]), _gib(kept),
                ]
            )  # fmt: skip
    if not lines:
        return ""
    size = found[0].details["batch_size"]
    title = (
        f"Activations at the fullest moment of the fullest stage, N = {size}, re-materialization, float32 "
        "(modelled)\nas shares of O(N L), what one device keeps without a pipeline and re-materialization:\n"
        "  formula       (N + (L/K)(N/M)) / (N L), constants of 1\n"
        "  own bytes     the same with the model's bytes: inputs of N + activations of N/M examples\n"
        "  memory model  all that is alive, transients of a backward pass included"
    )
    headers = [
        "model", "K", "M", "formula", "own bytes", "memory model", "GiB: own", "memory model", "transients",
        "O(N L)",
    ]  # fmt: skip
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def _traffic(records: Sequence[Record]) -> str:
    """Who sends more, and from which mini-batch on."""
    found = of_part(records, "traffic")
    if not found:
        return ""
    counts = sorted({count for record in found for count in record.details["num_stages"]})
    few, many = counts[0], counts[-1]
    lines = []
    for record in found:
        parameters, size = value(record, "parameters"), value(record, "mini-batch")
        assert parameters is not None
        assert size is not None
        line = [
            f"{record.case['model']} {record.case['size']}",
            show(parameters, "parameters", 3),
            f"{size:g}",
        ]
        for count in (few, many):
            ours = value(record, "pipeline, busiest device", K=count)
            theirs = value(record, "data parallelism, each device", K=count)
            even = value(record, "break-even mini-batch", K=count)
            if ours is None or theirs is None or even is None:
                line += ["-"] * 3
            else:
                line += [_gb(ours), _gb(theirs), f"{even:,.0f}"]
        lines.append(line)
    headers = ["model", "parameters", "N"]
    for count in (few, many):
        headers += [f"K={count}: pipeline", "data par.", "even at N"]
    title = (
        "GB that the busiest device sends in one step of N examples, float32 (modelled)\n"
        "  pipeline   activations forward and their gradients back at K - 1 cuts of equal FLOPs\n"
        "  data par.  ring all-reduce, 2 (K-1)/K of the gradient bytes, whatever N\n"
        "  even at N  the mini-batch up to which the pipeline sends less"
    )
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _gb(num_bytes: float) -> str:
    return show(num_bytes / 1e9, "number", 3)
