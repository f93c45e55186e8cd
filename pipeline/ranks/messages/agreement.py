"""What two stages know of the messages between them.

Nobody declares shapes. The first real micro-batch of each size is preceded by an outline of what it consists
of, and likewise its gradient; from then on receives of that kind can be posted ahead (`receiving`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from gpipe_bench.pipeline.ranks.messages.connection import Form
from gpipe_bench.pipeline.stage.trees import Structure

# Tensors of a message have tags of their own (`first_tag` + position).
MOST_TENSORS = 64
# Below the tags of what is no activation and no gradient.
MOST_MESSAGES = 2**28 // MOST_TENSORS
# Kinds of steps that are known at a time; with one more the ranks begin anew.
MOST_AGREEMENTS = 256


class Outline(NamedTuple):
    """A message without its data; of gradients, `forms` holds None where none comes back."""

    forms: tuple[Form | None, ...]
    structure: Structure = None
    needs_grad: tuple[bool, ...] = ()
    aliases: tuple[int, ...] = ()
    varies: bool = False  # a number beside each further message says whether the structure is another one

    @property
    def num_bytes(self) -> int:
        return sum(form.num_bytes for form in self.forms if form is not None)


def first_tag(stage: int, microbatch: int, num_stages: int) -> int:
    """The tag of the first tensor of the message of a micro-batch to `stage`."""
    return (microbatch * num_stages + stage) * MOST_TENSORS


class Outlines:
    """What is known of the messages to and from one stage, by the size of the micro-batch."""

    def __init__(self) -> None:
        self.activations: dict[int, Outline] = {}  # received
        self.activations_sent: dict[int, Outline] = {}
        self.gradients: dict[int, Outline] = {}  # received
        self.gradients_sent: dict[int, Outline] = {}


class Agreement:
    """What is known of the messages of one kind of step. Micro-batches of one size have one outline."""

    def __init__(self, lengths: tuple[int, ...], stages: Iterable[int] = ()) -> None:
        self.lengths = lengths  # examples in each micro-batch
        self.of_stage = {stage: Outlines() for stage in stages}
        self.of_portals: dict[tuple[int, bool], dict[int, Outline]] = {}  # by line, and whether of gradients
        self.loss: Form | None = None


class Agreements:
    """The agreements of all kinds of steps so far, by the numbers that the first rank gives them."""

    def __init__(self) -> None:
        self._found: list[Agreement] = []
        self._numbers: dict[Hashable, int] = {}  # by signature, on the first rank

    def number(self, signature: Hashable) -> int:
        """The number of steps of this kind, on the first rank; -1 if all are to be forgotten and this is the
        first of new ones.
        """
        if signature in self._numbers or len(self._numbers) < MOST_AGREEMENTS:
            return self._numbers.setdefault(signature, len(self._numbers))
        self._numbers = {signature: 0}
        return -1

    def find(self, number: int) -> Agreement | None:
        """The agreement of that number; None if it is the first step of its kind."""
        if number < 0:
            self._found.clear()
            return None
        return self._found[number] if number < len(self._found) else None

    def add(self, agreement: Agreement) -> Agreement:
        """A new one, with the next number."""
        self._found.append(agreement)
        return agreement

    def forget(self) -> None:
        """Forgets all of them, on every rank alike."""
        self._found.clear()
        self._numbers.clear()
