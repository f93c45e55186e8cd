"""What re-materialization copies so that a recomputation sees what its forward saw, in bytes.

Two things may change under a stage's hands between F and R: an input that a layer overwrites, and a buffer
that a layer updates. Of the first, F and R each work on a copy; of the second, each micro-batch that waits
for its R has a copy, and R works on one more (gpipe_bench.pipeline.stage).

    overwritten input, in one process     F           waits     R           R .. B
    as it was received                    1           1         until it    -
    copy                                  1           -         is copied   1

Inputs that are there anyway (``is_apart``) do not count: the first stage has the mini-batch of the user. Over
processes a buffer of the ring holds what was received until the end of B. There the copy comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from gpipe_bench.pipeline.memory.stages.demands import Demand
    from gpipe_bench.pipeline.memory.stages.footprint import Footprint


def with_shadows(stage: Footprint, demanded: Sequence[Demand]) -> Footprint:
    """The stage with the copies that stay where anything is recomputed."""
    if not stage.shadow_buffer_bytes or not any(demand.recomputed for demand in demanded):
        return stage
    return shadowed(stage)


def shadowed(stage: Footprint) -> Footprint:
    """The same where something is recomputed for certain."""
    return replace(stage, buffer_bytes=stage.buffer_bytes + stage.shadow_buffer_bytes, shadow_buffer_bytes=0)


class Copies(NamedTuple):
    """Bytes of copies at a moment, by where they count."""

    buffers: int
    boundary: int
    activations: int
    transients: int


NO_COPIES = Copies(0, 0, 0, 0)


class Counts(Protocol):
    """How many micro-batches there are of which a stage may hold copies."""

    @property
    def unrecomputed(self) -> int:
        """Those that wait for their R, or are in it."""

    @property
    def again_graphs(self) -> int:
        """Those with a graph that R has made."""

    @property
    def again_halves(self) -> int:
        """Those of them that are between I and W."""

    @property
    def stays(self) -> bool:
        """Whether what was received stays until the end of B, as over processes."""


def held(stage: Footprint, counts: Counts, *, is_apart: bool) -> Copies:
    """What is held between actions, and of other micro-batches in one."""
    buffers = counts.unrecomputed * stage.changing_buffer_bytes
    if not stage.copied_input_bytes:
        return Copies(buffers, 0, 0, 0)
    boundary = activations = 0
    if is_apart:
        boundary = counts.again_graphs * stage.kept_copied_bytes
        if stage.halves is not None:
            waits = min(stage.halves.kept_input_bytes, stage.copied_input_bytes)
            activations = counts.again_halves * waits
    elif counts.stays:
        boundary = counts.again_graphs * stage.copied_input_bytes
    return Copies(buffers, boundary, activations, 0)


def in_action(stage: Footprint, demand: Demand, moment_bytes: int, *, is_apart: bool) -> Copies:
    """What is held in an action, whose own moment has ``moment_bytes``, with the copies that F works on."""
    found = held(stage, demand, is_apart=is_apart)
    if not demand.is_recomputation:
        return found
    copied = stage.copied_input_bytes
    # Elsewhere the copy takes the place of what was received once it is made, before the first layer runs.
    transients = copied if is_apart or demand.stays else max(copied - moment_bytes, 0)
    return found._replace(buffers=found.buffers + stage.changing_buffer_bytes, transients=transients)
