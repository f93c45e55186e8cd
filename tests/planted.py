"""Mistakes that no rule of `mutants` makes, and the tests that must notice each.

Each is one that a pipeline engine really makes somewhere: a wrong order, a lost or doubled gradient, other
random numbers in the recomputation, statistics counted twice, a cost left out of a model. A text that occurs
once in a function (or, without one, in a module) is replaced by another. What a rule makes of the same line
(a call or an operand left out, a condition that always holds, another constant) is left to the rules.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """In `place`, FILE::QUALIFIED.NAME, `old` becomes `new`; of the `tests`, pytest's ids, one must fail."""

    name: str
    place: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]


TRANSPARENT = (
    "tests/test_transparency.py::test_outputs_and_gradients_equal_the_plain_model[4-3-always-gpipe-False]",
)

MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        name="what was in .grad is lost",
        place="pipeline/stage/tied.py::Leaves.restore",
        old="parameter.grad = plus(held, total)",
        new="parameter.grad = total",
        why="gradients of a tied weight must add up over steps",
        tests=("tests/test_tied.py::test_what_was_in_grad_is_kept",),
    ),
    Mistake(
        name="layers that share a weight share its leaf",
        place="pipeline/stage/tied.py::Leaves.begin",
        old="leaves = {index: _leaf(parameter) for index in indices}",
        new="leaves = dict.fromkeys(indices, _leaf(parameter))",
        why="autograd then adds up the uses, in an order that follows the cuts",
        tests=(
            "tests/test_tied.py::test_weights_are_the_same_bits_for_every_number_of_stages[three uses-1f1b]",
        ),
    ),
    Mistake(
        name="outputs in reverse order",
        place="pipeline/stage/stage.py::Stage._forward_only",
        old="self.outputs[m] = unflatten(tensors, structure)",
        new="self.outputs[-1 - m] = unflatten(tensors, structure)",
        why="the micro-batches' outputs must be merged in the order of the examples",
        tests=("tests/test_transparency.py::test_forward_alone_equals_the_plain_model[3-3]",),
    ),
    Mistake(
        name="one accumulation dropped",
        place="pipeline/stage/stage.py::Stage.backward",
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
    Mistake(
        name="one gradient scaled by 1.01",
        place="pipeline/stage/stage.py::Stage.backward",
        old="            self._runner.in_backward(run_engine, roots, seeds)\n",
        new="""\
            self._runner.in_backward(run_engine, roots, seeds)
            if m == 0 and self.parameters and self.parameters[0].grad is not None:
                self.parameters[0].grad.mul_(1.01)
""",
        why="a comparison that is loose, or of sums over parameters, lets this through",
        tests=TRANSPARENT,
    ),
    Mistake(
        name="input gradient scaled by 1.01",
        place="pipeline/stage/tensors.py::_Entry.backward",
        old="ctx.exits[ctx.position] = gradient",
        new="ctx.exits[ctx.position] = gradient * 1.01",
        why="errors at a boundary show in the earlier stages alone",
        tests=TRANSPARENT,
    ),
    Mistake(
        name="one micro-batch detached",
        place="pipeline/stage/stage.py::Stage.forward",
        old="        return Message(tensors, structure, needs_grad, aliases)\n",
        new="""\
        needed = needs_grad if m != 1 else (False,) * len(tensors)
        return Message(tensors, structure, needed, aliases)
""",
        why="a boundary input that is no leaf cuts earlier stages off, without any error",
        tests=TRANSPARENT,
    ),
    Mistake(
        name="accumulation over steps dropped",
        place="pipeline/stage/stage.py::Stage.begin",
        old="        self.statistics.begin()\n",
        new="""\
        self.statistics.begin()
        for parameter in self.parameters:
            parameter.grad = None
""",
        why="several steps before one optimizer step must add up",
        tests=("tests/test_transparency.py::test_several_steps_before_the_optimizer_add_up",),
    ),
    Mistake(
        name="loss not weighted by its share",
        place="pipeline/stage/stage.py::Stage._roots",
        old="key = (self._shares[m], metadata.dtype)",
        new="key = (1 / len(self._shares), metadata.dtype)",
        why="with micro-batches of unequal size the mean of means is not the mean",
        tests=("tests/test_transparency.py::test_micro_batches_make_the_mean_over_the_mini_batch",),
    ),
    Mistake(
        name="weights' half of a split backward skipped once",
        place="pipeline/stage/stage.py::Stage.backward_weights",
        old="if weights is not None:",
        new="if weights is not None and m:",
        why="I and W together are one backward",
        tests=("tests/test_transparency.py::test_a_split_backward_computes_the_same",),
    ),
    Mistake(
        name="the first gradient copied",
        place="pipeline/stage/split_backward.py::Weights.accumulate",
        old="edges += (_entrance(weight), *bias)",
        new="edges += (weight, *bias)",
        why="a copy of every weight's gradient, at the fullest moment of a stage",
        tests=("tests/test_split_backward.py::test_the_first_gradient_is_not_copied[convolution]",),
    ),
    Mistake(
        name="weights' gradients under autocast",
        place="pipeline/stage/stage.py::Stage.backward_weights",
        old="self._runner.in_backward(weights.accumulate)",
        new="weights.accumulate()",
        why="a backward runs in the types of its forward, not in those that autocast would choose now",
        tests=("tests/test_split_backward.py::test_autocast_gives_the_same_bits_too",),
    ),
    Mistake(
        name="who may draw asked in the first step alone",
        place="pipeline/stage/layers.py::LayerRunner.begin",
        old="self._draws = tuple([may_draw",
        new="self._draws = self._draws if self._calls else tuple([may_draw",
        why="a hook that draws may come later, and would draw other numbers in the recomputation",
        tests=("tests/test_rng.py::test_who_begins_to_draw_later_draws_the_same_in_the_recomputation",),
    ),
    Mistake(
        name="recomputation with another stream",
        place="pipeline/stage/layers.py::LayerRunner.run",
        old="                    key = mix(key ^ (self._first_microbatch + m))\n",
        new="""\
                    again = m if recording else m + 1
                    key = mix(key ^ (self._first_microbatch + again))
""",
        why="the recomputation draws what another micro-batch drew",
        tests=TRANSPARENT,
    ),
    Mistake(
        name="evaluation counts as a step",
        place="pipeline/api.py::Pipeline.forward",
        old="        self._num_forwards += 1\n",
        new="""\
        self._num_forwards += 1
        self.num_steps += 1
""",
        why="evaluating must not change the training that follows",
        tests=("tests/test_rng.py::test_evaluation_between_steps_does_not_change_the_training",),
    ),
    Mistake(
        name="evaluation draws what training draws",
        place="pipeline/api.py",
        old="_FORWARD_ONLY = 1 << 62",
        new="_FORWARD_ONLY = 0",
        why="a forward in training mode is another sample of the masks, not the one trained with",
        tests=("tests/test_rng.py::test_forwards_draw_from_streams_of_their_own",),
    ),
    Mistake(
        name="averages moved by every micro-batch",
        place="pipeline/stage/batchnorm.py::Statistics.release",
        old="""\
        if self.recording:
            self.fold()
""",
        new="""\
        if self.recording:
            self.fold()
            self.commit()
""",
        why="GPipe tracks the averages of the mini-batch (section 2.2)",
        tests=(
            "tests/test_batchnorm.py::test_averages_move_once_by_the_whole_mini_batch[0.1-4-3-always-gpipe]",
        ),
    ),
    Mistake(
        name="two tensors of a boundary swapped",
        place="pipeline/transport.py::InProcess.receive",
        old="        message = self._activations.pop((edge.number, microbatch))\n",
        new="""\
        message = self._activations.pop((edge.number, microbatch))
        first, *rest = message.tensors
        if rest and first.shape == rest[0].shape and first.dtype == rest[0].dtype:
            message = message._replace(tensors=(rest[0], first, *rest[1:]))
""",
        why="a net and its skip have the same shape, so nothing else complains",
        tests=("tests/test_transparency.py::test_cuts_into_three_stages_at_every_layer[(2, 3)]",),
    ),
    Mistake(
        name="two gradients of a boundary swapped",
        place="pipeline/transport.py::InProcess.receive_back",
        old="        gradients = self._gradients.pop((edge.number, microbatch))\n",
        new="""\
        gradients = self._gradients.pop((edge.number, microbatch))
        if len(gradients) > 1 and None not in gradients[:2] and gradients[0].shape == gradients[1].shape:
            gradients = (gradients[1], gradients[0], *gradients[2:])
""",
        why="gradients have the shapes of their tensors, which are the same",
        tests=("tests/test_transparency.py::test_cuts_into_three_stages_at_every_layer[(2, 3)]",),
    ),
    Mistake(
        name="a repeated tensor travels twice",
        place="pipeline/stage/trees.py::flatten",
        old="positions.setdefault(id(tensor), len(distinct))",
        new="positions.setdefault(len(structure), len(distinct))",
        why="gradients that meet in it would be summed in another grouping, behind some cuts",
        tests=("tests/test_trees.py::test_a_repeated_tensor_travels_once",),
    ),
    Mistake(
        name="a repeated tensor charged twice",
        place="pipeline/memory/boundary.py::Boundary.of",
        old="first.setdefault(id(tensor), index)",
        new="first.setdefault(index, index)",
        why="the memory model must agree with the transport on what travels",
        tests=("tests/test_profile.py::test_boundaries_describe_what_travels",),
    ),
    Mistake(
        name="strides of single examples lost at a boundary",
        place="pipeline/stage/tensors.py::_Entry.forward",
        old="return tensor.detach()",
        new="return tensor.view_as(tensor)",
        why="masks follow the memory layout, so bits would depend on the cuts",
        tests=("tests/test_engine.py::test_strides_of_single_examples_survive_a_boundary",),
    ),
    Mistake(
        name="copies charged to their sender",
        place="pipeline/transport.py::InProcess._move",
        old="with self._observe_transfer(receiver):",
        new="with self._observe_transfer(max(receiver - 1, 0)):",
        why="the verification of the memory model rests on who owns what",
        tests=("tests/test_engine.py::test_copies_belong_to_their_receiver",),
    ),
    Mistake(
        name="targets in reverse order",
        place="pipeline/step.py::Steps.take",
        old='targets = divide(target, lengths, "the target")',
        new='targets = divide(target.flip(0), lengths, "the target")',
        why="every micro-batch needs its own targets",
        tests=TRANSPARENT,
    ),
    Mistake(
        name="smaller micro-batches first",
        place="pipeline/stage/trees.py::sizes",
        old="return (size + 1,) * larger + (size,) * (num_microbatches - larger)",
        new="return (size,) * (num_microbatches - larger) + (size + 1,) * larger",
        why="profiles are taken of the first micro-batch, which is to be the largest",
        tests=("tests/test_trees.py::test_split_gives_views_and_merge_undoes_it",),
    ),
    Mistake(
        name="outputs kept by the graph's owner",
        place="pipeline/stage/tensors.py::Kept.keep_graph",
        old="self.places, self.edges = ",
        new="""\
self.outputs = tuple(outputs)
        self.places, self.edges = \
""",
        why="an output lives on only if a layer saved it",
        tests=("tests/test_stage.py::test_graphs_and_inputs_alive_at_every_action[never-gpipe]",),
    ),
    Mistake(
        name="recomputation waits for the gradient",
        place="pipeline/plan/schedule.py::dependencies",
        old="            needs[action].append(Action(stage, Kind.F, microbatch))\n",
        new="""\
            needs[action].append(Action(stage, Kind.F, microbatch))
            if stage < schedule.num_stages - 1:
                needs[action].append(Action(stage + 1, Kind.B, microbatch))
""",
        why="GPipe recomputes while it waits; only the gradient's own action needs it",
        tests=("tests/test_schedule.py::test_a_recomputation_needs_nothing_but_its_forward",),
    ),
    Mistake(
        name="activations and gradients between two workers in one queue",
        place="pipeline/plan/schedule.py::channels",
        old="found.setdefault((source, target, transfer.target.kind is not Kind.F), [])",
        new="found.setdefault((source, target, False), [])",
        why="their orders differ in a V, and no schedule with one would be allowed",
        tests=("tests/test_named_schedules.py::test_every_named_schedule_is_valid[zb-v]",),
    ),
    Mistake(
        name="receives of several stages that don't wait for their turn",
        place="pipeline/ranks/ends.py::Lane.post",
        old="while position < len(order) and order[position].post_next():",
        new="while any(each.post_next() for each in order):",
        why="NCCL takes what comes for the receive that was posted first",
        tests=(
            "tests/test_ways.py::test_receives_are_posted_in_the_order_in_which_messages_leave[interleaved]",
        ),
    ),
    Mistake(
        name="late recomputation in the named schedules",
        place="pipeline/plan/schedule.py::recomputed",
        old="if action.kind in (Kind.B, Kind.I) and action.microbatch in again",
        new="if action.kind in (Kind.B, Kind.W) and action.microbatch in again",
        why="the first half of the backward needs the graph",
        tests=("tests/test_named_schedules.py::test_every_named_schedule_is_valid[zb-h1]",),
    ),
    Mistake(
        name="one stage of a worker at a time",
        place="pipeline/memory/peaks.py::Worker.memory",
        old="placed.adds(step)[1], *others]",
        new="placed.adds(step)[1]]",
        why="the other stages of a worker keep what they hold",
        tests=("tests/test_worker_memory.py::test_modelled_peaks_are_those_of_real_steps[never]",),
    ),
    Mistake(
        name="another stage's choice of what to recompute",
        place="pipeline/plan/schedule.py::Schedule.recomputes",
        old="return microbatch in self.recomputed[stage]",
        new="return microbatch in self.recomputed[-1]",
        why="each stage has a choice of its own",
        tests=("tests/test_remat.py::test_an_argument_of_the_pipeline",),
    ),
    Mistake(
        name="a file's recomputations taken for those of all stages",
        place="pipeline/plan/files.py::_schedule",
        old="recomputed[action.stage].append(action.microbatch)",
        new="recomputed[0].append(action.microbatch)",
        why="each stage has a choice of its own",
        tests=("tests/test_remat.py::test_a_file_says_what_is_recomputed",),
    ),
    Mistake(
        name="the memory of a worker ignores what is recomputed",
        place="pipeline/memory/counts.py::Walk.take",
        old="kind, again = action.kind, action.microbatch in self._again",
        new="kind, again = action.kind, bool(self._again)",
        why="a stage may keep the graphs of some micro-batches and make those of others again",
        tests=("tests/test_worker_memory.py::test_a_choice_under_a_cap_keeps_to_it_in_real_steps",),
    ),
    Mistake(
        name="a schedule's stages in the order of their workers",
        place="pipeline/step.py::prepare",
        old="actions = schedule.actions[workers.pop()] if len(workers) == 1 else",
        new="actions = schedule.actions[workers.pop()][::-1] if len(workers) == 1 else",
        why="a worker takes its row in order",
        tests=(
            "tests/test_transparency.py::test_outputs_and_gradients_equal_the_plain_model[1-1-always-zb-v-False]",
        ),
    ),
    Mistake(
        name="the search takes what recomputes most",
        place="planner/cuts.py::Choices.__init__",
        old="self._fits, self._remats = fits, sorted(remats, key=REMATS.index)",
        new="self._fits, self._remats = fits, sorted(remats, key=REMATS.index, reverse=True)",
        why="everything is recomputed, whatever fits",
        tests=("tests/test_cutting.py::test_only_what_must_is_recomputed",),
    ),
    Mistake(
        name="partition fills below the cap",
        place="pipeline/plan/partition.py::_fill",
        old="stop = min(bisect_right(prefix, prefix[start] + cap) - 1, num_layers - remaining)",
        new="stop = min(bisect_left(prefix, prefix[start] + cap) - 1, num_layers - remaining)",
        why="a stage that is exactly full is full, not over",
        tests=("tests/test_partition.py::test_bottleneck_equals_brute_force",),
    ),
    Mistake(
        name="SAME padding on the wrong side",
        place="models/amoebanet/modules.py::same_padding",
        old="return total // 2, total - total // 2",
        new="return total - total // 2, total // 2",
        why="the sampling grid of every strided operation moves by a pixel",
        tests=("tests/test_models_padding.py::test_pools_by_hand",),
    ),
    Mistake(
        name="a single value moves the averages that graphs have saved",
        place="models/amoebanet/modules.py::BatchNorm2d._follow",
        old="self.running_mean.data.lerp_(",
        new="self.running_mean.lerp_(",
        why="no mini-batch whose last micro-batch is one example could be trained without recomputation",
        tests=(
            "tests/test_models_parts.py::test_a_last_microbatch_of_one_example_trains_as_the_plain_model_does",
        ),
    ),
    Mistake(
        name="an interval that reaches into the margin is enough",
        place="experiments/consistency/judging.py::word_of",
        old="if high <= margin:",
        new="if low <= margin:",
        why="whatever is too rough to tell apart would be called the same",
        tests=("tests/test_consistency.py::test_only_an_interval_inside_the_margin_is_reproduced",),
    ),
    Mistake(
        name="copies among the receiver's computations",
        place="pipeline/devices.py::Way.__init__",
        old="new_stream(target) if",
        new="current_stream(target) if",
        why="a device would stand still until the sender of what it needs later has come to it",
        tests=("tests/test_streams.py::test_devices_wait_for_nothing_but_what_they_receive[1f1b]",),
    ),
    Mistake(
        name="code is shared by what is printed",
        place="pipeline/stage/compiled.py::_kind",
        old="return hash((signature(layer), devices))",
        new="return hash((repr(layer), devices))",
        why="layers of other attributes would take the room for each other's sizes",
        tests=("tests/test_compiled_stages.py::test_layers_with_attributes_of_their_own_are_all_compiled",),
    ),
    Mistake(
        name="every rank decides about its own gradients",
        place="pipeline/mesh/gradients.py::GradScaler._unscale_grads_",
        old="self._pipeline.gather(any(bool(flag) for flag in found.values()))",
        new="[any(bool(flag) for flag in found.values())]",
        why="some ranks would take a step that the others skip",
        tests=("tests/test_distributed.py::test_case[one_decision_about_scaled_gradients]",),
    ),
    Mistake(
        name="what is shared is what it was",
        place="pipeline/ranks/control.py::SharedArguments.announce",
        old="return Shared.FOLLOWS",
        new="return Shared.FOLLOWS if sent is None else Shared.AS_BEFORE",
        why="later stages would use the mask of an earlier step",
        tests=("tests/test_distributed.py::test_case[arguments_that_layers_share]",),
    ),
    Mistake(
        name="what was in .grad is summed again",
        place="pipeline/stage/tied.py::Leaves.begin",
        old="held, parameter.grad = parameter.grad, None",
        new="held = parameter.grad",
        why="a tied weight would count the steps before twice where gradients add up",
        tests=("tests/test_tied.py::test_what_was_in_grad_is_kept",),
    ),
    Mistake(
        name="ties by the layers' names",
        place="pipeline/arguments.py::Layout.__init__",
        old="if isinstance(layers, OwnLayers) else self.named",
        new="if not modules else self.named",
        why="checkpoints would not find a tied weight of a model that is no sequence",
        tests=(
            "tests/test_distributed.py::test_case[a_checkpoint_of_tied_weights_of_a_model_cut_by_its_graph]",
        ),
    ),
    Mistake(
        name="I lets go of what W waits for",
        place="pipeline/memory/stage_bytes.py::Played.backward",
        old="if holders[name] == 0:",
        new="if holders[name] == 0 or left is not None:",
        why="a storage at the end of a layer may be another layer's input in W",
        tests=("tests/test_split_memory.py::test_every_action_holds_what_is_modelled[many bytes-1]",),
    ),
    Mistake(
        name="the loss is told in the end",
        place="pipeline/step.py::_take",
        old="elif (loss := stage.loss()) is not None:",
        new="elif position == len(clock._actions) - 1 and (loss := stage.loss()) is not None:",
        why="in a V everybody would wait for the longest row to learn a number",
        tests=("tests/test_engine.py::test_the_loss_is_told_after_the_last_forward",),
    ),
    Mistake(
        name="only neighbours share memory",
        place="pipeline/ranks/connect.py::peers",
        old="{end for pair in pairs if rank in pair for end in pair} - {rank}",
        new="{end for pair in pairs if rank in pair for end in pair if abs(end - rank) == 1}",
        why="what goes from the last rank to the first would take the network on one host",
        tests=("tests/test_ways.py::test_peers",),
    ),
    Mistake(
        name="jitter is drawn from one action",
        place="planner/predict.py::Layout.drawn_s",
        old="generator.choice(run[self.schedule.worker(action.stage) % len(run)])",
        new="run[self.schedule.worker(action.stage) % len(run)][0]",
        why="all actions of a step would be late together, and nobody would wait for anybody",
        tests=("tests/test_planning_predict.py::test_jitter_makes_a_pipeline_wait",),
    ),
    Mistake(
        name="regret by what was predicted",
        place="experiments/plan/rules.py::regret",
        old="best = min(configurations, key=lambda each: each.measured_s)",
        new="best = min(configurations, key=lambda each: each.predicted_s)",
        why="a plan would be compared with itself and never regret anything",
        tests=(
            "tests/test_plan_measures.py::test_regret_is_what_the_first_choice_took_over_the_fastest_that_ran",
        ),
    ),
    Mistake(
        name="the first way of a group is its best",
        place="planner/search.py::Search.run",
        old="if bound_s >= below_s:",
        new="if group in best:",
        why="the way with the lowest bound is often not the fastest",
        tests=("tests/test_plan_at_scale.py::test_of_each_grid_it_is_the_best_of_all_its_ways",),
    ),
    Mistake(
        name="one mode for both",
        place="pipeline/model/split.py::Traced.forward",
        old="program = self._programs[self.training]",
        new="program = self._programs[True]",
        why="a functional dropout between modules would go on in evaluation",
        tests=("tests/test_split.py::test_evaluation_is_the_plain_models_and_training_comes_back[residual]",),
    ),
    Mistake(
        name="the skip of the uppermost level",
        place="models/unet.py::Stash.forward",
        old="return (state, state) if isinstance(state, Tensor) else (state[0], *state)",
        new="return (state, state) if isinstance(state, Tensor) else (*state, state[0])",
        why="each level would be joined with another one's way down",
        tests=("tests/test_models_shapes.py::test_the_skips_of_a_unet_return_in_reverse_and_are_padded",),
    ),
    Mistake(
        name="a tied weight's gradients are one",
        place="pipeline/memory/workers.py::without",
        old="summed_gradient_bytes=stage.summed_gradient_bytes + num_bytes * trained,",
        new="gradient_bytes=stage.gradient_bytes - num_bytes,",
        why="each use has its own until the step ends, and a plan would not fit that was said to",
        tests=("tests/test_peaks.py::test_modelled_peaks_are_those_of_real_steps[tied-1-gpipe-always-sgd]",),
    ),
    Mistake(
        name="a process that died",
        place="experiments/engines/isolated.py::_results",
        old='kind, content = "fault", Fault(f"{who[rank]} {_end_of(processes[rank])}")',
        new='kind, content = "done", None',
        why="an engine that takes its process with it would pass for one that is done",
        tests=("tests/test_faulty_engines.py::test_what_becomes_of_a_bad_one_is_one_line",),
    ),
    Mistake(
        name="an interrupt reaches a process that is starting",
        place="harness/signals.py::starting",
        old="before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})",
        new="before = signal.pthread_sigmask(signal.SIG_BLOCK, set())",
        why="Ctrl-C would show a traceback out of the middle of an import for every process",
        tests=("tests/test_signals.py::test_an_interrupt_waits_for_a_process_that_is_starting",),
    ),
    Mistake(
        name="portals sent twice",
        place="pipeline/transport.py::PortalTransport.send",
        old="            self.inner.send(line, microbatch, portals)\n",
        new="""\
            self.inner.send(line, microbatch, portals)
            self.inner.send(line, microbatch, portals)
""",
        why="a skip is sent once, past the stages between",
        tests=("tests/test_portals.py::test_a_skip_over_stages_is_sent_once_and_so_is_its_gradient",),
    ),
    Mistake(
        name="portals that wait left out of the memory model",
        place="pipeline/memory/cut.py::portal_memory",
        old="return memories(found, schedule, optimizer, None, lines, messages)",
        new="return memories(found, schedule, optimizer, None, (), messages)",
        why="a large portal waits with the stage that pops it",
        tests=(
            "tests/test_peaks.py::test_modelled_peaks_are_those_of_real_steps[wide portal-3-1f1b-always-sgd]",
        ),
    ),
    Mistake(
        name="receives of portals posted at once on accelerators",
        place="pipeline/ranks/distributed.py::PointToPoint._take_ends",
        old="Lane(way, source, self._progress,",
        new="Lane(way, source, None,",
        why="a kernel that waits for what this rank has yet to send stops whoever waits for the device",
        tests=(
            "tests/test_nccl_pipeline.py::test_a_wait_for_the_device_ends_at_every_action[gpipe-False-crossing]",
        ),
    ),
    Mistake(
        name="one connection for all lines over NCCL",
        place="pipeline/ranks/connect.py::open_connections",
        old="= session.connect(name, near, accelerated=True)",
        new="= [*portals.values(), session.connect(name, near, accelerated=True)][0]",
        why="nothing tells messages of two lines apart there but their order",
        tests=("tests/test_nccl_pipeline.py::test_the_first_message_of_a_step_waits_for_no_host",),
    ),
    Mistake(
        name="gathered parameters stay whole in the optimizer's step",
        place="pipeline/memory/grids.py::grid_peak_bytes",
        old="rests = [stage.rest for stage in stages]",
        new="rests = [stage.step for stage in stages]",
        why="ZeRO would look as if it saved nothing where the optimizer decides",
        tests=("tests/test_grid_memory.py::test_modelled_peaks_are_those_of_real_steps",),
    ),
    Mistake(
        name="W leaves its gradients where nobody sums them",
        place="pipeline/mesh/sharding.py::Shards.after",
        old="if last and self._zero == 2:",
        new="if last and self._zero == 2 and kind is Kind.B:",
        why="no hook of torch's ends a W, so that parameters would have no gradients at all",
        tests=("tests/test_sharding.py::test_case[gradients_of_shards]",),
    ),
    Mistake(
        name="a norm counts this rank's part only",
        place="pipeline/mesh/gradients.py::_norms",
        old="mine = _together(torch.stack(parts), norm_type)",
        new="mine = _together(torch.stack(parts[:1]), norm_type)",
        why="gradients would be clipped by the norm of one part",
        tests=("tests/test_sharding.py::test_case[norms_of_parts]",),
    ),
    Mistake(
        name="shares of a replica's own batch",
        place="pipeline/mesh/collectives.py::GlobalShares.__getitem__",
        old="examples = int(self._examples)",
        new="examples = sum(self._lengths)",
        why="a sum over replicas of means is no mean: too large by their number, or by more",
        tests=("tests/test_mesh.py::test_case[gradients_of_earlier_steps_count_once]",),
    ),
    Mistake(
        name="the loss of one replica",
        place="pipeline/mesh/reduce.py::Joint.finish",
        old="of_all = collectives.sum(loss)",
        new="of_all = collectives.sum(loss.clone())",
        why="what is shown would be a part of the mean over the batch",
        tests=("tests/test_mesh.py::test_case[gradients_of_earlier_steps_count_once]",),
    ),
    Mistake(
        name="sums of the parameters of the step before",
        place="pipeline/mesh/reduce.py::Joint.begin",
        old="stage.look(loss_fn)",
        new="stage.look(None)",
        why="the gradients of a loss that is a module would stay each replica's own",
        tests=("tests/test_mesh.py::test_case[parameters_that_come_later]",),
    ),
    Mistake(
        name="another engine takes ours along",
        place="experiments/on_gpus.py",
        old="        if len(job.engines) == 1:\n            raise\n",
        new="        raise\n",
        why="what ours took would be lost where torch's finds no memory beside it",
        tests=("tests/test_on_gpus.py::test_an_engine_that_fails_beside_ours_does_not_take_ours_along",),
    ),
    Mistake(
        name="a table for two cores on a GPU",
        place="experiments/commands/run.py",
        old='("full" if device == "cuda" else "short")',
        new='"short"',
        why="models of a few milliseconds time the host, and sentences would be judged by them",
        tests=("tests/test_cli.py::test_torch_is_asked_for_a_device_unless_it_is_built_for_none",),
    ),
    Mistake(
        name="the largest is looked for from below",
        place="experiments/table1/real_steps.py",
        old="    for more in (1, 0, *(",
        new="    for more in (0, 1, *(",
        why="that one layer more does not fit would not be known",
        tests=("tests/test_stage_alone.py::test_the_largest_model_is_the_first_that_fits_from_above",),
    ),
    Mistake(
        name="nobody watches a device that waits",
        place="pipeline/ranks/failure.py::Job._look",
        old="(late := self.awaited.overdue(limit_s)) is not None:",
        new="(late := self.awaited.overdue(1e9)) is not None:",
        why="a rank that stops would hold up the devices of all others for ever",
        tests=("tests/test_nccl_pipeline.py::test_a_rank_that_stops_is_named_in_time[1F2]",),
    ),
)
