"""Replicas and a pipeline on this machine, measured, beside the replay with the collectives of a grid.

On two processes a Transformer trains as two replicas, and as a pipeline of two stages. The replay gets the
actions of each step as they ran, and a link whose latency and bandwidth are those of two sums between the
same processes. It gets neither medians of a kind nor one replica alone: processors sum with the cores that
compute, so that the last backward, inside of which the sums are, takes half as long again as the others; and
a step is as long as that of the replica which is slower in it. On four processes there is nothing to compute
with on two cores, so the layers wait (`overlap`): two replicas of two stages, whose sums take a fixed time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from gpipe_bench.experiments.grid.sums import link_of
from gpipe_bench.experiments.grid.sums import sums_s as time_sums
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, Scalar
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.pipeline.plan.links import LINKS, Link
from gpipe_bench.pipeline.plan.reductions import data_parallel
from gpipe_bench.pipeline.plan.replay import replay
from gpipe_bench.pipeline.plan.schedule import Kind, gpipe

STEPS, WAITING = "steps", "waiting stages"
SIZES = {
    "smoke": {
        "num_layers": 4, "d_model": 32, "ffn_dim": 128, "num_heads": 2, "vocab_size": 200, "seq_len": 16,
    },
    "short": {
        "num_layers": 6, "d_model": 256, "ffn_dim": 1024, "num_heads": 4, "vocab_size": 1000, "seq_len": 64,
    },
}  # fmt: skip
MODEL = "transformer-lm"
EXAMPLES = {"smoke": 8, "short": 16}  # of all replicas
NUM_STEPS = {"smoke": 3, "short": 15}
BEFORE = 3
MICROBATCHES = 4  # of a replica
BUCKET_BYTES = 4 * 2**20
GRIDS = ((2, 1), (1, 2))


class Job(NamedTuple):
    """One grid as its processes see it."""

    dp: int
    pp: int
    sizes: dict[str, Any]
    examples: int
    num_steps: int
    seed: int


class Ran(NamedTuple):
    """What one process found: seconds of steps (of the slowest process), of this pipeline's actions in each
    of them by stage, kind and micro-batch, bytes of the gradients of each stage's layers, and of a
    micro-batch over the boundary; and seconds of the sums.
    """

    steps_s: list[float]
    actions_s: list[dict[tuple[int, str, int], float]]
    gradient_bytes: list[list[list[int]]]
    boundary_bytes: int
    sums_s: tuple[float, float]


def keys(profile: str) -> list[tuple[dict[str, Scalar], float]]:
    found: list[tuple[dict[str, Scalar], float]] = [
        ({"part": STEPS, "dp": dp, "pp": pp}, 20.0 if profile != "smoke" else 8.0) for dp, pp in GRIDS
    ]
    return [*found, ({"part": WAITING, "dp": 2, "pp": 2}, 12.0)]


def run(key: Mapping[str, Scalar], profile: str, seed: int) -> Outcome:
    if key["part"] == WAITING:
        return _waiting()
    from gpipe_bench.experiments.measuring.processes import run_processes

    size = "smoke" if profile == "smoke" else "short"
    dp, pp = int(str(key["dp"])), int(str(key["pp"]))
    job = Job(dp, pp, SIZES[size], EXAMPLES[size], NUM_STEPS[size], seed)
    found: list[Ran] = run_processes(work, dp * pp, job)
    link = link_of(found[0].sums_s, "measured before the steps")
    replayed_s = laid_out_s(job, found, link)
    measured = from_samples("step", [1e3 * each for each in found[0].steps_s], "ms")
    quantities = _beside(measured, 1e3 * replayed_s)
    facts = {
        "sizes": job.sizes, "batch_size": job.examples, "num_microbatches": MICROBATCHES,
        "link": {"latency_s": link.latency_s, "bytes_per_s": link.bandwidth_bytes_per_s},
        "actions_ms": {
            f"{k}{kind}{m}": 1e3 * median(step[k, kind, m] for step in found[0].actions_s)
            for k, kind, m in found[0].actions_s[0]
        },
    }  # fmt: skip
    return Outcome(quantities, facts)


def _waiting() -> Outcome:
    from gpipe_bench.experiments.grid import overlap

    case = overlap.Case("1f1b")
    found = overlap.measure(case)
    inside_s, behind_s = (case.replayed(overlap=each).makespan_s for each in (True, False))
    measured = Quantity(
        name="step", value=1e3 * found.step_s, unit="ms", provenance="measured", higher_is_better=False,
        note="the fastest of some, of the slowest process",
    )  # fmt: skip
    behind = Quantity(
        name="replayed step, sums behind the last backward", value=1e3 * behind_s, unit="ms",
        provenance="replayed", higher_is_better=False,
    )  # fmt: skip
    return Outcome((*_beside(measured, 1e3 * inside_s), behind), {"timeline": found.timeline.to_data()})


def _beside(measured: Quantity, replayed_ms: float) -> tuple[Quantity, ...]:
    assert measured.value is not None
    return (
        measured,
        Quantity(
            name="replayed step", value=replayed_ms, unit="ms", provenance="replayed", higher_is_better=False
        ),
        Quantity(
            name="replayed over measured", value=replayed_ms / measured.value, unit="ratio",
            provenance="replayed",
        ),
    )  # fmt: skip


def laid_out_s(job: Job, found: Sequence[Ran], link: Link) -> float:
    """The step by the replay: the median of steps, each of which is as long as its slowest pipeline's."""
    steps = zip(
        *[[_step_s(job, ran, actions_s, link) for actions_s in ran.actions_s] for ran in found], strict=True
    )
    return float(median(map(max, steps)))


