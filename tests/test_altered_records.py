"""A record that somebody changed is not judged, and who reads the comparison learns of it."""

from __future__ import annotations

import hashlib
import re

import pytest
from command_line import call, lines, run_fake

CHANGES = {
    "infinite": (b"1e999", True, "Number out of range"),
    "infinite, its digest not adapted": (b"1e999", False, "its digest does not fit"),
    "no number": (b"NaN", True, "not a complete line of JSON, truncated or edited"),
    "another number": (b"542000000", False, "its digest does not fit"),
}


def alter(path, line, number, by, adapt):
    """Replaces a number in a line of the file, and the line's digest if asked, as a careful hand would."""
    content = path.read_bytes().split(b"\n")
    assert number in content[line - 1]
    changed = content[line - 1].replace(number, by)
    if adapt:
        end = re.search(rb',"digest":"[0-9a-f]{16}"\}\Z', changed)
        body = changed[: end.start()] + b"}"
        digest = hashlib.sha256(body).hexdigest()[:16].encode()
        changed = body[:-1] + b',"digest":"' + digest + b'"}'
    content[line - 1] = changed
    path.write_bytes(b"\n".join(content))


@pytest.fixture(params=CHANGES)
def altered(request, tmp_path):
    """Five records, the third one changed; the file, and why the line is left out."""
    by, adapt, why = CHANGES[request.param]
    assert run_fake(tmp_path)[0] == 0
    path = tmp_path / "fake.jsonl"
    alter(path, 3, b"540986433", by, adapt)
    return path, why


def test_the_comparison_says_what_it_leaves_out_and_what_to_do(altered):
    path, why = altered
    status, out, err = call("compare", "fake", "--results", path.parent)
    assert status == 0
    assert "nothing judged; 16 not run\nrun here: 4 identities\n" in out
    last = out[out.index("left out, and not judged") :]
    assert f"{path}:3: " in last
    assert why in last
    assert last.rstrip().endswith("restore the file from a copy, or make these cases anew with: run fake")
    assert f"warning: {path}:3: " in err


@pytest.mark.parametrize("form", ["--json", "--markdown"])
def test_in_every_form(altered, form):
    path, why = altered
    _, out, err = call("compare", "fake", "--results", path.parent, form)
    assert f"warning: {path}:3: " in err
    if form == "--markdown":
        assert f"{path}:3: " in out
        return
    found = next(cell for cell in lines(out) if (cell["row"], cell["column"]) == ("parameters", "pipeline-2"))
    assert (found["ours"], found["verdict"]) == (None, "not run")
    assert f"{path}:3: " in found["reason"]
    assert why in found["reason"]


def test_where_nothing_is_left_the_reason_is_said(tmp_path):
    run_fake(tmp_path, "--only", "step=1")
    path = tmp_path / "fake.jsonl"
    alter(path, 1, b"81785166", b"1e999", True)
    status, _, err = call("compare", "fake", "--results", tmp_path)
    assert status == 2
    assert f"error: no records of fake in {tmp_path} (1 line can't be read: {path}:1: " in err
