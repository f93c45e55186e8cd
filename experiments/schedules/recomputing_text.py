"""What choosing the recomputations saves, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpipe_bench.experiments.schedules.recomputing import PART, SCHEDULES, WAYS, WORKERS
from gpipe_bench.harness.record import Quantity, Record, Scalar, of_case
from gpipe_bench.harness.report.grid import Grid, numbers

HEADERS = (
    "schedule, K", "nothing", "one word", "per stage", "adaptive", "at least", "saved of one word",
    "of per stage",
)  # fmt: skip


def tables(records: Sequence[Record]) -> Iterator[str]:
    """One for each model."""
    for record in of_case(records, "done", part=PART):
        details = record.details
        yield Grid(
            title=(
                f"{details['title']} on {details['accelerator']}s of {details['cap_gib']} GiB, mini-batch "
                f"{details['batch_size']}, M = {details['num_microbatches']}: what is recomputed\n"
                "  ms of a step (GiB of the fullest worker), replayed with modelled times at "
                f"{details['shares_of_peak'][1]:.0%} of the peak;\n"
                "  saved: for shares of the peak from "
                f"{details['shares_of_peak'][0]:.0%} to {details['shares_of_peak'][2]:.0%}"
            ),
            columns=list(HEADERS),
            lines=[_line(record, name, number) for number in WORKERS for name in SCHEDULES],
            right=numbers(list(HEADERS)),
        ).text()


def _line(record: Record, name: str, num_workers: int) -> list[str]:
    key: dict[str, Scalar] = {"schedule": name, "K": num_workers}
    cells = [f"{name}, K={num_workers}"]
    for way in WAYS:
        step = record.quantity("step", **key, recomputed=way)
        peak = record.quantity("peak memory", **key, recomputed=way)
        if step is None or step.value is None or peak is None or peak.value is None:
            cells.append("does not fit")
            continue
        over = "" if peak.value <= record.details["cap_gib"] else ", too much"
        cells.append(f"{step.value:.0f} ({peak.value:.3g}{over})")
    bound = record.quantity("bound", **key)
    cells.append("-" if bound is None or bound.value is None else f"{bound.value:.0f}")
    return [*cells, *(_saved(record.quantity("saved", **key, of=way)) for way in WAYS[1:3])]


def _saved(quantity: Quantity | None) -> str:
    if quantity is None or quantity.value is None or quantity.low is None or quantity.high is None:
        return "-"
    return f"{quantity.value:.1%} [{quantity.low:.1%}, {quantity.high:.1%}]"
