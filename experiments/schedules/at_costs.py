"""All schedules with the measured costs of a model's stages: step, bubble and peak memory over K and M.

The mini-batch is Table 2's, so its cells can be read beside those here: with M micro-batches each has a
share of the examples. Steps are replayed over a free link; the memory of the fullest worker is modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipe_bench.experiments.measuring.speed_models import SUBJECTS
from gpipe_bench.experiments.schedules.grid import GENERATED, GENERATED_V, NAMES, REMATS
from gpipe_bench.experiments.schedules.stage_costs import StageCosts, measure, profiles_of
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, Scalar
from gpipe_bench.pipeline.plan.replay import replay
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.schedules.generator import generate
from gpipe_bench.pipeline.plan.schedules.known import NAMED, named
from gpipe_bench.pipeline.plan.schedules.placement import vee

if TYPE_CHECKING:
    from gpipe_bench.pipeline.memory.story import LayerProfile

PART = "measured costs"
WORKERS = {"smoke": (2,), "short": (2, 4, 8), "full": (2, 4, 8)}
SECONDS = {
    "smoke": {4: 5.0},
    "short": {1: 60.0, 4: 60.0, 32: 45.0},
    "full": {1: 900.0, 4: 900.0, 32: 900.0},
}
"""By the number of micro-batches: those of Table 2, and how long a case takes."""
ROUNDS = {"smoke": 1, "short": 1, "full": 4}
MIB = 2**20
OPTIMIZER = "sgd"
"""Without state, so that what differs between schedules is not drowned in what does not."""


@dataclass(frozen=True)
class Cell:
    """One K and M, with the costs of one and of two stages per worker."""

    costs: Mapping[int, StageCosts]
    num_workers: int
    num_microbatches: int

    def costs_of(self, name: str) -> StageCosts | None:
        """Of the stages of a schedule; None where the model has too few layers for so many."""
        turns = {GENERATED: 1, GENERATED_V: 2}.get(name) or NAMED[name].stages_per_worker or 2
        return self.costs.get(turns * self.num_workers)

    def schedule(self, name: str, remat: str, costs: StageCosts) -> Schedule:
        """By a name of `NAMES`. What is generated for these costs is the shorter one of whole and of split
        backwards, with no more graphs alive than 1F1B has.
        """
        if name not in (GENERATED, GENERATED_V):
            return named(name, self.num_workers, self.num_microbatches, remat=remat)
        place = tuple(range(self.num_workers)) if name == GENERATED else vee(self.num_workers)
        found = [
            generate(
                place, self.num_microbatches, costs.seconds, remat=remat, split=split, most_alive=len(place)
            )
            for split in (True, False)
        ]
        return min(found, key=lambda schedule: replay(schedule, costs.seconds).makespan_s)


def run(name: str, profile: str, num_microbatches: int) -> Outcome:
    """Measures the stages of a model of Table 2 and lays all schedules out."""
    subject = SUBJECTS[name]
    size = subject.sizes[profile].batch_size // num_microbatches
    numbers = sorted({turns * workers for workers in WORKERS[profile] for turns in (1, 2)})
    found = measure(name, profile, size, numbers, ROUNDS[profile])
    quantities = [
        Quantity(
            name="(I + W) / B", key={"stages": number}, value=costs.price_of_split(), unit="ratio",
            provenance="measured", higher_is_better=False,
        )
        for number, costs in found.items()
    ]  # fmt: skip
    layers, loss = profiles_of(name, profile, size)
    for num_workers in WORKERS[profile]:
        quantities += of_cell(Cell(found, num_workers, num_microbatches), layers, loss)
    return Outcome(
        tuple(quantities),
        {
            "title": subject.title,
            "scale": subject.sizes[profile].scale,
            "batch_size": subject.sizes[profile].batch_size,
            "stages": [costs.to_data() for costs in found.values()],
        },
    )


def of_cell(cell: Cell, layers: Sequence[LayerProfile], loss: LayerProfile) -> Iterator[Quantity]:
    """Step, bubble and peak of each schedule."""
    from gpipe_bench.pipeline.memory.stages.workers import peak_bytes, stage_footprints

    for name in NAMES:
        costs = cell.costs_of(name)
        if costs is None:
            continue
        footprints = stage_footprints(layers, loss, costs.partition)
        for remat in REMATS:
            schedule = cell.schedule(name, remat, costs)
            timeline = replay(schedule, costs.seconds)
            key: dict[str, Scalar] = {
                "schedule": name, "K": cell.num_workers, "M": cell.num_microbatches, "remat": remat,
            }  # fmt: skip
            step_ms = 1e3 * timeline.makespan_s
            yield Quantity(name="step", key=key, value=step_ms, unit="ms", provenance="replayed")
            yield Quantity(name="bubble", key=key, value=timeline.bubble, unit="ratio", provenance="replayed")
            peak = max(peak_bytes(footprints, schedule, OPTIMIZER, receive_ahead=1))
            yield Quantity(
                name="peak memory", key=key, value=peak / MIB, unit="MiB", provenance="modelled",
                note="of the fullest worker; plain SGD",
            )  # fmt: skip
