"""Predictions of the paper's numbers, and the reasons for differences, that leave something out."""

from __future__ import annotations

from planted.mutant import Mutant

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
        file="experiments/computed.py",
        old='        counted = head == "counted in"\n',
        new="        counted = True\n",
        why="whether it counts is not stated, so the range has both",
        tests=("tests/test_computed.py::test_the_range_goes_over_everything_that_is_not_stated",),
    ),
    Mutant(
        name="a part of the range with other settings moved along",
        file="experiments/computed.py",
        old="ratios[*middle[:place], value, *middle[place + 1 :]]",
        new="ratios[*middle[:place], value, *[v[-1] for v in list(allowed.values())[place + 1 :]]]",
        why="a part says what one setting does alone",
        tests=("tests/test_computed.py::test_the_range_goes_over_everything_that_is_not_stated",),
    ),
)

TESTED_REASONS = (
    Mutant(
        name="rounding is no excuse",
        file="harness/hypotheses.py",
        old="if hypothesis.share(cell) >= SLIVER:",
        new="if abs(value - cell.target) <= 0.1 * cell.target:",
        why="a setting would account for a number that the verdict says it does not meet",
        tests=(
            "tests/test_hypotheses.py"
            "::test_a_number_is_accounted_for_where_the_verdict_on_it_alone_would_be_reproduced",
        ),
    ),
    Mutant(
        name="a sliver reproduces",
        file="harness/verdict.py",
        old="met is not None and met < SLIVER",
        new="met is not None and met < 0",
        why="one setting of a hundred would be enough",
        tests=(
            "tests/test_harness_verdict.py"
            "::test_a_range_that_meets_a_number_under_a_sliver_of_its_settings_decides_nothing",
        ),
    ),
    Mutant(
        name="what fits nowhere bars every setting",
        file="experiments/table1/settings.py",
        old='fitting = [each for each in columns if "1" in each]',
        new="fitting = columns",
        why="a model that fits under no setting would make all settings count again",
        tests=(
            "tests/test_table1_published.py"
            "::test_a_model_that_fits_under_no_combination_tells_nothing_of_the_others",
        ),
    ),
    Mutant(
        name="jointly by any cell",
        file="harness/hypotheses.py",
        old="        return max(\n            _apart(",
        new="        return min(\n            _apart(",
        why="a setting that gives one cell of a table would give the table",
        tests=("tests/test_joint.py::test_every_cell_may_be_met_by_a_setting_of_its_own_and_all_by_none",),
    ),
    Mutant(
        name="a batch that fits again is not taken",
        file="experiments/predicted/tables.py",
        old="best = np.where(fits[..., batch] & np.isfinite(rates[..., batch]), rates[..., batch], best)",
        new="best = np.where(fits[..., batch] & np.isnan(best), rates[..., batch], best)",
        why="a nominal batch would be reduced to the smallest that fits, not the largest",
        tests=("tests/test_predicted.py::test_a_batch_that_does_not_fit_is_reduced_as_far_as_it_takes",),
    ),
    Mutant(
        name="fewer numbers rank higher",
        file="harness/hypotheses.py",
        old="(-len(fit.ratios), fit.overall, order",
        new="(fit.overall, order",
        why="a hypothesis that says nothing of the hard cells would be the best",
        tests=("tests/test_hypotheses.py::test_a_hypothesis_without_some_numbers_comes_last_however_near",),
    ),
    Mutant(
        name="parts of unlike company",
        file="experiments/table1/settings.py",
        old="if len(values) == most]",
        new="if values]",
        why="what a setting does alone would contain what others do beside it",
        tests=("tests/test_table1_published.py::test_a_part_is_only_what_was_tried_with_the_same_others",),
    ),
    Mutant(
        name="the search stops one early",
        file="experiments/table1/largest.py",
        old="    while high - low > 1:\n",
        new="    while high - low > 2:\n",
        why="the largest model that fits would be one step too small",
        tests=("tests/test_table1_published.py::test_the_last_that_holds_is_found_from_any_guess",),
    ),
    Mutant(
        name="the makespan as the cost",
        file="experiments/schedules/published.py",
        old="return max(events[-1].end_s - events[0].start_s for events in ends)",
        new="return max(events[-1].end_s for events in ends)",
        why="a schedule that keeps its skew from step to step would have a bubble that nobody sees",
        tests=("tests/test_schedules_experiment.py::test_the_cost_of_zb_h2_is_a_span_and_not_the_makespan",),
    ),
    Mutant(
        name="graphs alive from F although recomputed",
        file="pipeline/plan/schedule.py",
        old="return _either(row, Kind.R, Kind.F)",
        new="return [action for action in row if action.kind is Kind.F]",
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
