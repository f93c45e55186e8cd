"""One file of records that is sent to somebody else, and what can be said of it without trusting it.

The file is a zip archive with a manifest and one JSON-lines file for each experiment, and nothing else:

    manifest.json   format, version, schema of the records; bytes, lines and sha256 of every file; machines
    table1.jsonl    the records, byte for byte as they were written

It is deterministic: the same records give the same bytes, with the same compression library. Reading never
unpacks to names that the file chooses, and never runs anything in it.
"""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gpipe_bench.harness.environment import COMPARABLE_FIELDS
from gpipe_bench.harness.record import SCHEMA, Record, decode

FORMAT, VERSION, MANIFEST, SUFFIX = "gpipe-bench records", 1, "manifest.json", ".zip"
MOST_BYTES = 512 * 2**20
"""Of all records in a file, unpacked: the committed reference records of a machine are a hundredth of it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.jsonl\Z")
_TIME = (1980, 1, 1, 0, 0, 0)  # the first that the format knows
_FIRST = b"PK\x03\x04"
_MACHINE = (*COMPARABLE_FIELDS, "code_sha256", "git_commit")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the manifest says of one file."""

    num_bytes: int
    lines: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file of records says of itself. `machines` are the distinct environments in it."""

    format: str
    version: int
    schema: int
    files: dict[str, Entry]
    machines: list[dict[str, Any]]


@dataclass(frozen=True)
class Parcel:
    """A file of records that is whole and unaltered: the records by experiment, and their lines as they
    were written.
    """

    manifest: Manifest
    records: Mapping[str, tuple[Record, ...]]
    contents: Mapping[str, bytes]


@contextmanager
def unpacked(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """A folder of records for each file, while inside. Raises ValueError that names the file."""
    with tempfile.TemporaryDirectory(prefix="gpipe-bench-") as name:
        folders = []
        for number, path in enumerate(paths):
            try:
                parcel = unpack(path)
            except OSError as error:
                raise ValueError(
                    f"{path}: {error.strerror or error}; give a file that export wrote"
                ) from error
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            folder = Path(name) / str(number)
            folder.mkdir()
            for experiment, content in parcel.contents.items():  # names that `_NAME` has seen
                (folder / f"{experiment}.jsonl").write_bytes(content)
            folders.append(folder)
        yield folders


class _Head(msgspec.Struct):
    format: str
    version: int


def pack(lines: Mapping[str, bytes]) -> bytes:
    """The file of the records of each experiment, given as JSON lines. ValueError for lines that are none."""
    records = {name: _records(name, content) for name, content in lines.items()}
    manifest = Manifest(
        FORMAT, VERSION, SCHEMA,
        {f"{name}.jsonl": _entry(content) for name, content in sorted(lines.items())},
        _machines([record for name in sorted(records) for record in records[name]]),
    )  # fmt: skip
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (
            (MANIFEST, msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1)),
            *((f"{name}.jsonl", lines[name]) for name in sorted(lines)),
        ):
            info = zipfile.ZipInfo(name, _TIME)
            info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            archive.writestr(info, content, compresslevel=9)
    return target.getvalue()


def unpack(path: Path) -> Parcel:
    """The records of a file. OSError where it can't be read; ValueError, with one line that says what is
    wrong, unless it holds what `pack` wrote into it, to the last byte.
    """
    with open(path, "rb") as file:
        first = file.read(len(_FIRST))
        if first != _FIRST:
            kind = "is empty" if not first else "is no zip archive"
            raise ValueError(f"foreign: it {kind}, so `export` has not written it")
        try:
            with zipfile.ZipFile(file) as archive:
                return _read(archive)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
            if "not a zip file" in str(error):
                raise ValueError("truncated: the end of the archive is missing; send it again") from error
            raise ValueError(f"altered: the archive is damaged ({error})") from error


def _read(archive: zipfile.ZipFile) -> Parcel:
    infos = archive.infolist()
    names = [info.filename for info in infos]
    for info in infos:
        # No name leads out of a folder, although none is ever used as a path.
        if info.filename != MANIFEST and not _NAME.match(info.filename):
            raise ValueError(
                f"foreign: it holds {info.filename!r}; only {MANIFEST} and EXPERIMENT.jsonl belong there"
            )
        if info.flag_bits & 1:
            raise ValueError(f"foreign: {info.filename} is encrypted")
    if len(set(names)) < len(names):
        raise ValueError("foreign: a name is there twice")
    if MANIFEST not in names:
        raise ValueError(f"foreign: it has no {MANIFEST}, so `export` has not written it")
    if sum(info.file_size for info in infos) > MOST_BYTES:
        raise ValueError(f"foreign: unpacked it would be more than {MOST_BYTES} bytes")
    contents = {info.filename: _content(archive, info) for info in infos}
    manifest = _manifest(contents.pop(MANIFEST))
    for name in sorted(manifest.files.keys() - contents.keys()):
        raise ValueError(f"altered: {name} is in the manifest, but not in the file")
    for name in sorted(contents.keys() - manifest.files.keys()):
        raise ValueError(f"altered: {name} is in the file, but not in the manifest")
    for name, content in contents.items():
        if _entry(content) != manifest.files[name]:
            raise ValueError(f"altered: {name} is not what the manifest says (bytes, lines or sha256)")
    by_name = {name.removesuffix(".jsonl"): content for name, content in contents.items()}
    records = {name: _records(name, content) for name, content in by_name.items()}
    if manifest.machines != _machines([each for name in sorted(records) for each in records[name]]):
        raise ValueError("altered: the machines in the manifest are not those of the records")
    return Parcel(manifest, records, by_name)


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """No more than the directory says, whatever the archive holds."""
    with archive.open(info) as file:
        content = file.read(info.file_size + 1)
    if len(content) != info.file_size:
        raise ValueError(f"altered: {info.filename} is not as long as the archive says")
    return content


def _manifest(content: bytes) -> Manifest:
    try:
        head = msgspec.json.decode(content, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"foreign: its {MANIFEST} is not one of `export` ({error})") from error
    if head.format != FORMAT:
        raise ValueError(f"foreign: its format is {head.format!r}, not {FORMAT!r}")
    if head.version > VERSION:
        raise ValueError(
            f"written by a newer version: {head.version}, while this one reads up to {VERSION}; update first"
        )
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"altered: its {MANIFEST} is not one of `export` ({error})") from error
    if manifest.schema != SCHEMA:
        raise ValueError(f"its records have schema {manifest.schema}, while this version reads {SCHEMA}")
    return manifest


def _entry(content: bytes) -> Entry:
    return Entry(len(content), content.count(b"\n"), hashlib.sha256(content).hexdigest())


def _records(name: str, content: bytes) -> tuple[Record, ...]:
    records = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            record = decode(line)
        except ValueError as error:
            raise ValueError(f"altered: {name}.jsonl, line {number}: {error}") from error
        if record.experiment != name:
            raise ValueError(f"altered: {name}.jsonl, line {number}: a record of {record.experiment!r}")
        records.append(record)
    return tuple(records)


def _machines(records: list[Record]) -> list[dict[str, Any]]:
    """What numbers depend on, once for each that differs, in the order of the records."""
    found: list[dict[str, Any]] = []
    for record in records:
        machine = {name: record.environment.get(name) for name in _MACHINE}
        if machine not in found:
            found.append(machine)
    return found
