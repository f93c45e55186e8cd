"""The mini-batch fitted to memory, as the paper chose its own (section 3: "adjusted to fit memory")."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.paper.timed.workloads import Configuration, Workload
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import partition

if TYPE_CHECKING:
    from gpipe_bench.pipeline.memory.profile import ModelProfile

FITTED_MICROBATCHES = 2  # that are run
LARGEST_MICROBATCH = 32


def fitted(
    workload: Workload, cells: Iterable[tuple[int, int]]
) -> tuple[tuple[Configuration, ...], dict[str, Any]]:
    """Configurations for cells of K and M, and facts for the record. Cells with equal stages and examples are
    laid out from one configuration.
    """
    counts: dict[tuple[int, int], tuple[int, ...]] = {}
    peaks: dict[str, int] = {}
    for k, m in cells:
        examples, peaks[f"K={k} M={m}"] = fitted_microbatch(workload, k, m, workload.cap_bytes)
        counts[k, examples] = (*counts.get((k, examples), ()), m)
    ran = FITTED_MICROBATCHES
    return tuple(
        Configuration(k, ran, ran * examples, counts=several) for (k, examples), several in counts.items()
    ), {"cap_bytes": workload.cap_bytes, "modelled_peak_bytes": peaks}


def fitted_microbatch(
    workload: Workload, num_stages: int, num_microbatches: int, cap_bytes: int
) -> tuple[int, int]:
    """Examples of the largest micro-batch, a power of two, whose stages stay under a memory cap, and the peak
    bytes of the fullest stage. ValueError if none fits.
    """
    found, size = None, 1
    while size <= LARGEST_MICROBATCH:
        peak = peak_bytes(workload, num_stages, num_microbatches, size)
        if peak > cap_bytes:
            break
        found, size = (size, peak), 2 * size
    if found is None:
        raise ValueError(
            f"{workload.model} on {num_stages} stages with {num_microbatches} micro-batches of one example "
            f"needs {peak:,} bytes on one stage; the cap is {cap_bytes:,}: raise it or take more stages"
        )
    return found


def peak_bytes(workload: Workload, num_stages: int, num_microbatches: int, microbatch_size: int) -> int:
    """Peak bytes of the fullest stage under gpipe with re-materialization and RMSProp (modelled). The cut is
    by the estimated cost of the layers, since nothing has been timed yet.
    """
    from gpipe_bench.pipeline.memory.workers import pipeline_memory

    stages = partition(_layer_costs(workload), num_stages)
    schedule = gpipe(num_stages, num_microbatches, "always")
    memory = pipeline_memory(*_profile(workload, microbatch_size), stages, schedule, receive_ahead=1)
    return max(stage.peak for stage in memory)


@cache
def _profile(workload: Workload, microbatch_size: int) -> ModelProfile:
    from gpipe_bench.pipeline.memory.profile import Profiler

    return workload.profile(microbatch_size, Profiler(None))


@cache
def _layer_costs(workload: Workload) -> tuple[float, ...]:
    from gpipe_bench.pipeline.memory.profile import layer_costs

    return layer_costs(list(workload.build("meta")), workload.example(1, "meta")[0])
