"""Gradients lost, doubled or scaled; a backward split wrongly; steps that do not add up."""

from __future__ import annotations

from planted.mutant import TRANSPARENT, Mutant

SPLIT = "tests/test_split_backward.py::test_"

TIED = "tests/test_tied.py::test_"

GRADIENTS = (
    Mutant(
        name="uses of a tied weight added up from the first",
        file="pipeline/stage/tied.py",
        old="for index in sorted(self._left[parameter], reverse=True):",
        new="for index in sorted(self._left[parameter], key=lambda i: i % 2):",
        why="another order of a sum of three is right to rounding only",
        tests=("tests/test_distributed.py::test_case[tied_weights_are_one_weight]",),
    ),
    Mutant(
        name="what was in .grad is lost",
        file="pipeline/stage/tied.py",
        old="            parameter.grad = plus(held, total)\n",
        new="            parameter.grad = total\n",
        why="gradients of a tied weight must add up over steps",
        tests=(TIED + "what_was_in_grad_is_kept",),
    ),
    Mutant(
        name="layers that share a weight share its leaf",
        file="pipeline/stage/tied.py",
        old="            leaves = {index: _leaf(parameter) for index in indices}\n",
        new="            leaves = dict.fromkeys(indices, _leaf(parameter))\n",
        why="autograd then adds up the uses, in an order that follows the cuts",
        tests=(TIED + "weights_are_the_same_bits_for_every_number_of_stages[three uses-1f1b]",),
    ),
    Mutant(
        name="outputs in reverse order",
        file="pipeline/stage/stage.py",
        old="            self.outputs[m] = unflatten(tensors, structure)\n",
        new="            self.outputs[-1 - m] = unflatten(tensors, structure)\n",
        why="the micro-batches' outputs must be merged in the order of the examples",
        tests=("tests/test_transparency.py::test_forward_alone_equals_the_plain_model[3-3]",),
    ),
    Mutant(
        name="one accumulation dropped",
        file="pipeline/stage/stage.py",
        old="            self._runner.in_backward(run_engine, roots, seeds)\n",
        new="""\
            last = self.parameters[-1] if m == 1 and self.parameters else None
            kept = None if last is None or last.grad is None else last.grad.clone()
            self._runner.in_backward(run_engine, roots, seeds)
            if last is not None:
                last.grad = kept
""",
        why="one micro-batch's gradient of one tensor of each stage is lost, and nothing else",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="one gradient scaled by 1.01",
        file="pipeline/stage/stage.py",
        old="            self._runner.in_backward(run_engine, roots, seeds)\n",
        new="""\
            self._runner.in_backward(run_engine, roots, seeds)
            if m == 0 and self.parameters and self.parameters[0].grad is not None:
                self.parameters[0].grad.mul_(1.01)
""",
        why="a comparison that is loose, or of sums over parameters, lets this through",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="input gradient scaled by 1.01",
        file="pipeline/stage/graph.py",
        old="        ctx.exits[ctx.position] = gradient\n",
        new="        ctx.exits[ctx.position] = gradient * 1.01\n",
        why="errors at a boundary show in the earlier stages alone",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="one micro-batch detached",
        file="pipeline/stage/stage.py",
        old="        return Message(tensors, structure, needs_grad, aliases)\n",
        new="        needed = needs_grad if m != 1 else (False,) * len(tensors)\n"
        "        return Message(tensors, structure, needed, aliases)\n",
        why="a boundary input that is no leaf cuts earlier stages off, without any error",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="an input that shares memory overwritten unseen",
        file="pipeline/stage/stage.py",
        old="        if not set(state.aliases).isdisjoint(found):\n",
        new="        if self._training and not set(state.aliases).isdisjoint(found) and state.versions:\n",
        why="without re-materialization too, the other tensor's gradients would be those of other values",
        tests=(
            "tests/test_in_place.py::"
            "test_an_input_that_shares_memory_is_not_silently_overwritten[overlapping-never]",
        ),
    ),
    Mutant(
        name="accumulation over steps dropped",
        file="pipeline/stage/stage.py",
        old="        self.statistics.begin()\n",
        new="""\
        self.statistics.begin()
        for parameter in self.parameters:
            parameter.grad = None
""",
        why="several steps before one optimizer step must add up",
        tests=("tests/test_transparency.py::test_several_steps_before_the_optimizer_add_up",),
    ),
    Mutant(
        name="loss not weighted by its share",
        file="pipeline/stage/stage.py",
        old="        key = (self._shares[m], metadata.dtype)\n",
        new="        key = (1 / len(self._shares), metadata.dtype)\n",
        why="with micro-batches of unequal size the mean of means is not the mean",
        tests=("tests/test_transparency.py::test_micro_batches_make_the_mean_over_the_mini_batch",),
    ),
    Mutant(
        name="reported loss not weighted by its share",
        file="pipeline/stage/stage.py",
        old="self._losses.append(loss.detach() * self._shares[m])",
        new="self._losses.append(loss.detach() / len(self._shares))",
        why="the loss that is returned is the mini-batch's, too",
        tests=("tests/test_transparency.py::test_micro_batches_make_the_mean_over_the_mini_batch",),
    ),
    Mutant(
        name="gradients summed instead of averaged",
        file="pipeline/step.py",
        old="tuple([length / plan.examples for",
        new="tuple([length * num_microbatches / plan.examples for",
        why="the step is M times too long; an optimizer that normalizes would hide it",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="weights' half of a split backward skipped once",
        file="pipeline/stage/stage.py",
        old="        if weights is not None:\n",
        new="        if weights is not None and m:\n",
        why="I and W together are one backward",
        tests=("tests/test_engine.py::test_a_split_backward_computes_the_same",),
    ),
    Mutant(
        name="hooks of activations passed by",
        file="pipeline/stage/split_backward.py",
        old="            if waiting.inputs:\n",
        new="            if False:\n",
        why="a gradient that a hook has changed is the one that a whole backward would have used",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole[hooks on activations-torch.float32]",),
    ),
    Mutant(
        name="hooks of parameters run in both halves",
        file="pipeline/stage/split_backward.py",
        old="        active.clear()\n",
        new="        pass\n",
        why="a hook that changes the gradient would change it twice",
        tests=(SPLIT + "hooks_of_parameters_run_once_with_the_sum[changing]",),
    ),
    Mutant(
        name="uses of one weight added one by one",
        file="pipeline/stage/split_backward.py",
        old="(single if self._shared.isdisjoint(waiting.leaves) else shared)",
        new="single",
        why="a whole backward adds up the uses of a weight in a micro-batch first",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole[large and used twice-torch.float32]",),
    ),
    Mutant(
        name="uses of one weight added in their order in the forward",
        file="pipeline/stage/split_backward.py",
        old="        shared.sort(key=_ORDER, reverse=True)\n",
        new="        shared.sort(key=_ORDER)\n",
        why="a sum of three depends on the order",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole[convolution used three times-torch.float32]",),
    ),
    Mutant(
        name="a weight's direct use before its turn",
        file="pipeline/stage/split_backward.py",
        old="(len(uses) > 2 and not _arrive_in_turn(uses))",
        new="False",
        why="a sum of three depends on the order",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole[tied to two heads-torch.float32]",),
    ),
    Mutant(
        name="a weight that something unknown uses too",
        file="pipeline/stage/split_backward.py",
        old="if not self._rest.keys().isdisjoint(w.leaves)]:\n",
        new="if False]:\n",
        why="what the first half computes of it would be there twice",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole[used and scaled-torch.float32]",),
    ),
    Mutant(
        name="graph kept after the inputs' half of its backward",
        file="pipeline/stage/stage.py",
        old="            del self._microbatches[m], state\n",
        new="",
        why="what W needs is less than what I needed",
        tests=(SPLIT + "the_graph_is_gone_after_the_first_half_and_the_rest_after_the_second",),
    ),
    Mutant(
        name="the outputs held until the second half",
        file="pipeline/stage/split_backward.py",
        old="    return tensor.detach()\n",
        new="    return tensor\n",
        why="a tensor that knows where it comes from holds the graph",
        tests=(SPLIT + "the_graph_is_gone_after_the_first_half_and_the_rest_after_the_second",),
    ),
    Mutant(
        name="checkpoints looked into",
        file="pipeline/stage/split_backward.py",
        old='    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:\n',
        new="    if False:\n",
        why="every look at what a checkpoint did not save computes all of it again",
        tests=(SPLIT + "a_checkpoint_computes_its_part_once_and_in_the_first_half",),
    ),
    Mutant(
        name="the first gradient copied",
        file="pipeline/stage/split_backward.py",
        old="            edges += (_entrance(weight), *bias)\n",
        new="            edges += (weight, *bias)\n",
        why="a copy of every weight's gradient, at the fullest moment of a stage",
        tests=(SPLIT + "the_first_gradient_is_not_copied[convolution]",),
    ),
    Mutant(
        name="a column's product taken by rows",
        file="pipeline/stage/split_backward.py",
        old="    if down == 1 and across == rows:\n",
        new="    if False:\n",
        why="the same product computed in another layout has other bits, or strides",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole",),
    ),
    Mutant(
        name="weights' gradients under autocast",
        file="pipeline/stage/stage.py",
        old="            self._runner.in_backward(weights.accumulate)\n",
        new="            weights.accumulate()\n",
        why="a backward runs in the types of its forward, not in those that autocast would choose now",
        tests=(SPLIT + "autocast_gives_the_same_bits_too",),
    ),
    Mutant(
        name="first gradients left in shared memory",
        file="pipeline/stage/stage.py",
        old="                self._without_grad = separate(self._without_grad, (*seeds, *exits))\n",
        new="                pass\n",
        why="a parameter's sum would also be the gradient that goes out, or another parameter's sum",
        tests=("tests/test_aliases.py::test_no_parameters_gradient_is_another_tensors_memory[2-gpipe]",),
    ),
    Mutant(
        name="shared memory given out while something lives in it",
        file="pipeline/ranks/shared_memory.py",
        old="            if not memory.holders.others:\n                del",
        new="            if True:\n                del",
        why="a message would overwrite what was made of an earlier one",
        tests=("tests/test_neighbour.py::test_shared_memory_is_given_out_again_when_nothing_lives_in_it",),
    ),
    Mutant(
        name="recomputation moves the buffers on",
        file="pipeline/stage/stage.py",
        old="        with buffers, torch.set_grad_enabled(True):\n",
        new="        with torch.set_grad_enabled(True):\n",
        why="a recomputation must see what the forward saw, and leave what it left",
        tests=("tests/test_buffers.py::test_a_recomputation_sees_what_the_forward_saw[InPlace-always]",),
    ),
    Mutant(
        name="a recomputation finds today's attributes",
        file="pipeline/stage/buffers.py",
        old="                    module.__dict__[name] = value\n",
        new="                    pass\n",
        why="what an attribute says of a buffer must be true of the copy too",
        tests=("tests/test_buffers.py::test_a_recomputation_sees_what_the_forward_saw[CountsBeside-always]",),
    ),
    Mutant(
        name="the first forward's buffers not copied",
        file="pipeline/stage/buffers.py",
        old="        kept = [*self._changing, *self._still] if self._learning else self._changing\n",
        new="        kept = list(self._changing)\n",
        why="that a buffer changes is known only after it has changed",
        tests=("tests/test_buffers.py::test_a_recomputation_sees_what_the_forward_saw[Large-always]",),
    ),
    Mutant(
        name="overwritten input recomputed",
        file="pipeline/stage/stage.py",
        old="        if state.versions != tuple([tensor._version for tensor in state.inputs]):\n",
        new="        if len(state.versions) != len(state.inputs):\n",
        why="a layer that overwrites the stage's input makes the recomputation silently wrong",
        tests=(
            "tests/test_in_place.py::test_a_layer_that_begins_to_overwrite_the_stage_input_is_refused_not_silently_wrong",
        ),
    ),
    Mutant(
        name="what needs a gradient never asked again",
        file="pipeline/stage/stage.py",
        old="            self._forget_what_was_found()\n",
        new="            self._overwritten.clear()\n",
        why="unfreezing a parameter changes what travels back",
        tests=("tests/test_transparency.py::test_stages_without_anything_to_train[frozen0-always]",),
    ),
    Mutant(
        name="autocast during the backward",
        file="pipeline/stage/layers.py",
        old="            if not self._autocast:\n",
        new="            if True:\n",
        why="the context that chose the precisions must not choose those of the backward",
        tests=("tests/test_engine.py::test_autocast_is_over_when_the_backward_runs",),
    ),
)
