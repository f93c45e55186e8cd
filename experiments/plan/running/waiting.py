"""A case whose times are known exactly: stages that wait instead of computing.

What is wrong with a prediction of measured layers may be the layers or the laying out. Here every action
takes the slots it is told to, so what a step takes beyond its prediction is the laying out, and the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Quantity, Scalar
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.pipeline.plan.links import FREE
from gpipe_bench.pipeline.plan.replay import SLOTS
from gpipe_bench.planner.candidate import Candidate
from gpipe_bench.planner.costs import Costs, SizeCosts
from gpipe_bench.planner.predict import predict, schedule_of
from gpipe_bench.planner.prediction import Prediction
from gpipe_bench.planner.request import Request

PART = "waiting stages"
NUM_WORKERS, LAYERS, BATCH_SIZE = 2, 8, 8
SLOT_S = {"smoke": 10e-3, "short": 20e-3, "full": 20e-3}
STEPS = {"smoke": 3, "short": 7, "full": 15}
WAYS = (("gpipe", 1, "never"), ("gpipe", 1, "always"), ("1f1b", 1, "never"), ("zb-h1", 1, "never"),
        ("interleaved", 2, "never"), ("zb-v", 2, "never"))  # fmt: skip
NUMBERS = (2, 4)
STEP, PREDICTED = "waiting step", "predicted waiting step"


def run(key: dict[str, Scalar], options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.measuring.processes import run_processes

    slot_s, steps = SLOT_S[options.profile], STEPS[options.profile]
    candidates = ways()
    found = run_processes(work, NUM_WORKERS, candidates, slot_s, steps, device="cpu")
    quantities: list[Quantity] = []
    for place, candidate in enumerate(candidates):
        where: dict[str, Scalar] = {"schedule": candidate.schedule, "M": candidate.num_microbatches,
                                    "remat": candidate.remat[0]}  # fmt: skip
        prediction = predicted(candidate, slot_s)
        samples = [max(each) for each in zip(*(one[place] for one in found), strict=True)]
        quantities += [
            Quantity(
                name=PREDICTED, key=where, value=1e3 * prediction.step_s, unit="ms", provenance="replayed"
            ),
            from_samples(STEP, [1e3 * s for s in samples], "ms", key=where, higher_is_better=False),
        ]
    return Outcome(tuple(quantities), {"slot_ms": 1e3 * slot_s})


def ways() -> list[Candidate]:
    """Schedules on two workers, of equal stages."""
    return [
        Candidate(
            cut=tuple(
                range(start, start + LAYERS // (NUM_WORKERS * per_worker))
                for start in range(0, LAYERS, LAYERS // (NUM_WORKERS * per_worker))
            ),
            schedule=name, num_microbatches=number, remat=(remat,) * (NUM_WORKERS * per_worker),
            num_workers=NUM_WORKERS, stages_per_worker=per_worker,
        )
        for number in NUMBERS
        for name, per_worker, remat in WAYS
    ]  # fmt: skip


def known_costs(slot_s: float) -> Costs:
    """An action takes its slots, whatever its stage holds."""
    nothing = dict.fromkeys(("F", "G", "R", "B", "I", "W"), (0.0,) * LAYERS)
    slots = {str(kind): count * slot_s for kind, count in SLOTS.items()}
    sizes = {
        BATCH_SIZE // number: SizeCosts(layers_s=nothing, action_s={**slots, "G": slots["F"]})
        for number in NUMBERS
    }
    return Costs(sizes=sizes, provenance={"layers": "by definition: stages that wait"})


def predicted(candidate: Candidate, slot_s: float) -> Prediction:
    """Of stages that wait, over a free link."""
    request = Request(accelerators=NUM_WORKERS, memory_bytes=2**60, batch_size=BATCH_SIZE, link=FREE)
    return predict(candidate, known_costs(slot_s), request)


def work(candidates: Sequence[Candidate], slot_s: float, steps: int) -> list[list[float]]:
    """What one process does: seconds of some steps of each."""
    from functools import partial

    import torch
    from torch import distributed as dist
    from torch import nn

    from gpipe_bench.experiments.measuring.waiting_stages import waiting_stages
    from gpipe_bench.pipeline import Pipeline
    from gpipe_bench.planner.timing import time_step

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(LAYERS)]
    batch = torch.randn(BATCH_SIZE, 8)
    found = []
    with waiting_stages(slot_s):
        for each in candidates:
            schedule = schedule_of(each)
            pipeline = Pipeline(
                layers, num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches,
                schedule=schedule, cost=[1.0] * LAYERS, group=dist.group.WORLD,
            )  # fmt: skip
            with pipeline:
                step = partial(pipeline.step, batch, batch, nn.functional.mse_loss)
                time_step(step, layers)  # agrees on shapes
                found.append([time_step(step, layers) for _ in range(steps)])
    return found
