"""What other projects publish of the same schedules, replayed at equal costs.

A bubble and a count of what is alive follow from the schedule alone. A ratio of speeds hangs on what is not
stated with it: the number of micro-batches and of stages per worker, and on kernels and messages that equal
costs leave out. So those are ranges over the former, and the latter is what a verdict finds.
"""

from __future__ import annotations

from gpipe_bench.experiments.computed.answer import Answer, over
from gpipe_bench.experiments.schedules.grid import alive_by_worker, in_slots
from gpipe_bench.pipeline.plan.schedule import SCHEDULES
from gpipe_bench.pipeline.plan.schedules.generator import generate
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.pipeline.plan.schedules.placement import vee

OLMO = "OLMo-core, K=4, M=8"
TITAN = "torchtitan, 405B, K=8"
PRIMUS = "Primus, Llama2-7B, K=8"
NUM_WORKERS = 8
MICROBATCHES = (8, 16, 32, 64)
TURNS = (2, 4, 8)
MOST_IN_VEE = 9
"""Stages' micro-batches that a worker holds in the V: the least with which a schedule of whole backwards has
the bubble that is published."""


def elsewhere() -> list[Answer]:
    """An answer to every row of their table."""
    loop = named("interleaved", 4, 8)
    vee_of_wholes = generate(vee(4), 8, split=False, most_alive=MOST_IN_VEE)
    answers = [
        Answer(
            row="bubble, stages in a loop", column=OLMO, value=100 * in_slots(loop).bubble, unit="%",
            what="interleaved, two stages per worker", provenance="replayed",
        ),
        Answer(
            row="bubble, stages in a V", column=OLMO, value=100 * in_slots(vee_of_wholes).bubble, unit="%",
            what=f"generated for whole backwards and at most {MOST_IN_VEE} stages' micro-batches per worker",
            provenance="replayed",
        ),
    ]  # fmt: skip
    answers += [
        Answer(
            row=f"stages' micro-batches alive, worker {worker}", column=OLMO, value=alive,
            unit="micro-batches", what="interleaved, counted", provenance="replayed",
        )
        for worker, alive in enumerate(alive_by_worker(loop))
    ]  # fmt: skip
    answers.append(
        _speed("interleaved", TITAN, [_ratio("interleaved", m, v) for m in MICROBATCHES[:3] for v in TURNS])
    )
    for name in ("interleaved", "zb-v", "v-half", "v-min"):
        turns = TURNS if name == "interleaved" else (None,)
        answers.append(_speed(name, PRIMUS, [_ratio(name, m, v) for m in MICROBATCHES for v in turns]))
        alive = [_memory(name, m, v) for m in MICROBATCHES for v in turns]
        answers.append(
            Answer(
                row=f"{name} over 1F1B, memory", column=PRIMUS, value=sorted(alive)[len(alive) // 2],
                unit="ratio", what="graphs alive on the fullest worker, over 1F1B's", provenance="replayed",
                spread=over("micro-batches and stages per worker", alive),
            )
        )  # fmt: skip
    return answers


def _speed(name: str, column: str, values: list[float]) -> Answer:
    return Answer(
        row=f"{name} over 1F1B, throughput", column=column, value=sorted(values)[len(values) // 2],
        unit="ratio", what="equal costs, free messages; what is not stated is a range",
        provenance="replayed", spread=over("micro-batches and stages per worker", values),
    )  # fmt: skip


def _ratio(name: str, num_microbatches: int, turns: int | None) -> float:
    one = SCHEDULES["1f1b"](NUM_WORKERS, num_microbatches, "never")
    other = named(name, NUM_WORKERS, num_microbatches, stages_per_worker=turns)
    return in_slots(one).makespan_s / in_slots(other).makespan_s


def _memory(name: str, num_microbatches: int, turns: int | None) -> float:
    schedule = named(name, NUM_WORKERS, num_microbatches, stages_per_worker=turns)
    per_worker = schedule.num_stages // NUM_WORKERS
    return max(alive_by_worker(schedule)) / per_worker / min(NUM_WORKERS, num_microbatches)
