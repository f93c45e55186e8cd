"""Records picked by what their case says."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.harness.records.record import Record, Scalar, Status


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
