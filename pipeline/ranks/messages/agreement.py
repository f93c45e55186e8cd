"""What two stages know of the messages between them.

Nobody declares shapes. The first real micro-batch of each size is preceded by an outline of what it consists
of, and likewise its gradient; from then on receives of that kind can be posted ahead (`receiving`).
"""

from __future__ import annotations

from typing import NamedTuple

from gpipe_bench.pipeline.ranks.messages.connection import Form
from gpipe_bench.pipeline.stage.microbatch import Structure

# Tensors of a message have tags of their own: micro-batch * MOST_TENSORS + position.
MOST_TENSORS = 64
# Messages on their way, in one direction, whose memory does not matter.
SMALL_BYTES = 2**18


class Outline(NamedTuple):
    """A message without its data; of gradients, `forms` holds None where none comes back."""

    forms: tuple[Form | None, ...]
    structure: Structure = None
    needs_grad: tuple[bool, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(form.num_bytes for form in self.forms if form is not None)


class Agreement:
    """What is known of the messages of one kind of step. Micro-batches of one size have one outline."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths  # examples in each micro-batch
        self.activations: dict[int, Outline] = {}  # received, by the size of the micro-batch
        self.activations_sent: dict[int, Outline] = {}
        self.gradients: dict[int, Outline] = {}  # received
        self.gradients_sent: dict[int, Outline] = {}
        self.loss: Form | None = None
