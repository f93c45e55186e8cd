"""What crosses from stage to stage, in a wrong order, twice or in another form; and what stays alive for
too long.
"""

from __future__ import annotations

from planted.mutant import TRANSPARENT, Mutant

ALIVE = ("tests/test_stage.py::test_graphs_and_inputs_alive_at_every_action[always-gpipe]",)

BOUNDARIES = (
    Mutant(
        name="two tensors of a boundary swapped",
        file="pipeline/transport.py",
        old="        message = self._activations.pop((stage - 1, microbatch))\n",
        new="""\
        message = self._activations.pop((stage - 1, microbatch))
        first, *rest = message.tensors
        if rest and first.shape == rest[0].shape and first.dtype == rest[0].dtype:
            message = message._replace(tensors=(rest[0], first, *rest[1:]))
""",
        why="a net and its skip have the same shape, so nothing else complains",
        tests=("tests/test_transparency.py::test_cuts_into_three_stages_at_every_layer[(2, 3)]",),
    ),
    Mutant(
        name="two gradients of a boundary swapped",
        file="pipeline/transport.py",
        old="        gradients = self._gradients.pop((stage, microbatch))\n",
        new="""\
        gradients = self._gradients.pop((stage, microbatch))
        if len(gradients) > 1 and None not in gradients[:2] and gradients[0].shape == gradients[1].shape:
            gradients = (gradients[1], gradients[0], *gradients[2:])
""",
        why="gradients have the shapes of their tensors, which are the same",
        tests=("tests/test_transparency.py::test_cuts_into_three_stages_at_every_layer[(2, 3)]",),
    ),
    Mutant(
        name="a repeated tensor travels twice",
        file="pipeline/stage/trees.py",
        old="positions.setdefault(id(tensor), len(distinct))",
        new="positions.setdefault(len(structure), len(distinct))",
        why="gradients that meet in it would be summed in another grouping, behind some cuts",
        tests=("tests/test_trees.py::test_a_repeated_tensor_travels_once",),
    ),
    Mutant(
        name="a repeated tensor charged twice",
        file="pipeline/memory/boundary.py",
        old="first.setdefault(id(tensor), index)",
        new="first.setdefault(index, index)",
        why="the memory model must agree with the transport on what travels",
        tests=("tests/test_profile.py::test_boundaries_describe_what_travels",),
    ),
    Mutant(
        name="strides of single examples lost at a boundary",
        file="pipeline/stage/graph.py",
        old="        return tensor.detach()\n",
        new="        return tensor.view_as(tensor)\n",
        why="masks follow the memory layout, so bits would depend on the cuts",
        tests=("tests/test_engine.py::test_strides_of_single_examples_survive_a_boundary",),
    ),
    Mutant(
        name="copies charged to their sender",
        file="pipeline/transport.py",
        old="        with self._observe_transfer(receiver):\n",
        new="        with self._observe_transfer(max(receiver - 1, 0)):\n",
        why="the verification of the memory model rests on who owns what",
        tests=("tests/test_engine.py::test_copies_belong_to_their_receiver",),
    ),
    Mutant(
        name="targets in reverse order",
        file="pipeline/step.py",
        old='    return split(target, num_microbatches, "the target")\n',
        new='    return split(target.flip(0), num_microbatches, "the target")\n',
        why="every micro-batch needs its own targets",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="smaller micro-batches first",
        file="pipeline/stage/trees.py",
        old="    return (size + 1,) * larger + (size,) * (num_microbatches - larger)\n",
        new="    return (size,) * (num_microbatches - larger) + (size + 1,) * larger\n",
        why="profiles are taken of the first micro-batch, which is to be the largest",
        tests=("tests/test_trees.py::test_split_gives_views_and_merge_undoes_it",),
    ),
)

LIFETIMES = (
    Mutant(
        name="graph kept after its backward",
        file="pipeline/stage/stage.py",
        old="        del state\n        if roots:\n            self._runner.in_backward(run_engine",
        new="        if roots:\n            self._runner.in_backward(run_engine",
        why="memory is freed at the earliest action",
        tests=ALIVE,
    ),
    Mutant(
        name="outputs kept by the graph's owner",
        file="pipeline/stage/graph.py",
        old="        self.places, self.edges = ",
        new="        self.outputs = tuple(outputs)\n        self.places, self.edges = ",
        why="an output lives on only if a layer saved it",
        tests=("tests/test_stage.py::test_graphs_and_inputs_alive_at_every_action[never-gpipe]",),
    ),
    Mutant(
        name="forward with a graph under re-materialization",
        file="pipeline/stage/stage.py",
        old="        with torch.set_grad_enabled(graph or (known is None and not self.is_last)):\n",
        new="        with torch.enable_grad():\n",
        why="the gradients stay right while the memory that was to be saved is spent",
        tests=("tests/test_stage.py::test_number_of_forwards[always-gpipe]",),
    ),
)
