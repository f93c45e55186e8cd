"""When the receive of a portal may be posted on an accelerator (`posting` says why that matters).

A line joins two stages that are joined by the messages between them anyway, and what its receives wait for,
a buffer that their own stage gives back, comes before in that stage's row. So lines add no dependency between
actions, and leave the other messages' receives what they are. What is left is each line for itself: behind
which action of its own worker a receive is posted, and how many buffers it takes for no send to wait for a
later action of its own sender. A line has a connection of its own in each direction, on which messages are
told apart by their order alone. Only the standard library is imported.
"""

from __future__ import annotations

from gpipe_bench.pipeline.plan.portals import Line, PortalTransfer, portal_rings, portal_transfers
from gpipe_bench.pipeline.plan.receiving.posting import (
    FORWARDS_AHEAD,
    Latest,
    Posting,
    calls_of,
    forward_rows,
    with_forwards_ahead,
    with_slots,
)
from gpipe_bench.pipeline.plan.receiving.ring import end_microbatches, ring_of
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, derived, ends_of


@derived
def portal_postings(schedule: Schedule, lines: tuple[Line, ...]) -> dict[tuple[int, bool], Posting]:
    """The receives of each line that joins two workers, by its number and whether of gradients.

    `ValueError` for a line whose ends take the micro-batches in different orders.
    """
    messages: dict[tuple[int, bool], list[PortalTransfer]] = {}
    for message in portal_transfers(schedule, lines):
        key = (message.line.number, message.target.kind is not Kind.F)
        messages.setdefault(key, []).append(message)
    return {
        key: _posting(schedule, messages[key], ring.num_slots)
        for key, ring in portal_rings(schedule, lines).items()
    }


def _posting(schedule: Schedule, messages: list[PortalTransfer], slots: int) -> Posting:
    line, gradients = messages[0].line, messages[0].target.kind is not Kind.F
    stage = messages[0].target.stage
    worker, sender = schedule.worker(stage), schedule.worker(messages[0].source.stage)
    order = [message.target.microbatch for message in messages]
    _refuse_other_order(schedule, line, messages)
    place = {action: i for row in schedule.actions for i, action in enumerate(row)}
    latest = with_slots(schedule)[1]
    ends = ends_of(schedule.row(stage))
    while slots < len(messages) and any(
        latest[ends[i - slots]][sender] > place[message.source]
        for i, message in enumerate(messages)
        if i >= slots
    ):
        slots += 1
    calls = calls_of(schedule, schedule.actions[worker])
    ring = ring_of(order, end_microbatches(schedule.row(stage)), slots)
    after = _after(messages, latest, calls, worker)
    if gradients:
        return Posting(ring, ring, after)
    rows = forward_rows(schedule)
    latest = with_forwards_ahead(schedule)[1]
    place = {action: i for row in rows for i, action in enumerate(row)}
    before = _before(rows[worker])
    ahead = FORWARDS_AHEAD
    while ahead < len(messages) and any(
        (reason := before[messages[i - ahead].target]) is not None
        and latest[reason][sender] > place[message.source]
        for i, message in enumerate(messages)
        if i >= ahead
    ):
        ahead += 1
    calls = calls_of(schedule, rows[worker])
    return Posting(ring, ring, after, _after(messages, latest, calls, worker), ahead)


def _after(messages: list[PortalTransfer], latest: Latest, calls: list[int], worker: int) -> tuple[int, ...]:
    after = [0] * len(messages)
    for message in messages:
        position = latest[message.source][worker]
        after[message.target.microbatch] = calls[position] if position >= 0 else 0
    return tuple(after)


def _before(row: tuple[Action, ...]) -> dict[Action, Action | None]:
    return dict(zip(row, (None, *row), strict=False))


def _refuse_other_order(schedule: Schedule, line: Line, messages: list[PortalTransfer]) -> None:
    wanted = {message.source: message.source.microbatch for message in messages}
    sent = [wanted[action] for action in schedule.row(messages[0].source.stage) if action in wanted]
    needed = [message.target.microbatch for message in messages]
    if sent != needed:
        raise ValueError(
            f"portal {line.names[0]!r} leads from stage {line.source} to stage {line.target}, which take the "
            f"micro-batches in different orders ({sent[:4]}... and {needed[:4]}...); between accelerators "
            "they must be the same. Use another schedule, or pass the tensor through the layers between"
        )
