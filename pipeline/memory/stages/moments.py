"""The fullest moments of a stage's actions, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Moment:
    """What one action of one micro-batch holds at its fullest, beyond the boundary inputs of the stage."""

    activations: int = 0  # bytes held by the graph
    gradients: int = 0  # bytes of parameter gradients that appeared in this action
    transients: int = 0  # everything else: passing outputs, gradients of activations, temporaries

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.transients

    def without(self, num_bytes: int) -> Moment:
        """The same where so many bytes of what passes are held elsewhere."""
        return replace(self, transients=self.transients - num_bytes)


@dataclass(frozen=True)
class Halves:
    """What a stage holds in I, in W and in between, for one micro-batch.

    Where it is ``whole`` I does all of a backward, and W has nothing to do. ``apart`` is the same where the
    gradients of the stage's outputs come into memory that is there anyway; None for ``whole`` halves.
    """

    whole: bool
    kept_input_bytes: int  # of the boundary inputs, what stays from I to W
    saved_bytes: int  # held from the end of I to W, beyond them
    inputs: Moment  # I
    weights_first: Moment  # W that creates the parameter gradients; what waited for it is in it
    weights: Moment  # every later W
    own_weights_first: Moment  # the same without boundary inputs, where these are the user's and stay
    own_weights: Moment
    apart: Halves | None = None


@dataclass(frozen=True)
class Messages:
    """What a stage sends and receives of one micro-batch, by where it lives.

    What is sent stays until its sender has waited for it, which may be longer than the stage needs it.

    Args:
        sent_bytes: of what F makes for the next stage, without what the stage was given itself
        of_graph_bytes: of these, what a graph that F makes holds too
        longer: how much fuller a first B, a later B and I are where what F has sent is still on its way
        sent_back_bytes: of the gradients that B or I makes for the stage before
        received_bytes: of the gradients of outputs, which are held throughout a B or I
        apart: whether inputs come into memory that is there anyway
        buffer_bytes: of all buffers that inputs and gradients come into, where these stay
    """

    sent_bytes: int = 0
    of_graph_bytes: int = 0
    longer: tuple[int, int, int] = (0, 0, 0)
    sent_back_bytes: int = 0
    received_bytes: int = 0
    apart: bool = False
    buffer_bytes: int = 0


NO_MESSAGES = Messages()
