"""Partitions that are not the best, and bytes that the memory model leaves out or counts twice."""

from __future__ import annotations

from planted.mutant import Mutant

PARTITION = ("tests/test_partition.py::test_bottleneck_equals_brute_force",)
FOOTPRINT = ("tests/test_footprint.py::test_a_storage_is_freed_by_the_earliest_layer_that_holds_it",)
MEMORY = ("tests/test_memory.py::test_what_is_charged_at_the_fullest_moment",)
SPLIT_MEMORY = "tests/test_split_memory.py::"
COPIES = "tests/test_copies_memory.py::"
OVER_PROCESSES = "tests/test_memory_over_processes.py::"

CUTTING = "tests/test_cutting.py::"

MODELLED = (
    Mutant(
        name="a stage alone waits for no round trip",
        file="planner/cuts.py",
        old="                arrival = done[microbatch] + round_s\n",
        new="                arrival = done[microbatch] + 2 * round_s\n",
        why="bounds above real steps leave out the best cuts",
        tests=(CUTTING + "test_a_stage_alone_bounds_every_step_that_has_it",),
    ),
    Mutant(
        name="the search takes what recomputes most",
        file="planner/cuts.py",
        old="        self._fits, self._remats = fits, sorted(remats, key=REMATS.index)\n",
        new="        self._fits, self._remats = fits, sorted(remats, key=REMATS.index, reverse=True)\n",
        why="everything is recomputed, whatever fits",
        tests=(CUTTING + "test_only_what_must_is_recomputed",),
    ),
    Mutant(
        name="partition's bisection skips a cap",
        file="pipeline/plan/partition.py",
        old="            low = cap + 1\n",
        new="            low = cap + 2\n",
        why="the split is near the optimum and not the optimum",
        tests=PARTITION,
    ),
    Mutant(
        name="partition fills below the cap",
        file="pipeline/plan/partition.py",
        old="        stop = min(bisect_right(prefix, prefix[start] + cap) - 1, num_layers - remaining)\n",
        new="        stop = min(bisect_left(prefix, prefix[start] + cap) - 1, num_layers - remaining)\n",
        why="a stage that is exactly full is full, not over",
        tests=PARTITION,
    ),
    Mutant(
        name="partition's ties go to later stages",
        file="pipeline/plan/partition.py",
        old="                (squares + (end - prefix[start]) ** 2, -start)\n",
        new="                (squares + (end - prefix[start]) ** 2, start)\n",
        why="equal costs must be split the same way everywhere",
        tests=("tests/test_partition.py::test_ties_fill_earlier_stages_first",),
    ),
    Mutant(
        name="a model fits only if greedy filling says so",
        file="pipeline/plan/partition.py",
        old="    return bool(_suffix_counts(edges, num_layers, cap)[0] >> num_stages & 1)\n",
        new="    return False\n",
        why="filling to the brim may miss a split, and the largest model with it",
        tests=("tests/test_partition.py::test_a_split_that_filling_to_the_brim_misses_is_found",),
    ),
    Mutant(
        name="memory without the boundary",
        file="pipeline/memory/peaks.py",
        old="            _parts(boundary=received),\n",
        new="            _parts(),\n",
        why="M kept inputs are what re-materialization costs",
        tests=MEMORY,
    ),
    Mutant(
        name="memory without the gradients",
        file="pipeline/memory/peaks.py",
        old="            _parts(gradients=0 if self._is_whole else stage.gradient_bytes),\n",
        new="            _parts(),\n",
        why="gradients are there from the first backward on",
        tests=("tests/test_memory.py::test_gradients_exist_from_the_first_backward_on_and_none_before",),
    ),
    Mutant(
        name="memory without the graphs in flight",
        file="pipeline/memory/peaks.py",
        old="            _parts(boundary=kept, activations=stage.saved_bytes),\n",
        new="            _parts(boundary=kept),\n",
        why="without re-materialization the graphs are nearly all",
        tests=MEMORY,
    ),
    Mutant(
        name="a storage belongs to its latest holder",
        file="pipeline/memory/stage_bytes.py",
        old="                holders[name] = holders.get(name, 0) + 1\n            found",
        new="                holders[name] = 1\n            found",
        why="what two layers keep is freed in the backward of the earlier one",
        tests=FOOTPRINT,
    ),
    Mutant(
        name="a storage charged by every holder",
        file="pipeline/memory/stage_bytes.py",
        old="                if name not in holders and name not in self.boundary:\n",
        new="                if name not in self.boundary:\n",
        why="neighbours keep the same tensor, which exists once",
        tests=FOOTPRINT,
    ),
    Mutant(
        name="a forward that runs twice works on what was received",
        file="pipeline/memory/stage_bytes.py",
        old="self.boundary - self.copied\n",
        new="self.boundary\n",
        why="an input that the layers overwrite is copied for F and for R",
        tests=(COPIES + "test_a_copy_is_held_while_a_forward_runs",),
    ),
    Mutant(
        name="the copy of the user's input goes after R",
        file="pipeline/memory/peaks.py",
        old="            _parts(boundary=copied),\n",
        new="            _parts(),\n",
        why="the graph that R makes holds the copy until B",
        tests=(COPIES + "test_stages_that_overwrite_their_input[1-always-gpipe]",),
    ),
    Mutant(
        name="micro-batches wait without their buffers",
        file="pipeline/memory/peaks.py",
        old="            _parts(buffers=stage.changing_buffer_bytes),\n",
        new="            _parts(),\n",
        why="each recomputation starts from what its own forward saw",
        tests=(COPIES + "test_buffers_that_change_in_the_forward[always-False-100]",),
    ),
    Mutant(
        name="a result known for other strides",
        file="pipeline/memory/fake_tensors.py",
        old="        return value.shape, value.stride(), value.storage_offset(),",
        new="        return value.shape, value.storage_offset(),",
        why="what a layer copies depends on the layout of its input",
        tests=("tests/test_fake_tensors.py::test_results_are_those_of_torch",),
    ),
)

