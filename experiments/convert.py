"""Records of the first schema as records of this one, so that no finished run is lost to a new version.

    python -m gpipe_bench.experiments.convert results/local

The names of their quantities said in prose what the key says now ("step K=4 M=32"); this is the one place
that takes them apart. Values, samples and all else stay as they are. Each file is replaced as a whole and the
one before it kept beside it (`.jsonl.schema1`); lines that are no records of the first schema are copied as
they are. Nothing else may be writing to the folder meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gpipe_bench.experiments.report.figures import digest
from gpipe_bench.harness.records.codec import decode, decode_older, encode
from gpipe_bench.harness.records.files import write_whole
from gpipe_bench.harness.records.record import SCHEMA, Record, Scalar
from gpipe_bench.harness.records.store import latest

Named = tuple[str, dict[str, Scalar]]

_PARTS = ("computation", "recompute", "weight update", "setup", "communication", "load imbalance", "bubble")
_NUMBERS: dict[str, Callable[[str], Scalar]] = {
    "K": int, "M": int, "share_of_peak": lambda text: int(text) / 100,
}  # fmt: skip
_PATTERNS: dict[str, tuple[tuple[str, str], ...]] = {
    "table3": (
        (r"(?P<name>(?:normalised )?throughput) over (?P<link>.+) K=(?P<K>\d+)", ""),
        (r"(?P<name>normalised throughput) at (?P<share_of_peak>\d+)% of the peak K=(?P<K>\d+)", "PCIe"),
        (r"(?P<name>normalised bound|share of the balanced step|hidden from) K=(?P<K>\d+)", ""),
    ),
    "figure2": (
        (r"(?P<name>bubble) of (?P<schedule>.+) at M=(?P<M>\d+)", ""),
        (r"(?P<name>peak activations|formula|kept without re-materialization) at M=(?P<M>\d+)", ""),
        (r"(?P<name>pipeline, .+|data parallelism, .+|break-even mini-batch), K=(?P<K>\d+)", ""),
    ),
}
"""By experiment: a pattern whose groups are name and parts of the key, and a link that it leaves out."""


class Converted(NamedTuple):
    """A line of the file: as it is now, the record it holds, and the line it was made from, if it was."""

    line: bytes
    record: Record | None
    before: bytes | None


def convert_line(line: bytes) -> Converted:
    """The line of this schema for one of the first, or the line itself where it is none.

    Raises ValueError for a record that can't be told apart: two quantities of one name and key.
    """
    older = decode_older(line)
    if older is None:
        return Converted(line, None, None)
    details, names = older["details"], _names(older)
    for facts in _configurations(older).values():
        facts["key"] = _key(older["experiment"], details, facts)
    for name, facts in details.get("stages", {}).items() if older["experiment"] == "table3" else ():
        facts["num_stages"] = int(name.removeprefix("K="))
    if older["experiment"] == "table3" and (width := details.pop("gap", None)) is not None:
        details["share_of_peak"] = {name: [1 - most, 1 + most] for name, most in width.items()}
    for point in details.get("points", ()) if older["experiment"] == "table3" else ():
        del point["name"]
    for quantity in older["quantities"]:
        name, key = names.get(quantity["name"]) or _matched(older["experiment"], quantity["name"])
        quantity |= {"name": name, "key": key}
    older["schema"] = SCHEMA
    record = msgspec.convert(older, Record)
    written = encode(record)
    return Converted(written, decode(written), line.strip())


def _names(older: dict[str, Any]) -> dict[str, Named]:
    """Name and key of every quantity that belongs to one of the configurations or points in the details."""
    found: dict[str, Named] = {}
    details = older["details"]
    for label, facts in _configurations(older).items():
        key = _key(older["experiment"], details, facts)
        for quantity in older["quantities"]:
            what = quantity["name"].removesuffix(f" {label}")
            if what == quantity["name"]:
                continue
            if older["experiment"] == "table4" and what in _PARTS:
                found[quantity["name"]] = ("share of the step", {"part": what, **key})
            else:
                found[quantity["name"]] = (what, key)
    for point in details.get("points", ()) if older["experiment"] == "table3" else ():
        for what in ("bandwidth", "latency", "real step", "step", "replay error"):
            found[f"{what} {point['name']}"] = (what, {"messages_per_forward": point["multiple"]})
    return found


def _configurations(older: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was timed, by its name, in the experiments that time several configurations in a case."""
    found: dict[str, dict[str, Any]] = older["details"].get("cells", {})
    return found if older["experiment"] in ("table2", "table4", "figure3") else {}


def _key(experiment: str, details: dict[str, Any], facts: dict[str, Any]) -> dict[str, Scalar]:
    """The key of a configuration; figure 3 calls its own by scheme and number of stages."""
    if experiment != "figure3":
        return {"K": facts["num_stages"], "M": facts["num_microbatches"]}
    label = next(label for label, each in details["cells"].items() if each is facts)
    return {"configuration": label.partition(" ")[0], "M": facts["num_microbatches"]}


def _matched(experiment: str, name: str) -> Named:
    for pattern, link in _PATTERNS.get(experiment, ()):
        if match := re.fullmatch(pattern, name):
            groups = match.groupdict()
            what = groups.pop("name")
            key: dict[str, Scalar] = {"link": link} if link else {}
            return what, key | {part: _NUMBERS.get(part, str)(text) for part, text in groups.items()}
    return name, {}


def convert_file(path: Path) -> tuple[int, list[str]]:
    """Converts a file of records; how many, and a line for each that could not be. Raises OSError."""
    before = path.read_bytes()
    found: list[Converted] = []
    problems: list[str] = []
    for number, line in enumerate(before.split(b"\n"), start=1):
        try:
            found.append(convert_line(line))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            problems.append(f"{path}:{number}: can't be converted: {type(error).__name__}: {error}")
            found.append(Converted(line, None, None))
    count = sum(each.before is not None for each in found)
    if count:
        write_whole(path.with_name(f"{path.name}.schema1"), before)
        write_whole(path, b"\n".join(each.line for each in found))
        _renew_figures(path, found)
    return count, problems


def _renew_figures(path: Path, found: Iterable[Converted]) -> None:
    """Figures that showed the records before show the same numbers now; their note says so."""
    note_path = path.parent / "figures" / f"{path.stem}.json"
    try:
        note = json.loads(note_path.read_text(encoding="utf-8"))
        shown = note["records_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    before = {each.record.identity: each.before for each in found if each.record and each.before}
    groups: dict[str, list[Record]] = {}
    for record in latest(each.record for each in found if each.record is not None).values():
        groups.setdefault(repr((record.profile, record.revision, sorted(record.options.items()))), []).append(
            record
        )
    for records in groups.values():
        lines = sorted(hashlib.sha256(before[record.identity]).digest() for record in records)
        if hashlib.sha256(b"".join(lines)).hexdigest() == shown:
            note["records_sha256"] = digest(records)
            write_whole(note_path, json.dumps(note, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpipe_bench.experiments.convert", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder of records, such as results/local")
    folder: Path = parser.parse_args(arguments).folder
    failed = False
    for path in sorted(folder.glob("*.jsonl")):
        try:
            count, problems = convert_file(path)
        except OSError as error:
            count, problems = 0, [f"{path}: {error.strerror or error}"]
        for problem in problems:
            print(problem, file=sys.stderr)
        failed = failed or bool(problems)
        print(f"{path}: {count} records converted")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
