"""Layers that compute something else than the published models, and models cut into parts."""

from __future__ import annotations

from planted.mutant import Mutant

PADDING = ("tests/test_models_padding.py::test_pools_by_hand",)

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
        name="a single value moves the averages that graphs have saved",
        file="models/amoebanet/modules.py",
        old="        self.running_mean.data.lerp_(",
        new="        self.running_mean.lerp_(",
        why="no mini-batch whose last micro-batch is one example could be trained without recomputation",
        tests=(
            "tests/test_models_batchnorm.py::"
            "test_a_last_microbatch_of_one_example_trains_as_the_plain_model_does",
        ),
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

OWN_MODELS = (
    Mutant(
        name="a parameter of the part before",
        file="pipeline/model/split.py",
        old="not _anywhere(n) or i in {self._piece_of[user] for user in n.users}]",
        new="True]",
        why="a parameter that is read before a cut and used behind it would belong to two processes",
        tests=("tests/test_split.py::test_names_are_the_models_own[residual]",),
    ),
    Mutant(
        name="one mode for both",
        file="pipeline/model/split.py",
        old="program = self._programs[self.training]",
        new="program = self._programs[True]",
        why="a functional dropout between modules would go on in evaluation",
        tests=("tests/test_split.py::test_evaluation_is_the_plain_models_and_training_comes_back[residual]",),
    ),
    Mutant(
        name="values kept to the end",
        file="pipeline/model/split.py",
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
    Mutant(
        name="a skip in every stage that it passes",
        file="experiments/predicted/torchgpipe.py",
        old="    count = 1 + num_skips\n",
        new="    count = len(entering.tensors)\n",
        why="torchgpipe sends it past the stages between",
        tests=(
            "tests/test_torchgpipe_unet.py::test_a_stage_between_holds_nothing_of_the_skips_that_pass_it",
        ),
    ),
    Mutant(
        name="advice that does not help",
        file="planner/infeasible.py",
        old="        return least is not None and least.peak <= changed.usable_bytes\n",
        new="        return least is not None\n",
        why="whoever follows it would be refused again",
        tests=("tests/test_size_models.py::test_what_does_not_fit_says_where_and_what_would_do",),
    ),
    Mutant(
        name="the most micro-batches where fewer would do",
        file="experiments/commands/size.py",
        old="        if fewer.peak <= request.usable_bytes:\n",
        new="        if False:\n",
        why="smaller micro-batches are slower",
        tests=("tests/test_size_models.py::test_the_fewest_microbatches_that_fit",),
    ),
    Mutant(
        name="a tied weight's gradients are one",
        file="pipeline/memory/workers.py",
        old="        summed_gradient_bytes=stage.summed_gradient_bytes + num_bytes * trained,\n",
        new="        gradient_bytes=stage.gradient_bytes - num_bytes,\n",
        why="each use has its own until the step ends, and a plan would not fit that was said to",
        tests=("tests/test_tied_memory.py::test_a_tie_within_a_stage[gpipe-always-sgd]",),
    ),
    Mutant(
        name="a script forgets to divide the layers",
        file="planner/answer.py",
        old="        *(_divided(source) if candidate.tp > 1 else []),\n",
        new="",
        why="every rank of tp would compute all of every layer, and call it a plan",
        tests=("tests/test_plan_verb.py::test_ones_own_plan_of_tensor_parallelism_is_applied",),
    ),
)
