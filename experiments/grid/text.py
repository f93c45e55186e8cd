"""What the records of the grid say, in tables of words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpipe_bench.experiments.grid import accelerators, machine, traffic
from gpipe_bench.harness.record import Record, Scalar, of_case
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.table import text_table
from gpipe_bench.harness.verdict import Comparison

SHOWN = 6
"""The fastest grids that fit, of each number of accelerators."""


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    parts = [text_table(comparisons)] if comparisons else []
    parts += [*_traffic(records), *_steps(records), *_accelerators(records)]
    return "\n\n".join(parts)


def value(record: Record, name: str, **key: Scalar) -> float | None:
    found = record.quantity(name, **key)
    return None if found is None else found.value


def _traffic(records: Sequence[Record]) -> Iterator[str]:
    lines = []
    for part in (traffic.MODELLED, traffic.COUNTED):
        for record in of_case(records, "done", part=part):
            sent = [value(record, "bytes sent", way=way) or 0.0 for way in ("pp", "dp")]
            shapes = [value(record, "bytes by shape", way=way) for way in ("pp", "dp")]
            lines.append(
                [
                    str(record.details["column"]),
                    "measured" if part == traffic.COUNTED else "modelled",
                    *(f"{each / 1e6:,.2f}" for each in sent),
                    f"{value(record, 'pipeline over data parallelism'):.3f}",
                    ", ".join("-" if each is None else f"{each / 1e6:,.2f}" for each in shapes),
                ]
            )
    if lines:
        headers = ["", "provenance", "pipeline", "data par.", "ratio", "both by shape"]
        title = (
            "MB that the rank that sends most sends in one step, float32\n"
            "  pipeline   activations forward and their gradients back\n"
            "  data par.  the sum of the gradients over as many replicas"
        )
        yield Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _steps(records: Sequence[Record]) -> Iterator[str]:
    lines = []
    for part in (machine.STEPS, machine.WAITING):
        for record in of_case(records, "done", part=part):
            step, replayed = value(record, "step"), value(record, "replayed step")
            behind = value(record, "replayed step, sums behind the last backward")
            lines.append(
                [
                    f"dp {record.case['dp']} x pp {record.case['pp']}",
                    "a Transformer" if part == machine.STEPS else "layers that wait",
                    f"{step:.1f}",
                    f"{replayed:.1f}",
                    f"{value(record, 'replayed over measured'):.3f}",
                    "-" if behind is None else f"{behind:.1f}",
                ]
            )
    if lines:
        headers = ["", "of", "measured", "replayed", "ratio", "without overlap"]
        title = "Steps on this machine in ms, beside their replay"
        yield Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _accelerators(records: Sequence[Record]) -> Iterator[str]:
    for record in of_case(records, "done", part=accelerators.PART):
        steps = sorted(
            (each for each in record.quantities if each.name == "step"), key=lambda each: each.value or 0.0
        )
        spans = {place(each): each for each in record.details["ranges"]}
        lines: list[list[str]] = []
        for step in steps:
            memory = value(record, "peak memory", **step.key)
            if memory is None or memory > accelerators.MEMORY_BYTES / 2**30 or len(lines) == SHOWN:
                continue
            span = spans[place(step.key)]
            lines.append(
                [
                    *place(step.key),
                    str(span["M"]),
                    f"{step.value:.3f}",
                    f"{min(span['steps_s']):.2f} to {max(span['steps_s']):.2f}",
                    f"{memory:.2f}",
                ]
            )
        headers = ["dp", "pp", "tp", "parameters", "M", "step (s)", "range", "GiB"]
        title = (
            f"{record.details['title']} on {record.case['accelerators']} accelerators "
            f"({record.details['accelerator']}), {record.details['batch_size']} examples: the fastest of "
            f"{len(steps)} ways that fit 16 GiB\n"
            "  (modelled: a roofline's operations laid out by the replay; the range is over the share of\n"
            "  the peak, the bandwidth and the latency of the link; dp: all replicas have all parameters)"
        )
        yield Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def place(key: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Of a number or a range, as words."""
    return tuple(str(key[name]) for name in ("dp", "pp", "tp", "level"))
