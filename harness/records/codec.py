"""A record as one line of JSON that proves it was not altered.

Each line ends with a digest of its own bytes: a truncated line fails to parse, an edited one fails its
digest. Decoding checks types and never runs code from the line.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any

import msgspec

from gpipe_bench.harness.records.record import SCHEMA, Record

_DIGEST = re.compile(rb',"digest":"([0-9a-f]{16})"\}\Z')


class _Header(msgspec.Struct):
    schema: int


_header_decoder = msgspec.json.Decoder(_Header)
_record_decoder = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """The line of a record, without newline. Raises ValueError where its details are not plain data."""
    try:
        body = _encoder.encode(record)
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"the record of {record.label} can't be written as JSON: {error}") from error
    return body[:-1] + b',"digest":"' + _digest(body) + b'"}'


def decode(line: bytes) -> Record:
    """The record of a line. Raises ValueError that says what is wrong with the line."""
    line = line.strip()
    schema = _checked(line)
    if schema < SCHEMA:
        raise ValueError(
            f"made by an older version: schema {schema}, while this one reads {SCHEMA}; run the case again"
        )
    try:
        return _record_decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a valid record: {error}") from error


def _checked(line: bytes) -> int:
    """The schema of a line that is whole and unaltered. Raises ValueError that says what is wrong with it."""
    try:
        schema = _header_decoder.decode(line).schema
    except msgspec.ValidationError as error:
        raise ValueError(f"not a record: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a complete line of JSON, truncated or edited ({error})") from error
    if schema > SCHEMA:
        raise ValueError(f"written by a newer version: schema {schema}, while this one reads up to {SCHEMA}")
    match = _DIGEST.search(line)
    if match is None:
        raise ValueError("its digest is missing, so it was edited or not written by this program")
    if _digest(line[: match.start()] + b"}") != match[1]:
        raise ValueError("its digest does not fit, so it was edited after it was written")
    return schema


def printable(text: str) -> str:
    """The text with what UTF-8 can't hold (bytes of a file name that are no text) spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch, arrays and paths as plain data; everything else is refused by name."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"{type(value).__name__} is not plain data; convert it to numbers, text, lists or dictionaries"
    )


_encoder = msgspec.json.Encoder(enc_hook=_plain)
