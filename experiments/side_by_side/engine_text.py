"""The engine's targets and what was measured: one line each, missed ones too."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.side_by_side.control import Target, measured, state_of, verdict, void_by
from gpipe_bench.harness.record import Record, Scalar
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.units import show
from gpipe_bench.harness.verdict import Comparison


def _transformer(num_microbatches: int, remat: str) -> dict[str, Scalar]:
    return {"part": "transformer", "num_microbatches": num_microbatches, "remat": remat}


def _small(transport: str) -> dict[str, Scalar]:
    return {"part": "small", "transport": transport}


_SMALL = "micro-batches of no work, K=2, M=64, "
_PLAIN = "Transformer, K=2, M=16: "
_REMAT = "Transformer, K=2, re-materialized: step rate / ScheduleGPipe + checkpoint, "
_OVERLAP: dict[str, Scalar] = {"part": "overlap", "remat": "never"}
_BARE: dict[str, Scalar] = {"part": "in process", "against": "bare layers"}
_TORCHGPIPE: dict[str, Scalar] = {"part": "in process", "against": "torchgpipe"}

TARGETS = (
    Target("waiting stages, K=8, M=32: share of the ideal step", {**_OVERLAP, "num_stages": 8},
           "share of the ideal", True, 0.97),
    Target("waiting stages, K=4, M=8: share of the ideal step", {**_OVERLAP, "num_stages": 4},
           "share of the ideal", True, 0.95),
    Target("waiting stages, K=8, M=32: ... of the bare stages' ideal", {**_OVERLAP, "num_stages": 8},
           "share of the bare ideal", True, 0.97),
    Target("waiting stages, K=4, M=8: ... of the bare stages' ideal", {**_OVERLAP, "num_stages": 4},
           "share of the bare ideal", True, 0.95),
    Target(_PLAIN + "speed-up / (M K / (M + K - 1))", _transformer(16, "never"), "efficiency", True, 0.88),
    Target(_PLAIN + "step rate / ScheduleGPipe", _transformer(16, "never"),
           "rate against ScheduleGPipe", True, 1.0),
    Target(_REMAT + "M=1", _transformer(1, "except_last"), "rate against ScheduleGPipe", True, 1.3),
    Target(_REMAT + "M=4", _transformer(4, "except_last"), "rate against ScheduleGPipe", True, 1.12),
    Target(_REMAT + "M=16", _transformer(16, "except_last"), "rate against ScheduleGPipe", True, 1.04),
    Target(_SMALL + "gloo: engine and transport", _small("gloo"), "per micro-batch", False, 200.0),
    Target(_SMALL + "gloo: step rate / ScheduleGPipe", _small("gloo"),
           "rate against ScheduleGPipe", True, 2.0),
    Target(_SMALL + "shared memory: engine and transport", _small("memory"), "per micro-batch", False, 200.0),
    Target(_SMALL + "shared memory: step rate / ScheduleGPipe", _small("memory"),
           "rate against ScheduleGPipe", True, 2.0),
    Target("in one process: engine per action", {**_BARE, "remat": "never"}, "per action", False, 60.0),
    Target("in one process, re-materialized: engine per action", {**_BARE, "remat": "except_last"},
           "per action", False, 60.0),
    Target("in one process: step rate / torchgpipe", {**_TORCHGPIPE, "remat": "never"},
           "rate against torchgpipe", True, 1.0),
    Target("in one process, re-materialized: step rate / torchgpipe", {**_TORCHGPIPE, "remat": "except_last"},
           "rate against torchgpipe", True, 1.0),
)  # fmt: skip


def tables(records: Sequence[Record], comparisons: Sequence[Comparison]) -> str:
    """The targets, then everything else that was measured."""
    return f"{_targets(records)}\n\n{_everything(records)}"


def _targets(records: Sequence[Record]) -> str:
    lines = []
    for target in TARGETS:
        record = next((r for r in records if target.case.items() <= r.case.items()), None)
        quantity = record.quantity(target.quantity) if record is not None else None
        sign = ">=" if target.at_least else "<="
        if quantity is None:
            why = (
                "not run" if record is None else f"{record.status}: {record.reason or 'without this number'}"
            )
            lines.append([target.what, f"{sign} {target.bound:g}", "-", why])
            continue
        assert record is not None, "its quantity was found"
        bound = f"{sign} {show(target.bound, quantity.unit, 3)}"
        word, _ = state_of(record)
        control = record.quantity("control")
        said = f"{word}: {void_by(control)}" if word else verdict(target, quantity, control)
        lines.append([target.what, bound, measured(quantity), said])
    table = Grid(
        title="The engine's own cost, side by side (measured)",
        columns=["", "target", "median [95 % interval]", "holds?"],
        lines=lines,
    ).text()
    return f"{table}{_note(table)}"


def _note(table: str) -> str:
    """What void and contaminated mean, where they are said."""
    if "void: " not in table and "contaminated: " not in table:
        return ""
    return (
        "\n\nvoid: our first sample of a round and the second, of the same code, differ by more than\n"
        "chance. The machine changed while it measured, so nothing is judged; measure again.\n"
        "contaminated: so it was twice, the second time with more rounds."
    )


def _everything(records: Sequence[Record]) -> str:
    lines = [
        [record.label if number == 0 else "", quantity.label, measured(quantity)]
        for record in records
        for number, quantity in enumerate(record.quantities)
    ]
    return Grid(columns=["case", "quantity", "median [95 % interval]"], lines=lines).text()
