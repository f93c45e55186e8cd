"""Random streams that depend on more, or less, than the layer and the micro-batch; what a recomputation
must see again.
"""

from __future__ import annotations

from planted.mutant import TRANSPARENT, Mutant

MASKS = ("tests/test_rng.py::test_masks_depend_on_layer_and_micro_batch_alone[2-always-gpipe]",)

RANDOMNESS = (
    Mutant(
        name="one random stream for all micro-batches",
        file="pipeline/stage/layers.py",
        old="                    generators.seed(mix(key ^ (self._first_microbatch + m)))\n",
        new="                    generators.seed(mix(key))\n",
        why="all micro-batches would drop the same units",
        tests=MASKS,
    ),
    Mutant(
        name="who may draw asked in the first step alone",
        file="pipeline/stage/layers.py",
        old="        self._draws = tuple([may_draw",
        new="        self._draws = self._draws if self._calls else tuple([may_draw",
        why="a hook that draws may come later, and would draw other numbers in the recomputation",
        tests=("tests/test_rng.py::test_who_begins_to_draw_later_draws_the_same_in_the_recomputation",),
    ),
    Mutant(
        name="recomputation not seeded",
        file="pipeline/stage/layers.py",
        old="                    generators.seed(mix(key ^ (self._first_microbatch + m)))\n",
        new="                    if recording:\n"
        "                        generators.seed(mix(key ^ (self._first_microbatch + m)))\n",
        why="the recomputation draws what the generator happens to hold",
        tests=MASKS,
    ),
    Mutant(
        name="recomputation with another stream",
        file="pipeline/stage/layers.py",
        old="                    generators.seed(mix(key ^ (self._first_microbatch + m)))\n",
        new="                    again = m if recording else m + 1\n"
        "                    generators.seed(mix(key ^ (self._first_microbatch + again)))\n",
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
        old="self._generators.seed(mix(self._loss_key ^ (self._first_microbatch + m)))",
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
        old='    pipeline.num_steps = int(there["num_steps"])\n',
        new="",
        why="the number of steps keys the random streams, so it belongs to a checkpoint",
        tests=("tests/test_bitwise.py::test_a_saved_run_continues_with_another_number_of_stages",),
    ),
)
