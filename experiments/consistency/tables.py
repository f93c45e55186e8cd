"""The evidence as text: statistics, weights, and what micro-batches change.

Asynchronous training stands beside it for contrast, and deep networks for trainability.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.consistency.cells import (
    METRICS,
    Baseline,
    Finding,
    baseline,
    exact,
    learned,
    score_of,
    select,
    statistical,
)
from gpipe_bench.experiments.consistency.equivalence import joint_power, power
from gpipe_bench.experiments.consistency.protocol import load_protocol
from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.table import text_table
from gpipe_bench.harness.report.width import fill

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
    wrapped = [fill(note) for note in notes if note]
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
    own = {k: statistical(records, model, k) for k in load_protocol().plans[model].stages}
    lines = [*_of_baseline(found, runs, model), *_of_own_seeds(own, model), *_of_same_seed(records, model)]
    singles = [*runs, *select(records, "own seeds", model)]
    missed = sum(not learned(record) for record in singles)
    requirement = (
        f"Required of the mean of the sequential runs and of that of each K: {runs[0].details['requirement']}"
        + (f"; {missed} of {len(singles)} single runs missed it." if missed else ".")
    )
    reasons = dict.fromkeys(finding.reason for finding in own.values() if finding.reason)
    heading = f"{TITLES[model]}: {METRICS[model]} (measured), M = {runs[0].case['num_microbatches']}"
    return _table(
        heading,
        ["evidence", "", METRICS[model], "distance", "verdict"],
        lines,
        requirement,
        f"Not judged: {'; '.join(reasons)}." if reasons else "",
        _rule(model),
    )


def _of_baseline(found: Baseline, runs: Sequence[Record], model: str) -> list[list[str]]:
    margin = load_protocol().margin
    low, high = (found.mean + sign * margin * found.deviation for sign in (-1, 1))
    return [
        ["baseline", "sequential runs", _scores(model, found.scores), "",
         f"{sum(map(learned, runs))} of {len(runs)} learned"],
        ["", "mean, standard deviation", show_score(model, found.mean), _spread(model, found.deviation),
         f"margin {show_score(model, low)} to {show_score(model, high)}"],
    ]  # fmt: skip


def _of_own_seeds(own: dict[int, Finding], model: str) -> list[list[str]]:
    lines = []
    for num_stages, finding in own.items():
        if finding.scores or finding.reason:
            away = finding.distance
            shown = "" if away is None else f"{away.value:.2f} sd [{away.low:.2f}, {away.high:.2f}]"
            scores = _scores(model, finding.scores)
            lines.append(["(a) own seeds", f"K = {num_stages}", scores, shown, finding.word])
    return lines


def _of_same_seed(records: Sequence[Record], model: str) -> list[list[str]]:
    lines = []
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
    return lines


def _scores(model: str, scores: Sequence[float]) -> str:
    """Each run: a range would hide what the mean is made of."""
    if model == "images":
        return " ".join(f"{100 * score:.2f}" for score in scores) + (" %" if scores else "")
    return " ".join(show_score(model, score) for score in scores)


def _rule(model: str) -> str:
    """The test in words, with the power that its numbers of runs have."""
    protocol = load_protocol()
    plan = protocol.plans[model]
    numbers = plan.runs, len(plan.sequential), protocol.margin, protocol.alpha
    one, all_of_them = power(*numbers), joint_power(len(plan.stages), *numbers)
    return (
        f"Protocol {protocol.digest}, frozen before the runs: the distance of each K's mean in standard "
        f"deviations of the sequential runs, with its {100 - 200 * protocol.alpha:g} % interval (noncentral "
        f"t; two one-sided tests at {100 * protocol.alpha:g} %). Reproduced: all of it within "
        f"{protocol.margin:g}; undecided: it reaches beyond. If nothing differs, one K is found equal in "
        f"{100 * one:.0f} of 100 repetitions, all {len(plan.stages)} in {100 * all_of_them:.0f}. The weights "
        "are the sharper evidence: there is no margin."
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
