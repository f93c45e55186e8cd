"""The evidence as text: statistics, weights, and what micro-batches change.

Asynchronous training stands beside it for contrast, and deep networks for trainability.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from gpipe_bench.experiments.consistency.cells import (
    METRICS,
    NUM_DEVIATIONS,
    baseline,
    exact,
    learned,
    outside_by_chance,
    score_of,
    select,
    statistical,
)
from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.table import text_table

TITLES = {"images": "AmoebaNet-D on images", "text": "Transformer on text"}
WHY = {
    "images": (
        "Micro-batches change results here by what they are for batch normalization: each is normalized by "
        "its own mean and variance, and the gradient flows through them. That is the paper's definition, not "
        "rounding."
    ),
    "text": (
        "Dropout draws other masks for other micro-batches, and sums over the mini-batch are taken in "
        "another order; each step's rounding differs from there on."
    ),
}


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """Everything that `run` and `compare` print."""
    parts = [text_table(comparisons)]
    for model in TITLES:
        parts += [_evidence(records, model), _microbatches(records, model), _asynchronous(records, model)]
    return "\n\n".join(part for part in [*parts, _deep(records)] if part)


def _table(title: str, headers: list[str], lines: list[list[str]], *notes: str) -> str:
    wrapped = [textwrap.fill(note, 110) for note in notes if note]
    return Grid(title=title, columns=headers, lines=lines, notes=wrapped).text()


def show_score(model: str, score: float | None) -> str:
    if score is None:
        return "diverged"
    return f"{100 * score:.2f} %" if model == "images" else f"{score:.4g}"


def _evidence(records: Sequence[Record], model: str) -> str:
    found = baseline(records, model)
    if found is None:
        return ""
    runs = select(records, "baseline", model)
    scores = ", ".join(show_score(model, score) for score in found.scores)
    low, high = (found.mean + sign * NUM_DEVIATIONS * found.deviation for sign in (-1, 1))
    count = sum(map(learned, runs))
    lines = [
        ["baseline", "sequential runs", scores, "", f"{count} of {len(runs)} learned"],
        ["", "mean, standard deviation", show_score(model, found.mean),
         _spread(model, found.deviation), f"band {show_score(model, low)} to {show_score(model, high)}"],
    ]  # fmt: skip
    own_runs = []
    for num_stages in dict.fromkeys(r.case["num_stages"] for r in select(records, "own seeds", model)):
        own, distance, verdict = statistical(records, model, int(num_stages or 0))
        away = (
            "" if distance is None else f"{distance.value:.2f} sd [{distance.low:.2f}, {distance.high:.2f}]"
        )
        own_runs.append(len(own))
        shown = ", ".join(show_score(model, score) for score in own)
        lines.append(["(a) own seeds", f"K = {num_stages}", shown, away, _short(verdict)])
    for record in select(records, "same seed", model):
        gap, compared = record.quantity("largest weight difference"), record.quantity("numbers compared")
        processes = record.case["processes"]
        lines.append(
            [
                "(b) same seed as K = 1",
                f"K = {record.case['num_stages']}" + (f", {processes} processes" if processes != 1 else ""),
                show_score(model, score_of(record)),
                "" if gap is None else f"largest weight difference {gap.value:g}",
                _short(exact(record)) + (f" ({compared.value:,} numbers)" if compared is not None else ""),
            ]
        )
    problem = f"Not judged: {found.problem}." if found.problem else ""
    missed = sum(not learned(record) for record in select(records, "own seeds", model))
    requirement = (
        f"Required of every sequential run and of the mean of each K: {runs[0].details['requirement']}"
        + (f"; {missed} of {sum(own_runs)} single runs with own seeds missed it." if missed else ".")
    )
    heading = f"{TITLES[model]}: {METRICS[model]} (measured), M = {runs[0].case['num_microbatches']}"
    chance = _chance(max(own_runs, default=1), len(found.scores))
    return _table(
        heading, ["evidence", "", METRICS[model], "distance", "verdict"], lines, requirement, problem, chance
    )


def _chance(runs: int, baseline_runs: int) -> str:
    """What the band is worth, in words."""
    if baseline_runs < 2:
        return ""
    one, several = (100 * outside_by_chance(number, baseline_runs) for number in (1, runs))
    mean = f", the mean of {runs} in {several:.0f}" if runs > 1 else ""
    return (
        f"The band is made of {baseline_runs} runs, so it is rough: one more sequential run falls outside in "
        f"{one:.0f} of 100 repetitions{mean} (Student's t). Each K's runs are judged by their mean, whose "
        "distance has its own 95 % interval (noncentral t); outside the band but not by all of the interval "
        "is undecided. The weights are the stronger evidence: there is no band."
    )


def _short(verdict: str) -> str:
    """Without the reason, which stands below the table."""
    return verdict.split(":")[0] if verdict.startswith("not judged") else verdict


def _spread(model: str, deviation: float) -> str:
    return f"sd {100 * deviation:.2f} points" if model == "images" else f"sd {deviation:.3g}"


def _microbatches(records: Sequence[Record], model: str) -> str:
    """What may differ: the same seed at other numbers of micro-batches."""
    lines = []
    for record in select(records, "micro-batches", model):
        if record.status != "done":
            continue
        values = {q.name: q.value or 0.0 for q in record.quantities}
        plain = record.case["engine"] == "sequential"
        name = "the plain model, no pipeline" if plain else f"K = 1, M = {record.case['num_microbatches']}"
        lines.append(
            [
                name,
                show_score(model, score_of(record)),
                f"{values['largest weight difference']:.3g}",
                f"{100 * values['relative weight difference']:.3g} %",
                f"{values['numbers that differ']:,.0f} of {values['numbers compared']:,.0f}",
                str(record.details["weights_sha256"])[:12],
            ]
        )
    if not lines:
        return ""
    count = records_count(records, model)
    title = f"(c) {TITLES[model]}: from the same seed with other micro-batches, against K = 1, M = {count}"
    headers = [
        "",
        METRICS[model],
        "largest weight difference",
        "relative, all",
        "differ",
        "weights (SHA-256)",
    ]
    equal = "Equal digests are equal weights: the plain model is what K = 1, M = 1 computes."
    digests = [line[-1] for line in lines if line[0] in ("the plain model, no pipeline", "K = 1, M = 1")]
    same = len(digests) == 2 and digests[0] == digests[1]
    return _table(title, headers, lines, WHY[model], equal if same else "")


def records_count(records: Sequence[Record], model: str) -> object:
    """M of the baseline."""
    return next((r.case["num_microbatches"] for r in select(records, "baseline", model)), "?")


def _asynchronous(records: Sequence[Record], model: str) -> str:
    found = [r for r in select(records, "asynchronous", model) if r.status == "done"]
    if not found:
        return ""
    reference = [r for r in select(records, "own seeds", model) if r.case["num_stages"] == 1][:1]
    headers = [
        "", METRICS[model], "training loss", "staleness by stage", "versions by stage",
        "weights kept", "verdict",
    ]  # fmt: skip
    lines = []
    for record in reference:
        curve = record.details["curve"]
        lines.append(
            ["GPipe (any K)", show_score(model, score_of(record)), _loss(curve), "0", "1",
             "1.00 x the model", "learned" if learned(record) else "did not learn"]
        )  # fmt: skip
    for record in found:
        values = {q.name: q.value or 0.0 for q in record.quantities}
        score = score_of(record)
        verdict = "learned" if learned(record) else "did not learn"
        if reference and score is not None:
            verdict += f", {_against(model, score, score_of(reference[0]))}"
        lines.append(
            [
                name_of(record),
                show_score(model, score),
                _loss(record.details["curve"]),
                " ".join(map(str, record.details["staleness"])),
                " ".join(map(str, record.details["versions"])),
                f"{values['weights kept'] / values['weights of the model']:.2f} x the model",
                verdict,
            ]
        )
    title = f"{TITLES[model]}: what inconsistency looks like (measured; the same seed and data)"
    note = (
        "Staleness is counted in updates between a mini-batch's forward and the update with its "
        "gradient. Rates are the recipe's, and those divided by K, as staleness of K updates asks for; the "
        "sequential training at that rate shows what is the rate's doing. Times are not compared: the stages "
        "take turns in one process."
    )
    return _table(title, headers, lines, note)


def name_of(record: Record) -> str:
    """Of an asynchronous training: `asynchronous, with stashing, K = 8, rate / 8`. With one stage nothing is
    stale, so it is a sequential one.
    """
    num_stages, rate = record.case["num_stages"], float(record.case["rate"] or 1.0)
    slower = "" if rate == 1 else f", rate / {1 / rate:g}"
    if num_stages == 1:
        return f"sequential{slower}"
    return f"asynchronous, {'with' if record.case['stash'] else 'without'} stashing, K = {num_stages}{slower}"


def _loss(curve: Sequence[Sequence[float | None]]) -> str:
    last = curve[-1][1]
    return "not finite" if last is None else f"{last:.4g}"


def _against(model: str, score: float, reference: float | None) -> str:
    if reference is None:
        return "GPipe diverged"
    if model == "images":
        return f"{100 * (score - reference):+.2f} points"
    return f"{100 * (score / reference - 1):+.1f} %"


def _deep(records: Sequence[Record]) -> str:
    found = [r for r in records if r.case.get("part") == "trainability" and r.status == "done"]
    if not found:
        return ""
    lines = []
    for record in found:
        values = {q.name: q.value or 0.0 for q in record.quantities}
        lines.append(
            [
                f"{record.case['rate']:g}",
                "by 1 / L" if record.case["deep_init"] else "no",
                f"at {record.details['clip']:g}" if record.case["logit_clip"] else "no",
                f"{values['first gradient norm']:.3g}",
                f"{values['median gradient norm']:.3g}",
                f"{values['largest gradient norm']:.3g}",
                f"{values['non-finite steps']:.0f} of {len(record.details['norms'])}",
                f"{values['held-out perplexity']:.4g}",
            ]
        )
    recipe = found[0].details["recipe"]
    title = (
        f"Trainability: a Transformer of {recipe['num_layers']} layers, {recipe['d_model']} wide "
        "(measured; v5, section 5)"
    )
    headers = [
        "rate", "scaled start", "clipped logits", "first norm", "median norm", "largest norm", "non-finite",
        "perplexity",
    ]  # fmt: skip
    unigram = found[0].details["unigram_perplexity"]
    note = (
        f"Norms of the whole gradient; no warm-up, no gradient clipping. The unigram model has {unigram:.4g}."
    )
    return _table(title, headers, lines, note)
