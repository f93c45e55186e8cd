"""The deliberate mistakes that `mutants` plants, and the tests that must notice each.

A test suite that is green on right code shows little; these show that it turns red on wrong code. Every entry
is a mistake that a pipeline engine really makes somewhere: wrong order, a lost or doubled gradient, other
random numbers in the recomputation, statistics counted twice, a cost left out of a model. Each is one
replacement of a text that occurs exactly once in its file, and names the smallest selection of tests that has
to fail. `nox -s mutants` plants them all, and so does continuous integration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One mistake: `old` becomes `new` in `file`; of `tests`, node ids of pytest, at least one must fail."""

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]


# One node each for all selections that several mutants share.
TRANSPARENT = (
    "tests/test_transparency.py::test_outputs_and_gradients_equal_the_plain_model[4-3-always-gpipe]",
)
MASKS = ("tests/test_rng.py::test_masks_depend_on_layer_and_micro_batch_alone[2-always-gpipe]",)
AVERAGES = ("tests/test_batchnorm.py::test_averages_move_once_by_the_whole_mini_batch[0.1-4-3-always-gpipe]",)
ALIVE = ("tests/test_stage.py::test_graphs_and_inputs_alive_at_every_action[always-gpipe]",)
ROWS = ("tests/test_schedule.py::test_rows_as_in_the_paper",)
REFUSED = ("tests/test_schedule.py::test_an_impossible_schedule_is_refused",)
PARTITION = ("tests/test_partition.py::test_bottleneck_equals_brute_force",)
FOOTPRINT = ("tests/test_footprint.py::test_a_storage_is_freed_by_the_earliest_layer_that_holds_it",)
MEMORY = ("tests/test_memory.py::test_what_is_charged_at_the_fullest_moment",)
PADDING = ("tests/test_models_padding.py::test_pools_by_hand",)


SPLIT = "tests/test_split_backward.py::test_"
SPLIT_MEMORY = "tests/test_split_memory.py::"

