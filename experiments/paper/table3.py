"""Table 3: throughput without a fast interconnect, AmoebaNet-D (18, 128) and Transformer-24 with M = 32.

Expected: the Transformer is not slowed down (a message takes a hundredth of an action), AmoebaNet is with
many stages, whose messages take as long as their actions.

    python -m experiments run table3

Actions are measured in whole steps and replayed on K devices over PCIe through the host (`replayed`), as it
is and slowed down with the model, so that messages take the same share of the time as on the paper's P100.
Separate cases compute the table at the paper's size for P100s (`reproduction.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import truediv
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Record, interval_name
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.verdict import Result

from ..drawing import picture
from . import evidence
from .results import SAME_SHARE
from .workloads import NUM_MICROBATCHES, PROFILES, TABLE3, Configuration, Job, real_cases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = (2, 4, 8)
TABLES = {"amoebanet": "table3-amoebanet", "transformer": "table3-transformer"}
NAMES = {"amoebanet": "AmoebaNet-D", "transformer": "Transformer"}  # names in the sentences
TIMED_MICROBATCHES = 8  # of the steps that run; replayed with 32
ROUNDS = {"smoke": 1, "short": 2, "full": 3}  # each takes two samples
ESTIMATE_S = {"smoke": 7.0, "short": 40.0, "full": 90.0}
REAL_MICROBATCHES = (2, 8, 32)
REAL_ESTIMATES_S = (75.0, 75.0)  # of AmoebaNet-D and Transformer


def cases(options: RunOptions) -> list[Case]:
    estimate_s = ESTIMATE_S[options.profile]
    steps = [Case({"part": "steps", "model": name}, estimate_s) for name in TABLE3]
    return steps + real_cases(TABLE3, REAL_ESTIMATES_S, options) + reproduced.cases("table3", options)


def run(case: Case, options: RunOptions) -> Outcome:
    if reproduced.is_computed(case):
        from . import reproduction

        return reproduction.run("table3", case)
    from .full_size import FullSize
    from .results import replayed
    from .steps import measure, run_real

    sizes = TABLE3[str(case.key["model"])]
    workload, paper = sizes[options.profile], sizes["full"]
    if case.key["part"] == "replay error":
        return run_real(workload, REAL_MICROBATCHES, options, microbatch_size=1)
    count = min(TIMED_MICROBATCHES, workload.batch_size)
    examples = count * max(1, workload.batch_size // NUM_MICROBATCHES)
    plan = tuple(
        Configuration(k, count, examples) for k in (STAGES[:2] if options.profile == "smoke" else STAGES)
    )
    job = Job(workload, plan, ROUNDS[options.profile], device=options.device)
    theirs = FullSize(paper.model, dict(paper.options))
    metrics, details = replayed(plan, measure(job), theirs, paper.batch_size)
    facts = {**workload.facts(), "rounds": job.rounds, "timed_microbatches": count}
    return Outcome(tuple(metrics), {**facts, **details})


# Results for cells and sentences of the paper


def cells(records: Sequence[Record]) -> list[Result]:
    """Results for each K of each timed model, and for the sentence about them."""
    found: list[Result] = []
    for model, record in evidence.by_model(records, TABLES, part="steps").items():
        scale = record.details["scale"] or "at the full size"
        note = (
            f"Run here: {scale}; cut by measured seconds, over PCIe slowed down as much as the computation."
        )
        for k in stage_counts(record):
            metric = record.metric("normalised throughput", link=record.details["judged"], K=k)
            if metric is not None:  # None if the steps of K = 2 did not fit
                cell = (TABLES[model], "M=32", f"K={k}")
                found.append(evidence.beside(records, record, cell, metric, note, "a quotient"))
        slow, fast = (
            record.metric("normalised throughput", link=link, K=8)
            for link in (record.details["judged"], "free link")
        )
        kept = evidence.derived("speed-up without over with", truediv, slow, fast)
        place = "speed-up from 2 to 8 without a fast link over that with one", NAMES[model]
        note = "K = 8 over K = 2 over the slowed link, over the same over a free link; both of the same cut"
        found += evidence.sentence(records, record, place, kept, note, "a quotient of quotients")
    return [*found, *reproduced.answers(records)]


def stage_counts(record: Record) -> list[int]:
    """The numbers of stages on record."""
    return [facts["num_stages"] for facts in record.details["stages"].values()]


# Text and figures


COLUMNS = {SAME_SHARE: "PCIe,\nsame share", "PCIe": "PCIe", "free link": "free\nlink"}


def tables(records: Sequence[Record]) -> str:
    """Tables of throughput over each link."""
    parts = []
    for record in evidence.by_model(records, TABLES, part="steps").values():
        found = {
            f"K={k}": [record.metric("normalised throughput", link=link, K=k) for link in COLUMNS]
            for k in stage_counts(record)
        }
        lines = [
            [name, *("-" if each is None else evidence.interval(each) for each in of)]
            for name, of in found.items()
        ]
        several = max((len(each.samples) for of in found.values() for each in of if each), default=0)
        parts.append(numbers_text(_title(record, several), ["", *COLUMNS.values()], lines))
    return "\n\n".join(parts)


def _title(record: Record, several: int) -> str:
    details, k = record.details, stage_counts(record)[-1]
    scale = f"; scaled to this machine: {details['scale']}" if details["scale"] else ""
    forward_ms = details["stages"][f"K={k}"]["mean_forward_ms"]
    return (
        f"{details['title']}, M=32: throughput, K=2 is 1 (in brackets: {interval_name(several)})\n"
        f"  actions timed in steps of {details['timed_microbatches']} micro-batches{scale}; a forward takes "
        f"{forward_ms:.1f} ms at K={k}\n"
        "  PCIe: 16 lanes of PCIe 3 through the host, 7.9 GB/s; same share: slowed down with the "
        f"computation, {details['slowed_link']['bandwidth_bytes_per_s'] / 1e6:,.1f} MB/s\n"
        "  not in the interval: over links on which a message takes half a forward or longer, steps of two\n"
        "    processes took 6 to 19 % longer than their replay (TCP, measured once)\n"
        f"  same share: {details['assumption']}"
    )


def figures(records: Sequence[Record]) -> list[Plot]:
    """Figures of throughput over K, without a fast link and over a free one, beside the paper's."""
    laid_out = evidence.by_model(records, TABLES, part="steps")
    lines = picture(
        name="table3-throughput",
        caption="Table 3: throughput without a fast link, the paper's, ours computed at its size, with its "
        "error, and laid out from scaled models timed here, also over a free link (where its line lies upon "
        "the other, the link costs nothing)",
        alt="Lines over K for each link, the paper's and ours; every number stands in the table above.",
        draw=partial(_throughput, records, laid_out),
    )
    return [lines] if laid_out else []


