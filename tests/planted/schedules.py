"""Rows in a wrong order, checks of rows that let a deadlock pass, and a replay that waits for too much or
too little.
"""

from __future__ import annotations

from planted.mutant import Mutant

ROWS = ("tests/test_schedule.py::test_rows_as_in_the_paper",)
REFUSED = ("tests/test_schedule.py::test_an_impossible_schedule_is_refused",)

SCHEDULES = (
    Mutant(
        name="except_last shifted by one",
        file="pipeline/plan/remat.py",
        old="microbatch != num_microbatches - 1)",
        new="microbatch != num_microbatches - 2)",
        why="the micro-batch that keeps its activations is the one whose backward comes first",
        tests=ROWS,
    ),
    Mutant(
        name="drain in the order of the forwards",
        file="pipeline/plan/schedule.py",
        old="        for m in reversed(range(num_microbatches)):\n",
        new="        for m in range(num_microbatches):\n",
        why="GPipe's drain takes the micro-batches in reverse",
        tests=("tests/test_engine.py::test_gradients_arrive_in_reverse_order_of_the_micro_batches",),
    ),
    Mutant(
        name="warm-up of 1F1B one forward too long",
        file="pipeline/plan/schedule.py",
        old="min(num_microbatches, num_stages - 1 - s)",
        new="min(num_microbatches, num_stages - s)",
        why="one more micro-batch would be in flight on every stage",
        tests=ROWS,
    ),
    Mutant(
        name="backward does not wait for its forward",
        file="pipeline/plan/schedule.py",
        old="            maker = Kind.R if schedule.recomputes(microbatch, stage) else Kind.F\n"
        "            needs[action].append(Action(stage, maker, microbatch))\n",
        new="            pass\n",
        why="the validator would accept what no engine can run",
        tests=REFUSED,
    ),
    Mutant(
        name="recomputation does not wait for its forward",
        file="pipeline/plan/schedule.py",
        old="            needs[action].append(Action(stage, Kind.F, microbatch))\n",
        new="            pass\n",
        why="there is nothing to recompute before the inputs have come",
        tests=("tests/test_schedule.py::test_a_recomputation_needs_its_forward",),
    ),
    Mutant(
        name="the last boundary's gradients forgotten",
        file="pipeline/plan/schedule.py",
        old="action.stage < schedule.num_stages - 1:\n",
        new="action.stage < schedule.num_stages - 2:\n",
        why="one dependency of a whole stage is missing",
        tests=("tests/test_schedule.py::test_one_worker_consumes_before_it_produces_again",),
    ),
    Mutant(
        name="channels not checked",
        file="pipeline/plan/validate.py",
        old="    _validate_channels(schedule)\n    execution_order",
        new="    execution_order",
        why="messages that leave in another order than they are needed deadlock between processes",
        tests=REFUSED,
    ),
    Mutant(
        name="recomputation waits for the gradient",
        file="pipeline/plan/schedule.py",
        old="            needs[action].append(Action(stage, Kind.F, microbatch))\n",
        new="            needs[action].append(Action(stage, Kind.F, microbatch))\n"
        "            if stage < schedule.num_stages - 1:\n"
        "                needs[action].append(Action(stage + 1, Kind.B, microbatch))\n",
        why="GPipe recomputes while it waits; only the gradient's own action needs it",
        tests=("tests/test_schedule.py::test_a_recomputation_needs_nothing_but_its_forward",),
    ),
    Mutant(
        name="serial recomputation in the replay",
        file="pipeline/plan/simulation.py",
        old="        self.early_recompute = early_recompute\n",
        new="        self.early_recompute = False\n",
        why="K - 1 forwards more per step",
        tests=("tests/test_schedule.py::test_length_of_a_step_in_slots[4-16-76-73-72]",),
    ),
    Mutant(
        name="the earliest stage that can go on comes next",
        file="pipeline/plan/order.py",
        old="            worker = max(waiting, key",
        new="            worker = min(waiting, key",
        why="with all stages in one process the last that can go on holds the most",
        tests=("tests/test_schedule.py::test_one_worker_holds_one_recomputed_micro_batch_at_a_time",),
    ),
    Mutant(
        name="activations and gradients between two workers in one queue",
        file="pipeline/plan/schedule.py",
        old="found.setdefault((source, target, transfer.target.kind is not Kind.F), [])",
        new="found.setdefault((source, target, False), [])",
        why="their orders differ in a V, and no schedule with one would be allowed",
        tests=("tests/test_named_schedules.py::test_every_named_schedule_is_valid[zb-v]",),
    ),
    Mutant(
        name="receives of several stages that don't wait for their turn",
        file="pipeline/ranks/ways.py",
        old="        in_turn = Turns(order) if len(stages) > 1 else None\n",
        new="        in_turn = None\n",
        why="NCCL takes what comes for the receive that was posted first",
        tests=(
            "tests/test_ways.py::test_receives_are_posted_in_the_order_in_which_messages_leave[interleaved]",
        ),
    ),
    Mutant(
        name="a worker's messages to itself on the link",
        file="pipeline/plan/simulation.py",
        old="        if self.link is FREE or target.worker is stage.worker:\n",
        new="        if self.link is FREE:\n",
        why="what stays on a device takes no time",
        tests=("tests/test_workers.py::test_what_a_worker_sends_to_itself_takes_no_time_and_no_link",),
    ),
    Mutant(
        name="generated rows that overtake",
        file="pipeline/plan/schedules/listing.py",
        old="        return a == b or self.channels[a, b][forward][0] == target\n",
        new="        return True\n",
        why="messages between two workers are taken in the order in which they leave",
        tests=("tests/test_generator.py::test_random_circumstances",),
    ),
    Mutant(
        name="late recomputation in the named schedules",
        file="pipeline/plan/schedules/recomputed.py",
        old="            if action.kind in (Kind.B, Kind.I) and action.microbatch in again",
        new="            if action.kind in (Kind.B, Kind.W) and action.microbatch in again",
        why="the first half of the backward needs the graph",
        tests=("tests/test_named_schedules.py::test_every_named_schedule_is_valid[zb-h1]",),
    ),
    Mutant(
        name="ZB-H1 puts off too few weights",
        file="pipeline/plan/schedules/zero_bubble.py",
        old="lead=1, late=[*range(num_workers)])",
        new="lead=1, late=[0] * num_workers)",
        why="the last worker's weights fill what the first one's would leave idle",
        tests=("tests/test_named_schedules.py::test_lengths_in_slots[2-one_f0-interleaved0-h10-v0]",),
    ),
    Mutant(
        name="one stage of a worker at a time",
        file="pipeline/memory/stages/workers.py",
        old="            self.fullest = _sum([now, *rests], transients=self.waiting)\n",
        new="            self.fullest = _sum([now], transients=self.waiting)\n",
        why="the other stages of a worker keep what they hold",
        tests=("tests/test_worker_memory.py::test_modelled_peaks_are_those_of_real_steps[never]",),
    ),
    Mutant(
        name="a schedule's stages in the order of their workers",
        file="pipeline/engine.py",
        old="    actions = schedule.actions[workers.pop()] if len(workers) == 1 else",
        new="    actions = schedule.actions[workers.pop()][::-1] if len(workers) == 1 else",
        why="a worker takes its row in order",
        tests=("tests/test_several_stages.py::test_outputs_and_gradients_equal_the_plain_model[1-1-zb-v]",),
    ),
)