GRADIENTS = (
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
            last = self._parameters[-1] if m == 1 and self._parameters else None
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
            if m == 0 and self._parameters and self._parameters[0].grad is not None:
                self._parameters[0].grad.mul_(1.01)
""",
        why="a comparison that is loose, or of sums over parameters, lets this through",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="input gradient scaled by 1.01",
        file="pipeline/stage/kept.py",
        old="        ctx.exits[ctx.position] = gradient\n",
        new="        ctx.exits[ctx.position] = gradient * 1.01\n",
        why="errors at a boundary show in the earlier stages alone",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="one micro-batch detached",
        file="pipeline/stage/stage.py",
        old="for t in tensors]), structure, needs_grad)\n",
        new="for t in tensors]), structure, needs_grad if m != 1 else (False,) * len(tensors))\n",
        why="a boundary input that is no leaf cuts earlier stages off, without any error",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="accumulation over steps dropped",
        file="pipeline/stage/stage.py",
        old="        self.statistics.begin()\n",
        new="""\
        self.statistics.begin()
        for parameter in self._parameters:
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
        old="self.losses.append(loss.detach() * self._shares[m])",
        new="self.losses.append(loss.detach() / len(self._shares))",
        why="the loss that is returned is the mini-batch's, too",
        tests=("tests/test_transparency.py::test_micro_batches_make_the_mean_over_the_mini_batch",),
    ),
    Mutant(
        name="gradients summed instead of averaged",
        file="pipeline/steps.py",
        old="shares=tuple(size / plan.examples for",
        new="shares=tuple(size * num_microbatches / plan.examples for",
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
        file="pipeline/stage/split.py",
        old="            if waiting.inputs:\n",
        new="            if False:\n",
        why="a gradient that a hook has changed is the one that a whole backward would have used",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole[hooks on activations-torch.float32]",),
    ),
    Mutant(
        name="hooks of parameters run in both halves",
        file="pipeline/stage/split.py",
        old="        active.clear()\n",
        new="        pass\n",
        why="a hook that changes the gradient would change it twice",
        tests=(SPLIT + "hooks_of_parameters_run_once_with_the_sum[changing]",),
    ),
    Mutant(
        name="uses of one weight added one by one",
        file="pipeline/stage/split.py",
        old="(single if self._shared.isdisjoint(waiting.leaves) else shared)",
        new="single",
        why="a whole backward adds up the uses of a weight in a micro-batch first",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole[large and used twice-torch.float32]",),
    ),
    Mutant(
        name="uses of one weight added in their order in the forward",
        file="pipeline/stage/split.py",
        old="        shared.sort(key=_ORDER, reverse=True)\n",
        new="        shared.sort(key=_ORDER)\n",
        why="a sum of three depends on the order",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole[convolution used three times-torch.float32]",),
    ),
    Mutant(
        name="a weight's direct use before its turn",
        file="pipeline/stage/split.py",
        old="(len(uses) > 2 and not _arrive_in_turn(uses))",
        new="False",
        why="a sum of three depends on the order",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole[tied to two heads-torch.float32]",),
    ),
    Mutant(
        name="a weight that something unknown uses too",
        file="pipeline/stage/split.py",
        old="if not self._rest.keys().isdisjoint(w.leaves)]:\n",
        new="if False]:\n",
        why="what the first half computes of it would be there twice",
        tests=(SPLIT + "the_halves_give_the_bits_of_the_whole[used and scaled-torch.float32]",),
    ),
    Mutant(
        name="graph kept after the inputs' half of its backward",
        file="pipeline/stage/stage.py",
        old="        inputs = state.inputs\n        state.drop()\n",
        new="        inputs = state.inputs\n",
        why="what W needs is less than what I needed",
        tests=(SPLIT + "the_graph_is_gone_after_the_first_half_and_the_rest_after_the_second",),
    ),
    Mutant(
        name="the outputs held until the second half",
        file="pipeline/stage/deferrable.py",
        old="    return tensor.detach()\n",
        new="    return tensor\n",
        why="a tensor that knows where it comes from holds the graph",
        tests=(SPLIT + "the_graph_is_gone_after_the_first_half_and_the_rest_after_the_second",),
    ),
    Mutant(
        name="checkpoints looked into",
        file="pipeline/stage/deferrable.py",
        old='    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:\n',
        new="    if False:\n",
        why="every look at what a checkpoint did not save computes all of it again",
        tests=(SPLIT + "a_checkpoint_computes_its_part_once_and_in_the_first_half",),
    ),
    Mutant(
        name="the first gradient copied",
        file="pipeline/stage/waiting.py",
        old="            edges += (_entrance(weight), *bias)\n",
        new="            edges += (weight, *bias)\n",
        why="a copy of every weight's gradient, at the fullest moment of a stage",
        tests=(SPLIT + "the_first_gradient_is_not_copied[convolution]",),
    ),
    Mutant(
        name="a column's product taken by rows",
        file="pipeline/stage/deferrable.py",
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
        file="pipeline/ranks/messages/neighbour.py",
        old="            if not self._holders[buffer.data_ptr()].others:\n",
        new="            if True:\n",
        why="a message would overwrite what was made of an earlier one",
        tests=("tests/test_neighbour.py::test_shared_memory_is_given_out_again_when_nothing_lives_in_it",),
    ),
    Mutant(
        name="recomputation moves the buffers on",
        file="pipeline/stage/stage.py",
        old="        with buffers, torch.enable_grad():\n",
        new="        with torch.enable_grad():\n",
        why="a recomputation must see what the forward saw, and leave what it left",
        tests=("tests/test_buffers.py::test_a_recomputation_sees_what_the_forward_saw[InPlace-always]",),
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
            "tests/test_stage.py::test_a_layer_that_overwrites_the_stage_input_is_refused_not_silently_wrong",
        ),
    ),
    Mutant(
        name="what needs a gradient never asked again",
        file="pipeline/stage/stage.py",
        old="            self._needs_grad.clear()\n            self._overwritten.clear()\n        arriving",
        new="            self._overwritten.clear()\n        arriving",
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

RANDOMNESS = (
    Mutant(
        name="one random stream for all micro-batches",
        file="pipeline/stage/layers.py",
        old="                    generators.seed(mix(key ^ m))\n",
        new="                    generators.seed(mix(key))\n",
        why="all micro-batches would drop the same units",
        tests=MASKS,
    ),
    Mutant(
        name="recomputation not seeded",
        file="pipeline/stage/layers.py",
        old="                    generators.seed(mix(key ^ m))\n",
        new="                    if recording:\n                        generators.seed(mix(key ^ m))\n",
        why="the recomputation draws what the generator happens to hold",
        tests=MASKS,
    ),
    Mutant(
        name="recomputation with another stream",
        file="pipeline/stage/layers.py",
        old="                    generators.seed(mix(key ^ m))\n",
        new="                    generators.seed(mix(key ^ (m if recording else m + 1)))\n",
        why="the recomputation draws what another micro-batch drew",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="streams numbered within the stage",
        file="pipeline/stage/layers.py",
        old="layer_key(self.seed, step, self.first_layer + i)",
        new="layer_key(self.seed, step, i)",
        why="masks would depend on where the model is cut",
        tests=MASKS,
    ),
    Mutant(
        name="the loss has one stream for all micro-batches",
        file="pipeline/stage/layers.py",
        old="self._generators.seed(mix(self._loss_key ^ m))",
        new="self._generators.seed(mix(self._loss_key))",
        why="a loss may draw too",
        tests=("tests/test_rng.py::test_a_loss_may_draw_too",),
    ),
    Mutant(
        name="the user's generator not given back",
        file="pipeline/stage/layers.py",
        old="            if states is not None:\n                generators.restore(states)\n",
        new="",
        why="data loading after a step would repeat itself",
        tests=("tests/test_rng.py::test_the_users_generator_is_left_alone",),
    ),
    Mutant(
        name="the same streams in every step",
        file="pipeline/stage/rng.py",
        old="mix(mix(mix(seed & _MASK) ^ step) ^ layer)",
        new="mix(mix(mix(seed & _MASK)) ^ layer)",
        why="every step would drop the same units",
        tests=("tests/test_rng.py::test_every_layer_micro_batch_step_and_seed_has_its_own_stream",),
    ),
    Mutant(
        name="evaluation counts as a step",
        file="pipeline/api.py",
        old="        self._num_forwards += 1\n",
        new="        self._num_forwards += 1\n        self.num_steps += 1\n",
        why="evaluating must not change the training that follows",
        tests=("tests/test_rng.py::test_evaluation_between_steps_does_not_change_the_training",),
    ),
    Mutant(
        name="evaluation draws what training draws",
        file="pipeline/api.py",
        old="_FORWARD_ONLY = 1 << 62",
        new="_FORWARD_ONLY = 0",
        why="a forward in training mode is another sample of the masks, not the one trained with",
        tests=("tests/test_rng.py::test_forwards_draw_from_streams_of_their_own",),
    ),
    Mutant(
        name="a continued run repeats its first masks",
        file="pipeline/checkpoint.py",
        old='    pipeline.num_steps = int(state["num_steps"])\n',
        new="",
        why="the number of steps keys the random streams, so it belongs to a checkpoint",
        tests=("tests/test_bitwise.py::test_a_saved_run_continues_with_another_number_of_stages",),
    ),
)

STATISTICS = (
    Mutant(
        name="averages moved by every micro-batch",
        file="pipeline/stage/batchnorm.py",
        old="        if self.recording:\n            self.fold()\n",
        new="        if self.recording:\n            self.fold()\n            self.commit()\n",
        why="GPipe tracks the averages of the mini-batch (section 2.2)",
        tests=AVERAGES,
    ),
    Mutant(
        name="averages see the recomputation too",
        file="pipeline/stage/stage.py",
        old="unflatten(state.enter(copied), state.structure), recording=False)",
        new="unflatten(state.enter(copied), state.structure), recording=True)",
        why="every micro-batch would count twice, or once where it keeps its activations",
        tests=AVERAGES,
    ),
    Mutant(
        name="averages see what a layer recomputes itself",
        file="pipeline/stage/layers.py",
        old="            self.statistics.redirect(recording=False)\n",
        new="            self.statistics.redirect(recording=True)\n",
        why="a layer that checkpoints its own parts runs them once more inside the backward",
        tests=("tests/test_batchnorm.py::test_averages_do_not_see_what_a_layer_recomputes_itself",),
    ),
    Mutant(
        name="biased variance",
        file="pipeline/stage/batchnorm.py",
        old="[1.0 / max(m.count - 1, 1) for m in meters]",
        new="[1.0 / max(m.count, 1) for m in meters]",
        why="torch keeps the unbiased variance",
        tests=AVERAGES,
    ),
    Mutant(
        name="means of micro-batches not merged into the variance",
        file="pipeline/stage/batchnorm.py",
        old="        self.squares.add_(shift)\n",
        new="",
        why="the mean of the micro-batches' variances is not the mini-batch's variance",
        tests=AVERAGES,
    ),
    Mutant(
        name="statistics of a failed step linger",
        file="pipeline/stage/stage.py",
        old="        self.statistics.forget()\n",
        new="",
        why="half a mini-batch would be counted with the next one",
        tests=("tests/test_batchnorm.py::test_a_failed_step_leaves_no_statistics_for_the_next",),
    ),
)

BOUNDARIES = (
    Mutant(
        name="two tensors of a boundary swapped",
        file="pipeline/transport.py",
        old="        return self._activations.pop((stage, microbatch))\n",
        new="""\
        found = self._activations.pop((stage, microbatch))
        first, *rest = found.tensors
        if rest and first.shape == rest[0].shape and first.dtype == rest[0].dtype:
            found = found._replace(tensors=(rest[0], first, *rest[1:]))
        return found
""",
        why="a net and its skip have the same shape, so nothing else complains",
        tests=("tests/test_transparency.py::test_every_cut_into_three_stages[cuts10]",),
    ),
    Mutant(
        name="two gradients of a boundary swapped",
        file="pipeline/transport.py",
        old="        return self._gradients.pop((stage, microbatch))\n",
        new="""\
        found = self._gradients.pop((stage, microbatch))
        if len(found) > 1 and None not in found[:2] and found[0].shape == found[1].shape:
            found = (found[1], found[0], *found[2:])
        return found
""",
        why="gradients have the shapes of their tensors, which are the same",
        tests=("tests/test_transparency.py::test_every_cut_into_three_stages[cuts10]",),
    ),
    Mutant(
        name="a repeated tensor travels twice",
        file="pipeline/stage/microbatch.py",
        old="positions.setdefault(id(tensor), len(distinct))",
        new="positions.setdefault(len(structure), len(distinct))",
        why="gradients that meet in it would be summed in another grouping, behind some cuts",
        tests=("tests/test_microbatch.py::test_a_repeated_tensor_travels_once",),
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
        file="pipeline/stage/kept.py",
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
        file="pipeline/steps.py",
        old='    return split(target, num_microbatches, "the target")\n',
        new='    return split(target.flip(0), num_microbatches, "the target")\n',
        why="every micro-batch needs its own targets",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="smaller micro-batches first",
        file="pipeline/stage/microbatch.py",
        old="    return (size + 1,) * larger + (size,) * (num_microbatches - larger)\n",
        new="    return (size,) * (num_microbatches - larger) + (size + 1,) * larger\n",
        why="profiles are taken of the first micro-batch, which is to be the largest",
        tests=("tests/test_microbatch.py::test_split_gives_views_and_merge_undoes_it",),
    ),
)

LIFETIMES = (
    Mutant(
        name="graph kept after its backward",
        file="pipeline/stage/stage.py",
        old="        state.drop()\n        if roots:\n            self._runner.in_backward(run_engine",
        new="        if roots:\n            self._runner.in_backward(run_engine",
        why="memory is freed at the earliest action",
        tests=ALIVE,
    ),
    Mutant(
        name="outputs kept by the graph's owner",
        file="pipeline/stage/kept.py",
        old="        self.places = tuple(",
        new="        self.weights = tuple(outputs)\n        self.places = tuple(",
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

SCHEDULES = (
    Mutant(
        name="except_last shifted by one",
        file="pipeline/plan/schedule.py",
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
        old="            maker = Kind.R if schedule.recomputes(microbatch) else Kind.F\n"
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
        old="            if action.kind in (Kind.B, Kind.I) and again",
        new="            if action.kind in (Kind.B, Kind.W) and again",
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
        file="pipeline/memory/workers.py",
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

MODELLED = (
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
        old="        boundary=user_bytes + boundary,\n",
        new="        boundary=user_bytes,\n",
        why="M kept inputs are what re-materialization costs",
        tests=MEMORY,
    ),
    Mutant(
        name="memory without the gradients",
        file="pipeline/memory/peaks.py",
        old="        gradients = stage.gradient_bytes if _has_gradients(stage, demand) else 0\n",
        new="        gradients = 0\n",
        why="gradients are there from the first backward on",
        tests=("tests/test_memory.py::test_gradients_exist_from_the_first_backward_on_and_none_before",),
    ),
    Mutant(
        name="memory without the graphs in flight",
        file="pipeline/memory/peaks.py",
        old="        activations = demand.graphs * stage.saved_bytes\n",
        new="        activations = 0\n",
        why="without re-materialization the graphs are nearly all",
        tests=MEMORY,
    ),
    Mutant(
        name="a storage belongs to its latest holder",
        file="pipeline/memory/footprint.py",
        old="            if name not in links.boundary and name not in holder:\n"
        "                holder[name] = index\n"
        "                saved += links.sizes[name]\n",
        new="            if name not in links.boundary:\n"
        "                saved += links.sizes[name] if name not in holder else 0\n"
        "                holder[name] = index\n",
        why="what two layers keep is freed in the backward of the earlier one",
        tests=FOOTPRINT,
    ),
    Mutant(
        name="a storage charged by every holder",
        file="pipeline/memory/footprint.py",
        old="            if name not in links.boundary and name not in holder:\n",
        new="            if name not in links.boundary:\n",
        why="neighbours keep the same tensor, which exists once",
        tests=FOOTPRINT,
    ),
    Mutant(
        name="a result known for other lengths",
        file="pipeline/memory/fake_tensors.py",
        old="    numbers = {1: 1, 0: 0}\n",
        new="    numbers: dict[int, int] = {}\n",
        why="a dimension of length 1 is stretched to another's, and any other is not",
        tests=("tests/test_fake_tensors.py::test_results_are_those_of_torch",),
    ),
)

MODELS = (
    Mutant(
        name="SAME padding on the wrong side",
        file="models/amoebanet/modules.py",
        old="    return total // 2, total - total // 2\n",
        new="    return total - total // 2, total // 2\n",
        why="the sampling grid of every strided operation moves by a pixel",
        tests=PADDING,
    ),
    Mutant(
        name="averages count the padding",
        file="models/amoebanet/modules.py",
        old="ceil_mode=True, count_include_pad=False)",
        new="ceil_mode=True, count_include_pad=True)",
        why="the reference leaves the padding out of the divisor",
        tests=PADDING,
    ),
    Mutant(
        name="symmetric averages count the padding",
        file="models/amoebanet/ops.py",
        old="nn.AvgPool2d(kernel, stride, kernel // 2, count_include_pad=False)",
        new="nn.AvgPool2d(kernel, stride, kernel // 2)",
        why="the same in the other padding convention",
        tests=("tests/test_models_padding.py::test_symmetric_pools_sample_torchs_grid",),
    ),
    Mutant(
        name="odd pixels taken from the even grid",
        file="models/amoebanet/ops.py",
        old="x[:, :, 1::step, 1::step]",
        new="x[:, :, ::step, ::step]",
        why="the factorized reduction exists to lose no pixel",
        tests=("tests/test_models_padding.py::test_the_factorized_reduction_takes_even_and_odd_pixels",),
    ),
    Mutant(
        name="auxiliary loss dropped",
        file="models/tasks.py",
        old="        loss = loss + AUX_LOSS_WEIGHT * part\n",
        new="",
        why="training would run, with an auxiliary head that learns nothing",
        tests=("tests/test_models_registry.py::test_the_loss_of_amoebanet_by_hand",),
    ),
    Mutant(
        name="auxiliary logits dropped",
        file="models/amoebanet/network.py",
        old="        return (logits, *aux) if aux else logits\n",
        new="        return logits\n",
        why="the same from the model's side",
        tests=(
            "tests/test_models_amoebanet.py::"
            "test_the_auxiliary_head_works_in_training_only_and_changes_nothing_else",
        ),
    ),
    Mutant(
        name="kept examples not scaled by drop path",
        file="models/amoebanet/modules.py",
        old="(kept.to(x.dtype) / self.keep)",
        new="kept.to(x.dtype)",
        why="the expected output would change with the keep probability",
        tests=("tests/test_models_drop_path.py::test_examples_are_dropped_whole_and_the_kept_ones_scaled",),
    ),
    Mutant(
        name="attention sees one token ahead",
        file="models/transformer/blocks.py",
        old="device=q.device).triu(1)\n",
        new="device=q.device).triu(2)\n",
        why="a language model that sees the next token learns nothing and reports a fine loss",
        tests=("tests/test_models_transformer.py::test_the_language_model_never_sees_the_future",),
    ),
)

CONSISTENCY = (
    Mutant(
        name="an interval that reaches into the margin is enough",
        file="experiments/consistency/equivalence.py",
        old="        if self.high <= margin:\n",
        new="        if self.low <= margin:\n",
        why="whatever is too rough to tell apart would be called the same",
        tests=("tests/test_consistency.py::test_only_an_interval_inside_the_margin_is_reproduced",),
    ),
    Mutant(
        name="the standard deviation taken for exact",
        file="experiments/consistency/equivalence.py",
        old="_scale(runs, baseline_runs), baseline_runs - 1\n",
        new="_scale(runs, baseline_runs), 10**6\n",
        why="it is estimated from ten runs, and the margin is made of it",
        tests=(
            "tests/test_consistency_protocol.py::test_the_interval_is_that_of_repeated_experiments[3.0-6-10]",
        ),
    ),
    Mutant(
        name="the sequential mean taken for exact",
        file="experiments/consistency/equivalence.py",
        old="math.sqrt(1 / runs + 1 / baseline_runs)",
        new="math.sqrt(1 / runs)",
        why="both means vary",
        tests=(
            "tests/test_consistency_protocol.py::"
            "test_the_numbers_of_runs_suffice_for_the_stated_power[images]",
        ),
    ),
    Mutant(
        name="seeds used before are admitted",
        file="experiments/consistency/protocol.py",
        old="                if low <= seed <= high:\n",
        new="                if low == seed == high:\n",
        why="a recipe could be judged by the runs that it was chosen with",
        tests=("tests/test_consistency_protocol.py::test_a_seed_that_was_used_before_is_refused",),
    ),
    Mutant(
        name="seeds that anybody chose",
        file="experiments/consistency/protocol.py",
        old="            if seed != wanted:\n",
        new="            if seed < 0:\n",
        why="seeds that follow from nothing may have been chosen by their results",
        tests=("tests/test_consistency_protocol.py::test_a_file_that_says_something_else_is_refused",),
    ),
    Mutant(
        name="records under any protocol are judged",
        file="experiments/consistency/cells.py",
        old="    return of_case(records, part=part, model=model, protocol=load_protocol().digest)\n",
        new="    return of_case(records, part=part, model=model)\n",
        why="a protocol that may change after the runs is none",
        tests=("tests/test_consistency.py::test_records_under_another_protocol_are_not_judged",),
    ),
    Mutant(
        name="a failed sequential run widens the margin",
        file="experiments/consistency/cells.py",
        old='    failed = sum(not _suffices(score, runs[0], "floor") for score in scores)\n',
        new="    failed = 0\n",
        why="one run at chance makes everything lie within two standard deviations",
        tests=("tests/test_consistency.py::test_sequential_runs_that_did_not_learn_make_nothing_equal",),
    ),
    Mutant(
        name="fewer runs than the protocol's",
        file="experiments/consistency/cells.py",
        old="    count = sum(seed in done for seed in seeds)\n",
        new="    count = len(seeds)\n",
        why="the power, and the right to stop, are those of the stated number",
        tests=("tests/test_consistency.py::test_all_of_the_protocols_runs_are_needed_and_no_others",),
    ),
    Mutant(
        name="initial weights from the run's own seed",
        file="experiments/consistency/training.py",
        old="    torch.manual_seed(setting.seed if setting.initial_seed is None else setting.initial_seed)\n",
        new="    torch.manual_seed(setting.seed)\n",
        why="runs that the protocol pairs would begin with different weights",
        tests=(
            "tests/test_consistency_training.py::"
            "test_paired_runs_begin_with_the_same_weights_and_see_other_data",
        ),
    ),
    Mutant(
        name="idx file cut off",
        file="experiments/consistency/tasks/idx.py",
        old="    if len(content) - header != size:\n",
        new="    if len(content) - header < 0:\n",
        why="a download that broke off would be trained on, or end in numpy's words",
        tests=("tests/test_idx.py::test_a_file_that_is_no_idx_file",),
    ),
)

COMPUTED = (
    Mutant(
        name="the stride control without its reduction",
        file="models/amoebanet/network.py",
        old="        stride = (2 if reduce else 1) * (2 if name == moved else 1)\n",
        new="        stride = 2 if reduce else 1\n",
        why="the map must end as small as the original's",
        tests=(
            "tests/test_models_moved_stride.py::"
            "test_maps_have_twice_the_side_up_to_the_layer_that_the_stride_moves_to",
        ),
    ),
    Mutant(
        name="a matched input reduced by two whatever the stride",
        file="models/amoebanet/network.py",
        old="            prev_stride=before,\n",
        new="",
        why="behind a stride of four the input of two cells before is four times as large",
        tests=(
            "tests/test_models_moved_stride.py::"
            "test_maps_have_twice_the_side_up_to_the_layer_that_the_stride_moves_to",
        ),
    ),
    Mutant(
        name="the auxiliary head always counted",
        file="experiments/computed/stride.py",
        old='        counted = head == "counted in"\n',
        new="        counted = True\n",
        why="whether it counts is not stated, so the range has both",
        tests=("tests/test_computed.py::test_the_range_goes_over_everything_that_is_not_stated",),
    ),
    Mutant(
        name="a part of the range with other settings moved along",
        file="experiments/computed/stride.py",
        old="ratios[*first[:place], value, *first[place + 1 :]]",
        new="ratios[*first[:place], value, *[v[-1] for v in list(allowed.values())[place + 1 :]]]",
        why="a part says what one setting does alone",
        tests=("tests/test_computed.py::test_the_range_goes_over_everything_that_is_not_stated",),
    ),
    Mutant(
        name="numbers of others among the paper's",
        file="experiments/computed/experiment.py",
        old='        source = "write-up" if table == WRITTEN else "paper"\n',
        new='        source = "paper"\n',
        why="what a web page claims counts nowhere among the paper's numbers",
        tests=(
            "tests/test_computed.py::test_every_number_answers_as_published_and_those_of_others_stand_apart",
        ),
    ),
    Mutant(
        name="a backward for nothing",
        file="experiments/computed/write_ups.py",
        old="    return float(forward / both)\n",
        new="    return float(forward / (both - forward))\n",
        why="the share is of forward and backward together",
        tests=("tests/test_computed.py::test_a_recomputed_forward_is_a_third_of_the_step",),
    ),
)

COMPILED = (
    Mutant(
        name="element-wise operations take memory",
        file="pipeline/memory/compiling/compiled.py",
        old="            if not self.fusible(node):\n",
        new="            if True:\n",
        why="a compiled layer would seem to need what it never makes",
        tests=("tests/test_compiled_memory.py::test_what_is_element_wise_leaves_no_tensor_of_its_own",),
    ),
    Mutant(
        name="compiled gradients stay after they are added",
        file="pipeline/memory/compiling/compiled.py",
        old="            events += [-number - 1 for number in sorted(gradients)]\n",
        new="            pass\n",
        why="every layer would leave a second copy of its gradients behind",
        tests=("tests/test_compiled_memory.py::test_every_story_ends_with_gradients_and_nothing_else",),
    ),
    Mutant(
        name="a compiled layer writes to its statistics",
        file="pipeline/memory/compiling/halves.py",
        old="        state = {name: buffer.clone() for name, buffer in zip(buffers, held, strict=True)}\n",
        new="        state = dict(zip(buffers, held, strict=True))\n",
        why="new statistics would be outputs of the graph and shift all others by their number",
        tests=("tests/test_compiled_memory.py::test_a_real_compiled_step_keeps_the_same_bytes[cell]",),
    ),
    Mutant(
        name="tiles of 16 rows",
        file="pipeline/memory/labels.py",
        old="_up(shape[low], 8)",
        new="_up(shape[low], 16)",
        why="memory would be padded twice as much",
        tests=("tests/test_labels.py::test_tiles_pad_the_two_dimensions_that_cost_least",),
    ),
    Mutant(
        name="a length is relabelled once",
        file="pipeline/memory/labels.py",
        old="                while rest and rest % label.prime == 0:\n",
        new="                if rest and rest % label.prime == 0:\n",
        why="weights, which are quadratic in the width, would grow linearly",
        tests=("tests/test_labels.py::test_a_relabelled_profile_is_that_of_the_other_size",),
    ),
)

TESTED_REASONS = (
    Mutant(
        name="rounding is no excuse",
        file="harness/judging/hypotheses.py",
        old="max(cell.target_rounding, NEAR * cell.target)",
        new="NEAR * cell.target",
        why="a hypothesis that meets a roughly printed number would not account for it",
        tests=("tests/test_hypotheses.py::test_a_number_is_accounted_for_within_its_rounding_or_a_tenth",),
    ),
    Mutant(
        name="fewer numbers rank higher",
        file="harness/judging/hypotheses.py",
        old="(-len(fit.ratios), fit.overall, order",
        new="(fit.overall, order",
        why="a hypothesis that says nothing of the hard cells would be the best",
        tests=("tests/test_hypotheses.py::test_a_hypothesis_without_some_numbers_comes_last_however_near",),
    ),
    Mutant(
        name="parts of unlike company",
        file="experiments/table1/published/settings.py",
        old="if len(values) == most]",
        new="if values]",
        why="what a setting does alone would contain what others do beside it",
        tests=("tests/test_table1_published.py::test_a_part_is_only_what_was_tried_with_the_same_others",),
    ),
    Mutant(
        name="the search stops one early",
        file="experiments/table1/published/capacity.py",
        old="    while high - low > 1:\n",
        new="    while high - low > 2:\n",
        why="the largest model that fits would be one step too small",
        tests=("tests/test_table1_published.py::test_the_last_that_holds_is_found_from_any_guess",),
    ),
    Mutant(
        name="the makespan as the cost",
        file="experiments/schedules/zero_bubble.py",
        old="return max(events[-1].end_s - events[0].start_s for events in ends)",
        new="return max(events[-1].end_s for events in ends)",
        why="a schedule that keeps its skew from step to step would have a bubble that nobody sees",
        tests=("tests/test_schedules_experiment.py::test_the_cost_of_zb_h2_is_a_span_and_not_the_makespan",),
    ),
    Mutant(
        name="graphs alive from F although recomputed",
        file="experiments/schedules/grid.py",
        old="alive += action.kind is (Kind.R if key in again else Kind.F)",
        new="alive += action.kind is Kind.F",
        why="recomputation would seem to save no memory",
        tests=(
            "tests/test_schedules_experiment.py"
            "::test_graphs_alive_are_counted_from_recomputation_to_the_weights",
        ),
    ),
    Mutant(
        name="the frontier keeps what is beaten",
        file="experiments/schedules/figures.py",
        old="if not best or point.memory < best[-1].memory:",
        new="if not best or point.memory <= best[-1].memory:",
        why="the line would join schedules that take longer for the same memory",
        tests=("tests/test_schedules_experiment.py::test_nothing_beats_a_schedule_on_the_frontier",),
    ),
)

STREAMS = "tests/test_streams.py::test_"

DEVICES = (
    Mutant(
        name="the receiver does not wait",
        file="pipeline/transfers.py",
        old="            stream.wait_event(mark.event)\n",
        new="            pass\n",
        why="a device would compute with what has not arrived, now and then",
        tests=(STREAMS + "every_use_of_memory_is_ordered_and_the_host_never_waits[gpipe]",),
    ),
    Mutant(
        name="a message given back while it is copied",
        file="pipeline/transfers.py",
        old="            devices.record_stream(tensor, self._leaving)\n",
        new="            pass\n",
        why="the sender's next tensor would be written over what the copy still reads",
        tests=(STREAMS + "every_use_of_memory_is_ordered_and_the_host_never_waits[1f1b]",),
    ),
    Mutant(
        name="copies among the receiver's computations",
        file="pipeline/transfers.py",
        old="devices.new_stream(target) if",
        new="devices.current_stream(target) if",
        why="a device would stand still until the sender of what it needs later has come to it",
        tests=(STREAMS + "devices_wait_for_nothing_but_what_they_receive[1f1b]",),
    ),
    Mutant(
        name="the first event happened when it was enqueued",
        file="pipeline/clock.py",
        old="    return (before_ns + after_ns) / 2 - event.elapsed_time(now) * 1e6\n",
        new="    return (before_ns + after_ns) / 2 - event.elapsed_time(now) * 0\n",
        why="devices that are behind the host would be shifted against each other",
        tests=(STREAMS + "a_device_that_is_behind_does_not_shift_the_timeline",),
    ),
    Mutant(
        name="whatever device is current",
        file="pipeline/steps.py",
        old="            if self._on_accelerators:\n",
        new="            if False:\n",
        why="a layer that names no device would put its tensors on the first one",
        tests=(STREAMS + "a_layer_that_names_no_device_works_on_its_stages",),
    ),
)

ON_DEVICES = (
    Mutant(
        name="rank 1 on the only GPU",
        file="pipeline/ranks/launch.py",
        old='if kind != "cpu" and count < num_processes:',
        new='if kind != "cpu" and count == 0:',
        why="processes would be given GPUs that are not there",
        tests=("tests/test_launch.py::test_more_processes_than_gpus_are_refused_before_any_starts",),
    ),
    Mutant(
        name="one core in front of a GPU",
        file="pipeline/ranks/launch.py",
        old='pin=pin and kind == "cpu"',
        new="pin=pin",
        why="the threads that feed a GPU would take turns on one core",
        tests=("tests/test_launch.py::test_a_process_in_front_of_a_gpu_keeps_all_cores",),
    ),
    Mutant(
        name="an absolute peak",
        file="experiments/table1/stage_alone.py",
        old="devices.peak_bytes(self._device) - self._baseline,",
        new="devices.peak_bytes(self._device),",
        why="a stage's peak would have the libraries' workspaces and earlier tensors in it",
        tests=("tests/test_stage_alone.py::test_an_allocators_absolute_numbers_become_those_of_the_stage",),
    ),
    Mutant(
        name="targets everywhere",
        file="experiments/table1/stage_alone.py",
        old="    del inputs, target  #",
        new="    del inputs  #",
        why="a stage would be charged with targets that only the last one holds",
        tests=("tests/test_stage_alone.py::test_an_allocators_absolute_numbers_become_those_of_the_stage",),
    ),
    Mutant(
        name="out of memory alone",
        file="experiments/measuring/configuration.py",
        old="    dist.all_gather_object(found, mine)\n",
        new="    found[0] = mine\n",
        why="a process that ran out of memory would leave the others waiting for it",
        tests=("tests/test_timing.py::test_all_processes_give_up_together",),
    ),
    Mutant(
        name="a rehearsal is a result",
        file="experiments/gpu/run.py",
        old="if taken.rehearsed == rehearsed}",
        new="if not rehearsed or taken.rehearsed}",
        why="steps would pass for done on a GPU that were rehearsed on a CPU",
        tests=("tests/test_gpu_steps.py::test_a_rehearsal_is_not_taken_for_the_real_thing",),
    ),
    Mutant(
        name="a graph's own gradients",
        file="pipeline/stage/graphed.py",
        old="None if t is None else t.clone() for t in self.results",
        new="t for t in self.results",
        why="a parameter's `.grad` would be memory that the next micro-batch overwrites",
        tests=(
            "tests/test_graphed_stages.py::test_gradients_are_the_plain_models_over_steps_and_uneven_micro_batches",
        ),
    ),
    Mutant(
        name="one slot for all micro-batches",
        file="pipeline/stage/graphed.py",
        old="        slot = free.pop()\n",
        new="        slot = free[-1]\n",
        why="micro-batches in flight would overwrite each other's activations",
        tests=(
            "tests/test_graphed_stages.py::test_gradients_are_the_plain_models_over_steps_and_uneven_micro_batches",
        ),
    ),
    Mutant(
        name="F is another program than R",
        file="pipeline/stage/layers.py",
        old="if torch.is_grad_enabled() or not any(needs_grad):",
        new="if True:",
        why="a recomputation would run another compiled form than the forward did, with other roundings",
        tests=("tests/test_compiled_stages.py::test_layers_of_a_kind_are_compiled_once",),
    ),
)

TREES = (
    Mutant(
        name="constants are never new",
        file="pipeline/ranks/distributed.py",
        old="            self._news.send(new, rank, target)\n            if new:\n",
        new="            self._news.send(False, rank, target)\n            if False:\n",
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
        file="pipeline/stage/kept.py",
        old="t.clone() if i in copied else t",
        new="t",
        why="the recomputation would begin with what the forward left",
        tests=("tests/test_in_place.py",),
    ),
    Mutant(
        name="every rank decides about its own gradients",
        file="pipeline/scaler.py",
        old="self._pipeline.gather(any(bool(flag) for flag in found.values()))",
        new="[any(bool(flag) for flag in found.values())]",
        why="some ranks would take a step that the others skip",
        tests=("tests/test_distributed.py::test_case[one_decision_about_scaled_gradients]",),
    ),
    Mutant(
        name="what is shared is what it was",
        file="pipeline/ranks/messages/sharing.py",
        old="        return Shared.FOLLOWS\n\n    def pass_on",
        new="        return Shared.FOLLOWS if latest is None else Shared.AS_BEFORE\n\n    def pass_on",
        why="later stages would use the mask of an earlier step",
        tests=("tests/test_distributed.py::test_case[arguments_that_layers_share]",),
    ),
    Mutant(
        name="what was in .grad is summed again",
        file="pipeline/ranks/tied.py",
        old="        for tie in self._ties:\n            tie.parameter.grad = None\n",
        new="        self._held = []\n",
        why="a tied weight would count the steps before twice where gradients add up",
        tests=("tests/test_distributed.py::test_case[tied_gradients_add_up]",),
    ),
    Mutant(
        name="the first use first",
        file="pipeline/ranks/tied.py",
        old="        for rank in tie.ranks:\n            found = mine",
        new="        for rank in reversed(tie.ranks):\n            found = mine",
        why="three uses of one weight would be added in another order than in a plain backward",
        tests=("tests/test_distributed.py::test_case[tied_weights_are_one_weight]",),
    ),
)

NCCL = "tests/test_nccl_pipeline.py::test_"

ACCELERATED = (
    Mutant(
        name="the gate is open",
        file="pipeline/ranks/messages/receiving.py",
        old="self._gate.passed < self._after[microbatch]",
        new="False",
        why="a wait for the device would wait for a message that needs what this rank has yet to enqueue",
        tests=(f"{NCCL}a_wait_for_the_device_ends_at_every_action[gpipe-True]",),
    ),
    Mutant(
        name="a send may wait for its own sender",
        file="pipeline/plan/posting.py",
        old="            late = _held_up(schedule, schedule.actions, of_ring, latest)\n",
        new="            late = set()\n",
        why="a ring with too few slots makes a wait for the device behind a send endless",
        tests=("tests/test_posting.py::test_a_send_waits_for_no_later_action_of_its_own_worker",),
    ),
    Mutant(
        name="closed without a wait for the device",
        file="pipeline/ranks/ties.py",
        old="        if not self.noticed:\n            self.synchronize()\n",
        new="",
        why="messages over NCCL that have not left would be taken back",
        tests=(f"{NCCL}closing_waits_until_everything_has_left",),
    ),
    Mutant(
        name="who takes leave is missed",
        file="pipeline/ranks/heartbeats.py",
        old="        if heard == _LEFT.encode():\n",
        new="        if heard is None:\n",
        why="a rank that is done first would end the pipeline of the others",
        tests=(f"{NCCL}a_rank_that_leaves_in_good_order_is_not_missed",),
    ),
    Mutant(
        name="conjugation lost on the way",
        file="pipeline/ranks/messages/sending.py",
        old=" or tensor.is_conj() or tensor.is_neg()",
        new="",
        why="the memory of a conjugated view is that of its original",
        tests=(f"{NCCL}types_that_nccl_has_no_name_for",),
    ),
)

HALVES_MODELLED = (
    Mutant(
        name="a bias' gradient is let go of before it is added up",
        file="pipeline/memory/split_footprint.py",
        old="            if self._users[name] == 0 and name not in kept:\n",
        new="            if self._users[name] == 0:\n",
        why="the gradient of the output is the bias' own until the engine has added it",
        tests=(SPLIT_MEMORY + "test_every_action_holds_what_is_modelled[many bytes-1]",),
    ),
    Mutant(
        name="I lets go of what W waits for",
        file="pipeline/memory/split_footprint.py",
        old=" and name not in self._awaited:\n",
        new=":\n",
        why="a storage at the end of a layer may be another layer's input in W",
        tests=(SPLIT_MEMORY + "test_every_action_holds_what_is_modelled[many bytes-1]",),
    ),
    Mutant(
        name="W takes the operations as the graph was walked",
        file="pipeline/stage/split.py",
        old="        single.sort(key=_ORDER, reverse=True)\n",
        new="",
        why="where branches meet, what is let go of when would depend on the walk",
        tests=(SPLIT_MEMORY + "test_every_action_holds_what_is_modelled[awkward-1]",),
    ),
    Mutant(
        name="messages wait with nobody",
        file="pipeline/memory/workers.py",
        old="            home[target].waiting += home[target].message_bytes(target, kind)\n",
        new="            home[target].waiting += 0\n",
        why="what has come and is not needed yet takes memory",
        tests=(SPLIT_MEMORY + "test_every_action_holds_what_is_modelled[awkward-3]",),
    ),
)

PLANNED = (
    Mutant(
        name="the loss is told in the end",
        file="pipeline/engine.py",
        old="elif (loss := stage.loss()) is not None:",
        new="elif action is program[-1].action and (loss := stage.loss()) is not None:",
        why="in a V everybody would wait for the longest row to learn a number",
        tests=("tests/test_engine.py::test_the_loss_is_told_after_the_last_forward",),
    ),
    Mutant(
        name="a chosen schedule may drain in reverse",
        file="pipeline/plan/schedules/generator.py",
        old="        if in_order and not _in_order(candidate):\n",
        new="        if not in_order and not _in_order(candidate):\n",
        why="the last bits of the weights would depend on what the clock said",
        tests=("tests/test_automatic.py::test_random_times",),
    ),
    Mutant(
        name="halves are joined whatever it takes",
        file="pipeline/plan/schedules/fusing.py",
        old="        if candidate_s <= makespan_s:\n",
        new="        if candidate_s:\n",
        why="the worker before would wait for the weights' half, too",
        tests=("tests/test_automatic.py::test_halves_stay_apart_where_the_one_is_waited_for",),
    ),
    Mutant(
        name="the warm-up is timed",
        file="pipeline/calibration.py",
        old="timed = self._timelines[WARM_UP_STEPS:]",
        new="timed = self._timelines[:WARM_UP_STEPS]",
        why="the choice would be made for what the first step of a process takes, and without B",
        tests=("tests/test_automatic.py::test_the_choice_is_made_for_what_was_timed",),
    ),
    Mutant(
        name="no place for the next input",
        file="pipeline/plan/ring.py",
        old="max(schedule.in_flight(stage - 1), in_flight + halved)",
        new="max(schedule.in_flight(stage - 1), in_flight)",
        why="an input that comes when a W ends would wait until its sender has computed on",
        tests=("tests/test_ring.py::test_inputs_of_split_schedules_find_a_place",),
    ),
    Mutant(
        name="only neighbours share memory",
        file="pipeline/ranks/ways.py",
        old="{end for pair in pairs if rank in pair for end in pair} - {rank}",
        new="{end for pair in pairs if rank in pair for end in pair if abs(end - rank) == 1}",
        why="what goes from the last rank to the first would take the network on one host",
        tests=("tests/test_ways.py::test_peers",),
    ),
)

OWN_MODELS = (
    Mutant(
        name="a parameter of the part before",
        file="pipeline/model/cut.py",
        old="not _anywhere(node) or i in {piece_of[user] for user in node.users}]",
        new="True]",
        why="a parameter that is read before a cut and used behind it would belong to two processes",
        tests=("tests/test_split.py::test_names_are_the_models_own[residual]",),
    ),
    Mutant(
        name="one mode for both",
        file="pipeline/model/traced.py",
        old="program = self._programs[self.training]",
        new="program = self._programs[True]",
        why="a functional dropout between modules would go on in evaluation",
        tests=("tests/test_split.py::test_evaluation_is_the_plain_models_and_training_comes_back[residual]",),
    ),
    Mutant(
        name="values kept to the end",
        file="pipeline/model/traced.py",
        old="            for index in done:\n                values[index] = None\n",
        new="",
        why="without a graph a part would hold all that its modules gave",
        tests=("tests/test_split.py::test_a_part_lets_go_of_what_it_no_longer_needs",),
    ),
    Mutant(
        name="the skip of the uppermost level",
        file="models/unet.py",
        old="return (state, state) if isinstance(state, Tensor) else (state[0], *state)",
        new="return (state, state) if isinstance(state, Tensor) else (*state, state[0])",
        why="each level would be joined with another one's way down",
        tests=("tests/test_models_shapes.py::test_the_skips_of_a_unet_return_in_reverse_and_are_padded",),
    ),
)

EXCHANGED = (
    Mutant(
        name="an altered file of records",
        file="harness/records/travel.py",
        old="if _entry(content) != manifest.files[name]:",
        new="if False:",
        why="what was edited would pass for what was measured, as far as the manifest goes",
        tests=("tests/test_travel.py::test_an_altered_file_is_refused_with_what_is_wrong",),
    ),
    Mutant(
        name="a name that leads out",
        file="harness/records/travel.py",
        old="if info.filename != MANIFEST and not _NAME.match(info.filename):",
        new="if False:",
        why="a file could name a place outside of the folder that it is unpacked into",
        tests=("tests/test_travel.py::test_no_name_leads_out_and_nothing_is_written",),
    ),
    Mutant(
        name="a control that is not looked at",
        file="experiments/report/plausible.py",
        old="off = not control.low <= 1 <= control.high",
        new="off = False",
        why="a case that the machine's noise has decided would be taken in as a result",
        tests=("tests/test_travel.py::test_what_cannot_be_true_is_refused",),
    ),
    Mutant(
        name="a process that died",
        file="experiments/engines/isolated.py",
        old='self.faults.append(Fault(f"{self._who(rank)} {_end_of(self.processes[rank])}"))',
        new="self.found[rank] = None",
        why="an engine that takes its process with it would pass for one that is done",
        tests=("tests/test_faulty_engines.py::test_what_becomes_of_a_bad_one_is_one_line",),
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *GRADIENTS, *RANDOMNESS, *STATISTICS, *BOUNDARIES, *LIFETIMES, *SCHEDULES, *MODELLED, *MODELS,
    *CONSISTENCY, *COMPUTED, *COMPILED, *TESTED_REASONS, *DEVICES, *ON_DEVICES, *TREES, *ACCELERATED,
    *HALVES_MODELLED, *PLANNED, *OWN_MODELS, *EXCHANGED,
)  # fmt: skip
