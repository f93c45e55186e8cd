"""Schedules chosen for measured times: what is timed, what is joined, and when messages leave."""

from __future__ import annotations

from planted.mutant import Mutant

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
        file="pipeline/plan/schedules/calibration.py",
        old="timed = self._timelines[WARM_UP_STEPS:]",
        new="timed = self._timelines[:WARM_UP_STEPS]",
        why="the choice would be made for what the first step of a process takes, and without B",
        tests=("tests/test_automatic.py::test_the_choice_is_made_for_what_was_timed",),
    ),
    Mutant(
        name="no place for the next input",
        file="pipeline/plan/receiving/ring.py",
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
    Mutant(
        name="an action costs as often as it has layers",
        file="experiments/planning/costs/measured.py",
        old="    own = [max(0.0, each - action) for each in seconds]\n",
        new="    own = [max(0.0, each) for each in seconds]\n",
        why="a stage of many layers would be predicted too long, and small stages too short",
        tests=("tests/test_planning_costs.py::test_layers_and_what_an_action_costs_once_are_told_apart",),
    ),
    Mutant(
        name="jitter is drawn from one action",
        file="experiments/planning/predict.py",
        old="generator.choice(run[self.schedule.worker(action.stage) % len(run)])",
        new="run[self.schedule.worker(action.stage) % len(run)][0]",
        why="all actions of a step would be late together, and nobody would wait for anybody",
        tests=("tests/test_planning_predict.py::test_jitter_makes_a_pipeline_wait",),
    ),
    Mutant(
        name="regret by what was predicted",
        file="experiments/plan/measures.py",
        old="best = min(configurations, key=lambda each: each.measured_s)",
        new="best = min(configurations, key=lambda each: each.predicted_s)",
        why="a plan would be compared with itself and never regret anything",
        tests=(
            "tests/test_plan_measures.py::test_regret_is_what_the_first_choice_took_over_the_fastest_that_ran",
        ),
    ),
    Mutant(
        name="a worker holds all of the model",
        file="experiments/planning/searching/room.py",
        old="+ rest.optimizer_state) // self._schedule.num_workers\n",
        new="+ rest.optimizer_state)\n",
        why="grids would be left out whose cuts fit",
        tests=("tests/test_planning_search.py::test_no_cut_holds_less_than_the_least_of_its_grid",),
    ),
    Mutant(
        name="the first way of a grid is its best",
        file="experiments/plan/at_scale/case.py",
        old="        if grid in best and search.bound_s(way) >= best[grid].step_s:\n",
        new="        if grid in best:\n",
        why="the way with the lowest bound is often not the fastest",
        tests=("tests/test_plan_at_scale.py::test_of_each_grid_it_is_the_best_of_all_its_ways",),
    ),
    Mutant(
        name="the frontier goes by the search's steps",
        file="experiments/planning/answer.py",
        old="    known = {each.candidate: each for each in predictions}\n",
        new="    known: dict[Any, Prediction] = {}\n",
        why="a plan could be left out that is faster with less memory",
        tests=("tests/test_plan_verb.py::test_the_frontier_goes_by_predicted_steps",),
    ),
)
