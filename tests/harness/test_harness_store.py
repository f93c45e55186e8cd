"""The store: whatever happens to a file costs at most the line it happens to, and is reported."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import record

from gpipe_bench.harness.record import SCHEMA, encode
from gpipe_bench.harness.store import Store, StoreError, latest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "made" / "on demand")


def test_the_last_record_of_a_case_wins_whatever_its_clock_says(store):
    store.append(record(1, started_at="2026-02-02T00:00:00+00:00", duration_s=1))
    store.append(record(2))
    store.append(record(1, started_at="1999-01-01T00:00:00+00:00", duration_s=2))
    found = latest(store.load("fake").records)
    assert [(each.case["step"], each.duration_s) for each in found.values()] == [(2, 0.5), (1, 2)]


@settings(max_examples=60)
@given(st.data())
def test_a_torn_tail_never_reaches_the_next_record(tmp_path_factory, data):
    store = Store(tmp_path_factory.mktemp("store"))
    store.append(record(1))
    store.append(record(2))
    content = store.path("fake").read_bytes()
    first = content.index(b"\n") + 1
    keep = data.draw(st.integers(first, len(content)))
    store.path("fake").write_bytes(content[:keep])
    store.append(record(3))
    loaded = store.load("fake")
    whole = keep >= len(content) - 1  # only the newline is missing: the record is complete
    assert [each.case["step"] for each in loaded.records] == ([1, 2, 3] if whole else [1, 3])
    assert [problem.line for problem in loaded.problems] == ([] if whole or keep == first else [2])


def test_every_kind_of_bad_line_is_reported_and_the_rest_used(store):
    store.append(record(1))
    good = encode(record(2))
    newer = good.replace(b'"schema":%d' % SCHEMA, b'"schema":%d' % (SCHEMA + 1))
    foreign = encode(record(3, experiment="other"))
    with store.path("fake").open("ab") as file:
        file.write(
            b"\n".join([b"", good[:40], b"\xff\xfe\x00", b'{"schema":"one"}', newer, foreign, b"  ", good])
            + b"\n"
        )
    loaded = store.load("fake")
    assert [each.case["step"] for each in loaded.records] == [1, 2]
    assert [problem.line for problem in loaded.problems] == [3, 4, 5, 6, 7]
    for problem, words in zip(
        loaded.problems, ["truncated", "truncated", "not a record", "newer version", "'other'"], strict=True
    ):
        assert words in str(problem)


def test_a_disk_that_fills_up_within_a_line_leaves_the_file_as_it_was(tmp_path):
    store = Store(tmp_path)
    store.append(record(1))
    before = store.path("fake").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (len(before) + 50, hard)
    )  # a file can't grow beyond: a partial write
    try:
        with pytest.raises(StoreError, match="File too large"):
            store.append(record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.path("fake").read_bytes() == before
    store.append(record(2))
    assert [each.case["step"] for each in store.load("fake").records] == [1, 2]


WRITER = """
import sys
from records import record
from gpipe_bench.harness.store import Store
store = Store(sys.argv[1])
sys.stdin.readline()  # both writers start together
for step in range(100):
    store.append(record(step, profile=sys.argv[2], details={"filling": "x" * 9000}))
"""


def test_two_processes_write_at_once_without_losing_or_mixing_lines(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), name], stdin=subprocess.PIPE, env=environment
        )
        for name in ("one", "two")
    ]
    for writer in writers:
        writer.stdin.write(b"go\n")
        writer.stdin.close()
    assert [writer.wait(60) for writer in writers] == [0, 0]
    loaded = Store(tmp_path).load("fake")
    assert loaded.problems == ()
    for name in ("one", "two"):
        assert [each.case["step"] for each in loaded.records if each.profile == name] == list(range(100))
