"""Our answers to the numbers that others published about schedules, by the table of paper.csv."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpipe_bench.experiments.computed.answer import Answer, spread_of, to_details, to_quantities
from gpipe_bench.experiments.schedules.elsewhere import elsewhere
from gpipe_bench.experiments.schedules.zero_bubble import (
    COSTS,
    HALVES,
    SETTINGS,
    interleaved_with_all_messages_ms,
    vee_rates,
    with_few_microbatches,
)
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Record, Scalar, of_case
from gpipe_bench.harness.verdict import Entry

PUBLISHED = "published"
RATES, RATES_V, SPEEDS, ELSEWHERE = "zero-bubble", "zero-bubble-v", "zero-bubble-speed", "schedules-elsewhere"
FEW = (2, 4, 8)
SPEED_NAMES = ("1F1B-I", "ZB-1p", "ZB-2p")
SPEED_COLUMNS = tuple(SETTINGS[place].column for place in (0, 2, 3, 5, 6, 9))
"""Settings of Table 5 whose speeds Table 4 prints."""
SECONDS = {"1.5B": 2.0, "6.2B": 2.0, "14.6B": 7.0, "28.3B": 20.0}
WHOLE_MEMORY = "theirs is the memory of a GPU, parameters and optimizer included; ours the activations' alone"

NOTES = {
    "1F1B": "Replayed.",
    "1F1B-I": (
        "Replayed, less one message per worker: in the authors' script only the first micro-batch of a group "
        "waits for the message from the last worker to the first."
    ),
    "ZB-H1": "Replayed.",
    "ZB-H2": "Replayed; the longest span of a worker, which keeps its skew from step to step.",
    "ZB-1p": "The shortest that the generator finds within the activations of 1F1B, replayed.",
    "ZB-2p": "The shortest that was found within twice the activations of 1F1B, replayed.",
    "ZB-V": "The hand-written rows, replayed; the longest span of a worker.",
}


def keys(smoke: bool) -> list[tuple[dict[str, Scalar], float]]:
    """The cases: their keys, and how long each takes."""
    models: list[Scalar] = ["1.5B"] if smoke else [*SECONDS]
    return [
        *(({"part": PUBLISHED, "what": RATES, "model": model}, SECONDS[str(model)]) for model in models),
        ({"part": PUBLISHED, "what": RATES_V}, 4.0),
        ({"part": PUBLISHED, "what": ELSEWHERE}, 1.0),
    ]


def run(key: dict[str, Scalar]) -> Outcome:
    make: dict[str, Callable[[], Sequence[Answer]]] = {
        RATES: lambda: [*rates(str(key["model"]))],
        RATES_V: lambda: [*vee()],
        ELSEWHERE: elsewhere,
    }
    answers = make[str(key["what"])]()
    return Outcome(to_quantities(answers), to_details(answers))


def rates(model: str) -> Iterator[Answer]:
    """Table 5's rates, and Table 4's and 12's speeds that follow from the same costs."""
    for setting in (each for each in SETTINGS if each.model == model):
        costs = {name: cost(setting) for name, cost in COSTS.items()}
        column = setting.column
        for name, cost_ms in costs.items():
            yield Answer(
                row=f"bubble rate of {name}", column=column, value=setting.rate(cost_ms), unit="ratio",
                what=NOTES[name], provenance="replayed",
            )  # fmt: skip
        yield Answer(
            row="bubble rate of 1F1B-I, all messages", column=column,
            value=setting.rate(interleaved_with_all_messages_ms(setting)), unit="ratio",
            what="Megatron's order replayed with every message", provenance="replayed",
        )  # fmt: skip
        for name in SPEED_NAMES if column in SPEED_COLUMNS else ():
            yield Answer(
                row=f"throughput of {name} over 1F1B", column=column, value=costs["1F1B"] / costs[name],
                unit="ratio", what="The quotient of the replayed costs.", provenance="replayed",
            )  # fmt: skip
    if model == "1.5B":
        for number in FEW:
            yield Answer(
                row="throughput of zero bubble over 1F1B, m <= p", column=f"1.5B, p=8, m={number}",
                value=with_few_microbatches(SETTINGS[0], number), unit="ratio",
                what="The generator's schedule over 1F1B, with the times that were profiled for m = 24.",
                provenance="replayed",
            )  # fmt: skip


def vee() -> Iterator[Answer]:
    """Table 8."""
    for setting in HALVES:
        for name, rate in vee_rates(setting).items():
            yield Answer(
                row=f"bubble rate of {name}", column=setting.column, value=rate, unit="ratio",
                what=NOTES[name], provenance="replayed",
            )  # fmt: skip


def cells(records: Sequence[Record]) -> list[Entry]:
    """An entry for every answer on record whose number was published."""
    found = []
    for record in of_case(records, "done", part=PUBLISHED):
        for quantity in record.quantities:
            row, column = quantity.name, str(quantity.key["column"])
            if row.endswith("all messages") or (row.endswith("of 1F1B-I") and column not in SPEED_COLUMNS):
                continue  # nobody printed these, or they could not be had
            table = SPEEDS if "throughput of" in row else str(record.case["what"])
            found.append(
                Entry(
                    table=table,
                    row=row,
                    column=column,
                    source="others",
                    question="as published",
                    quantity=quantity,
                    spread=spread_of(record, row, column),
                    not_comparable=WHOLE_MEMORY if row.endswith("over 1F1B, memory") else "",
                    record=record,
                    note=quantity.note,
                )
            )
    return found
