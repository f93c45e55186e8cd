"""Table 2: normalised throughput of AmoebaNet-D (18, 256) and Transformer-48 over K and M.

Expected: throughput grows with M until the bubble is negligible, and with K almost linearly for the
Transformer, whose layers are equal; AmoebaNet's cells differ, so its stages are uneven.

    python -m experiments run table2

Actions are measured in whole steps, with all stages in one process, and replayed on K devices (`replayed`).
With enough devices the step also runs on them (`measured`); the difference is the replay's error. Separate
cases compute the paper's table at its size (experiments/paper/reproduction.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import REPRODUCTION, Metric, Record, from_samples, of_case
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.verdict import Result

from ..drawing import picture
from ..registry import ENGINES
from . import evidence
from .workloads import PROFILES, TABLE2, Configuration, Workload, real_cases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES = {"amoebanet": "table2-amoebanet", "transformer": "table2-transformer"}
STAGES = {"smoke": (2, 4), "short": (2, 4, 8), "full": (2, 4, 8)}
MICROBATCHES = {"smoke": (1, 4), "short": (1, 4, 32), "full": (1, 4, 32)}
BATCHES = {
    "fitted": "(a) the largest mini-batch under a memory cap in every cell, as the paper did",
    "fixed": "(b) the same mini-batch in all cells: only K and M differ",
}
BY_RULE = "the largest mini-batch that fits, a rule taken up with both outcomes in view"
"""Cells and sentences about throughput use the first rule, as the paper does."""
ROUNDS = {"smoke": 1, "short": 2, "full": 2}
"""Rounds of a case: every configuration takes two turns per round, and each turn is a sample."""
ESTIMATE_S = {"smoke": (8.0, 8.0), "short": (75.0, 95.0), "full": (150.0, 150.0)}
REAL_ESTIMATES_S = (195.0, 175.0)  # of AmoebaNet-D and Transformer
REAL = "normalised real throughput"
MORE = "more micro-batches, more throughput", "the smallest quotient of neighbours in M, K fixed"


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    steps = [
        Case({"model": name, "batch": batch}, estimate_s)
        for batch, estimate_s in zip(BATCHES, ESTIMATE_S[options.profile], strict=True)
        for name in TABLE2
        # It takes ten seconds of profiling; on a GPU each command of `.ci/gpu` has its cases.
        if not smoke or (batch, name) != ("fitted", "amoebanet") or options.device == "cuda"
    ]
    return steps + real_cases(TABLE2, REAL_ESTIMATES_S, options) + reproduced.cases("table2", options)


def run(case: Case, options: RunOptions) -> Outcome:
    if reproduced.is_computed(case):
        from . import reproduction

        return reproduction.run("table2", case)
    from .steps import run_real, timed

    workload = TABLE2[str(case.key["model"])][options.profile]
    if "part" in case.key:
        return run_real(workload, MICROBATCHES[options.profile], options)
    plan, facts = _configurations(workload, str(case.key["batch"]), options)
    _, metrics, details = timed(workload, plan, ROUNDS[options.profile], options)
    return Outcome(tuple(metrics), {"model": workload.model, **facts, **details})


def _configurations(
    workload: Workload, batch: str, options: RunOptions
) -> tuple[tuple[Configuration, ...], dict[str, Any]]:
    """The configurations to run, and facts for the record."""
    from .steps import num_devices
    from .workloads import fitted

    cells = [(k, m) for k in STAGES[options.profile] for m in MICROBATCHES[options.profile]]
    if batch == "fitted":
        return fitted(workload, cells)
    real, size = num_devices(options.device), workload.batch_size
    return tuple(Configuration(k, m, size, runs_for_real=k <= real) for k, m in cells), {"batch_size": size}


# Results for cells and sentences of the paper


def cells(records: Sequence[Record]) -> list[Result]:
    """Results for every cell of each model on record, and for sentences about them."""
    fitted, fixed = (evidence.by_model(records, TABLES, batch=batch) for batch in BATCHES)
    found: list[Result] = []
    for record in fitted.values():
        note = f"Run here: {record.details['scale'] or 'at the full size'}; cut by seconds; {BY_RULE}."
        for name in _in_order(record):
            metric, place = _speed(record, name), _place(record, name)
            found.append(evidence.beside(records, record, place, metric, note, "a quotient"))
    for model, record in evidence.by_model(records, TABLES, part="replay error").items():
        if model not in fitted and _is_whole(record):  # with one mini-batch, unlike the paper
            for name in _in_order(record):
                metric, place = _speed(record, name, REAL), _place(record, name)
                found.append(evidence.beside(records, record, place, metric, "Measured.", "a quotient"))
    sentences = [*_quotients(records, fitted, fixed), *_bubble(records, fixed)]
    return [*found, *sentences, *reproduced.answers(records)]


def _in_order(record: Record) -> list[str]:
    cells = record.details["cells"]
    return sorted(cells, key=lambda name: (cells[name]["num_stages"], cells[name]["num_microbatches"]))


def _place(record: Record, name: str) -> reproduced.Place:
    stages, count = name.split()
    return TABLES[str(record.case["model"])], count, stages


def _speed(record: Record, name: str, what: str = "normalised throughput") -> Metric | None:
    facts = record.details["cells"].get(name)
    return None if facts is None else record.metric(what, **facts["key"])


def _is_whole(record: Record) -> bool:
    """Whether several numbers of stages were measured, so that they form a table."""
    return len({facts["num_stages"] for facts in record.details["cells"].values()}) > 1


def _quotients(
    records: Sequence[Record], fitted: Mapping[str, Record], fixed: Mapping[str, Record]
) -> Iterator[Result]:
    """Results for sentences about a quotient of two cells, or the least of several."""
    about = [
        ((row, column), [(model, "K=8 M=32", "K=2 M=32")], divisor)
        for model in fitted
        for row, column, divisor in [evidence.SPEED_UPS[TABLES[model]]]
    ]
    neighbours = [
        (model, more, fewer)
        for model, record in fitted.items()
        for fewer, more in pairwise(_in_order(record))
        if fewer.split()[0] == more.split()[0]
    ]
    for place, pairs, divisor in [*about, (MORE, neighbours, 1.0)]:
        least, other = (evidence.least(of, pairs, _speed, divisor) for of in (fitted, fixed))
        if least is not None:
            model, metric = least
            note = f"{metric.name} of {model}, a scaled model, the mini-batch fitted to memory"
            note += "" if other is None else f"; with one mini-batch for all {other[1].value:.3g}"
            yield from evidence.sentence(records, fitted[model], place, metric, note, "a quotient")


def _bubble(records: Sequence[Record], of: Mapping[str, Record]) -> Iterator[Result]:
    """The largest idle share of timed steps with at least four micro-batches per stage."""
    bubbles = [
        (100 * facts["as_timed"]["shares"]["bubble"], name, model)
        for model, record in of.items()
        for name, facts in record.details["cells"].items()
        if facts["num_microbatches"] >= 4 * facts["num_stages"] and "as_timed" in facts
    ]
    if bubbles:
        found, name, model = max(bubbles, key=itemgetter(0))
        metric = from_samples(name, [found], "%", provenance="replayed")
        note = f"Share of K x step of {model}, {name}, the largest of {len(bubbles)}"
        place = "bubble at M >= 4K", "largest over K"
        yield from evidence.sentence(records, of[model], place, metric, note, "a step")


# Text and figures


def tables(records: Sequence[Record]) -> str:
    """Tables for fitted and for fixed mini-batches, for measured steps, and of the replay's errors."""
    steps = [record for batch in BATCHES for record in of_case(records, "done", batch=batch)]
    real = of_case(records, "done", part="replay error")
    numbers = evidence.long([*steps, *real, *of_case(records, part=REPRODUCTION)], _place)
    notes = "  normalised throughput, K=2 M=1 is 1; actions timed in whole steps and laid out on K devices"
    shown = [
        evidence.throughput(of.sort_values(["K", "M"], kind="stable"), f"{title} {BATCHES[batch]}", notes)
        for batch in BATCHES
        for title, of in numbers[numbers.batch == batch].groupby("title", sort=False)
    ]
    whole = evidence.long([record for record in real if _is_whole(record)], _place)
    shown += [
        evidence.throughput(
            of.sort_values(["K", "M"], kind="stable"), f"{title} run on as many devices as stages"
        )
        for title, of in whole.groupby("title", sort=False)
    ]
    return "\n\n".join(filter(None, [*shown, evidence.replay_errors(numbers)]))


