"""Schedules beyond GPipe's: what others published of them, all of them side by side, and timed against torch.

Expected: published bubble rates follow to the last digit from the times that are printed with them; at equal
costs zero bubble in a V needs the least time, V-Min the least memory without recomputation, and
re-materialization with the weights' gradients put off comes near a step without it. The machine should
have nothing else to do:

    python -m experiments run schedules
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.measuring.speed_models import SUBJECTS
from gpipe_bench.experiments.schedules import at_costs, grid, published, recomputing
from gpipe_bench.experiments.schedules.beside import side_by_side
from gpipe_bench.experiments.schedules.figures import figures
from gpipe_bench.experiments.schedules.text import tables
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, PaperTable, RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.verdict import Entry

STAGES = {"smoke": (2, 4), "short": (2, 4, 8, 16), "full": (2, 4, 8, 16)}
GRID_S = {2: 0.5, 4: 1.0, 8: 4.0, 16: 15.0}


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    return [
        *(Case(key, seconds) for key, seconds in published.keys(smoke)),
        *(
            Case({"part": grid.GRID, "num_workers": workers}, GRID_S[workers])
            for workers in STAGES[options.profile]
        ),
        *(
            Case({"part": at_costs.PART, "model": model, "num_microbatches": number}, seconds)
            for model in SUBJECTS
            for number, seconds in at_costs.SECONDS[options.profile].items()
            if not smoke or model == "transformer"
        ),
        *(
            Case({"part": recomputing.PART, "model": model}, seconds)
            for model, seconds in recomputing.SECONDS.items()
            if not smoke
        ),
        *(Case(key, seconds) for key, seconds in side_by_side.keys(options.profile)),
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    match case.key["part"]:
        case published.PUBLISHED:
            return published.run(case.key)
        case at_costs.PART:
            return at_costs.run(
                str(case.key["model"]), options.profile, int(str(case.key["num_microbatches"]))
            )
        case recomputing.PART:
            return recomputing.run(str(case.key["model"]))
        case side_by_side.PART:
            return side_by_side.run(case.key, options)
    workers = int(str(case.key["num_workers"]))
    kept = {"timelines": grid.charts(workers)} if workers == grid.CHART_WORKERS else {}
    return Outcome(tuple(grid.quantities(workers)), kept)


def cells(records: Sequence[Record]) -> list[Entry]:
    return published.cells(records)


PAPER_TABLES = {
    published.RATES: PaperTable(
        title="Bubble rates in the zero-bubble paper",
        short="Zero bubble",
        about="The share of a worker's time that is left idle, from the times printed beside it.",
    ),
    published.RATES_V: PaperTable(
        title="Bubble rates of ZB-V in the zero-bubble paper",
        short="Zero bubble, V",
        about="Two stages per worker in a V, within the activations of 1F1B.",
    ),
    published.SPEEDS: PaperTable(
        title="Speed over 1F1B in the zero-bubble paper",
        short="Zero bubble, speed",
        about="Measured there on up to 32 GPUs; here what the profiled times say.",
    ),
    published.ELSEWHERE: PaperTable(
        title="Schedules in other projects",
        short="Schedules elsewhere",
        about="Bubbles, what is alive, and ratios to 1F1B that OLMo-core, torchtitan and Primus print.",
    ),
}


EXPERIMENT = Experiment(
    name="schedules",
    title="Schedules beyond GPipe's: published rates, all side by side, against torch's",
    source="beyond the paper; arXiv 2401.10241; OLMo-core, torchtitan, Primus",
    describe=(
        "Published bubble rates replayed; length, bubble and memory of all schedules over K and M, at equal "
        "and at measured costs; our schedules beside torch's; Table 2 with the best schedule; what must be "
        "recomputed under Table 1's memory."
    ),
    profiles={
        "smoke": "published rates of one model, K up to 4",
        "short": "everything, K up to 16",
        "full": "the same with more rounds",
    },
    cases=cases,
    run=run,
    cells=cells,
    tables=tables,
    figures=figures,
    paper_tables=PAPER_TABLES,
    docs="docs/schedules.md",
    options=("seed",),
)
