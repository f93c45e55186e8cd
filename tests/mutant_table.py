"""The deliberate mistakes that `mutants` plants, and the tests that must notice each.

A test suite that is green on right code shows little; these show that it turns red on wrong code. Every entry
is a mistake that a pipeline engine really makes somewhere: wrong order, a lost or doubled gradient, other
random numbers in the recomputation, statistics counted twice, a cost left out of a model. Each is one
replacement of a text that occurs exactly once in its file, and names the smallest selection of tests that has
to fail. They stand in `planted`, a file for each part of the code. `nox -s mutants` plants them all, and
`.github/workflows/nightly.yml` does so every night.
"""

from __future__ import annotations

from planted.accelerated import ACCELERATED
from planted.boundaries import BOUNDARIES, LIFETIMES
from planted.compiled import COMPILED
from planted.computed import COMPUTED, TESTED_REASONS
from planted.consistency import CONSISTENCY
from planted.devices import DEVICES, ON_DEVICES
from planted.divided import DIVIDED
from planted.exchanged import EXCHANGED
from planted.gradients import GRADIENTS
from planted.grids import GRIDS
from planted.memory import HALVES_MODELLED, MODELLED
from planted.models import MODELS, OWN_MODELS
from planted.mutant import Mutant
from planted.planned import PLANNED
from planted.portals import PORTALS
from planted.randomness import RANDOMNESS
from planted.replicas import REPLICAS
from planted.schedules import SCHEDULES
from planted.statistics import STATISTICS
from planted.trees import TREES

MUTANTS: tuple[Mutant, ...] = (
    *GRADIENTS, *RANDOMNESS, *STATISTICS, *BOUNDARIES, *LIFETIMES, *SCHEDULES, *MODELLED, *MODELS,
    *CONSISTENCY, *COMPUTED, *COMPILED, *TESTED_REASONS, *DEVICES, *ON_DEVICES, *TREES, *ACCELERATED,
    *HALVES_MODELLED, *PLANNED, *OWN_MODELS, *EXCHANGED, *PORTALS, *GRIDS, *DIVIDED, *REPLICAS,
)  # fmt: skip