CAPTIONS = {
    "fitted": "Table 2, the mini-batch fitted to memory: the paper's; ours computed at its size, with its "
    "error, as declared: the mini-batch that the paper says, halved until it fits; and ours laid out from "
    "scaled models timed here, with the largest that fits",
    "fixed": "Table 2 with one mini-batch for all: M = 32 leaves single examples, which take longer each, so "
    "ours falls where the paper, which adjusted the mini-batch, rises",
}


def figures(records: Sequence[Record]) -> list[Plot]:
    """Figures of throughput over M beside the paper's."""
    return [
        picture(
            name=f"table2-throughput-{batch}", caption=caption, draw=partial(_throughput, records, batch),
            alt="Lines over M for each K, the paper's and ours; every number stands in the table above.",
        )
        for batch, caption in CAPTIONS.items()
        if of_case(records, "done", batch=batch)
    ]  # fmt: skip


def _throughput(records: Sequence[Record], batch: str) -> Figure:
    computed = of_case(records, part=REPRODUCTION)
    numbers = evidence.long([*of_case(records, "done", batch=batch), *computed], _place)
    return evidence.lines(numbers, x="M", hue="K", y="throughput, K = 2, M = 1 is 1")


EXPERIMENT = Experiment(
    name="table2",
    title="Table 2: normalised throughput over K and M",
    source="arXiv v5, Table 2",
    describe=(
        "AmoebaNet-D (18, 256) and Transformer-48 on 2, 4 and 8 stages with 1, 4 and 32 micro-batches: "
        "actions measured in one process and laid out on K devices, beside real steps on K = 2."
    ),
    profiles=PROFILES | {"smoke": "tiny models, K up to 4, M up to 4; one model computed"},
    cases=cases,
    run=run,
    cells=cells,
    reproduction=reproduced.text,
    paper_tables=("table2-amoebanet", "table2-transformer", "table2-bound"),
    tables=tables,
    figures=figures,
    options=("device", "engine"),
    engines=tuple(ENGINES),
)
