"""What one finished case leaves behind, and how it is written as one line of JSON.

Every table, figure and verdict is a pure function of records, so a record carries all that is needed to
judge it later and elsewhere: raw samples, units, provenance, the machine and the code it came from.

What was measured several times is its median, because one disturbed repeat must not move the result, with an
interval by bootstrap, because timings are skewed and no normal law holds for a handful of them.
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
"""Version of the stored form; a reader refuses other lines instead of guessing what they mean."""
REPRODUCTION = "reproduction"
"""The `part` of the cases that compute the paper's numbers at the paper's size."""

Scalar = str | int | float | bool | None
Provenance = Literal["measured", "replayed", "modelled"]
Status = Literal["done", "skipped", "out_of_memory", "failed"]

PROVENANCES: tuple[str, ...] = get_args(Provenance)

FINAL: frozenset[str] = frozenset({"done", "out_of_memory"})
"""Statuses that are results; other cases are tried again by the next run."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number with its unit, where it comes from and how sure it is.

    `name` says what is counted, `key` of what within the case: {"K": 4, "M": 32}. `low` and `high` are its
    interval (`interval_name`), `samples` the raw measurements behind `value`, which is None where the case
    ended without one.

    Raises ValueError for values that are not finite, an interval that does not hold the value, an unknown
    provenance, or a key whose values are not plain.
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
            slack = 1e-9 * max(abs(self.low), abs(self.high))  # of a bootstrap's last bit
            if not self.low - slack <= self.value <= self.high + slack:
                raise ValueError(
                    f"metric {self.name!r}: {self.value} is outside its interval {self.low} to {self.high}"
                )

    @property
    def label(self) -> str:
        """`step K=4 M=32`: name and key in words, for people."""
        return f"{self.name} {label(self.key)}" if self.key else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One case of one experiment: what was asked, what came out, on what, and when.

    `case` is the key of the case within the experiment, `options` the run options its result depends on,
    `revision` the experiment's own version: together with `experiment` and `profile` they identify the
    case. `reason` says why there is no result where `status` is not "done". `started_at` is UTC and for
    people only; order in the file decides which record is later.
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
        """The metric of exactly that name and key, or None where the case did not produce it."""
        return next((each for each in self.metrics if each.name == name and each.key == key), None)

    @property
    def is_computed(self) -> bool:
        """Whether its case computes the paper's numbers at the paper's size, as declared."""
        return self.case.get("part") == REPRODUCTION

    @property
    def identity(self) -> str:
        """Equal for two records of the same case (see `identity`)."""
        return identity(self.experiment, self.profile, self.revision, self.case, self.options)

    @property
    def label(self) -> str:
        """The case in words, for messages."""
        return label(self.case)


def identity(
    experiment: str, profile: str, revision: int, case: dict[str, Scalar], options: dict[str, Scalar]
) -> str:
    """A text that two records share exactly when they are of the same case; independent of key order."""
    return repr((experiment, profile, revision, sorted(case.items()), sorted(options.items())))


def check_key(key: Mapping[str, Scalar], what: str) -> None:
    """Raises ValueError for values that would not survive being stored; `what` begins the message."""
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
    """The records whose case has these values, in order; with `status`, only those."""
    return [
        record
        for record in records
        if (status is None or record.status == status)
        and all(record.case.get(key) == value for key, value in case.items())
    ]


def find(records: Sequence[Record], status: Status | None = None, /, **case: Scalar) -> Record | None:
    """The first such record, None where there is none."""
    return next(iter(of_case(records, status, **case)), None)


# Repeated measurements

_RESAMPLES = 2000
_SEED = 1811_06965  # the interval of the same samples must be the same number every time


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the median, in the samples' unit; None below two samples."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it is a share between 0 and 1, such as 0.95")
    if len(samples) < 2:
        return None
    if min(samples) == max(samples):
        return float(samples[0]), float(samples[0])
    import numpy  # what `scipy.stats.bootstrap` does; importing that takes half as long again as a `compare`

    values = numpy.asarray(samples, dtype=float)
    drawn = numpy.random.default_rng(_SEED).integers(0, len(values), (_RESAMPLES, len(values)))
    outside = (1 - confidence) / 2
    ends = numpy.quantile(numpy.median(values[drawn], axis=-1), (outside, 1 - outside))
    middle = statistics.median(samples)  # interpolation may leave the samples' range by the last bit
    low, high = (min(max(float(end), min(samples)), max(samples)) for end in ends)
    return min(low, middle), max(high, middle)


FEWEST = 6
"""Samples from which on an interval of their median has a per cent: a bootstrap of fewer covers it 94 times
in a hundred at most, so below they are the smallest and the largest."""


def interval_name(num_samples: int) -> str:
    """Name of the interval of so many samples."""
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
    """Median of the samples with its 95 % interval, below `FEWEST` with the smallest and the largest. Raises
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
    """The line of a record, without newline. Raises ValueError where its details are not plain data."""
    try:
        return _encoder.encode(record)
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"the record of {record.label} can't be written as JSON: {error}") from error


def decode(line: bytes) -> Record:
    """The record of a line, with control characters but tabs and ends of lines spelled out: whoever wrote it
    gives no orders to a terminal. Raises ValueError that says what is wrong with the line.
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


# In JSON: an escaped backslash, which may stand before anything, or a control character.
_CONTROL = re.compile(
    rb"\\(?:\\|[bfr]|u00(?:0[0-8bBcCdDeEfF]|1[0-9a-fA-F]|7[fF]|[89][0-9a-fA-F]))|\xc2[\x80-\x9f]|\x7f"
)


def _spelled_out(found: re.Match[bytes]) -> bytes:
    if found[0] == b"\\\\":
        return found[0]
    text = found[0].decode() if found[0][:1] != b"\\" else msgspec.json.decode(b'"' + found[0] + b'"')
    return f"\\\\x{ord(text):02x}".encode()


def printable(text: str) -> str:
    """The text with what UTF-8 can't hold (bytes of a file name that are no text) spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch, arrays and paths as plain data; everything else is refused by name."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"{type(value).__name__} is not plain data; convert it to numbers, text, lists or dictionaries"
    )


_encoder, _decoder = msgspec.json.Encoder(enc_hook=_plain), msgspec.json.Decoder(Record)


BEFORE = ("record", "experiment", "profile", "status", "reason", "duration_s")
"""Columns of `frame` before the keys. `record` is the record's place in what was given, for its details."""
BEHIND = ("metric", "value", "low", "high", "unit", "provenance", "samples", "note")
"""Columns of `frame` behind the keys. `metric` is its name, without its key."""


def frame(records: Sequence[Record]) -> DataFrame:
    """A pandas DataFrame with a row for each metric of each record, in their order, and one without a
    metric for a record that has none, so that a table is a selection and a pivot:

        numbers = frame(records).query("metric == 'step' and M == 32")
        table = numbers.pivot(index="K", columns="schedule", values="value")

    Columns are `BEFORE`, the keys of the cases, the keys of the metrics, `BEHIND`. What a record does not
    have is missing (`isna`); a key of whole numbers stays one of whole numbers all the same. Where case and
    metric share a key, the metric's counts. Raises ValueError for a key that is named like a column.
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
