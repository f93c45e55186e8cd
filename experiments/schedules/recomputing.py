"""What must be recomputed of Table 2's models under Table 1's memory: nothing more makes a step shorter.

The models have their published sizes, so what their layers take is computed (operations at a share of the
peak of the paper's accelerators), the steps are replayed with these times over a free link, and the memory is
modelled. One word for all stages is compared with one word for each, the best there is, and with the choice
of stages and micro-batches that `planner.recompute` finds. The ratio of two steps hangs little on the
share of the peak, which is unknown; its range stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, Record, Scalar, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.remat import Remat, to_text
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.simulate import replay
from gpipe_bench.planner.candidate import REMATS
from gpipe_bench.planner.recompute import adaptive, held_by

if TYPE_CHECKING:
    from gpipe_bench.experiments.predicted.sizes import FullSize
    from gpipe_bench.pipeline.memory.profile import ModelProfile
    from gpipe_bench.pipeline.plan.partition import Partition
    from gpipe_bench.planner.accelerators import Accelerator

PART = "adaptive re-materialization"
SECONDS = {"amoebanet": 35.0, "transformer": 20.0}
"""By model: how long a case takes."""
WORKERS = (4, 8)
SCHEDULES = ("gpipe", "1f1b")
SHARES = (0.3, 0.45, 0.6)
"""Of the accelerator's peak; steps are given for the one in the middle."""
OPTIMIZER = "rmsprop"
WAYS = ("nothing", "one word", "per stage", "adaptive")
GIB = 2**30


@dataclass(frozen=True)
class Subject:
    """A model at its published size, on the accelerator that Table 1 has for it."""

    title: str
    full: FullSize
    profile: ModelProfile
    accelerator: Accelerator
    cap_gib: float
    batch_size: int
    num_microbatches: int


@dataclass(frozen=True)
class Found:
    """The step of one way, its fullest worker, and what is recomputed."""

    step_s: float
    peak_bytes: int
    remat: Remat
    bound_s: float = 0.0


def run(model: str) -> Outcome:
    """All ways for all schedules and numbers of workers, of AmoebaNet-D (18, 256) or Transformer-48."""
    subject = _subject_of(model)
    quantities: list[Quantity] = []
    choices: dict[str, str] = {}
    for num_workers in WORKERS:
        cut = subject.full.cut("operations", "least variance", num_workers)
        assert cut is not None
        for name in SCHEDULES:
            by_share = {share: ways_of(subject, cut, name, share) for share in SHARES}
            quantities += quantities_of({"schedule": name, "K": num_workers}, by_share)
            choices |= {
                f"{name}, K={num_workers}, {way}": to_text(found.remat)
                for way, found in by_share[SHARES[1]].items()
                if way in WAYS[2:]
            }
    return Outcome(
        tuple(quantities),
        {
            "title": subject.title,
            "accelerator": subject.accelerator.name,
            "cap_gib": subject.cap_gib,
            "batch_size": subject.batch_size,
            "num_microbatches": subject.num_microbatches,
            "shares_of_peak": list(SHARES),
            "recomputed": choices,
        },
    )


def _subject_of(model: str) -> Subject:
    from gpipe_bench.experiments.paper_profiles import Reading, amoebanet, transformer
    from gpipe_bench.experiments.predicted.sizes import of_the_paper
    from gpipe_bench.models.paper import HALVES
    from gpipe_bench.planner.accelerators import TPU_V2, TPU_V3

    half = HALVES[model]
    size = half.batch_size // half.num_microbatches
    if model == "amoebanet":
        title, accelerator, profile = "AmoebaNet-D (18, 256)", TPU_V2, amoebanet(Reading(), 18, 256, size)
    else:
        title, accelerator, profile = "Transformer-48", TPU_V3, transformer(Reading(), 48, size)
    sizes = (half.cap_gib, half.batch_size, half.num_microbatches)
    return Subject(title, of_the_paper("table2", model), profile, accelerator, *sizes)


