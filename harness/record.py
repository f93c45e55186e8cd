"""`Record`: the result of one case, and its line of JSON.

Every table, figure and verdict is a pure function of records, so a record has all that is needed to judge it
later and elsewhere: raw samples, units, provenance, the machine and the code.

Repeated measurements are given as their median, which one disturbed repeat does not move, with a bootstrap
interval, because a few skewed timings follow no normal distribution.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA = 3
"""Version of the format; lines of other versions are refused."""
REPRODUCTION = "reproduction"
"""The `part` of cases that compute the paper's numbers at the paper's size."""

Scalar = str | int | float | bool | None
Provenance = Literal["measured", "replayed", "modelled"]
Status = Literal["done", "skipped", "out_of_memory", "failed"]

PROVENANCES: tuple[str, ...] = get_args(Provenance)

FINAL: frozenset[str] = frozenset({"done", "out_of_memory"})
"""Statuses that are results; cases with another status run again."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number with its unit, provenance and uncertainty.

    `name` says what it is, `key` of which configuration within the case: {"K": 4, "M": 32}. `low` and `high`
    are its interval (`interval_name`), `samples` the raw measurements behind `value`, which is None if the
    case ended without one.

    Raises ValueError for values that are not finite, an interval without the value, an unknown provenance, or
    a key whose values are no plain data.
    """

    name: str
    key: Mapping[str, Scalar] = field(default_factory=dict, kw_only=True)
    value: float | int | None
    unit: str
    provenance: Provenance
    _: KW_ONLY
    low: float | None = None
    high: float | None = None
    samples: tuple[float, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        check_key(self.key, f"metric {self.name!r}: key")
        if self.provenance not in PROVENANCES:
            raise ValueError(
                f"metric {self.name!r}: provenance {self.provenance!r} is none of {list(PROVENANCES)}"
            )
        for label, number in (("value", self.value), ("low", self.low), ("high", self.high)):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"metric {self.name!r}: {label} is {number}; use None and say why in note")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"metric {self.name!r}: give both ends of the interval or neither")
        if self.low is not None and self.high is not None and self.value is not None:
            slack = 1e-9 * max(abs(self.low), abs(self.high))  # rounding of a bootstrap
            if not self.low - slack <= self.value <= self.high + slack:
                raise ValueError(
                    f"metric {self.name!r}: {self.value} is outside its interval {self.low} to {self.high}"
                )

    @property
    def label(self) -> str:
        """`step K=4 M=32`: name and key in words."""
        return f"{self.name} {label(self.key)}" if self.key else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The result of one case of one experiment, with its machine and time.

    `experiment`, `profile`, `case` (the case's key), `options` (run options that the result depends on) and
    `revision` (the experiment's version) identify the case. `reason` says why there is no result if `status`
    is not "done". `started_at` is in UTC and informs people; the order in the file decides which record is
    later.
    """

    schema: int
    experiment: str
    profile: str
    case: dict[str, Scalar]
    status: Status
    reason: str
    metrics: tuple[Metric, ...]
    details: dict[str, Any]
    environment: dict[str, Any]
    command: str
    started_at: str
    duration_s: float
    revision: int = 1
    options: dict[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status != "done" and not self.reason:
            raise ValueError(f"a record with status {self.status!r} needs a reason")
        seen = Counter((metric.name, frozenset(metric.key.items())) for metric in self.metrics)
        for metric in self.metrics:
            if seen[metric.name, frozenset(metric.key.items())] > 1:
                raise ValueError(
                    f"metric {metric.label!r} is given twice; name and key identify metrics within a case"
                )

    def metric(self, name: str, /, **key: Scalar) -> Metric | None:
        """The metric of exactly this name and key; None if the case has none."""
        return next((each for each in self.metrics if each.name == name and each.key == key), None)

    @property
    def is_computed(self) -> bool:
        """Whether its case computes the paper's numbers at the paper's size."""
        return self.case.get("part") == REPRODUCTION

    @property
    def identity(self) -> str:
        """Equal for records of the same case (see `identity`)."""
        return identity(self.experiment, self.profile, self.revision, self.case, self.options)

    @property
    def label(self) -> str:
        """The case in words, for messages."""
        return label(self.case)


def identity(
    experiment: str, profile: str, revision: int, case: dict[str, Scalar], options: dict[str, Scalar]
) -> str:
    """A text that is equal for records of the same case and no others; the order of keys is ignored."""
    return repr((experiment, profile, revision, sorted(case.items()), sorted(options.items())))


def check_key(key: Mapping[str, Scalar], what: str) -> None:
    """`ValueError` for values that JSON would change; `what` begins the message."""
    for name, value in key.items():
        if not (value is None or type(value) in (str, int, float, bool)):
            raise ValueError(
                f"{what} {name}={value!r} is {type(value).__name__}; use str, int, float, bool or None"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{what} {name}={value} is not finite")


def label(case: Mapping[str, Scalar]) -> str:
    """`K=2 M=4`: the key of a case in words."""
    return " ".join(f"{key}={value}" for key, value in case.items()) or "the only case"


def of_case(records: Sequence[Record], status: Status | None = None, /, **case: Scalar) -> list[Record]:
    """The records whose case has these values, in order; with `status`, only those with this status."""
    return [
        record
        for record in records
        if (status is None or record.status == status)
        and all(record.case.get(key) == value for key, value in case.items())
    ]


def find(records: Sequence[Record], status: Status | None = None, /, **case: Scalar) -> Record | None:
    """The first such record; None if there is none."""
    return next(iter(of_case(records, status, **case)), None)


# Repeated measurements

_RESAMPLES = 2000
_SEED = 1811_06965  # fixed, so that the same samples have the same interval


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of the median, in the samples' unit; None below two samples."""
    if len(samples) < 2:
        return None
    if min(samples) == max(samples):
        return float(samples[0]), float(samples[0])
    import numpy  # as `scipy.stats.bootstrap`, whose import takes half as long as a `compare`

    values = numpy.asarray(samples, dtype=float)
    drawn = numpy.random.default_rng(_SEED).integers(0, len(values), (_RESAMPLES, len(values)))
    ends = numpy.quantile(numpy.median(values[drawn], axis=-1), (0.025, 0.975))
    middle = statistics.median(samples)  # interpolation may leave their range by the last bit
    low, high = (min(max(float(end), min(samples)), max(samples)) for end in ends)
    return min(low, middle), max(high, middle)


FEWEST = 6
"""Samples from which on an interval of their median has a per cent: a bootstrap of fewer covers it 94 times
in a hundred at most, so below they are the smallest and the largest."""


def interval_name(num_samples: int) -> str:
    """What the interval of so many samples is called."""
    if num_samples >= FEWEST:
        return "95 % interval"
    return {0: "interval", 1: "one sample"}.get(num_samples, f"smallest to largest of {num_samples}")


def from_samples(
    name: str,
    samples: Sequence[float],
    unit: str,
    *,
    key: Mapping[str, Scalar] | None = None,
    provenance: Provenance = "measured",
    note: str = "",
) -> Metric:
    """The median of the samples with its 95 % interval, or below `FEWEST` samples with their range. Raises
    ValueError without samples.
    """
    if not samples:
        raise ValueError(f"metric {name!r} has no samples")
    interval = median_interval(samples) if len(samples) >= FEWEST else (min(samples), max(samples))
    low, high = (None, None) if interval is None or len(samples) == 1 else interval
    return Metric(
        name, float(statistics.median(samples)), unit, provenance, key=dict(key or {}), low=low, high=high,
        samples=tuple(map(float, samples)), note=note,
    )  # fmt: skip


# One line of JSON


class _Header(msgspec.Struct):
    schema: int


def encode(record: Record) -> bytes:
    """The line of a record, without newline. Raises ValueError if its details are not plain data."""
    try:
        return _encoder.encode(record)
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"the record of {record.label} can't be written as JSON: {error}") from error


def decode(line: bytes) -> Record:
    """The record of a line. Control characters, except tabs and line ends, are spelled out, so that no file
    sends commands to a terminal. Raises ValueError that says what is wrong with the line.
    """
    line = _CONTROL.sub(_spelled_out, line.strip())
    try:
        schema = msgspec.json.decode(line, type=_Header).schema
    except msgspec.ValidationError as error:
        raise ValueError(f"not a record: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a complete line of JSON, truncated or edited ({error})") from error
    if schema != SCHEMA:
        age = "newer version" if schema > SCHEMA else "older version; run the case again"
        raise ValueError(f"written with schema {schema}, while this one reads {SCHEMA}, by a {age}")
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a valid record: {error}") from error


# Control characters in JSON, and escaped backslashes, which are matched to be left alone.
_CONTROL = re.compile(
    rb"\\(?:\\|[bfr]|u00(?:0[0-8bBcCdDeEfF]|1[0-9a-fA-F]|7[fF]|[89][0-9a-fA-F]))|\xc2[\x80-\x9f]|\x7f"
)


def _spelled_out(found: re.Match[bytes]) -> bytes:
    if found[0] == b"\\\\":
        return found[0]
    text = found[0].decode() if found[0][:1] != b"\\" else msgspec.json.decode(b'"' + found[0] + b'"')
    return f"\\\\x{ord(text):02x}".encode()


def printable(text: str) -> str:
    """The text with what UTF-8 can't encode (such as undecodable file names) spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any) -> Any:
    """Turns numbers of numpy and torch, arrays and paths into plain data; refuses all else."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"{type(value).__name__} is not plain data; convert it to numbers, text, lists or dictionaries"
    )


