"""Batch normalization's averages: moved twice, by the wrong share, or in a recomputation."""

from __future__ import annotations

from planted.mutant import Mutant

AVERAGES = ("tests/test_batchnorm.py::test_averages_move_once_by_the_whole_mini_batch[0.1-4-3-always-gpipe]",)

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
