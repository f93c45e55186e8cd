"""Which records a table is made of: those of one profile, one revision and one set of run options."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.records.store import latest


def select_records(records: Sequence[Record], experiment: Experiment, profile: str | None) -> list[Record]:
    """The latest record of each case at the current revision; without `profile`, of the latest one."""
    current = [record for record in records if record.revision == experiment.revision]
    if profile is None and current:
        profile = current[-1].profile
    return list(latest(record for record in current if record.profile == profile).values())


def merge(stored: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """The stored records with the new ones in their place; on a full disk new ones are not stored."""
    return list(latest([*stored, *new]).values())