_encoder, _decoder = msgspec.json.Encoder(enc_hook=_plain), msgspec.json.Decoder(Record)


BEFORE = ("record", "experiment", "profile", "status", "reason", "duration_s")
"""Columns of `frame` before the keys. `record` is the index of the record."""
BEHIND = ("metric", "value", "low", "high", "unit", "provenance", "samples", "note")
"""Columns of `frame` behind the keys. `metric` is the metric's name."""


def frame(records: Sequence[Record]) -> DataFrame:
    """A pandas DataFrame with a row for each metric of each record, in order, and one for a record without
    metrics, so that a table is a selection and a pivot:

        numbers = frame(records).query("metric == 'step' and M == 32")
        table = numbers.pivot(index="K", columns="schedule", values="value")

    Columns are `BEFORE`, the keys of cases, the keys of metrics, `BEHIND`. Missing values are missing
    (`isna`), also in columns of integers. If case and metric share a key, the metric's value is used. Raises
    ValueError for a key with a column's name.
    """
    from pandas import DataFrame  # which takes half a second

    keys = dict.fromkeys(name for record in records for name in record.case)
    keys |= dict.fromkeys(name for record in records for each in record.metrics for name in each.key)
    if taken := keys.keys() & {*BEFORE, *BEHIND}:
        raise ValueError(f"key {min(taken)!r} of a case or metric is a column's name; choose another key")
    rows: list[dict[str, Any]] = []
    for place, record in enumerate(records):
        case = {"record": place, **{name: getattr(record, name) for name in BEFORE[1:]}, **record.case}
        for metric in record.metrics:
            number = {name: getattr(metric, name) for name in BEHIND[1:]}
            rows.append({**case, **metric.key, "metric": metric.name, **number})
        if not record.metrics:
            rows.append(case)
    names = [*BEFORE, *keys, *BEHIND]
    columns = {name: [row.get(name) for row in rows] for name in names}  # of Python's own objects
    found = DataFrame(columns, columns=names, dtype=object).infer_objects()
    whole = [key for key in keys if all(type(row[key]) is int for row in rows if row.get(key) is not None)]
    return found.astype({**dict.fromkeys(whole, "Int64"), **dict.fromkeys(("value", "low", "high"), float)})