def ways_of(subject: Subject, cut: Partition, name: str, share: float) -> dict[str, Found]:
    """The shortest step under the cap of each way that fits; "nothing" is there whether it fits or not."""
    from gpipe_bench.pipeline.memory.workers import bytes_of_stages, peak_bytes

    footprints = bytes_of_stages(subject.profile.layers, subject.profile.loss, cut)
    num_workers, number, cap_bytes = len(cut), subject.num_microbatches, subject.cap_gib * GIB
    peaks_of = partial(peak_bytes, footprints, optimizer=OPTIMIZER, receive_ahead=1)
    lay_out = partial(replay, action_s=_seconds(subject, cut, share))

    def found(remat: Remat) -> Found:
        schedule = named(name, num_workers, number, remat=remat)
        return Found(lay_out(schedule).makespan_s, max(peaks_of(schedule=schedule)), remat)

    peaks = {word: peaks_of(schedule=named(name, num_workers, number, remat=word)) for word in REMATS}
    ways = {"nothing": found("never")}
    one = next((word for word in REMATS if max(peaks[word]) <= cap_bytes), None)
    if one is not None:
        ways["one word"] = found(one)
    # A worker's bytes hang on its own stage alone, and a recomputation more makes no step shorter: so the
    # first word that fits is the best one for each stage.
    fitting = [[word for word in REMATS if peaks[word][worker] <= cap_bytes] for worker in range(num_workers)]
    if all(fitting):
        ways["per stage"] = found([words[0] for words in fitting])
    schedule = named(name, num_workers, number)
    try:
        best = adaptive(schedule, lay_out, held_by(footprints, schedule, OPTIMIZER), cap_bytes)
    except ValueError:  # nothing fits
        return ways
    peak = max(peaks_of(schedule=best.schedule))
    return ways | {"adaptive": Found(best.step_s, peak, best.schedule.remat, best.bound_s)}


def _seconds(subject: Subject, cut: Partition, share: float) -> dict[tuple[int, Kind], float]:
    """By stage and kind; a recomputation takes what a forward takes."""
    size = subject.batch_size // subject.num_microbatches
    layers = subject.full.seconds(subject.accelerator, "float32", size, (share,))
    found = {}
    for stage, span in enumerate(cut):
        found[stage, Kind.F] = found[stage, Kind.R] = sum(float(layers[i].forward[0]) for i in span)
        found[stage, Kind.B] = sum(float(layers[i].backward[0]) for i in span)
    return found


def quantities_of(
    key: dict[str, Scalar], by_share: Mapping[float, Mapping[str, Found]]
) -> Iterator[Quantity]:
    """Steps and peaks of all ways, and what choosing saves of the step of one word."""
    middle = by_share[SHARES[1]]
    for way, found in middle.items():
        own: dict[str, Scalar] = {**key, "recomputed": way}
        yield Quantity("step", 1e3 * found.step_s, "ms", "modelled", key=own)
        yield Quantity(
            "peak memory", found.peak_bytes / GIB, "GiB", "modelled", key=own, note="of the fullest worker"
        )
    if "adaptive" in middle:
        yield Quantity(
            "bound", 1e3 * middle["adaptive"].bound_s, "ms", "modelled", key=key,
            note="no choice under the cap has a shorter step",
        )  # fmt: skip
    for way in WAYS[1:3]:
        saved = [1 - ways["adaptive"].step_s / ways[way].step_s for ways in by_share.values() if way in ways]
        if len(saved) == len(SHARES):
            yield Quantity(
                "saved", saved[1], "ratio", "modelled", key={**key, "of": way}, low=min(saved),
                high=max(saved), note="of the step; over the shares",
            )  # fmt: skip


def tables(records: Sequence[Record]) -> list[str]:
    """What choosing the recomputations saves, a table for each model."""
    columns = ["schedule, K", *WAYS, "at least", "saved of one word", "of per stage"]
    found = []
    for record in of_case(records, "done", part=PART):
        facts = record.details
        least, middle, most = facts["shares_of_peak"]
        title = (
            f"{facts['title']} on {facts['accelerator']}s of {facts['cap_gib']} GiB, mini-batch "
            f"{facts['batch_size']}, M = {facts['num_microbatches']}: what is recomputed\n"
            "  ms of a step (GiB of the fullest worker), replayed with modelled times at "
            f"{middle:.0%} of the peak;\n  saved: for shares of the peak from {least:.0%} to {most:.0%}"
        )
        lines = [_line(record, name, number) for number in WORKERS for name in SCHEDULES]
        found.append(numbers_text(title, columns, lines))
    return found


def _line(record: Record, name: str, num_workers: int) -> list[str]:
    found: dict[Any, Any] = {(each.name, *each.key.values()): each for each in record.quantities}
    cells = [f"{name}, K={num_workers}"]
    for way in WAYS:
        step = found.get(("step", name, num_workers, way))
        if step is None:
            cells.append("does not fit")
        else:
            gib = found["peak memory", name, num_workers, way].value
            over = "" if gib <= record.details["cap_gib"] else ", too much"
            cells.append(f"{step.value:.0f} ({gib:.3g}{over})")
    bound = found.get(("bound", name, num_workers))
    saved = [found.get(("saved", name, num_workers, way)) for way in WAYS[1:3]]
    cells.append("-" if bound is None else f"{bound.value:.0f}")
    return cells + ["-" if q is None else f"{q.value:.1%} [{q.low:.1%}, {q.high:.1%}]" for q in saved]
