"""The rules by which notes of streams are judged, each by the smallest example."""

from __future__ import annotations

import pytest
from fakes.happens_before import HOST, Buffer, History, Kind


def kinds(history: History) -> list[Kind]:
    return [fault.kind for fault in history.faults]


def test_streams_are_ordered_by_marks_alone() -> None:
    history, buffer = History(), Buffer("x", "a")
    done = history.operation("a", "write", writes=[buffer])
    history.operation("b", "too early", reads=[buffer])
    assert kinds(history) == [Kind.READ]
    history.wait("b", done)
    history.operation("b", "read", reads=[buffer])
    assert kinds(history) == [Kind.READ]


def test_a_mark_covers_what_was_enqueued_before_it() -> None:
    history, buffer = History(), Buffer("x", "a")
    early = history.mark("a")
    history.operation("a", "write", writes=[buffer])
    history.wait("b", early)
    history.operation("b", "read", reads=[buffer])
    assert kinds(history) == [Kind.READ]


def test_order_is_passed_on() -> None:
    """From a to c through b."""
    history, buffer = History(), Buffer("x", "a")
    history.wait("b", history.operation("a", "write", writes=[buffer]))
    history.wait("c", history.operation("b", "something else"))
    history.operation("c", "read", reads=[buffer])
    assert not history.faults


def test_a_write_comes_after_all_reads() -> None:
    history, buffer = History(), Buffer("x", "a")
    history.wait("b", history.operation("a", "write", writes=[buffer]))
    done = history.operation("b", "read", reads=[buffer])
    history.operation("a", "overwrite", writes=[buffer])
    assert kinds(history) == [Kind.WRITE]
    history.faults.clear()
    history.wait("a", done)
    history.operation("a", "overwrite", writes=[buffer])
    assert not history.faults


def test_what_the_host_has_waited_for_is_over_for_all() -> None:
    history, buffer = History(), Buffer("x", "a")
    done = history.operation("a", "write", writes=[buffer], cost=3)
    history.host_wait([done], "outside of a step it may")
    history.operation("b", "read", reads=[buffer])
    assert not history.faults
    assert history.host_time == 3
    with history.step():
        history.host_wait([done], "here not")
    assert kinds(history) == [Kind.HOST_WAIT]


@pytest.mark.parametrize("remedy", ["nothing", "told", "waited"])
def test_memory_goes_back_to_its_own_stream(remedy: str) -> None:
    history, buffer = History(), Buffer("x", "a")
    history.wait("b", history.operation("a", "write", writes=[buffer]))
    done = history.operation("b", "read", reads=[buffer])
    if remedy == "told":
        buffer.recorded.add("b")
    if remedy == "waited":
        history.wait("a", done)
    history.free(buffer)
    assert kinds(history) == ([Kind.FREED] if remedy == "nothing" else [])


def test_time_runs_side_by_side_and_stands_still_in_waits() -> None:
    history = History()
    done = history.operation("a", "long", cost=5)
    history.operation("b", "short", cost=1)
    assert history.makespan == 5
    history.wait("b", done)
    history.operation("b", "short", cost=1)
    assert history.makespan == 6
    assert history.mark(HOST).time == 0
