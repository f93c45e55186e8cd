"""Records: what they refuse, how they are identified, and that a line holds exactly one of them."""

from __future__ import annotations

import pathlib

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import metric, of_first_schema, record

from gpipe_bench.harness.record import SCHEMA, decode, encode

texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=20)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | texts | numbers
plain = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


@settings(max_examples=40)
@given(st.dictionaries(texts, scalars, max_size=4), st.dictionaries(texts, plain, max_size=4), texts)
def test_a_line_holds_a_record_and_gives_it_back(case, details, reason):
    written = record(case=case, details=details, reason=reason)
    line = encode(written)
    assert b"\n" not in line
    assert decode(line) == written
    assert decode(line).identity == written.identity


def test_numbers_of_numpy_and_paths_become_plain_data():
    details = {"array": numpy.arange(3), "number": numpy.float32(0.5), "path": pathlib.PurePosixPath("a/b")}
    written = record(details=details, metrics=(metric(numpy.float64(1.5)), metric(numpy.int64(3), name="n")))
    read = decode(encode(written))
    assert read.details == {"array": [0, 1, 2], "number": 0.5, "path": "a/b"}
    assert [each.value for each in read.metrics] == [1.5, 3]


def test_identity_tells_cases_apart_and_nothing_else():
    one = record(case={"K": 2, "M": 4})
    assert one.identity == record(case={"M": 4, "K": 2}, status="failed", reason="x", duration_s=9).identity
    others = [
        record(case={"K": 2}),
        record(case={"K": 2, "M": 4.0}),
        record(case={"K": 2, "M": "4"}),
        record(case={"K": 2, "M": 4}, profile="full"),
        record(case={"K": 2, "M": 4}, revision=2),
        record(case={"K": 2}, options={"M": 4}),
    ]
    assert len({one.identity, *(other.identity for other in others)}) == 1 + len(others)


def test_a_metric_is_found_by_its_name_and_whole_key():
    assert record().metric("time") == metric()
    assert record().metric("space") is None
    several = [metric(n, key={"K": n, "link": "PCIe, same share"}) for n in (2, 4)]
    found = decode(encode(record(metrics=(metric(), *several))))
    assert found.metric("time", link="PCIe, same share", K=4) == several[1]
    assert found.metric("time") == metric()
    assert found.metric("time", K=4) is None
    assert several[1].label == "time K=4 link=PCIe, same share"


def test_control_characters_of_a_record_are_spelled_out():
    """But for tabs and ends of lines; a backslash that stands there already is one."""
    found = decode(encode(record(reason="a\x1b[2J\x9bb\x7f\r\b\n\tc\\u001b\\\\\x07 é")))
    assert found.reason == "a\\x1b[2J\\x9bb\\x7f\\x0d\\x08\n\tc\\u001b\\\\\\x07 é"
    assert decode(encode(found)) == found


def test_lines_say_what_is_wrong_with_them():
    line = encode(record())
    newer = line.replace(b'{"schema":%d' % SCHEMA, b'{"schema":%d' % (SCHEMA + 1), 1)
    for broken, why in (
        (line[:-5], "truncated or edited"),
        (line.replace(b"a processor", b"\xff\xfe"), "can't decode byte"),
        (b'{"answer":42}', "not a record: .* `schema`"),
        (b'{"schema":1,"details":' + b"[" * 100_000, "truncated or edited"),
        (newer, "written by a newer version: schema 4"),
        (of_first_schema(), "made by an older version: schema 1"),
    ):
        with pytest.raises(ValueError, match=why):
            decode(broken)
