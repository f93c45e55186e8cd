"""One file of records that is sent to somebody else, and what can be said of it without trusting it.

The file is a zip archive of one JSON-lines file for each experiment, byte for byte as the records were
written, and nothing else. Each line carries its own digest; that none is missing shows in its comment:

    gpipe-bench records 2, schema 2, sha256 of all names and lines

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
from pathlib import Path

from gpipe_bench.harness.record import SCHEMA, Record, decode

SUFFIX = ".zip"
MOST_BYTES = 512 * 2**20
"""Of all records in a file, unpacked: the committed reference records of a machine are a hundredth of it."""
VERSION = 2
_COMMENT = re.compile(rb"gpipe-bench records (\d{1,6}), schema (\d{1,6}), ([0-9a-f]{64})")
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})\.jsonl")
_TIME = (1980, 1, 1, 0, 0, 0)  # the first that the format knows


def pack(lines: Mapping[str, bytes]) -> bytes:
    """The file of the records of each experiment, given as JSON lines. ValueError for lines that are none."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted(lines.items()):
            records_of(name, content)
            info = zipfile.ZipInfo(f"{name}.jsonl", _TIME)
            info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            archive.writestr(info, content)
        head = f"gpipe-bench records {VERSION}, schema {SCHEMA}, {_digest(lines)}"
        archive.comment = head.encode()
    return target.getvalue()


def unpack(path: Path) -> dict[str, bytes]:
    """The JSON lines of each experiment in a file, as they were written.

    OSError where it can't be read; ValueError, with one line that says what is wrong, unless it holds what
    `pack` wrote into it, to the last byte.
    """
    with open(path, "rb") as file:
        first = file.read(4)
        if first != b"PK\x03\x04":
            kind = "is empty" if not first else "is no zip archive"
            raise ValueError(f"foreign: it {kind}, so `export` has not written it")
        try:
            with zipfile.ZipFile(file) as archive:
                return _read(archive)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
            if "not a zip file" in str(error):
                raise ValueError("truncated: the end of the archive is missing; send it again") from error
            raise ValueError(f"altered: the archive is damaged ({error})") from error


@contextmanager
def unpacked(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """A folder of records for each file, while inside. Raises ValueError that names the file."""
    with tempfile.TemporaryDirectory(prefix="gpipe-bench-") as name:
        folders = []
        for number, path in enumerate(paths):
            try:
                contents = unpack(path)
            except OSError as error:
                cause = error.strerror or error
                raise ValueError(f"{path}: {cause}; give a file that export wrote") from error
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            folder = Path(name) / str(number)
            folder.mkdir()
            for experiment, content in contents.items():  # names that `_NAME` has seen
                (folder / f"{experiment}.jsonl").write_bytes(content)
            folders.append(folder)
        yield folders


def records_of(name: str, content: bytes) -> tuple[Record, ...]:
    """The records of an experiment's lines. Raises ValueError with the line that is none of its."""
    records = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            record = decode(line)
            if record.experiment != name:
                raise ValueError(f"a record of {record.experiment!r}")
        except ValueError as error:
            raise ValueError(f"altered: {name}.jsonl, line {number}: {error}") from error
        records.append(record)
    return tuple(records)


def _read(archive: zipfile.ZipFile) -> dict[str, bytes]:
    head = _COMMENT.fullmatch(archive.comment)
    if head is None:
        raise ValueError("truncated or foreign: its comment is not that of `export`")
    version, schema, digest = int(head[1]), int(head[2]), head[3].decode()
    if version > VERSION:
        raise ValueError(
            f"written by a newer version: {version}, while this one reads up to {VERSION}; update first"
        )
    if schema != SCHEMA:
        raise ValueError(f"its records have schema {schema}, while this version reads {SCHEMA}")
    contents: dict[str, bytes] = {}
    if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
        raise ValueError(f"foreign: unpacked it would be more than {MOST_BYTES} bytes")
    for info in archive.infolist():
        # No name leads out of a folder, although none is ever used as a path.
        name = _NAME.fullmatch(info.filename)
        if name is None or name[1] in contents:
            raise ValueError(
                f"foreign: it holds {info.filename!r}; only one EXPERIMENT.jsonl each belongs there"
            )
        if info.flag_bits & 1:
            raise ValueError(f"foreign: {info.filename} is encrypted")
        with archive.open(info) as file:
            contents[name[1]] = file.read(info.file_size + 1)  # no more than it says, whatever it holds
    for experiment, content in contents.items():
        records_of(experiment, content)
    if _digest(contents) != digest:
        raise ValueError("altered: its lines are not all that the digest in its comment was made of")
    return contents


def _digest(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
