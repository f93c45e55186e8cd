"""The grid's collectives: what they take, when they leave, and who waits for them."""

from __future__ import annotations

from planted.mutant import Mutant

GRIDS = (
    Mutant(
        name="buckets leave when the backward is through",
        file="pipeline/plan/simulation.py",
        old="ready_s = event.start_s + bucket.ready * event.duration_s",
        new="ready_s = event.end_s",
        why="the overlap of reductions with the last backward would be missing from every prediction",
        tests=(
            "tests/test_collectives.py::test_buckets_leave_inside_the_last_backward_and_the_update_waits",
        ),
    ),
    Mutant(
        name="the update does not wait for reductions",
        file="pipeline/plan/simulation.py",
        old="after_s = worker.free_s if worker.free_s > worker.reduced_s else worker.reduced_s",
        new="after_s = worker.free_s",
        why="weights would be updated before their gradients are summed",
        tests=(
            "tests/test_collectives.py::test_buckets_leave_inside_the_last_backward_and_the_update_waits",
        ),
    ),
    Mutant(
        name="an all-reduce goes round once",
        file="pipeline/plan/collectives.py",
        old="    return 2 * _round_s(num_bytes, ranks, link)\n",
        new="    return _round_s(num_bytes, ranks, link)\n",
        why="data parallelism would look twice as cheap as it is",
        tests=("tests/test_collectives.py::test_numbers_by_hand",),
    ),
)
