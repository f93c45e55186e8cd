"""Messages over NCCL: in which order, when a connection ends, and what a message loses."""

from __future__ import annotations

from planted.mutant import Mutant

NCCL = "tests/test_nccl_pipeline.py::test_"

ACCELERATED = (
    Mutant(
        name="the gate is open",
        file="pipeline/ranks/ends.py",
        old="lane.progress.calls < self._after[microbatch]",
        new="False",
        why="a wait for the device would wait for a message that needs what this rank has yet to enqueue",
        tests=(f"{NCCL}a_wait_for_the_device_ends_at_every_action[gpipe-True]",),
    ),
    Mutant(
        name="a send may wait for its own sender",
        file="pipeline/plan/edges.py",
        old="    if accelerated:\n        # More",
        new="    if False:\n        # More",
        why="a ring with too few slots makes a wait for the device behind a send endless",
        tests=("tests/test_edges.py::test_a_send_waits_for_no_later_action_of_its_own_worker",),
    ),
    Mutant(
        name="closed without a wait for the device",
        file="pipeline/ranks/connect.py",
        old="        if not self.job.noticed:\n            self.synchronize()\n",
        new="",
        why="messages over NCCL that have not left would be taken back",
        tests=(f"{NCCL}closing_waits_until_everything_has_left",),
    ),
    Mutant(
        name="who takes leave is missed",
        file="pipeline/ranks/failure.py",
        old="        if heard == _LEFT:\n",
        new="        if heard is None:\n",
        why="a rank that is done first would end the pipeline of the others",
        tests=(f"{NCCL}a_rank_that_leaves_in_good_order_is_not_missed",),
    ),
    Mutant(
        name="nobody watches a device that waits",
        file="pipeline/ranks/failure.py",
        old="(late := self.awaited.overdue(limit_s)) is not None:",
        new="(late := self.awaited.overdue(1e9)) is not None:",
        why="a rank that stops would hold up the devices of all others for ever",
        tests=(f"{NCCL}a_rank_that_stops_is_named_in_time[1F2]",),
    ),
    Mutant(
        name="conjugation lost on the way",
        file="pipeline/ranks/ends.py",
        old=" or tensor.is_conj() or tensor.is_neg()",
        new="",
        why="the memory of a conjugated view is that of its original",
        tests=(f"{NCCL}types_that_nccl_has_no_name_for",),
    ),
)
