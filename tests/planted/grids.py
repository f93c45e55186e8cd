"""The grid's collectives: what they take, when they leave, and who waits for them."""

from __future__ import annotations

from planted.mutant import Mutant

GRIDS = (
    Mutant(
        name="buckets leave when the backward is through",
        file="pipeline/plan/simulate.py",
        old="ready_s = event.start_s + bucket.ready * event.duration_s",
        new="ready_s = event.end_s",
        why="the overlap of reductions with the last backward would be missing from every prediction",
        tests=(
            "tests/test_collectives.py::test_buckets_leave_inside_the_last_backward_and_the_update_waits",
        ),
    ),
    Mutant(
        name="the update does not wait for reductions",
        file="pipeline/plan/simulate.py",
        old="after_s = worker.free_s if worker.free_s > worker.reduced_s else worker.reduced_s",
        new="after_s = worker.free_s",
        why="weights would be updated before their gradients are summed",
        tests=(
            "tests/test_collectives.py::test_buckets_leave_inside_the_last_backward_and_the_update_waits",
        ),
    ),
    Mutant(
        name="an all-reduce goes round once",
        file="planner/collectives.py",
        old="    return 2 * all_gather_s(num_bytes, ranks, link)\n",
        new="    return all_gather_s(num_bytes, ranks, link)\n",
        why="data parallelism would look twice as cheap as it is",
        tests=("tests/test_collectives.py::test_numbers_by_hand",),
    ),
    Mutant(
        name="gathered parameters stay whole in the optimizer's step",
        file="pipeline/memory/grids.py",
        old="    rests = [stage.rest for stage in stages]\n",
        new="    rests = [stage.step for stage in stages]\n",
        why="ZeRO would look as if it saved nothing where the optimizer decides",
        tests=("tests/test_grid_memory.py::test_modelled_peaks_are_those_of_real_steps",),
    ),
    Mutant(
        name="who waits in a sum blames the first that does not",
        file="pipeline/ranks/failure.py",
        old="        if self._alive:\n            if found",
        new="        if False:\n            if found",
        why="replicas that are only slower would be blamed for one that has stopped",
        tests=("tests/test_failure.py::test_of_those_who_may_be_meant_the_silent_one_is_blamed",),
    ),
    Mutant(
        name="the store goes at once",
        file="pipeline/ranks/failure.py",
        old="            while self._rank == self._store.host and",
        new="            while False and",
        why="a rank that looks late would be told nothing but that the store has gone",
        tests=("tests/test_failure.py::test_the_rank_that_holds_the_store_stays_until_the_others_know",),
    ),
    Mutant(
        name="time counts in which the whole job was stopped",
        file="pipeline/ranks/failure.py",
        old="self._silent_s += min(now_s - self._looked_s, _MOST_SILENT_S)",
        new="self._silent_s += now_s - self._looked_s",
        why="a job that is suspended for longer than the limit would end when it goes on",
        tests=("tests/test_nccl_ends.py::test_nobody_is_missed_for_a_time_in_which_all_were_stopped",),
    ),
    Mutant(
        name="messages of scattered gradients are gone at once",
        file="pipeline/memory/grids.py",
        old="""            message += each.gradients[layer]
            gone += each.gradients[layer] - each.shards""",
        new="""            message = 0
            gone += each.gradients[layer] - each.shards""",
        why="FSDP2 keeps them to the end of a backward, and a model of one stage would promise too much",
        tests=("tests/test_grid_memory.py::test_modelled_peaks_are_those_of_real_steps",),
    ),
)
