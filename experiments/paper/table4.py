"""Table 4, the overhead breakdown: where the device time of a step goes.

For ResNet-101 and AmoebaNet-D (4, 512). Expected: two thirds computation, a fifth to a quarter recomputation;
the rest is bubble and uneven stages, and grows with the number of stages.

    python -m experiments run table4

Actions are timed in whole steps of 4 micro-batches and replayed with 16 on K devices (`replayed`), then again
without a link, without set-up and with even stages; the differences are the parts (planner/predict.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Record, from_samples
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.verdict import Result

from ..drawing import picture
from ..registry import ENGINES
from . import evidence
from .workloads import PROFILES, VERSION1, Configuration, real_cases

if TYPE_CHECKING:
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure
    from pandas import DataFrame

NUM_MICROBATCHES = 16  # of v1's Table 1; neither version states the breakdown's
TIMED_MICROBATCHES = 4  # of the steps that run
COUNTS = NUM_MICROBATCHES, TIMED_MICROBATCHES  # numbers of micro-batches to replay
STAGES = (2, 4, 8)
JUDGED, JUDGED_COLUMN = "resnet101", "ResNet-101"  # of the sentences
SHARE = "share of the step"
REAL_MICROBATCHES = (1, 2, 4)
REAL_ESTIMATES_S = (170.0, 170.0)  # of ResNet-101 and AmoebaNet-D
ROUNDS = {"smoke": 1, "short": 1, "full": 2}  # each takes two samples
ESTIMATE_S = {"smoke": 10.0, "short": 55.0, "full": 100.0}
COLORS = ("#3182bd", "#fdd49e", "#636363", "#bdbdbd", "#9ecae1", "#e6550d", "#f0f0f0")  # of the parts
SETUP = (
    "Set-up divides and reshapes the inputs. The paper's happens on its host or its first accelerator and is "
    "sent on; here the inputs lie in the memory that the stages share."
)


def cases(options: RunOptions) -> list[Case]:
    estimate_s = ESTIMATE_S[options.profile]
    steps = [Case({"model": name}, estimate_s) for name in VERSION1]
    others = real_cases(VERSION1, REAL_ESTIMATES_S, options)
    return steps + others + reproduced.cases("table4", options)


def run(case: Case, options: RunOptions) -> Outcome:
    if reproduced.is_computed(case):
        from . import reproduction

        return reproduction.run("table4", case)
    from .results import by_turn, joined, link_of, take_apart
    from .steps import num_devices, run_real, timed

    model = str(case.key["model"])
    workload = VERSION1[model][options.profile]
    if "part" in case.key:
        size = max(1, workload.batch_size // 2)
        return run_real(workload, REAL_MICROBATCHES, options, microbatch_size=size)
    examples, real = TIMED_MICROBATCHES * max(1, workload.batch_size // 2), num_devices(options.device)
    plan = tuple(
        Configuration(k, TIMED_MICROBATCHES, examples, runs_for_real=k <= real, counts=COUNTS)
        for k in (STAGES[:1] if options.profile == "smoke" else STAGES)
    )
    found, metrics, details = timed(workload, plan, ROUNDS[options.profile], options)
    link = link_of(found, options.device)
    for index, configuration in enumerate(plan):
        turns = by_turn([each.steps[index] for each in found])
        if not turns:
            continue
        facts = details["cells"][f"K={configuration.num_stages} M={NUM_MICROBATCHES}"]
        shares = [take_apart(turn, link, NUM_MICROBATCHES).shares for turn in turns]
        whole = take_apart(joined(turns), link, NUM_MICROBATCHES)
        facts["shares"] = {part: float(share) for part, share in whole.shares.items()}
        facts["exact sum"] = str(sum(whole.shares.values()))
        for part in whole.shares:
            key, percent = {"part": part, **facts["key"]}, [100 * float(each[part]) for each in shares]
            metrics.append(from_samples(SHARE, percent, "%", key=key, provenance="replayed"))
    return Outcome(tuple(metrics), details)


Number = Callable[[int, int, Mapping[str, float]], float]
NOTES = ("Share of K x step over the formula's", "Quotient of two shares of K x step")  # of the sentences


def cells(records: Sequence[Record]) -> list[Result]:
    """v1 breaks down ResNet-101; v5's pie names no model, but has v1's load imbalance at K = 2, 3.2 %."""
    record = evidence.by_model(evidence.of_steps(records), [JUDGED]).get(JUDGED)
    if record is None:
        return reproduced.answers(records)
    scale = record.details["scale"] or "at the full size"
    note = f"Run here: {scale}, M = {NUM_MICROBATCHES}, exact cut by seconds."
    found = [each for each in record.metrics if each.name == SHARE]
    shares = {k: {str(each.key["part"]): each for each in found if each.key["K"] == k} for k in (2, 4)}
    two = {part: each for part, each in shares[2].items() if part != "communication"}
    cells = [(("breakdown-v5", part, SHARE), each) for part, each in two.items()]
    if shares[4]:
        cells.append((("breakdown-v1", "load imbalance", "K=4"), shares[4]["load imbalance"]))
    results = [
        evidence.beside(records, record, place, metric, SETUP if place[1] == "setup" else note, "a step")
        for place, metric in cells
    ]
    for (row, number), note in zip(evidence.OF_SHARES.items(), NOTES, strict=True):
        ratios = {
            f"K={k}": ratio
            for k, of in shares.items()
            if of and (ratio := evidence.derived(row, partial(_of_parts, number, k, tuple(of)), *of.values()))
        }
        if ratios:
            numbers = {k: float(ratio.value or 0.0) for k, ratio in ratios.items()}
            least = evidence.worst(row, JUDGED_COLUMN, numbers)
            metric = next(ratio for ratio in ratios.values() if ratio.value == least)
            metric = replace(metric, key={"over": least.over})
            of: evidence.Of = "a quotient" if row == reproduced.NEXT else "a step"
            results += evidence.sentence(records, record, (row, JUDGED_COLUMN), metric, note, of)
    return [*results, *reproduced.answers(records)]


def _of_parts(number: Number, num_stages: int, parts: Sequence[str], *shares: float) -> float:
    return number(num_stages, NUM_MICROBATCHES, dict(zip(parts, shares, strict=True)))


def _taken_apart(records: Sequence[Record]) -> DataFrame:
    """Exact shares in per cent: a column for each step, a row for each part."""
    from pandas import DataFrame

    return 100 * DataFrame(
        {
            (record.details["title"], name): facts["shares"]
            for record in evidence.of_steps(records)
            if record.status == "done"
            for name, facts in record.details["cells"].items()
            if "shares" in facts
        }
    )


def tables(records: Sequence[Record]) -> str:
    """Tables of the shares, and of the replay's errors."""
    shares = _taken_apart(records)
    scales = {
        record.details["title"]: record.details["scale"]
        for record in evidence.of_steps(records)
        if record.status == "done"
    }
    scaled = "; ".join(f"{title}: {scale}" for title, scale in scales.items() if scale)
    title = "Where the device time of a step goes (replayed, exact), % of K x step"
    title += f"\n  scaled to this machine: {scaled}" if scaled else ""
    lines = [
        [part, *(f"{share:.1f}" for share in of)]
        for part, of in zip(shares.index, shares.to_numpy(), strict=True)
    ]
    lines += [["sum", *(f"{share:.1f}" for share in shares.sum())]] if lines else []
    parts = numbers_text(title, ["", *map("\n".join, shares.columns)], lines)
    errors = evidence.replay_errors(evidence.long(records, lambda *_: ("", "", "")))
    return "\n\n".join(filter(None, [parts, errors]))


