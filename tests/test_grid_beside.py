"""Replicas beside those of torch: that both arms train alike, before anything is said about their speed."""

from __future__ import annotations

import pytest

from gpipe_bench.experiments.grid.side_by_side import OURS, SIZES, TORCHS, Job, lines, work
from gpipe_bench.experiments.timed.steps import run_processes

SMALL = {
    **SIZES,
    "num_layers": 1,
    "d_model": 16,
    "ffn_dim": 16,
    "num_heads": 2,
    "vocab_size": 11,
    "seq_len": 4,
}


@pytest.mark.parametrize("zero", [None, 2, 3])
def test_both_compute_the_same_gradients_and_take_turns(zero: int | None) -> None:
    job = Job(examples=4, num_microbatches=2, num_rounds=2, zero=zero, sizes=SMALL)
    found = run_processes(work, job.replicas, job)
    for each in found:
        assert each.details["difference"] < 1e-5
        assert {name: len(samples) for name, samples in each.times.items()} == {OURS: 4, TORCHS: 4}
    first, *_, last = lines(job, found)
    assert ("fully_shard" in first) == (zero is not None)
    assert last.startswith("ours / torch's ")
