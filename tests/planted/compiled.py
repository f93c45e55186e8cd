"""What a compiled layer is said to keep, and numbers of other lengths than were profiled."""

from __future__ import annotations

from planted.mutant import Mutant

COMPILED = (
    Mutant(
        name="element-wise operations take memory",
        file="pipeline/memory/compiled.py",
        old="            if not self.fusible(node):\n",
        new="            if True:\n",
        why="a compiled layer would seem to need what it never makes",
        tests=("tests/test_compiled_memory.py::test_what_is_element_wise_leaves_no_tensor_of_its_own",),
    ),
    Mutant(
        name="compiled gradients stay after they are added",
        file="pipeline/memory/compiled.py",
        old="            events += [-number - 1 for number in sorted(gradients)]\n",
        new="            pass\n",
        why="every layer would leave a second copy of its gradients behind",
        tests=("tests/test_compiled_memory.py::test_every_trace_ends_with_gradients_and_nothing_else",),
    ),
    Mutant(
        name="a compiled layer writes to its statistics",
        file="pipeline/memory/compiled.py",
        old="        state = {name: buffer.clone() for name, buffer in zip(buffers, held, strict=True)}\n",
        new="        state = dict(zip(buffers, held, strict=True))\n",
        why="new statistics would be outputs of the graph and shift all others by their number",
        tests=("tests/test_compiled_memory.py::test_a_real_compiled_step_keeps_the_same_bytes[cell]",),
    ),
    Mutant(
        name="tiles of 16 rows",
        file="experiments/paper_profiles.py",
        old="_up(shape[low], 8)",
        new="_up(shape[low], 16)",
        why="memory would be padded twice as much",
        tests=("tests/test_labels.py::test_tiles_pad_the_two_dimensions_that_cost_least",),
    ),
    Mutant(
        name="a length is relabelled once",
        file="experiments/paper_profiles.py",
        old="                while rest and rest % label.prime == 0:\n",
        new="                if rest and rest % label.prime == 0:\n",
        why="weights, which are quadratic in the width, would grow linearly",
        tests=("tests/test_labels.py::test_a_relabelled_profile_is_that_of_the_other_size",),
    ),
)
