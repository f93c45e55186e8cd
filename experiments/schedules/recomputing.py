"""What must be recomputed of Table 2's models under Table 1's memory: nothing more makes a step shorter.

The models have their published sizes, so what their layers take is computed (operations at a share of the
peak of the paper's accelerators), the steps are replayed with these times over a free link, and the memory is
modelled. One word for all stages is compared with one word for each, the best there is, and with the choice
of stages and micro-batches that `plan.recomputing.adaptive` finds. The ratio of two steps hangs little on the
share of the peak, which is unknown; its range stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, Scalar
from gpipe_bench.pipeline.plan.recomputing.adaptive import adaptive
from gpipe_bench.pipeline.plan.remat import Remat, to_text
from gpipe_bench.pipeline.plan.replay import replay
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.schedules.known import named

if TYPE_CHECKING:
    from gpipe_bench.experiments.published.accelerator_steps.full_size import FullSize
    from gpipe_bench.pipeline.memory.profile import ModelProfile
    from gpipe_bench.pipeline.memory.stages.footprint import Footprint
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
WORDS = ("never", "except_last", "always")
"""From the one that takes least time to the one that takes least memory."""
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


def subject_of(model: str) -> Subject:
    """AmoebaNet-D (18, 256) or Transformer-48."""
    from gpipe_bench.experiments.paper_profiles import Reading, amoebanet, transformer
    from gpipe_bench.experiments.published.accelerator_steps.paper_models import table2
    from gpipe_bench.models.paper import HALVES
    from gpipe_bench.planner.accelerators import TPU_V2, TPU_V3

    half = HALVES[model]
    size = half.batch_size // half.num_microbatches
    if model == "amoebanet":
        profile, title = amoebanet(Reading(), 18, 256, size), "AmoebaNet-D (18, 256)"
    else:
        profile, title = transformer(Reading(), 48, size), "Transformer-48"
    return Subject(
        title,
        table2(model),
        profile,
        TPU_V2 if model == "amoebanet" else TPU_V3,
        half.cap_gib,
        half.batch_size,
        half.num_microbatches,
    )


@dataclass(frozen=True)
class Found:
    """The step of one way, its fullest worker, and what is recomputed; None where it does not fit."""

    step_s: float
    peak_bytes: int
    remat: Remat
    bound_s: float


def run(model: str) -> Outcome:
    """All ways for all schedules and numbers of workers."""
    subject = subject_of(model)
    quantities: list[Quantity] = []
    choices: dict[str, str] = {}
    for num_workers in WORKERS:
        cut = subject.full.cut("operations", "least variance", num_workers)
        assert cut is not None
        for name in SCHEDULES:
            by_share = {share: ways_of(subject, cut, name, share) for share in SHARES}
            key: dict[str, Scalar] = {"schedule": name, "K": num_workers}
            quantities += of_cell(key, by_share)
            for way, found in by_share[SHARES[1]].items():
                if way in ("per stage", "adaptive") and found is not None:
                    choices[f"{name}, K={num_workers}, {way}"] = to_text(found.remat)
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


def ways_of(subject: Subject, cut: Partition, name: str, share: float) -> Mapping[str, Found | None]:
    """Each way's shortest step under the cap; "nothing" is there whether it fits or not."""
    from gpipe_bench.pipeline.memory.stages.rematerialized import held_by
    from gpipe_bench.pipeline.memory.stages.workers import peak_bytes, stage_footprints

    footprints: tuple[Footprint, ...] = stage_footprints(subject.profile.layers, subject.profile.loss, cut)
    num_workers, number, cap_bytes = len(cut), subject.num_microbatches, subject.cap_gib * GIB
    lay_out = partial(replay, action_s=_seconds(subject, cut, share))

    def found(remat: Remat) -> Found:
        schedule = named(name, num_workers, number, remat=remat)
        peaks = peak_bytes(footprints, schedule, OPTIMIZER, receive_ahead=1)
        return Found(lay_out(schedule).makespan_s, max(peaks), remat, 0.0)

    words = {
        word: peak_bytes(footprints, named(name, num_workers, number, remat=word), OPTIMIZER, receive_ahead=1)
        for word in WORDS
    }
    ways: dict[str, Found | None] = dict.fromkeys(WAYS)
    ways["nothing"] = found("never")
    one = next((word for word in WORDS if max(words[word]) <= cap_bytes), None)
    if one is not None:
        ways["one word"] = found(one)
    # A worker's bytes hang on its own stage alone, and a recomputation more makes no step shorter: so the
    # first word that fits is the best one for each stage.
    each = [next((w for w in WORDS if words[w][worker] <= cap_bytes), None) for worker in range(num_workers)]
    if None not in each:
        ways["per stage"] = found([word for word in each if word is not None])
    schedule = named(name, num_workers, number)
    try:
        best = adaptive(schedule, lay_out, held_by(footprints, schedule, OPTIMIZER), cap_bytes)
    except ValueError:
        return ways
    peak = max(peak_bytes(footprints, best.schedule, OPTIMIZER, receive_ahead=1))
    ways["adaptive"] = Found(best.step_s, peak, best.schedule.remat, best.bound_s)
    return ways


def _seconds(subject: Subject, cut: Partition, share: float) -> dict[tuple[int, Kind], float]:
    """By stage and kind; a recomputation takes what a forward takes."""
    size = subject.batch_size // subject.num_microbatches
    layers = subject.full.work.seconds(subject.accelerator, "float32", size, (share,))
    found = {}
    for stage, span in enumerate(cut):
        found[stage, Kind.F] = found[stage, Kind.R] = sum(float(layers[i].forward[0]) for i in span)
        found[stage, Kind.B] = sum(float(layers[i].backward[0]) for i in span)
    return found


def of_cell(
    key: dict[str, Scalar], by_share: Mapping[float, Mapping[str, Found | None]]
) -> Iterator[Quantity]:
    """Steps and peaks of all ways, and what choosing saves of the step of one word."""
    middle = by_share[SHARES[1]]
    for way, found in middle.items():
        if found is None:
            continue
        own: dict[str, Scalar] = {**key, "recomputed": way}
        yield Quantity(name="step", key=own, value=1e3 * found.step_s, unit="ms", provenance="modelled")
        yield Quantity(
            name="peak memory", key=own, value=found.peak_bytes / GIB, unit="GiB", provenance="modelled",
            note="of the fullest worker",
        )  # fmt: skip
    best = middle["adaptive"]
    if best is not None:
        yield Quantity(
            name="bound", key=key, value=1e3 * best.bound_s, unit="ms", provenance="modelled",
            note="no choice under the cap has a shorter step",
        )  # fmt: skip
    for way in WAYS[1:3]:
        saved = [
            1 - ways["adaptive"].step_s / other.step_s  # type: ignore[union-attr]  # what one word fits, all do
            for ways in by_share.values()
            if (other := ways[way]) is not None
        ]
        if len(saved) == len(SHARES):
            yield Quantity(
                name="saved", key={**key, "of": way}, value=saved[1], unit="ratio", provenance="modelled",
                low=min(saved), high=max(saved), higher_is_better=True, note="of the step; over the shares",
            )  # fmt: skip
