"""Pytrees between layers, keyword arguments, weights that stages share, and decisions of all ranks."""

from __future__ import annotations

from planted.mutant import Mutant

TREES = (
    Mutant(
        name="constants are never new",
        file="pipeline/ranks/distributed.py",
        old="                told = message.structure if new else None\n",
        new="                told = None\n",
        why="a receiver would put the tensors into the tree that it knows: other keys, old numbers",
        tests=("tests/test_distributed.py::test_case[keys_that_change_between_calls]",),
    ),
    Mutant(
        name="1 is True",
        file="pipeline/stage/trees.py",
        old="type(self.value) is not type(other.value)",
        new="False",
        why="a constant would arrive as another one that compares equal",
        tests=("tests/test_trees.py::test_structures_are_equal_only_if_everything_is",),
    ),
    Mutant(
        name="an overwritten input is kept itself",
        file="pipeline/stage/graph.py",
        old="t.clone() if i in copied else t",
        new="t",
        why="the recomputation would begin with what the forward left",
        tests=("tests/test_in_place.py::test_the_first_layer_of_a_stage_may_be_in_place[always-gpipe]",),
    ),
    Mutant(
        name="every rank decides about its own gradients",
        file="pipeline/mesh/gradients.py",
        old="self._pipeline.gather(any(bool(flag) for flag in found.values()))",
        new="[any(bool(flag) for flag in found.values())]",
        why="some ranks would take a step that the others skip",
        tests=("tests/test_distributed.py::test_case[one_decision_about_scaled_gradients]",),
    ),
    Mutant(
        name="what is shared is what it was",
        file="pipeline/ranks/control.py",
        old="        return Shared.FOLLOWS\n\n    def pass_on",
        new="        return Shared.FOLLOWS if sent is None else Shared.AS_BEFORE\n\n    def pass_on",
        why="later stages would use the mask of an earlier step",
        tests=("tests/test_distributed.py::test_case[arguments_that_layers_share]",),
    ),
    Mutant(
        name="what was in .grad is summed again",
        file="pipeline/stage/tied.py",
        old="            held, parameter.grad = parameter.grad, None\n",
        new="            held = parameter.grad\n",
        why="a tied weight would count the steps before twice where gradients add up",
        tests=("tests/test_tied.py::test_what_was_in_grad_is_kept",),
    ),
    Mutant(
        name="the first use first",
        file="pipeline/ranks/tied.py",
        old="for _, use in reversed(found)))",
        new="for _, use in found))",
        why="three uses of one weight would be added in another order than in a plain backward",
        tests=("tests/test_distributed.py::test_case[tied_weights_are_one_weight]",),
    ),
    Mutant(
        name="ties by the layers' names",
        file="pipeline/arguments.py",
        old="if isinstance(layers, OwnLayers) else self.named\n",
        new="if not modules else self.named\n",
        why="checkpoints would not find a tied weight of a model that is no sequence",
        tests=(
            "tests/test_distributed.py::test_case[a_checkpoint_of_tied_weights_of_a_model_cut_by_its_graph]",
        ),
    ),
    Mutant(
        name="replaced tied weight goes unnoticed",
        file="pipeline/ranks/tied.py",
        old="            if parameters.get(name) is not tie.parameter:\n",
        new="            if name not in parameters:\n",
        why="its gradients would not be summed, and every process would train its own",
        tests=("tests/test_distributed.py::test_case[a_tied_weight_that_was_replaced_is_refused]",),
    ),
)
