"""Mistakes with portals: sent again, added up wrongly, let go too early, or counted in the wrong place."""

from __future__ import annotations

from planted.mutant import Mutant

TESTS = "tests/test_portals.py::"

PORTALS = (
    Mutant(
        name="gradients of portals replace one another",
        file="pipeline/transport.py",
        old="gradient if before is None else before + gradient",
        new="gradient",
        why="a stash with several poppers gets the sum",
        tests=(TESTS + "test_a_stash_that_several_layers_pop[4-1f1b-always]",),
    ),
    Mutant(
        name="portals sent twice",
        file="pipeline/transport.py",
        old="            self.inner.send(edge, microbatch, portals)\n",
        new="            self.inner.send(edge, microbatch, portals)\n" * 2,
        why="a skip is sent once, past the stages between",
        tests=(TESTS + "test_a_skip_over_stages_is_sent_once_and_so_is_its_gradient",),
    ),
    Mutant(
        name="a portal that nobody pops",
        file="pipeline/plan/portals.py",
        old="        if name not in popped:",
        new="        if False:",
        why="its messages would be received by nobody",
        tests=(TESTS + "test_what_is_no_portal_is_refused_before_any_step",),
    ),
    Mutant(
        name="a change in place between stash and pop unseen",
        file="pipeline/stage/portals.py",
        old="        if version(tensor) != before:",
        new="        if False:",
        why="the cuts would decide whether it shows",
        tests=(TESTS + "test_a_tensor_that_is_overwritten_on_the_way_is_refused[1]",),
    ),
    Mutant(
        name="portals that wait left out of the memory model",
        file="pipeline/memory/portals.py",
        old="    return memories(found, schedule, optimizer, None, lines, messages)\n",
        new="    return memories(found, schedule, optimizer, None, (), messages)\n",
        why="a large portal waits with the stage that pops it",
        tests=("tests/test_portal_memory.py::test_a_large_portal_waits_where_it_is_popped[always]",),
    ),
    Mutant(
        name="receives of portals posted at once on accelerators",
        file="pipeline/ranks/distributed.py",
        old="Lane(way, source, self._progress,",
        new="Lane(way, source, None,",
        why="a kernel that waits for what this rank has yet to send stops whoever waits for the device",
        tests=("tests/test_nccl_portals.py::test_a_wait_for_the_device_ends_at_every_action[gpipe-False-0]",),
    ),
    Mutant(
        name="one connection for all lines over NCCL",
        file="pipeline/ranks/connect.py",
        old="= session.connect(name, near, accelerated=True)",
        new="= [*portals.values(), session.connect(name, near, accelerated=True)][0]",
        why="nothing tells messages of two lines apart there but their order",
        tests=("tests/test_nccl_portals.py::test_the_first_message_of_a_step_waits_for_no_host",),
    ),
    Mutant(
        name="lines not warmed up",
        file="pipeline/ranks/connect.py",
        old="                greetings.append((portals[line.number, gradients], *ends))\n",
        new="",
        why="the first message between two ranks holds up both hosts, in the middle of a step",
        tests=("tests/test_nccl_portals.py::test_the_first_message_of_a_step_waits_for_no_host",),
    ),
    Mutant(
        name="the replay forgets the way back of portals",
        file="pipeline/plan/simulate.py",
        old="            source.needs[Kind.B].append(edge.arrivals_s)\n",
        new="",
        why="the stage that stashed waits for the gradient of what it stashed",
        tests=("tests/test_portal_plans.py::test_a_portal_takes_the_link_between_its_workers_alone",),
    ),
)
