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
        old="            self._runner.run_backward(roots, seeds, keep_graph=False)\n",
        new="""\
            last = self._parameters[-1] if m == 1 and self._parameters else None
            kept = None if last is None or last.grad is None else last.grad.clone()
            self._runner.run_backward(roots, seeds, keep_graph=False)
            if last is not None:
                last.grad = kept
""",
        why="one micro-batch's gradient of one tensor of each stage is lost, and nothing else",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="one gradient scaled by 1.01",
        file="pipeline/stage/stage.py",
        old="            self._runner.run_backward(roots, seeds, keep_graph=False)\n",
        new="""\
            self._runner.run_backward(roots, seeds, keep_graph=False)
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
        file="pipeline/api.py",
        old="shares=tuple(size / plan.examples for",
        new="shares=tuple(size * num_microbatches / plan.examples for",
        why="the step is M times too long; an optimizer that normalizes would hide it",
        tests=TRANSPARENT,
    ),
    Mutant(
        name="weights' half of a split backward skipped once",
        file="pipeline/stage/stage.py",
        old="        if weights and edges:\n",
        new="        if weights and edges and m:\n",
        why="I and W together are one backward",
        tests=("tests/test_engine.py::test_a_split_backward_computes_the_same",),
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
        old="            self._needs_grad.clear()\n        self._runner",
        new="        self._runner",
        why="unfreezing a parameter changes what travels back",
        tests=("tests/test_transparency.py::test_stages_without_anything_to_train[frozen0-always]",),
    ),
    Mutant(
        name="autocast during the backward",
        file="pipeline/stage/layers.py",
        old="            if not self._autocast:\n                run(",
        new="            if True:\n                run(",
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
        old="unflatten(state.enter(), state.structure), recording=False)",
        new="unflatten(state.enter(), state.structure), recording=True)",
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
        file="pipeline/api.py",
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
        old="        state.drop()\n        if roots:\n",
        new="        if roots:\n",
        why="memory is freed at the earliest action",
        tests=ALIVE,
    ),
    Mutant(
        name="outputs kept by the graph's owner",
        file="pipeline/stage/kept.py",
        old="        self.places = tuple(",
        new="        self.gradients = tuple(outputs)\n        self.places = tuple(",
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
        file="pipeline/plan/schedule.py",
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
        file="pipeline/plan/replay.py",
        old="        self.early_recompute = early_recompute\n",
        new="        self.early_recompute = False\n",
        why="K - 1 forwards more per step",
        tests=("tests/test_schedule.py::test_length_of_a_step_in_slots[4-16-76-73-72]",),
    ),
    Mutant(
        name="the earliest stage that can go on comes next",
        file="pipeline/plan/schedule.py",
        old="            stage = waiting[-1]\n",
        new="            stage = waiting[0]\n",
        why="with all stages in one process the last that can go on holds the most",
        tests=("tests/test_schedule.py::test_one_worker_holds_one_recomputed_micro_batch_at_a_time",),
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
        old="            boundary=user_bytes + boundary,\n",
        new="            boundary=user_bytes,\n",
        why="M kept inputs are what re-materialization costs",
        tests=MEMORY,
    ),
    Mutant(
        name="memory without the gradients",
        file="pipeline/memory/peaks.py",
        old="            stage.gradient_bytes if demand.after_first_backward else 0,\n",
        new="            0,\n",
        why="gradients are there from the first backward on",
        tests=("tests/test_memory.py::test_gradients_exist_from_the_first_backward_on_and_none_before",),
    ),
    Mutant(
        name="memory without the graphs in flight",
        file="pipeline/memory/peaks.py",
        old="            demand.graphs * stage.saved_bytes,\n",
        new="            0,\n",
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
        old="x[:, :, 1::2, 1::2]",
        new="x[:, :, ::2, ::2]",
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

MUTANTS: tuple[Mutant, ...] = (
    *GRADIENTS, *RANDOMNESS, *STATISTICS, *BOUNDARIES, *LIFETIMES, *SCHEDULES, *MODELLED, *MODELS,
)  # fmt: skip
