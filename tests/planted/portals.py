"""Mistakes with portals: sent again, added up wrongly, let go too early, or counted in the wrong place."""

from __future__ import annotations

from planted.mutant import Mutant

TESTS = "tests/test_portals.py::"

PORTALS = (
    Mutant(
        name="gradients of portals replace one another",
        file="pipeline/portals.py",
        old="gradient if before is None else before + gradient",
        new="gradient",
        why="a stash with several poppers gets the sum",
        tests=(TESTS + "test_a_stash_that_several_layers_pop[4-1f1b-always]",),
    ),
    Mutant(
        name="portals sent twice",
        file="pipeline/portals.py",
        old="                self._carrier.send(line, microbatch, portals)\n",
        new="                self._carrier.send(line, microbatch, portals)\n" * 2,
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
        old="            if source == stage:",
        new="            if source == stage and line.target == stage + 1:",
        why="a large portal waits with the stage that pops it",
        tests=("tests/test_portal_memory.py::test_a_large_portal_waits_where_it_is_popped[always]",),
    ),
)
