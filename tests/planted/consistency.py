"""Training runs judged by another rule, other seeds or other data than the protocol says."""

from __future__ import annotations

from planted.mutant import Mutant

CONSISTENCY = (
    Mutant(
        name="an interval that reaches into the margin is enough",
        file="experiments/consistency/judging.py",
        old="    if high <= margin:\n",
        new="    if low <= margin:\n",
        why="whatever is too rough to tell apart would be called the same",
        tests=("tests/test_consistency.py::test_only_an_interval_inside_the_margin_is_reproduced",),
    ),
    Mutant(
        name="the standard deviation taken for exact",
        file="experiments/consistency/judging.py",
        old="_scale(runs, baseline_runs), baseline_runs - 1\n",
        new="_scale(runs, baseline_runs), 10**6\n",
        why="it is estimated from ten runs, and the margin is made of it",
        tests=(
            "tests/test_consistency_protocol.py::test_the_interval_is_that_of_repeated_experiments[3.0-6-10]",
        ),
    ),
    Mutant(
        name="the sequential mean taken for exact",
        file="experiments/consistency/judging.py",
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
        file="experiments/consistency/judging.py",
        old="                    if low <= seed <= high:\n",
        new="                    if low == seed == high:\n",
        why="a recipe could be judged by the runs that it was chosen with",
        tests=("tests/test_consistency_protocol.py::test_a_seed_that_was_used_before_is_refused",),
    ),
    Mutant(
        name="seeds that anybody chose",
        file="experiments/consistency/judging.py",
        old="                if seed != wanted:\n",
        new="                if seed < 0:\n",
        why="seeds that follow from nothing may have been chosen by their results",
        tests=("tests/test_consistency_protocol.py::test_a_file_that_says_something_else_is_refused",),
    ),
    Mutant(
        name="records under any protocol are judged",
        file="experiments/consistency/judging.py",
        old="    return of_case(records, part=part, model=model, protocol=load_protocol().digest)\n",
        new="    return of_case(records, part=part, model=model)\n",
        why="a protocol that may change after the runs is none",
        tests=("tests/test_consistency.py::test_records_under_another_protocol_are_not_judged",),
    ),
    Mutant(
        name="a failed sequential run widens the margin",
        file="experiments/consistency/judging.py",
        old='    failed = sum(not _suffices(score, runs[0], "floor") for score in scores)\n',
        new="    failed = 0\n",
        why="one run at chance makes everything lie within two standard deviations",
        tests=("tests/test_consistency.py::test_sequential_runs_that_did_not_learn_make_nothing_equal",),
    ),
    Mutant(
        name="fewer runs than the protocol's",
        file="experiments/consistency/judging.py",
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
        file="experiments/consistency/tasks.py",
        old="    if len(content) - header != size:\n",
        new="    if len(content) - header < 0:\n",
        why="a download that broke off would be trained on, or end in numpy's words",
        tests=("tests/test_idx.py::test_a_file_that_is_no_idx_file",),
    ),
)
