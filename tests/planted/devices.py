"""Devices that do not wait for one another, and steps of a GPU measured or recorded wrongly."""

from __future__ import annotations

from planted.mutant import Mutant

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
        file="pipeline/step.py",
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
        file="experiments/table1/real_steps.py",
        old="devices.peak_bytes(self._device) - self._baseline,",
        new="devices.peak_bytes(self._device),",
        why="a stage's peak would have the libraries' workspaces and earlier tensors in it",
        tests=("tests/test_stage_alone.py::test_an_allocators_absolute_numbers_become_those_of_the_stage",),
    ),
    Mutant(
        name="targets everywhere",
        file="experiments/table1/real_steps.py",
        old="    del inputs, target  #",
        new="    del inputs  #",
        why="a stage would be charged with targets that only the last one holds",
        tests=("tests/test_stage_alone.py::test_an_allocators_absolute_numbers_become_those_of_the_stage",),
    ),
    Mutant(
        name="out of memory alone",
        file="experiments/timed/steps.py",
        old="    dist.all_gather_object(found, mine)\n",
        new="    found[0] = mine\n",
        why="a process that ran out of memory would leave the others waiting for it",
        tests=("tests/test_timed_steps.py::test_all_processes_give_up_together",),
    ),
    Mutant(
        name="one more size than torch keeps",
        file="pipeline/stage/compiled.py",
        old="        except torch._dynamo.exc.FailOnRecompileLimitHit:\n",
        new="        except ZeroDivisionError:\n",
        why="the ninth size of a mini-batch would end the training",
        tests=(
            "tests/test_compiled_stages.py::test_more_sizes_than_torch_keeps_run_as_they_are_with_one_warning",
        ),
    ),
    Mutant(
        name="code is shared by what is printed",
        file="pipeline/stage/compiled.py",
        old="    return hash((signature(layer), devices))\n",
        new="    return hash((repr(layer), devices))\n",
        why="layers of other attributes would take the room for each other's sizes",
        tests=("tests/test_compiled_stages.py::test_layers_with_attributes_of_their_own_are_all_compiled",),
    ),
    Mutant(
        name="F is another program than R",
        file="pipeline/stage/layers.py",
        old="if torch.is_grad_enabled() or not any(needs_grad):",
        new="if True:",
        why="a recomputation would run another compiled form than the forward did, with other roundings",
        tests=("tests/test_compiled_stages.py::test_layers_of_a_kind_are_compiled_once",),
    ),
    Mutant(
        name="another engine takes ours along",
        file="experiments/on_gpus.py",
        old="        if len(job.engines) == 1:\n            raise\n",
        new="        raise\n",
        why="what ours took would be lost where torch's finds no memory beside it",
        tests=("tests/test_on_gpus.py::test_an_engine_that_fails_beside_ours_does_not_take_ours_along",),
    ),
    Mutant(
        name="a table for two cores on a GPU",
        file="experiments/commands/run.py",
        old='("full" if device == "cuda" else "short")',
        new='"short"',
        why="models of a few milliseconds time the host, and sentences would be judged by them",
        tests=("tests/test_cli.py::test_torch_is_asked_for_a_device_unless_it_is_built_for_none",),
    ),
    Mutant(
        name="the largest is looked for from below",
        file="experiments/table1/real_steps.py",
        old="    for more in (1, 0, *(",
        new="    for more in (0, 1, *(",
        why="that one layer more does not fit would not be known",
        tests=("tests/test_stage_alone.py::test_the_largest_model_is_the_first_that_fits_from_above",),
    ),
)
