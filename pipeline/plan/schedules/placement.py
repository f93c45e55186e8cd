"""Which worker holds which stages.

More stages than workers make a bubble smaller: a micro-batch comes to the last worker sooner, because each
stage on its way is shorter. In a loop it goes round the workers several times; in a V it comes back the way
it went, so that the worker that has the first stage has the last one too and begins with the backward.

    loop, 3 workers    0 1 2 0 1 2        V, 3 workers    0 1 2 2 1 0
"""

from __future__ import annotations


def loop(num_workers: int, stages_per_worker: int) -> tuple[int, ...]:
    """The worker of each stage when the stages go round the workers. `ValueError` for sizes below 1."""
    _check(num_workers, stages_per_worker)
    return tuple(range(num_workers)) * stages_per_worker


def vee(num_workers: int, stages_per_worker: int = 2) -> tuple[int, ...]:
    """The worker of each stage when every second round goes back. `ValueError` for sizes below 1."""
    _check(num_workers, stages_per_worker)
    there = tuple(range(num_workers))
    return tuple(
        worker for turn in range(stages_per_worker) for worker in (there[::-1] if turn % 2 else there)
    )


def shared_by(num_workers: int, num_stages: int) -> tuple[int, ...]:
    """The worker of each stage where nothing else is wanted: a V, or one stage each. `ValueError` if the
    workers cannot have equally many.
    """
    if num_workers < 1 or num_stages % num_workers:
        raise ValueError(
            f"num_stages={num_stages} cannot be shared by num_workers={num_workers} workers; give a multiple"
        )
    return vee(num_workers, num_stages // num_workers)


def _check(num_workers: int, stages_per_worker: int) -> None:
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}; a pipeline has at least 1 worker")
    if stages_per_worker < 1:
        raise ValueError(f"stages_per_worker is {stages_per_worker}; a worker holds at least 1 stage")
