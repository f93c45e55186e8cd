"""Checkpoints are data: whatever a file holds, loading it runs nothing."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_bench.pipeline import Pipeline, checkpoint


class Evil:
    """Pickled, it runs a command wherever it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    pipeline = Pipeline(model, num_stages=2, num_microbatches=2)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.1)
    pipeline.step(torch.ones(4, 2), torch.ones(4, 1), nn.functional.mse_loss)
    optimizer.step()
    return pipeline, optimizer


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "checkpoint"
    checkpoint.save(folder, *make())
    return folder


def test_an_index_that_names_code_is_refused_unread(saved, tmp_path):
    marker = tmp_path / "ran"
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(ValueError, match=r"\.metadata is no index of a checkpoint: it names \w+\.system"):
        checkpoint.load(saved, *make())
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists(), "the same file would have run it"


@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage", b"{}"])
def test_a_damaged_index_is_an_error_that_names_it(saved, content):
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata is no index of a checkpoint"):
        checkpoint.load(saved, *make())


def test_a_value_that_holds_code_is_refused_unread(saved, tmp_path):
    """The learning rate is no tensor, so it is kept as a pickle of its own inside the data file."""
    marker = tmp_path / "ran"
    (data,) = saved.glob("*.distcp")
    content = data.read_bytes()
    index = torch.distributed.checkpoint.FileSystemReader(saved).read_metadata()
    (place,) = (info for key, info in index.storage_data.items() if key.fqn.endswith("0.weight.lr"))
    evil = io.BytesIO()
    torch.save(Evil(marker), evil)
    data.write_bytes(content + evil.getvalue())
    object.__setattr__(place, "offset", len(content))
    object.__setattr__(place, "length", len(evil.getvalue()))
    object.__delattr__(place, "digest")  # who writes such a file can compute it too
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"weight\.lr is no plain data"):
        checkpoint.load(saved, *make())
    assert not marker.exists()
    torch.load(io.BytesIO(evil.getvalue()), weights_only=False)
    assert marker.exists(), "the same bytes would have run it"


def test_what_was_saved_is_loaded_whole(saved):
    pipeline, optimizer = make()
    wanted = {name: value.clone() for name, value in pipeline.state_dict().items()}
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.zero_()
    optimizer.param_groups[0]["lr"] = 7.0
    checkpoint.load(saved, pipeline, optimizer)
    assert all(torch.equal(value, wanted[name]) for name, value in pipeline.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.1
