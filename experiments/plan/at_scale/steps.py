"""Published steps of the largest models, predicted on paper: results/published-steps.toml.

Each is laid out as it was stated and not searched for: the cut is even by the work of layers, and memory is
not asked. A share of recomputation between none and all lies between those two steps.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.places import PUBLISHED
from gpipe_bench.harness.record import Quantity

if TYPE_CHECKING:
    from gpipe_bench.planner.accelerators import Accelerator
    from gpipe_bench.planner.models import Model
    from gpipe_bench.planner.prediction import Prediction
    from gpipe_bench.planner.request import Request

PART = "published steps"
PATH = PUBLISHED / "published-steps.toml"
HOST = 8
"""Accelerators of a host, in all of them."""
SECONDS = 130.0
"""That the case takes, about."""


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
    cards: float = 1.0
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

    @property
    def measured_s(self) -> float:
        """Of a step."""
        if self.step_s:
            return self.step_s
        return self.batch_size * int(self.model().inputs.tensors[0].shape[1]) / self.accelerators / self.speed

    def model(self) -> Model:
        """On the meta device, with the attention that it had."""
        from gpipe_bench.models import SHAPES
        from gpipe_bench.planner.models import built

        builder, options = SHAPES[self.shape] if self.shape else (self.builder, self.options)
        model = built(self.name, builder, options, self.batch_size)
        return replace(model, attention=self.attention)

    def accelerator(self) -> Accelerator:
        from gpipe_bench.planner.accelerators import accelerator

        return replace(accelerator(self.device, "bfloat16"), fuses=self.fuses)

    def request(self) -> Request:
        """As `plan` is asked."""
        from gpipe_bench.pipeline.plan.links import LINKS
        from gpipe_bench.planner.request import Request

        far = LINKS[self.between] if self.between else None
        if far is not None:
            far = replace(far, bandwidth_bytes_per_s=self.cards * far.bandwidth_bytes_per_s)
        return Request(
            accelerators=self.accelerators, memory_bytes=2**60, batch_size=self.batch_size,
            link=LINKS[self.link], between=far, hosts=self.accelerators // HOST, precision="bfloat16",
            device_type=self.device,
        )  # fmt: skip


@cache
def steps() -> tuple[Step, ...]:
    """Of the file."""
    return tuple(Step(**row) for row in tomllib.loads(PATH.read_text(encoding="utf-8"))["step"])


def predicted(step: Step) -> tuple[float, float, float]:
    """Seconds of the step, and the ends of its range."""
    none, every = (_laid_out(step, remat) for remat in ("never", "always"))
    share = step.recomputed
    low, middle, high = (
        (1 - share) * getattr(none, end) + share * getattr(every, end)
        for end in ("low_s", "step_s", "high_s")
    )
    return middle, low, high


def _laid_out(step: Step, remat: str) -> Prediction:
    from gpipe_bench.pipeline.memory.stages.peaks import StageMemory
    from gpipe_bench.pipeline.plan.partition import partition
    from gpipe_bench.planner.answer import predicted as laid_out
    from gpipe_bench.planner.candidate import Candidate
    from gpipe_bench.planner.found import Found
    from gpipe_bench.planner.roofline import by_roofline
    from gpipe_bench.planner.search import Search
    from gpipe_bench.planner.space import Space

    model, request = step.model(), step.request()
    size = step.batch_size // (step.dp * step.fsdp * step.num_microbatches)
    costs = by_roofline(model, request, (size,), step.accelerator())
    seconds = costs.at(size).layers_s
    stages = step.pp * step.stages_per_worker
    candidate = Candidate(
        cut=partition([f + b for f, b in zip(seconds["F"], seconds["B"], strict=True)], stages),
        schedule=step.schedule, num_microbatches=step.num_microbatches, remat=(remat,) * stages,
        num_workers=step.pp, stages_per_worker=step.stages_per_worker, dp=step.dp, fsdp=step.fsdp,
        fsdp_level=step.level, tp=step.tp,
    )  # fmt: skip
    search = Search(costs, request, Space(tp=(step.tp,), fewer=False), model.ties)
    uncounted = (StageMemory(0, 0, 0, 0, 0, 0, 0, ""),) * step.pp
    return laid_out(Found(candidate, 0.0, 0.0, uncounted), search)


def run() -> Outcome:
    """The case of all of them."""
    rows = list[dict[str, Any]]()
    for step in steps():
        step_s, low_s, high_s = predicted(step)
        rows.append(
            {
                "name": step.name, "source": step.source, "differs": step.differs,
                "measured_s": step.measured_s, "step_s": step_s, "low_s": low_s, "high_s": high_s,
            }
        )  # fmt: skip
    quantities = [
        Quantity(
            name="step", key={"name": row["name"]}, value=row["step_s"], unit="s", provenance="modelled",
            low=row["low_s"], high=row["high_s"],
        )
        for row in rows
    ]  # fmt: skip
    return Outcome(tuple(quantities), {"steps": rows})


def is_inside(row: dict[str, Any]) -> bool:
    """Whether what was measured lies in the range that was predicted."""
    return bool(row["low_s"] <= row["measured_s"] <= row["high_s"])
