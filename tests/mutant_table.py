"""The deliberate mistakes that `mutants` plants, and the tests that must notice each.

A test suite that is green on right code shows little; these show that it turns red on wrong code. Every entry
is a mistake that a pipeline engine really makes somewhere: wrong order, a lost or doubled gradient, other
random numbers in the recomputation, statistics counted twice, a cost left out of a model. Each is one
replacement of a text that occurs exactly once in its file, and names the smallest selection of tests that has
to fail. They stand in `planted`, a file for each part of the code. `nox -s mutants` plants them all, and so
does continuous integration.
"""

from __future__ import annotations

from planted.accelerated import ACCELERATED
from planted.boundaries import BOUNDARIES, LIFETIMES
from planted.compiled import COMPILED
from planted.computed import COMPUTED, TESTED_REASONS
from planted.consistency import CONSISTENCY
from planted.devices import DEVICES, ON_DEVICES
from planted.gradients import GRADIENTS
from planted.memory import HALVES_MODELLED, MODELLED
from planted.models import MODELS, OWN_MODELS
from planted.mutant import Mutant
from planted.planned import PLANNED
from planted.randomness import RANDOMNESS
from planted.schedules import SCHEDULES
from planted.statistics import STATISTICS
from planted.trees import TREES

EXCHANGED = (
    Mutant(
        name="an altered file of records",
        file="harness/records/travel.py",
        old="if _entry(content) != manifest.files[name]:",
        new="if False:",
        why="what was edited would pass for what was measured, as far as the manifest goes",
        tests=("tests/test_travel.py::test_an_altered_file_is_refused_with_what_is_wrong",),
    ),
    Mutant(
        name="a name that leads out",
        file="harness/records/travel.py",
        old="if info.filename != MANIFEST and not _NAME.match(info.filename):",
        new="if False:",
        why="a file could name a place outside of the folder that it is unpacked into",
        tests=("tests/test_travel.py::test_no_name_leads_out_and_nothing_is_written",),
    ),
    Mutant(
        name="a control that is not looked at",
        file="experiments/report/plausible.py",
        old="off = not control.low <= 1 <= control.high",
        new="off = False",
        why="a case that the machine's noise has decided would be taken in as a result",
        tests=("tests/test_travel.py::test_what_cannot_be_true_is_refused",),
    ),
    Mutant(
        name="a process that died",
        file="experiments/engines/isolated.py",
        old='self.faults.append(Fault(f"{self._who(rank)} {_end_of(self.processes[rank])}"))',
        new="self.found[rank] = None",
        why="an engine that takes its process with it would pass for one that is done",
        tests=("tests/test_faulty_engines.py::test_what_becomes_of_a_bad_one_is_one_line",),
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *GRADIENTS, *RANDOMNESS, *STATISTICS, *BOUNDARIES, *LIFETIMES, *SCHEDULES, *MODELLED, *MODELS,
    *CONSISTENCY, *COMPUTED, *COMPILED, *TESTED_REASONS, *DEVICES, *ON_DEVICES, *TREES, *ACCELERATED,
    *HALVES_MODELLED, *PLANNED, *OWN_MODELS, *EXCHANGED,
)  # fmt: skip
