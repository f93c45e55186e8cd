"""One deliberate mistake, and the tests that several of them are noticed by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One mistake: `old` becomes `new` in `file`; of `tests`, node ids of pytest, at least one must fail."""

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]


TRANSPARENT = (
    "tests/test_transparency.py::test_outputs_and_gradients_equal_the_plain_model[4-3-always-gpipe]",
)
