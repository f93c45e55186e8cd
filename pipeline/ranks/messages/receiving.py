"""The receiving half of a connection: which receives are posted ahead, and into which memory.

A receive that is posted only when its message is needed makes the sender wait, and one buffer for each
micro-batch would give back the memory that a schedule saves. So receives are posted in the order of need,
each into its buffer of the ring, as soon as an outline says how large the message is (`agreement`). A slot in
whose memory something still lives (`holders`) is not overwritten: it gets new memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from gpipe_bench.pipeline.plan.edges import SMALL_BYTES, Rings
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.ranks.messages.agreement import Outline
from gpipe_bench.pipeline.ranks.messages.connection import Buffer, Connection, Work
from gpipe_bench.pipeline.ranks.messages.gate import Gate


class Turns:
    """The order in which the receives of several stages from one rank are posted, by their stages: NCCL takes
    what comes for the receive that was posted first.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order, self._position = order, 0
        self.receivers: dict[int, Receiver] = {}

    def begin(self) -> None:
        """Starts a step, before its receivers do."""
        self._position = 0

    def post(self) -> None:
        """Posts every receive whose turn it is."""
        while self._position < len(self._order):
            if not self.receivers[self._order[self._position]].post_next():
                break
            self._position += 1


class Receiver:
    """One direction of receiving: posts receives in the order of need, each into its slot of the ring.

    `tags` is the first tag of each micro-batch's message. With `turns` a receive is posted when its turn has
    come, and with a `gate` not before the `rings` say so.
    """

    def __init__(
        self,
        connection: Connection,
        source: int,
        rings: Rings,
        device: torch.device,
        *,
        tags: Sequence[int],
        turns: Turns | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._gate = gate
        self._after: Sequence[int] = ()  # calls of this rank before each receive
        if gate is not None:
            gate.expect(self, True, rings.after)
            gate.expect(self, False, rings.after_forward)
        self._connection, self._source, self._device = connection, source, device
        self._tags, self._turns = tags, turns
        self._rings, self._ring = rings, rings.tight
        most = self._rings.small.num_slots
        self._slots: list[tuple[Outline, tuple[Buffer | None, ...]] | None] = [None] * most
        self._posted: dict[int, tuple[tuple[Buffer | None, ...], list[Work]]] = {}
        self._unposted: deque[int] = deque()  # have a slot, but perhaps no known outline yet
        self._later: deque[int] = deque()  # have none; without a backward
        self._outlines: dict[int, Outline] = {}
        self._lengths: tuple[int, ...] = ()
        self._training = True

    def begin(self, outlines: dict[int, Outline], lengths: tuple[int, ...], *, training: bool) -> None:
        """Starts a step and posts what the ring allows."""
        self._outlines, self._lengths, self._training = outlines, lengths, training
        self._posted.clear()
        self._choose_ring()
        # Without a backward nothing is kept, and two receives ahead are enough.
        ahead = self._rings.ahead
        self._after = self._rings.after if training else self._rings.after_forward
        self._unposted = deque(self._ring.initial if training else self._ring.order[:ahead])
        self._later = deque(() if training else self._ring.order[ahead:])
        self.post()

    def _choose_ring(self) -> None:
        known = all(length in self._outlines for length in self._lengths)
        largest = max((outline.num_bytes for outline in self._outlines.values()), default=0)
        ring = self._rings.of(largest, SMALL_BYTES) if known else self._rings.tight
        if ring is not self._ring:
            for position in range(ring.num_slots, len(self._slots)):
                kept, self._slots[position] = self._slots[position], None
                if kept is not None:
                    self._give_back(kept[1])
            self._ring = ring

    def post(self) -> None:
        """Posts every receive that has a slot, as far as the outlines are known."""
        if self._turns is not None:
            self._turns.post()
        else:
            while self.post_next():
                pass
        self._connection.flush(self._source)

    def post_next(self) -> bool:
        """Posts the next receive, to be followed by a flush; whether it has a slot, a known outline and leave
        of the gate.
        """
        if not self._unposted:
            return False
        microbatch = self._unposted[0]
        if self._gate is not None and self._gate.passed < self._after[microbatch]:
            return False
        outline = self._outlines.get(self._lengths[microbatch])
        if outline is None:
            return False
        self._unposted.popleft()
        buffers = self._buffers(microbatch, outline)
        tag = self._tags[microbatch]
        works = [
            self._connection.receive(buffer, self._source, tag + i)
            for i, buffer in enumerate(buffers)
            if buffer is not None and buffer.flat.numel()
        ]
        self._posted[microbatch] = (buffers, works)
        return True

    def is_posted(self, microbatch: int) -> bool:
        return microbatch in self._posted

    def wait(self, microbatch: int, action: Action) -> None:
        """Until the message of a micro-batch, which `action` sends, has arrived; to be followed by `take`."""
        for work in self._posted[microbatch][1]:
            self._connection.wait(work, action, self._source)

    def take(self, microbatch: int) -> tuple[Tensor | None, ...]:
        """The tensors of a message that has arrived; whoever keeps one keeps its memory."""
        buffers, _ = self._posted.pop(microbatch)
        # `detach` makes a tensor of its own, so that it counts as a holder.
        tensors = tuple([None if buffer is None else buffer.tensor.detach() for buffer in buffers])
        if self._training:
            return tensors
        # The output may hold on to what comes in, so it gets memory of its own.
        tensors = tuple([None if tensor is None else tensor.clone() for tensor in tensors])
        self._give_back(buffers)
        del buffers
        if self._later:
            self._unposted.append(self._later.popleft())
            self.post()
        return tensors

    def release(self, microbatch: int) -> None:
        """The stage is done with the slot of a micro-batch."""
        following = self._ring.following[microbatch]
        if following is not None:
            self._unposted.append(following)
            self.post()

    def close(self) -> None:
        """Gives all buffers back, between two steps."""
        for kept in self._slots:
            if kept is not None:
                self._give_back(kept[1])
        self._slots = []

    def _buffers(self, microbatch: int, outline: Outline) -> tuple[Buffer | None, ...]:
        if not self._training:
            return self._make(outline)
        slot = self._ring.slot[microbatch]
        kept = self._slots[slot]
        if kept is not None and kept[0].forms == outline.forms:
            buffers = kept[1]
            for buffer in buffers:
                if buffer is not None and buffer.holders.others:
                    buffers = self._without_holders(outline, buffers)
                    self._slots[slot] = (outline, buffers)
                    break
            return buffers
        if kept is not None:
            self._give_back(kept[1])
            self._slots[slot] = kept = None  # or its tensors would keep the memory from being used again
        buffers = self._make(outline)
        self._slots[slot] = (outline, buffers)
        return buffers

    def _without_holders(
        self, outline: Outline, buffers: tuple[Buffer | None, ...]
    ) -> tuple[Buffer | None, ...]:
        """New buffers in place of those in which something of an earlier message still lives."""
        found = list(buffers)
        for position, (buffer, form) in enumerate(zip(buffers, outline.forms, strict=True)):
            if buffer is not None and form is not None and buffer.holders.others:
                self._give_back((buffer,))
                found[position] = self._connection.buffer(form, self._source, self._device)
        return tuple(found)

    def _make(self, outline: Outline) -> tuple[Buffer | None, ...]:
        connection, source, device = self._connection, self._source, self._device
        return tuple(
            [None if form is None else connection.buffer(form, source, device) for form in outline.forms]
        )

    def _give_back(self, buffers: tuple[Buffer | None, ...]) -> None:
        for buffer in buffers:
            if buffer is not None:
                self._connection.give_back(buffer, self._source)