def _throughput(records: Sequence[Record], laid_out: Mapping[str, Record]) -> Figure:
    from pandas import DataFrame

    computed = {(each.table, each.column): each for each in reproduced.answers(records)}
    rows = []
    for model, record in laid_out.items():
        printed = evidence.published(TABLES[model])
        for k in stage_counts(record):
            numbers: list[tuple[str, str, Any]] = [
                (evidence.OURS, LINKS[link], record.metric("normalised throughput", link=link, K=k))
                for link in (record.details["judged"], "free link")
            ]
            slow = LINKS[SAME_SHARE]
            numbers.append((evidence.PAPER, slow, printed.get(("paper", "M=32", f"K={k}"))))
            at = {"title": record.details["title"], "scale": record.details["scale"], "K": k}
            at |= {"low": None, "high": None}
            rows += [
                {**at, "metric": whose, "link": link, "value": None if number is None else number.value}
                for whose, link, number in numbers
            ]
            of = computed.get((TABLES[model], f"K={k}"))
            if of is not None and of.metric is not None and of.range is not None:
                (low, high), whose = of.range, {"metric": evidence.COMPUTED, "link": slow}
                rows.append({**at, **whose, "value": of.metric.value, "low": low, "high": high})
    return evidence.lines(DataFrame(rows), x="K", hue="link", y="throughput, K = 2 is 1")


LINKS = {SAME_SHARE: "without a fast link", "free link": "over a free link"}


EXPERIMENT = Experiment(
    name="table3",
    title="Table 3: throughput without a fast interconnect",
    source="arXiv v5, Table 3",
    describe=(
        "AmoebaNet-D (18, 128) and Transformer-24 with 32 micro-batches on 2, 4 and 8 stages over PCIe."
    ),
    profiles=PROFILES
    | {"smoke": "tiny models, K up to 4; one model computed", "full": "the paper's models, for a GPU"},
    cases=cases,
    run=run,
    cells=cells,
    reproduction=reproduced.text,
    paper_tables=("table3-amoebanet", "table3-transformer"),
    revision=2,
    tables=tables,
    figures=figures,
    options=("device",),
)
