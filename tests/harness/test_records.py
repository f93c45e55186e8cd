"""Records, their file and their environment: whatever happens to a file costs at most a line."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import metric, record

from gpipe_bench.harness import environment as module
from gpipe_bench.harness.compare import differences
from gpipe_bench.harness.environment import code_state, environment
from gpipe_bench.harness.record import SCHEMA, decode, encode
from gpipe_bench.harness.store import Store, StoreError, latest, write_whole

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
    store.path("loop").symlink_to("loop.jsonl")
    (problem,) = store.load("loop").problems
    assert str(problem) == f"{store.path('loop')}: can't be read: Too many levels of symbolic links; skipped"


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


FULL = """
import resource, sys
from pathlib import Path
from gpipe_bench.harness.store import write_whole
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
write_whole(Path(sys.argv[1]), "new " * 10_000)
"""


def test_folders_are_made_and_the_file_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "page.html"
    for text in ("first\n", "é: 第二\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in path.parent.iterdir()] == ["page.html"]


def test_an_interrupt_right_behind_the_replacement_is_that_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def interrupted(source: str, target: Path) -> None:
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "page.html", "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("page.html", "new")]


def test_no_room_for_the_new_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "counters.json"
    write_whole(path, "old")
    process = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "OSError" in process.stderr
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["counters.json"]


# The machine, the software and the code


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git work tree with one source file, and its git command."""
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "tester@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = (tmp_path / "work").resolve()
    (root / "harness").mkdir(parents=True)
    (root / "harness" / "one.py").write_text("ONE = 1\n")

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", root, *arguments], check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    code_state.cache_clear()
    return root, git


def test_only_variables_that_matter_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somebodys/folder")
    module._software.cache_clear()
    found = environment()["variables"]
    module._software.cache_clear()
    assert found["OMP_NUM_THREADS"] == "1"
    assert "SECRET_TOKEN" not in found
    assert "TORCHINDUCTOR_CACHE_DIR" not in found, "a folder changes no number"


def test_a_changed_work_tree_has_its_commit_and_another_digest(repository, monkeypatch, tmp_path):
    root, git = repository
    clean = code_state(root)
    assert (clean["git_commit"], clean["git_dirty"]) == (git("rev-parse", "HEAD").strip(), False)
    (root / "harness" / "one.py").write_text("ONE = 2\n")
    code_state.cache_clear()
    changed = code_state(root)
    assert (changed["git_dirty"], changed["code_sha256"] == clean["code_sha256"]) == (True, False)
    monkeypatch.setenv("PATH", str(tmp_path))
    code_state.cache_clear()
    without = {"git_commit": None, "git_dirty": None, "code_sha256": changed["code_sha256"]}
    assert code_state(root) == without, "there is no git"


def test_differences_name_what_numbers_depend_on_and_leave_out_what_always_changes():
    one = {**environment(), "load": [0.1], "cpu_model": "one"}
    two = {**one, "load": [9.0], "memory_available_gib": 0.1, "cpu_model": "two"}
    assert differences([one, two, one]) == {"cpu_model": ["one", "two"]}
    assert differences([one, one]) == differences([]) == {}
    assert differences([one, {**one, "torch_threads": None, "gpus": None, "code_sha256": "another"}]) == {}


def test_how_gpus_compute_is_kept_where_there_are_any(monkeypatch):
    """What torch holds to be so, and what the driver says; a machine without a GPU has neither."""
    gpu = SimpleNamespace(name="H100", total_memory=80 * 2**30, major=9, minor=0)
    assert "gpu_numerics" not in environment() or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    now, ever = "1410 MHz, 2619 MHz, 71, 688.10 W, 0x4", "580.65.06, 1980 MHz, 2619 MHz, 700.00 W"
    monkeypatch.setattr(module, "_said", lambda *command: now if "clocks.sm" in command[1] else ever)
    module._driver.cache_clear()
    here = environment()
    module._driver.cache_clear()
    assert here["gpus"][0]["memory_gib"] == 80
    assert here["gpu_driver"][0]["driver_version"] == "580.65.06"
    assert here["gpu_now"][0]["temperature.gpu"] == "71"
    numerics = here["gpu_numerics"]
    assert numerics["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    other = {**here, "gpu_numerics": {**numerics, "cudnn_allow_tf32": not numerics["cudnn_allow_tf32"]}}
    assert "gpu_numerics" in differences([here, other])
    assert differences([here, {**here, "gpu_now": None}]) == {}
