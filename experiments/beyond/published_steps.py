"""Steps that others measured on many accelerators (results/published-steps.toml), predicted on paper.

They are laid out as they were stated and not searched for: the cut is even by the work of layers, and there
is memory for all of them. A share of recomputation between none and all lies between those two steps. Layers
are a roofline of the accelerator and links are nominal, so every number is modelled and has the range of the
share of the peak.

Where memory was published, too, the peak is what `plan --pp 1 --num-microbatches 1 --remat ...` says of that
grid. What was published is what torch's allocator had reserved, its fragments included.

Sweeps are ways to train one model on one cluster that somebody tried in turn: a plan needs no right number to
be right, only the right order.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Metric, Record
from gpipe_bench.harness.report.grid import Grid as TextGrid
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.planner.candidate import Grid, Prediction, Way
from gpipe_bench.planner.collectives import forward_kind
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.request import Request, link_named

if TYPE_CHECKING:
    from gpipe_bench.planner.model import Model

PART, SWEEPS, STEP = "published steps", "published sweeps", "step"
PATH = PUBLISHED / "published-steps.toml"
SECONDS = 130.0
"""Approximate seconds of each of the two cases."""
HOST = 8
"""Accelerators of a host, in all of them."""
RECOMPUTED = {0.0: "never", 0.5: "selective", 1.0: "blocks"}
"""What `--remat` calls a share of recomputation."""
MEMORY_ERROR = 0.1
"""What a predicted peak may be away from a published one, for the allocator's fragments and for whether a
selective checkpoint keeps every product or every second one: fixed before any of them was predicted."""
INSIDE_SHARE, MOST_WIDTH = 0.75, 1.6
"""The share of the steps that is asked to lie in its predicted range, and how wide that may be at most, its
upper end over its lower end: fixed before any of them was predicted."""


def as_stated(costs: Costs, request: Request, way: Way, remat: str) -> Prediction:
    """A way, cut evenly by the work of layers; its bytes are counted where the costs have profiles."""
    seconds = costs.at(way.microbatch_size).layers_s
    ahead_s, back_s = seconds[forward_kind(seconds)], seconds["B"]
    cut = partition([a + b for a, b in zip(ahead_s, back_s, strict=True)], way.num_stages)
    candidate = way.candidate(cut, (remat,) * way.num_stages)
    return predict(candidate, costs, request, parts=False)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A row of the file, which says what each of them is."""

    name: str
    source: str
    device: str
    accelerators: int
    link: str
    batch_size: int
    recomputed: float
    attention: str
    differs: str
    shape: str = ""
    builder: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    between: str = ""
    cards: int = HOST
    per_host: int = HOST
    precision: str = "bfloat16"
    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    level: int = 0
    tp: int = 1
    schedule: str = "1f1b"
    stages_per_worker: int = 1
    num_microbatches: int = 1
    fuses: bool = False
    speed: float = 0.0
    step_s: float = 0.0
    memory_gib: float = 0.0

    @property
    def measured_s(self) -> float:
        """Seconds of a step."""
        if self.step_s:
            return self.step_s
        return self.batch_size * int(self.model().inputs.tensors[0].shape[1]) / self.accelerators / self.speed

    def model(self) -> Model:
        """The model on the meta device, with the attention that the published step used."""
        from gpipe_bench.models import SHAPES
        from gpipe_bench.planner.model import built

        builder, options = SHAPES[self.shape] if self.shape else (self.builder, self.options)
        return replace(built(self.name, builder, options, self.batch_size), attention=self.attention)

    def predicted(self) -> tuple[float, float, float]:
        """Seconds of the step, and the ends of its range."""
        costs, request, way = self._costs()
        costs = replace(costs, profiles=None)
        none, every = (as_stated(costs, request, way, remat) for remat in ("never", "always"))
        middle, low, high = (
            (1 - self.recomputed) * getattr(none, end) + self.recomputed * getattr(every, end)
            for end in ("step_s", "low_s", "high_s")
        )
        return middle, low, high

    def peak_gib(self) -> float:
        """Peak of the fullest accelerator, with the recomputation that `plan` has a name for."""
        return as_stated(*self._costs(), RECOMPUTED[self.recomputed]).peak / 2**30

    def _costs(self) -> tuple[Costs, Request, Way]:
        from gpipe_bench.planner.accelerators import accelerator
        from gpipe_bench.planner.roofline import by_roofline

        request = Request(
            accelerators=self.accelerators, device_type=self.device, memory_bytes=2**60,
            batch_size=self.batch_size, precision=self.precision, link=link_named(self.link, self.device),
            between=link_named(self.between, self.device) if self.between else None, cards=self.cards,
            hosts=max(1, self.accelerators // self.per_host),
        )  # fmt: skip
        size = self.batch_size // (self.dp * self.fsdp * self.num_microbatches)
        on = replace(accelerator(self.device, self.precision), fuses=self.fuses)
        costs = by_roofline(self.model(), request, (size,), on)
        grid = Grid(self.pp, self.dp, self.fsdp, self.level, self.tp)
        return costs, request, Way(grid, self.schedule, self.stages_per_worker, self.num_microbatches, size)


@cache
def steps() -> tuple[Step, ...]:
    """The steps in results/published-steps.toml."""
    return tuple(Step(**row) for row in tomllib.loads(PATH.read_text(encoding="utf-8"))["step"])


@cache
def sweeps() -> dict[str, tuple[Step, ...]]:
    """The sweeps in results/published-steps.toml: ways of one cluster, by the sweep's name."""
    rows = tomllib.loads(PATH.read_text(encoding="utf-8")).get("sweep", ())
    return {row["name"]: tuple(Step(**_without(row, "ways") | way) for way in row["ways"]) for row in rows}


def _without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def way_of(step: Step) -> str:
    """Name of a step within its sweep: `pp 2 dp 4 tp 1 M 8 a100`."""
    return f"pp {step.pp} dp {step.dp * step.fsdp} tp {step.tp} M {step.num_microbatches} {step.device}"


def run(part: str) -> Outcome:
    """The case of all published steps, or of all sweeps."""
    if part == PART:
        return _outcome([(step.name, step) for step in steps()])
    return _outcome(
        [
            (f"{name}, {number}: {way_of(step)}", step)
            for name, ways in sweeps().items()
            for number, step in enumerate(ways, start=1)
        ]
    )


def _outcome(named: Sequence[tuple[str, Step]]) -> Outcome:
    rows: list[dict[str, Any]] = [
        {"name": name, "source": step.source, "differs": step.differs, "measured_s": step.measured_s}
        | {"sweep": step.name, "batch_size": step.batch_size}
        | dict(zip(("step_s", "low_s", "high_s"), step.predicted(), strict=True))
        | ({"memory_gib": step.memory_gib, "peak_gib": step.peak_gib()} if step.memory_gib else {})
        for name, step in named
    ]
    metrics = [
        Metric(
            STEP, row["step_s"], "s", "modelled", key={"name": row["name"]}, low=row["low_s"],
            high=row["high_s"],
        )
        for row in rows
    ]  # fmt: skip
    return Outcome(tuple(metrics), {"steps": rows})


def table(record: Record) -> TextGrid:
    """Each step beside the range that is predicted of it."""
    rows = record.details["steps"]
    inside = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows]
    widest = max(row["high_s"] / row["low_s"] for row in rows)
    enough = "yes" if sum(inside) >= INSIDE_SHARE * len(rows) and widest <= MOST_WIDTH else "NO"
    return TextGrid(
        title="Published steps of the largest models, on paper (modelled)",
        columns=["", "measured (s)", "predicted (s) [range]", "inside", "GiB", "predicted", "inside"],
        lines=[
            [
                row["name"], f"{row['measured_s']:.2f}",
                f"{row['step_s']:.2f} [{row['low_s']:.2f}, {row['high_s']:.2f}]", "yes" if each else "NO",
                *_memory(row),
            ]
            for row, each in zip(rows, inside, strict=True)
        ],
        notes=[
            f"{sum(inside)} of {len(rows)} inside, the widest range a factor of {widest:.2f}; asked: "
            f"{INSIDE_SHARE:.0%} of them, and at most {MOST_WIDTH:g}: {enough}",
            f"memory, where it was published: inside is at most {MEMORY_ERROR:.0%} away",
            *(f"{row['name']}: {row['source']}; not in the prediction: {row['differs']}" for row in rows),
        ],
        right=frozenset({1, 4}),
    )  # fmt: skip


def _memory(row: dict[str, Any]) -> list[str]:
    """Published peak, predicted peak and the difference, and whether that is small enough."""
    if "memory_gib" not in row:
        return ["", "", ""]
    error = row["peak_gib"] / row["memory_gib"] - 1
    near = "yes" if abs(error) <= MEMORY_ERROR else "NO"
    return [f"{row['memory_gib']:.1f}", f"{row['peak_gib']:.1f} ({error:+.0%})", near]
