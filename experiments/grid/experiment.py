"""Grids of processes: what each way of dividing the work sends, takes and holds.

Expected: a pipeline sends a small part of what replicas send for Transformers, and not for small AmoebaNets;
steps on this machine are those of the replay; of all grids of an accelerator's, few stages are fast and full.
The machine should have nothing else to do:

    python -m experiments run grid
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.grid import accelerators, machine, traffic
from gpipe_bench.experiments.grid.figures import figures
from gpipe_bench.experiments.grid.text import tables
from gpipe_bench.experiments.report.timelines import kept_timelines
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, PaperTable, RunOptions
from gpipe_bench.harness.record import Quantity, Record, find, of_case
from gpipe_bench.harness.verdict import Entry, Part, Spread

TABLE = "grid"
STAGES, REPLICAS = 8, 8  # of the sentence about scaling further
SMOKE = "The smoke profile has a tiny model."


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    found = traffic.keys(smoke) + machine.keys(options.profile) + accelerators.keys(options.profile)
    return [Case(key, seconds) for key, seconds in found]


def run(case: Case, options: RunOptions) -> Outcome:
    match case.key["part"]:
        case traffic.MODELLED | traffic.COUNTED:
            return traffic.run(case.key)
        case accelerators.PART:
            return accelerators.run(case.key, quick=options.profile == "smoke")
    return machine.run(case.key, options.profile, options.seed)


def cells(records: Sequence[Record]) -> list[Entry]:
    found = [
        Entry(
            table=TABLE,
            row="bytes sent by a pipeline over data parallelism",
            column=str(record.details["column"]),
            source="others",
            question="as published" if part == traffic.MODELLED else "here",
            quantity=record.quantity("pipeline over data parallelism"),
            spread=_over_cuts(record),
            record=record,
            note="Of the rank that sends most in a step"
            + (", by shape." if part == traffic.MODELLED else ", as its process wrote them."),
        )
        for part in (traffic.MODELLED, traffic.COUNTED)
        for record in of_case(records, "done", part=part)
    ]
    for name, model in accelerators.MODELS.items():
        one, many = (
            find(records, "done", part=accelerators.PART, model=name, accelerators=STAGES * replicas)
            for replicas in (1, REPLICAS)
        )
        if one is not None and many is not None:
            found.append(_scaling(one, many, model.title))
    return found


def _over_cuts(record: Record) -> Spread | None:
    """What the ratio may be under other cuts than those of equal operations; None where it was counted."""
    by_cut = sorted(record.details.get("by_cut", {}).values())
    if not by_cut:
        return None
    part = Part(what="balanced by", low=by_cut[0], high=by_cut[-1])
    return Spread(low=by_cut[0], high=by_cut[-1], parts=(part,), combinations=len(by_cut))


def _scaling(one: Record, many: Record, title: str) -> Entry:
    """Examples per second of eight replicas of a pipeline over those of one, over what is not stated."""

    def rates(record: Record, dp: int) -> list[float]:
        """Under every setting, the middle first."""
        span = next(
            each
            for each in record.details["ranges"]
            if (each["dp"], each["pp"], each["tp"], each["level"]) == (dp, STAGES, 1, "dp")
        )
        return [float(record.details["batch_size"]) / step_s for step_s in span["steps_s"]]

    ratios = [all_of / single for single, all_of in zip(rates(one, 1), rates(many, REPLICAS), strict=True)]
    low, high = min(ratios), max(ratios)
    part = Part(what="share of the peak and the link", low=low, high=high)
    return Entry(
        table=TABLE,
        row="throughput of 8 replicas of a pipeline over one",
        column=f"{title}, K={STAGES}",
        source="others",
        question="as published",
        quantity=Quantity(name="throughput", value=ratios[0], unit="ratio", provenance="modelled"),
        spread=Spread(low=low, high=high, parts=(part,), combinations=len(ratios)),
        record=many,
        note="As many examples per replica; a roofline's operations laid out by the replay.",
        not_comparable=SMOKE if many.profile == "smoke" else "",
    )


PAPER_TABLES = {
    TABLE: PaperTable(
        title="Sentences about pipelines and data parallelism",
        short="Grids",
        about="What each way sends in a step, and what replicas of a pipeline add.",
    )
}


EXPERIMENT = Experiment(
    name="grid",
    title="Grids of processes: pipelines, replicas and divided layers together",
    source="beyond the paper; its sentence on data parallelism, and a web page's on traffic",
    describe=(
        "Bytes sent by a pipeline and by replicas, by shape and counted; steps of small grids beside their "
        "replay; step time and memory of every (dp, pp, tp) of 8, 64 and 512 accelerators."
    ),
    profiles={
        "smoke": "tiny models, 8 accelerators",
        "short": "everything, 15 steps of each grid on this machine",
        "full": "the same",
    },
    cases=cases,
    run=run,
    cells=cells,
    tables=tables,
    figures=figures,
    timelines=kept_timelines,
    paper_tables=PAPER_TABLES,
    options=("seed",),
)
