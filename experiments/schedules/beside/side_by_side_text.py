"""Our schedules beside 1F1B's and torch's: steps, ratios, what was asked of them, what voids them."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.schedules.beside.side_by_side import PART, SIZE, TARGETS, WORDS, arms
from gpipe_bench.experiments.side_by_side.control import Target, measured, state_of, verdict
from gpipe_bench.harness.record import Quantity, Record, of_case
from gpipe_bench.harness.report.grid import Grid


def tables(records: Sequence[Record]) -> list[str]:
    """A block for each case, then what holds for all."""
    found = of_case(records, "done", part=PART)
    return [*(_block(record) for record in found), *([_notes(found)] if found else [])]


def _block(record: Record) -> str:
    number, remat = int(str(record.case["num_microbatches"])), str(record.case["remat"])
    word, why = state_of(record)
    control = record.quantity("control")
    lines = []
    for arm in arms(remat):
        if arm in record.details["refused"]:
            lines.append([arm, "-", f"torch refuses it: {record.details['refused'][arm]}", "", "", ""])
            continue
        step = record.quantity("step", arm=arm)
        assert step is not None, "every arm that was not refused has been timed"
        ratios = [each for each in record.quantities if each.name == "step over" and each.key["arm"] == arm]
        lines += [
            [
                arm if place == 0 else "",
                measured(step) if place == 0 else "",
                *_against(ratio, number, word, control),
            ]
            for place, ratio in enumerate(ratios)
        ] or [[arm, measured(step), "", "", "", ""]]
    what = "not re-materialized" if remat == "never" else "every micro-batch recomputed"
    others = record.quantity("used by others")
    notes = [f"{each.name} {measured(each)}" for each in (control, others) if each is not None]
    return Grid(
        title=f"Side by side on two processes, M = {number}, {what} (measured)",
        columns=["schedule", "ms per step [95 %]", "over", "ratio [95 %]", "target", "holds?"],
        lines=lines,
        notes=["; ".join(notes), *([why] if why else [])],
    ).text()


def _against(ratio: Quantity, number: int, word: str, control: Quantity | None) -> list[str]:
    arm, against = str(ratio.key["arm"]), str(ratio.key["against"])
    bound = TARGETS.get((arm, against), {}).get(number)
    if bound is None:
        return [against, measured(ratio), "", ""]
    said = word or verdict(Target("", {}, "step over", False, bound), ratio, control)
    return [against, measured(ratio), f"<= {bound:.2f}", said]


def _notes(records: Sequence[Record]) -> str:
    short = any(record.profile != "smoke" for record in records)
    model = f"{WORDS}, " if short else f"A tiny Transformer, {SIZE['smoke']} sequence per micro-batch, "
    return "\n".join(
        [
            f"{model}float32, one thread per process.",
            "All schedules train the same layers; those of one name have the same stages. Before and after",
            "the timing all gradients were the plain model's. Ratios are formed round by round; control:",
            "1F1B's (or GPipe's) first sample of a round over its second; where its interval excludes 1",
            "nothing is judged, and nothing is certain that is no further from its target than that",
            "interval from 1. `interleaved zero bubble` runs torch's own rows here; `generated` are rows",
            "for the stages' times as measured in the same run; `gpipe, W put off` keeps two graphs alive.",
        ]
    )