HALVES_MODELLED = (
    Mutant(
        name="a bias' gradient is let go of before it is added up",
        file="pipeline/memory/stage_bytes.py",
        old="            if self._users[name] == 0 and name not in kept:\n",
        new="            if self._users[name] == 0:\n",
        why="the gradient of the output is the bias' own until the engine has added it",
        tests=(SPLIT_MEMORY + "test_every_action_holds_what_is_modelled[many bytes-1]",),
    ),
    Mutant(
        name="I lets go of what W waits for",
        file="pipeline/memory/stage_bytes.py",
        old="                    if holders[name] == 0:\n",
        new="                    if holders[name] == 0 or left is not None:\n",
        why="a storage at the end of a layer may be another layer's input in W",
        tests=(SPLIT_MEMORY + "test_every_action_holds_what_is_modelled[many bytes-1]",),
    ),
    Mutant(
        name="W takes the operations as the graph was walked",
        file="pipeline/stage/split_backward.py",
        old="        single.sort(key=_ORDER, reverse=True)\n",
        new="",
        why="where branches meet, what is let go of when would depend on the walk",
        tests=(SPLIT_MEMORY + "test_every_action_holds_what_is_modelled[awkward-1]",),
    ),
    Mutant(
        name="messages wait with nobody",
        file="pipeline/memory/counts.py",
        old="waiting[way[0]].get(way, 0) + 1\n",
        new="0\n",
        why="what has come and is not needed yet takes memory",
        tests=(SPLIT_MEMORY + "test_every_action_holds_what_is_modelled[awkward-3]",),
    ),
    Mutant(
        name="what is received takes no buffers",
        file="pipeline/memory/workers.py",
        old="                num_bytes += ring.of(size).num_slots * size\n",
        new="                num_bytes += size\n",
        why="the buffers of a ring stay from step to step, one for each of its slots",
        tests=(OVER_PROCESSES + "test_peaks_are_those_of_real_steps[small]",),
    ),
    Mutant(
        name="what is sent is gone at once",
        file="pipeline/memory/workers.py",
        old="        self._held_bytes += held_bytes\n",
        new="        self._held_bytes += 0\n",
        why="a sender keeps its latest messages, and small ones until the step ends",
        tests=(OVER_PROCESSES + "test_peaks_are_those_of_real_steps[large]",),
    ),
    Mutant(
        name="the optimizer's state of a shared weight counted twice",
        file="pipeline/memory/workers.py",
        old="    if trained:\n        sizes.remove(num_bytes)\n",
        new="",
        why="there is one parameter, and one state of it",
        tests=("tests/test_tied_memory.py::test_a_tie_within_a_stage[gpipe-always-adam]",),
    ),
    Mutant(
        name="the sum of a shared weight's gradients takes no memory",
        file="pipeline/memory/workers.py",
        old="transients=received_bytes,",
        new="transients=0,",
        why="what another owner has gathered comes beside what the layers of this one have",
        tests=("tests/test_tied_memory.py::test_a_tie_between_processes[1]",),
    ),
)