def _step_s(job: Job, ran: Ran, actions_s: Mapping[tuple[int, str, int], float], link: Link) -> float:
    buckets = [data_parallel(sizes, job.dp, link, bucket_bytes=BUCKET_BYTES) for sizes in ran.gradient_bytes]
    timeline = replay(
        gpipe(job.pp, MICROBATCHES, "never"),
        {(stage, Kind(kind), m): seconds for (stage, kind, m), seconds in actions_s.items()},
        LINKS["loopback"],
        activation_bytes=[ran.boundary_bytes] * (job.pp - 1),
        reductions=buckets,
    )
    return float(timeline.makespan_s)


def work(job: Job) -> Ran:
    """What each process does."""
    import time

    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from gpipe_bench.models import MODELS, example_batch, loss_fn
    from gpipe_bench.pipeline import Pipeline

    torch.manual_seed(job.seed)
    layers = MODELS[MODEL](**job.sizes)
    sizes = [[p.nbytes for p in layer.parameters()] for layer in layers]
    share = job.examples // job.dp
    batch, target = example_batch(MODEL, share, **job.sizes)
    loss = loss_fn(MODEL, **job.sizes)
    mesh = init_device_mesh("cpu", (job.dp, job.pp), mesh_dim_names=("dp", "pp"))
    pipeline = Pipeline(
        layers, mesh=mesh, num_microbatches=MICROBATCHES, remat="never", bucket_bytes=BUCKET_BYTES
    )
    sums_s = time_sums()
    steps_s, actions_s = list[float](), list[dict[tuple[int, str, int], float]]()
    for number in range(BEFORE + job.num_steps):
        dist.barrier()
        start_s = time.perf_counter()
        pipeline.step(batch, target, loss)
        step_s = torch.tensor(time.perf_counter() - start_s)
        dist.all_reduce(step_s, dist.ReduceOp.MAX)
        timeline = pipeline.gather_timeline()
        pipeline.zero_grad()
        if number >= BEFORE:
            steps_s.append(float(step_s))
            events = [(event.action, event.duration_s) for event in timeline.events]
            actions_s.append({(a.stage, str(a.kind), a.microbatch): seconds for a, seconds in events})
    cut = pipeline.partition
    pipeline.close()
    return Ran(
        steps_s,
        actions_s,
        [[sizes[layer] for layer in span] for span in cut],
        4 * share // MICROBATCHES * int(job.sizes["seq_len"]) * int(job.sizes["d_model"]),
        (sums_s[0], sums_s[1]),
    )
