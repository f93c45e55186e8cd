"""The first message of every pair of ranks that will talk over NCCL, sent before any step.

NCCL connects two ranks when the first message passes between them, and the host stands still until both are
there, for ever if one of them has failed. In a step that would hold up the pipeline, without a bound. So the
ranks meet in pairs when the pipeline is built, in rounds in which no rank has two meetings (a chain takes
two: pairs that begin with an even rank, then the others), each meeting in a thread that is left behind if the
other rank does not come in time.

All connections at once, by collective initialization, would be simpler; but then one stream would carry the
messages to both neighbours, one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe_bench.pipeline.errors import PeerError
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.schedule import Schedule, channels
from gpipe_bench.pipeline.ranks.connecting.ties import Ties
from gpipe_bench.pipeline.ranks.routes import Way, loss_chain
from gpipe_bench.pipeline.ranks.wire import Connection, Form, Work

_TAG = 2**29 + 1
_FORM = Form((1,), (1,), torch.float32)


class Greeting(NamedTuple):
    """A message from `source` to `target` on the connection of a way, or of a line and whether it is that of
    gradients, or on that of the loss.
    """

    way: Way | None
    source: int
    target: int
    line: tuple[int, bool] | None = None


def meetings(schedule: Schedule, lines: Sequence[Edge] = ()) -> list[list[tuple[Greeting, ...]]]:
    """Rounds of meetings. A meeting is all that two ranks have to greet each other on, in one order."""
    greetings = {
        Greeting((gradients, target > source), source, target)
        for source, target, gradients in channels(schedule)
    }
    if schedule.placement:
        chain = loss_chain(schedule)
        greetings |= {Greeting(None, *pair) for pair in pairwise(chain)}
    for line in lines:
        source, target = schedule.worker(line.source), schedule.worker(line.target)
        if source != target:
            greetings.add(Greeting(None, source, target, (line.number, False)))
            greetings.add(Greeting(None, target, source, (line.number, True)))
    pairs: dict[tuple[int, int], list[Greeting]] = {}
    for greeting in sorted(greetings, key=lambda each: (each.way or (), each.line or (), *each[1:3])):
        first, second = sorted((greeting.source, greeting.target))
        pairs.setdefault((first, second), []).append(greeting)
    rounds: list[list[tuple[Greeting, ...]]] = []
    busy: list[set[int]] = []
    for pair in sorted(pairs, key=lambda pair: (pair[0] % 2, pair)):
        turn = next((i for i, ranks in enumerate(busy) if not ranks & set(pair)), len(busy))
        if turn == len(busy):
            rounds.append([])
            busy.append(set())
        rounds[turn].append(tuple(pairs[pair]))
        busy[turn] |= set(pair)
    return rounds


def warm_up(
    ties: Ties,
    schedule: Schedule,
    ways: Mapping[Way, Connection],
    loss: Connection,
    lines: Sequence[Edge] = (),
    of_lines: Mapping[tuple[int, bool], Connection] | None = None,
) -> None:
    """This rank's meetings, which all ranks must come to. `PeerError` names the one that does not come within
    the timeout; a failure elsewhere that is noticed meanwhile ends them too.
    """
    network, device = ties.network, ties.device
    deadline_s = network.now() + ties.timeout_s
    for meeting in (meeting for turn in meetings(schedule, lines) for meeting in turn):
        ends = {meeting[0].source, meeting[0].target}
        if network.rank not in ends:
            continue
        (peer,) = ends - {network.rank}

        def greet(meeting: tuple[Greeting, ...] = meeting, peer: int = peer) -> None:
            works: list[tuple[Connection, Work, Tensor]] = []  # the tensors stay until they are gone
            for way, source, target, line in meeting:
                connection = loss if way is None else ways[way]
                if line is not None:
                    connection = (of_lines or {})[line]
                buffer = connection.buffer(_FORM, source, device)
                if network.rank == source:
                    work = connection.send(buffer.flat.zero_(), target, _TAG)
                else:
                    work = connection.receive(buffer, source, _TAG)
                works.append((connection, work, buffer.flat))
            for connection, work, _ in works:
                connection.wait(work, None, peer)
            ties.synchronize()

        try:
            network.bounded(device, greet, deadline_s - network.now(), lambda: ties.noticed)
        except TimeoutError as error:
            what = f"did not answer: it did not come to connect within {ties.timeout_s:g} s"
            raise PeerError(None, peer, what, timed_out=True) from error
        ties.refuse_after_notice()