def figures(records: Sequence[Record]) -> list[Plot]:
    """Stacked bars of the shares."""
    bars = picture(
        name="table4-breakdown",
        caption="Where the time of a step goes, by model and number of stages",
        alt=(
            "Stacked bars that add up to 100 percent: computation, recomputation, bubble, load imbalance, "
            "communication, setup and weight update."
        ),
        draw=partial(_bars, records),
    )
    return [bars] if not _taken_apart(records).empty else []


def _bars(records: Sequence[Record]) -> Figure:
    from matplotlib.figure import Figure

    shares = _taken_apart(records).T
    shares.index = [", ".join(each) for each in shares.index]
    figure = Figure(figsize=(7.5, 1.3 + 0.45 * len(shares)), layout="constrained")
    axes = figure.add_subplot()
    shares.plot.barh(stacked=True, ax=axes, color=COLORS, edgecolor="0.4", linewidth=0.5, legend=False)
    for bars, color in zip(axes.containers, COLORS, strict=True):
        labels = [f"{bar.get_width():.0f}" if bar.get_width() >= 3 else "" for bar in bars]
        text = "w" if color in COLORS[:3:2] else "k"
        axes.bar_label(cast("BarContainer", bars), labels, label_type="center", color=text)
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="share of K x step (%)")
    axes.grid(visible=False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


EXPERIMENT = Experiment(
    name="table4",
    title="Table 4: where the time of a step goes",
    source="arXiv v5, Table 4; v1, Figure 4",
    describe=(
        "The device time of a step of ResNet-101 and AmoebaNet-D (4, 512) on 2, 4 and 8 stages, attributed "
        "to computation, recomputation, weight update, set-up, communication, load imbalance and bubble."
    ),
    profiles=PROFILES | {"smoke": "tiny models, K = 2; one model computed"},
    cases=cases,
    run=run,
    cells=cells,
    reproduction=reproduced.text,
    paper_tables=("breakdown-v5", "breakdown-v1"),
    tables=tables,
    figures=figures,
    options=("device", "engine"),
    engines=tuple(ENGINES),
)
