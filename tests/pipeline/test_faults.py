"""A rank that is killed or stopped ends all others, which say who it was."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from fault_cases import END, FAULTS, Fault, take_part
from forked import HANGING_S, fork_server, free_port

pytestmark = pytest.mark.processes  # four at a time


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_broken_rank_ends_all_others_which_say_who_it_was(tmp_path: Path, fault: Fault) -> None:
    context, port = fork_server(), free_port()
    ranks = [
        context.Process(target=take_part, args=(fault, tmp_path, rank, port))  # type: ignore[attr-defined]
        for rank in range(fault.num_ranks)
    ]
    for process in ranks:
        process.start()
    others = [rank for rank in range(fault.num_ranks) if rank != fault.rank]
    for rank in others:
        ranks[rank].join(HANGING_S)
    statuses = {rank: ranks[rank].exitcode for rank in others}
    for process in ranks:
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert (tmp_path / "fault").exists(), "the fault did not happen"
    if fault.place == END:
        assert statuses == dict.fromkeys(others, 0)
        return
    assert all(status not in (0, None) for status in statuses.values()), statuses
    for rank in others:
        said = (tmp_path / f"error {rank}").read_text()
        assert said.startswith("ActionError: ")
        # Who was stopped, or has not connected, nobody knows: who waits in vain names whom it waited for.
        if fault.kind == "kill" and fault.place != "in construction":
            assert fault.coordinates in said
            assert re.search(rf"\brank {fault.rank}\b", said), said
