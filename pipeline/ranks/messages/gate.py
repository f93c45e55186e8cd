"""Which receives wait for an action of this rank, and how far the rank is.

On accelerators a receive is posted behind the last action of its own rank that its message depends on
(`plan.edges` says why). The transport is called when a message leaves the rank and when a stage
is done with a micro-batch; the gate counts these calls and lets through the receives whose number has come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class _Posting(Protocol):
    def post(self) -> None: ...


class Gate:
    """Counts the calls of a step."""

    def __init__(self) -> None:
        self.passed = 0
        self._training = True
        self._due: dict[tuple[bool, int], list[_Posting]] = {}

    def expect(self, receiver: _Posting, training: bool, numbers: Iterable[int]) -> None:
        """Lets `receiver` post again after each of these numbers of calls."""
        for number in sorted(set(numbers)):
            if number:
                self._due.setdefault((training, number), []).append(receiver)

    def begin(self, *, training: bool) -> None:
        """Starts a step."""
        self.passed, self._training = 0, training

    def step(self) -> None:
        """A message has left, or a stage is done with a micro-batch."""
        self.passed += 1
        for receiver in self._due.get((self._training, self.passed), ()):
            receiver.post()
