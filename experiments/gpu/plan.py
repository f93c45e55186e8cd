"""What of the steps this machine will take, about how long that takes, and what is skipped and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpipe_bench.experiments.gpu.device import Gpu
from gpipe_bench.experiments.gpu.packages import absent, name_of
from gpipe_bench.experiments.gpu.results import Taken
from gpipe_bench.experiments.gpu.steps import STEPS, Step

MODELLED = "minutes and memory are modelled, not measured; none of these steps has run on a GPU yet"


@dataclass(frozen=True, slots=True)
class Planned:
    """A step, and why it is not taken, if it is not: it was `taken` before, or `lacks` something."""

    step: Step
    taken: Taken | None
    lacks: str

    @property
    def is_next(self) -> bool:
        return not self.lacks and (self.taken is None or self.taken.status in ("cut", "skipped"))

    def describe(self) -> str:
        """One line."""
        step, taken = self.step, self.taken
        if taken is not None and taken.status in ("done", "failed"):
            words = f"{taken.status} in {taken.seconds:.0f} s on {taken.device}"
            return words + (f": {taken.why}" if taken.why else "")
        low, high = step.minutes
        takes = f"{low:g} to {high:g} min and {step.memory_gib:g} GiB of {step.gpus} GPU (modelled)"
        if self.lacks:
            return f"skipped: {self.lacks}; elsewhere {takes}"
        return takes + (f"; begun: {taken.why}" if taken is not None and taken.status == "cut" else "")


def plan(
    gpus: Sequence[Gpu],
    taken: Mapping[str, Taken],
    steps: Sequence[Step] = STEPS,
    path: Sequence[str] | None = None,
) -> list[Planned]:
    """All steps, in their order; packages are looked for in `path` instead of `sys.path`."""
    return [Planned(step, taken.get(step.name), _lacks(step, gpus, path)) for step in steps]


def _lacks(step: Step, gpus: Sequence[Gpu], path: Sequence[str] | None) -> str:
    """What a step needs and this machine has not, in words."""
    if len(gpus) < step.gpus:
        return f"needs {step.gpus} GPU{'s' * (step.gpus > 1)}, torch sees {len(gpus) or 'none'}"
    if gpus[0].gib < step.memory_gib:
        return f"needs {step.memory_gib:g} GiB (modelled), {gpus[0].name} has {gpus[0].gib:.0f}"
    missing = absent(step.packages, path)
    if missing:
        return f"needs {', '.join(map(name_of, missing))}"
    return ""
