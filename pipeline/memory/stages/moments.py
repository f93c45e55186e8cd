"""The fullest moments of a stage's actions, in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """What one action of one micro-batch holds at its fullest, beyond the boundary inputs of the stage."""

    activations: int = 0  # bytes held by the graph
    gradients: int = 0  # bytes of parameter gradients that appeared in this action
    transients: int = 0  # everything else: passing outputs, gradients of activations, temporaries

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.transients


@dataclass(frozen=True)
class Halves:
    """What a stage holds in I, in W and in between, for one micro-batch.

    Where it is ``whole`` I does all of a backward, and W has nothing to do.
    """

    whole: bool
    kept_input_bytes: int  # of the boundary inputs, what stays from I to W
    saved_bytes: int  # held from the end of I to W, beyond them
    inputs: Moment  # I
    weights_first: Moment  # W that creates the parameter gradients; what waited for it is in it
    weights: Moment  # every later W
    own_weights_first: Moment  # the same without boundary inputs, where these are the user's and stay
    own_weights: Moment
