"""Files of records: what comes out is what went in, and nothing else is taken."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

from command_line import call, lines
from records import metric, record

from gpipe_bench.experiments.registry import load
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.bundle import pack, records_of, unpack
from gpipe_bench.harness.record import Record, encode
from gpipe_bench.harness.store import Store

ENVIRONMENT = {
    "cpu_model": "a processor",
    "python": "3.12",
    "versions": {"torch": "2.13"},
    "code_sha256": "0",
}


def a_record(**changes: Any) -> Record:
    """One of an experiment that is known."""
    return record(**{"experiment": "computed", "environment": ENVIRONMENT, "duration_s": 12.0, **changes})


def lines_of(*records: Record) -> bytes:
    return b"".join(encode(each) + b"\n" for each in records)


def parcel(path: Path, *records: Record) -> Path:
    path.write_bytes(pack({"computed": lines_of(*(records or (a_record(),)))}))
    return path


def refusal(path: Path) -> str:
    """The one line that `check` refuses the file with."""
    status, out, err = call("check", path)
    assert (status, err) == (1, "")
    line, last = out.splitlines()
    assert last == f"check: {path}: not to be taken in"
    return line


def test_the_records_come_back_byte_for_byte_and_the_file_is_the_same_each_time(tmp_path: Path) -> None:
    content = lines_of(a_record(), a_record(step=2))
    path = tmp_path / "mine.zip"
    path.write_bytes(pack({"computed": content}))
    assert path.read_bytes() == pack({"computed": content})
    assert unpack(path) == {"computed": content}
    assert records_of("computed", content) == (a_record(), a_record(step=2))


def test_export_then_check_of_the_committed_records(tmp_path: Path) -> None:
    (machine,) = (path for path in REFERENCE.iterdir() if path.name == "cpu-2-cores")
    path = tmp_path / "records.zip"
    status, out, err = call("export", "--results", machine, "--output", path, "--json")
    assert (status, err) == (0, "")
    (facts,) = lines(out)
    assert facts["records"]["table1"] == unpack(path)["table1"].count(b"\n")
    status, out, err = call("check", path)
    assert (status, err) == (0, ""), out
    assert out.splitlines()[-1] == f"check: {path}: nothing speaks against it"


def test_what_nobody_could_read_or_use_does_not_travel(tmp_path: Path) -> None:
    folder, path = tmp_path / "mine", tmp_path / "mine.zip"
    earlier = a_record(step=2, revision=load("computed").revision - 1)
    folder.mkdir()
    (folder / "computed.jsonl").write_bytes(lines_of(a_record(), earlier) + b"no record\n")
    status, _, err = call("export", "--results", folder, "--output", path)
    assert status == 0
    unreadable, other = err.splitlines()
    assert unreadable.startswith("warning: ")
    assert unreadable.endswith("; skipped")
    assert other == "warning: computed: records of other revisions than 1 are left out: 1"
    assert unpack(path) == {"computed": lines_of(a_record())}


def test_nothing_on_record_is_bad_usage(tmp_path: Path) -> None:
    status, out, err = call("export", "--results", tmp_path / "none")
    assert (status, out) == (2, "")
    assert err.startswith("error: no records to export in")
    status, _, err = call("check", tmp_path / "none.zip")
    assert status == 2
    assert "No such file or directory; give a file that export wrote" in err


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = parcel(tmp_path / "it.zip")
    whole = path.read_bytes()
    for size in (4, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert refusal(path).startswith("refused: truncated")


def test_no_changed_bit_changes_what_is_read(tmp_path: Path) -> None:
    path = parcel(tmp_path / "it.zip")
    whole, contents = path.read_bytes(), unpack(path)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("computed.jsonl")
        start = info.header_offset + 30 + len(info.filename)
    refused = 0
    for place in range(start, start + info.compress_size, 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            same = unpack(path) == contents  # a bit that the compression does not need
        except ValueError as error:
            same, refused = "altered: " in str(error), refused + 1
        assert same, place
    assert refused


def test_two_machines_files_stand_in_one_report(tmp_path: Path) -> None:
    known = Store(REFERENCE / "cpu-2-cores").load("computed").records
    paths = []
    for name in ("laptop", "server"):
        results = Store(tmp_path / name)
        for each in known:
            results.append(dataclasses.replace(each, environment={**each.environment, "cpu_model": name}))
        paths.append(tmp_path / f"{name}.zip")
        assert call("export", "--results", tmp_path / name, "--output", paths[-1])[0] == 0
        assert call("check", paths[-1])[0] == 0
    command = ["report", "--no-figures", "--results", tmp_path / "none", "--output", tmp_path / "page"]
    status, _, err = call(*command, "--with", paths[0], "--with", paths[1])
    assert status == 0, err
    page = (tmp_path / "page" / "report.md").read_text()
    assert "- processor: laptop\n" in page
    assert "- processor: server\n" in page
    head = next(line for line in page.splitlines() if line.startswith("|") and "laptop" in line)
    assert "server" in head


def test_a_number_that_needs_no_machine_must_be_the_committed_one(tmp_path: Path) -> None:
    known = Store(REFERENCE / "cpu-2-cores").load("computed").records
    of = next(
        r for r in known if r.metrics and all(q.provenance == "modelled" and q.value for q in r.metrics)
    )
    first = of.metrics[0]
    assert first.value is not None
    wrong = metric(2 * first.value, name=first.name, key=first.key, unit=first.unit, provenance="modelled")
    changes: dict[str, Any] = {
        name: getattr(of, name) for name in ("case", "profile", "options", "revision", "environment")
    }
    path = parcel(tmp_path / "it.zip", a_record(**changes, metrics=(wrong,)))
    assert "and no machine matters" in refusal(path).partition("\n")[0]


def test_what_makes_it_weak_is_said_and_taken(tmp_path: Path) -> None:
    off = metric(1.2, name="control", unit="ratio", low=1.1, high=1.3)
    changes: dict[str, Any] = {"metrics": (off,), "details": {"void": "the control is not 1"}}
    path = parcel(tmp_path / "it.zip", a_record(profile="smoke", **changes))
    status, out, _ = call("check", path, "--json")
    assert status == 0
    texts = [line["text"] for line in lines(out)[:-1]]
    assert any("void, by its control of 1.100 to 1.300" in text for text in texts)
    assert "1 of 1 records are smoke runs, which prove the path alone" in texts


def test_a_file_stands_beside_other_machines(tmp_path: Path) -> None:
    machine = REFERENCE / "cpu-2-cores"
    path = tmp_path / "another.zip"
    assert call("export", "computed", "--results", machine, "--output", path)[0] == 0
    status, out, err = call("compare", "computed", "--machines", "cpu-2-cores", path)
    assert status == 0, err
    assert "another (profile" in out.splitlines()[0]
    status, out, err = call("report", "--with", path, "--json", "--results", tmp_path / "none")
    assert status == 0, err
    assert lines(out)
