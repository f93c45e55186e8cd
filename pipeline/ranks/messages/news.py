"""Whether a message is still built as agreed: one number beside each message that is no plain tuple.

Constants and keys may change from one micro-batch to the next although the tensors stay as they are, and a
receiver would put them into the wrong tree. So a message that is a pytree is accompanied by a number, which
says whether another structure follows; that is sent where it changes and never else. The number is read by
the host, so it takes the way of headers and outlines; its receive is posted when the step begins.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpipe_bench.pipeline.plan.schedule import Action, Schedule
from gpipe_bench.pipeline.ranks.messages.agreement import Agreement
from gpipe_bench.pipeline.ranks.messages.connection import Buffer, Connection, Form, Work
from gpipe_bench.pipeline.ranks.messages.sending import Sender

_NUMBER = Form((1,), (1,), torch.int64)
_CPU = torch.device("cpu")
# Above the tags of outlines and of what the layers share, far below those of `together`.
_FIRST_TAG = 128


class News:
    """One rank's part. `sources` are the ranks that its stages' messages come from, by stage."""

    def __init__(self, connection: Connection, schedule: Schedule, sources: Mapping[int, int]) -> None:
        self._connection, self._num_stages, self._sources = connection, schedule.num_stages, sources
        self._buffers: dict[tuple[int, int], Buffer] = {}
        self._works: dict[tuple[int, int], Work] = {}
        self._senders: dict[int, Sender] = {}

    def begin(self, agreement: Agreement) -> None:
        """Starts a step: posts the receives of all numbers that will come."""
        for stage, source in self._sources.items():
            outlines = agreement.of_stage[stage].activations
            posted = False
            for microbatch, length in enumerate(agreement.lengths):
                if length in outlines and outlines[length].varies:
                    self._post(stage, microbatch)
                    posted = True
            if posted:
                self._connection.flush(source)

    def send(self, new: bool, target: int, action: Action) -> None:
        """Tells rank `target` whether another structure follows, with the message for `action`."""
        if target not in self._senders:
            self._senders[target] = Sender(self._connection, target)
        tag = self._tag(action.stage, action.microbatch)
        self._senders[target].send([torch.tensor([int(new)])], tag, action)

    def is_new(self, stage: int, microbatch: int, source: Action) -> bool:
        """Whether another structure follows with the message for `stage`, which the action `source` sends."""
        place, rank = (stage, microbatch), self._sources[stage]
        if place not in self._works:  # this kind of message was not known when the step began
            self._post(stage, microbatch)
            self._connection.flush(rank)
        self._connection.wait(self._works.pop(place), source, rank)
        return bool(self._buffers[place].tensor.item())

    def finish(self) -> None:
        """Waits until everything that was sent is gone."""
        for sender in self._senders.values():
            sender.finish()

    def _post(self, stage: int, microbatch: int) -> None:
        place, source = (stage, microbatch), self._sources[stage]
        if place not in self._buffers:
            self._buffers[place] = self._connection.buffer(_NUMBER, source, _CPU)
        tag = self._tag(stage, microbatch)
        self._works[place] = self._connection.receive(self._buffers[place], source, tag)

    def _tag(self, stage: int, microbatch: int) -> int:
        return _FIRST_TAG + microbatch * self._num_stages + stage
