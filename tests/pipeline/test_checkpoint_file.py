"""Checkpoints are data: whatever a file holds, loading it runs nothing. They are whole: a finished or killed
save leaves the old or the new version in its folder; a load loads all or changes nothing.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch
from forked import free_port
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.optim.lr_scheduler import OneCycleLR

from gpipe_bench.pipeline import ActionError, Pipeline, checkpoint


class Evil:
    """Pickled, it runs a command wherever it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def fresh(*more, kind=torch.optim.Adam, width=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1), *more)
    pipeline = Pipeline(model, num_stages=2, num_microbatches=2, cost=[1] * len(model), **options)
    return pipeline, kind(pipeline.parameters(), lr=0.1)


def make(*more, **options):
    pipeline, optimizer = fresh(*more, **options)
    pipeline.step(torch.ones(4, 2), torch.ones(4, 1), nn.functional.mse_loss)
    optimizer.step()
    return pipeline, optimizer


def everything(pipeline, optimizer):
    """A copy of all that a load may change."""
    gradients = [parameter.grad for parameter in pipeline.parameters()]
    found = (pipeline.state_dict(), gradients, optimizer.state_dict(), pipeline.num_steps)
    return copy.deepcopy(found)


def same(a, b):
    """Whether two of the above are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a.view(torch.uint8) if a.ndim else a, b.view(torch.uint8) if b.ndim else b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "checkpoint"
    checkpoint.save(folder, *make())
    return folder


def test_an_index_that_names_code_is_refused_unread(saved, tmp_path):
    marker = tmp_path / "ran"
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(ValueError, match=r"of a checkpoint: it names posix\.system"):
        checkpoint.load(saved, *make())
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists(), "the same file would have run it"


@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage"])
def test_a_damaged_index_is_an_error_that_names_it(saved, content):
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="can't be loaded, says rank 0:"):
        checkpoint.load(saved, *make())


def test_a_value_that_holds_code_is_refused_unread(saved, tmp_path):
    """The learning rate is no tensor, so it is kept as a pickle of its own inside the data file."""
    marker = tmp_path / "ran"
    (data,) = saved.glob("*.distcp")
    content = data.read_bytes()
    index = FileSystemReader(saved).read_metadata()
    (place,) = (info for key, info in index.storage_data.items() if key.fqn.endswith("0.weight.lr"))
    evil = io.BytesIO()
    torch.save(Evil(marker), evil)
    data.write_bytes(content + evil.getvalue())
    object.__setattr__(place, "offset", len(content))
    object.__setattr__(place, "length", len(evil.getvalue()))
    vars(place).pop("digest", None)  # an attacker can compute it, too
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(
        ValueError, match=r"loaded, says rank 0: ValueError: optimizer\.param_groups\.0\.weight\.lr"
    ):
        checkpoint.load(saved, *make())
    assert not marker.exists()
    torch.load(io.BytesIO(evil.getvalue()), weights_only=False)
    assert marker.exists(), "the same bytes would have run it"


def drop_data(folder):
    for data in folder.glob("*.distcp"):
        data.unlink()


REFUSALS = {
    "another seed": (None, {"seed": 1}, "was written with seed 0, the pipeline has 1"),
    "another shape": (None, {"width": 4}, "Size mismatch between saved"),
    "another optimizer": (None, {"kind": torch.optim.SGD}, "no `dampening` for 0.weight"),
    "a layer more": (None, {"more": nn.Linear(1, 1)}, "Missing key in checkpoint state_dict: model.3"),
    "a layer less": ("longer", {}, "it has 3.bias, which the model does not have"),
    "no data": (drop_data, {}, "No such file"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_refused_load_changes_nothing(why, tmp_path):
    """Weights, gradients and the optimizer stay, whether or not it has a state."""
    change, options, message = REFUSALS[why]
    saved = tmp_path / "checkpoint"
    run = make(*[nn.Linear(1, 1)] * (change == "longer"))
    with torch.no_grad():
        for parameter in run[0].parameters():
            parameter += 1
    checkpoint.save(saved, *run)
    if callable(change):
        change(saved)
    options = dict(options)
    more = [options.pop("more")] if "more" in options else []
    pipeline, optimizer = (fresh if "optimizer" in why else make)(*more, **options)
    with torch.no_grad():
        pipeline.get_parameter("0.bias")[0] = -0.0
    before = everything(pipeline, optimizer)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(saved, pipeline, optimizer)
    assert same(everything(pipeline, optimizer), before)


def test_a_load_with_gradients_loads_the_optimizer_too(tmp_path):
    run = make(kind=sgd)
    checkpoint.save(tmp_path, *run)
    pipeline, optimizer = fresh(kind=sgd)
    for parameter in pipeline.parameters():
        parameter.grad = torch.ones_like(parameter)
    checkpoint.load(tmp_path, pipeline, optimizer)
    assert same(optimizer.state_dict(), run[1].state_dict())
    assert same(dict(pipeline.state_dict()), dict(run[0].state_dict()))
    assert all(bool((parameter.grad == 1).all()) for parameter in pipeline.parameters())


def test_saving_before_the_first_step_changes_nothing_and_loads_as_nothing(tmp_path):
    """A parameter that has no gradient yet has no state; a load drops the one that a trained run has."""
    run = fresh()
    before = everything(*run)
    checkpoint.save(tmp_path, *run)
    assert same(everything(*run), before)
    trained = make()
    checkpoint.load(tmp_path, *trained)
    assert not trained[1].state
    assert same(everything(*trained)[0], before[0])


def test_options_of_a_group_must_be_those_of_all_its_parameters(tmp_path):
    pipeline, _ = make()
    first, *others = pipeline.parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": others}, {"params": []}]
    checkpoint.save(tmp_path, pipeline, torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ValueError, match=r"loaded, says rank 0: ValueError: 0\.bias"):
        checkpoint.load(tmp_path, pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1))
    again = torch.optim.SGD([{**group, "lr": 1.0} for group in groups], lr=1.0)
    checkpoint.load(tmp_path, pipeline, again)
    assert [group["lr"] for group in again.param_groups] == [0.5, 0.1, 1.0]
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(7))])
    with pytest.raises(RuntimeError, match=r"none of `pipeline\.parameters\(\)`"):
        checkpoint.save(tmp_path, pipeline, stranger)
    again.state[first] = {"before": [torch.ones(2)]}
    with pytest.raises(
        RuntimeError, match=r"tensors in a list, optimizer\.state\.0\.weight\.before\.0; dictionaries"
    ):
        checkpoint.save(tmp_path, pipeline, again)


def with_a_scheduler(num_stages):
    """An optimizer that decays weights and no biases, and its scheduler."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)))
    pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=2, schedule="1f1b", cost=[1] * 4)
    named = list(pipeline.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith(end)], "weight_decay": decay}
        for end, decay in (("weight", 0.1), ("bias", 0.0))
    ]
    optimizer = torch.optim.AdamW(groups)
    return pipeline, optimizer, OneCycleLR(optimizer, [0.02, 0.05], total_steps=7)


def test_groups_and_a_scheduler_go_on_with_another_number_of_stages(tmp_path):
    """To the bit; the scheduler's state is the user's to keep."""

    def train(pipeline, optimizer, scheduler):
        for _ in range(3):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(pipeline.num_steps))
            pipeline.step(batch, batch.roll(1, dims=1), nn.functional.mse_loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    whole, first, second = (with_a_scheduler(num_stages) for num_stages in (1, 2, 4))
    for run in (whole, whole, first):
        train(*run)
    checkpoint.save(tmp_path, *first[:2])
    checkpoint.load(tmp_path, *second[:2])
    second[2].load_state_dict(first[2].state_dict())
    rates, again = ([group["lr"] for group in run[1].param_groups] for run in (first, second))
    assert rates == again
    assert rates[0] != rates[1]
    assert [group["weight_decay"] for group in second[1].param_groups] == [0.1, 0.0]
    train(*second)
    assert same(dict(second[0].state_dict()), dict(whole[0].state_dict()))


# Killed, refused and at the same time


def mark(pipeline, optimizer, number):
    """Sets every part of a run to `number`."""
    with torch.no_grad():
        for value in pipeline.state_dict().values():
            value.fill_(number)
    for parameter in pipeline.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, number)}
    pipeline.num_steps = number


def sgd(*args, **options):
    return torch.optim.SGD(*args, **options, momentum=0.9)


def version(folder):
    """Which version a checkpoint is; fails if it is a mixture. None if there is none."""
    if not (folder / ".metadata").exists():
        return None
    pipeline, optimizer = fresh(kind=sgd)
    checkpoint.load(folder, pipeline, optimizer)
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert len(states) == len(list(pipeline.parameters()))
    values = {float(value) for part in (*pipeline.state_dict().values(), *states) for value in part.flatten()}
    assert values == {pipeline.num_steps}
    return pipeline.num_steps


def only_version(folder):
    """As `version`, and the folder holds only the index and the files it names."""
    named = {place.relative_path for place in FileSystemReader(folder).read_metadata().storage_data.values()}
    assert {path.name for path in folder.iterdir()} == {".metadata", *named}
    return version(folder)


CHANGES = {"open", "mkdir", "write", "flush", "fsync", "rename", "replace", "unlink", "close"}


def kill_before(point, name=None):
    """Kills this process before its `point`-th file-changing call, or its `point`-th call of `name`; only
    every 100th write counts.
    """
    calls, writes = 0, 0

    def watch(frame, event, function):
        nonlocal calls, writes
        if event != "c_call" or function.__name__ not in CHANGES:
            return
        if isinstance(getattr(function, "__self__", None), io.BufferedWriter):
            writes += 1
            if writes % 100 != 1:
                return
        elif function.__module__ not in ("posix", "io", "_io"):
            return
        calls += name in (None, function.__name__)
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


def in_child(work, *arguments):
    """Forks a child to run `work`; returns its id."""
    if child := os.fork():
        return child
    status = 1
    try:
        work(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def status_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("full", [False, True], ids=["new folder", "over another version"])
def test_a_save_killed_at_any_call_leaves_the_version_before_or_the_new_one(tmp_path, full):
    """The next save removes leftovers. The kill point advances until a save finishes."""
    folder, pair = tmp_path / "a" / "checkpoint", fresh(kind=sgd)
    before, found = None, set()
    for point in range(1, 1000):
        if not full:
            shutil.rmtree(folder, ignore_errors=True)
        elif point % 10 == 1:
            mark(*pair, before := point + 1000)
            checkpoint.save(folder, *pair)  # over what killed ones left
            assert only_version(folder) == before
        mark(*pair, point)

        def save(point=point):
            kill_before(point)
            checkpoint.save(folder, *pair)

        status = status_of(in_child(save))
        if status == 0:
            assert only_version(folder) == point
            break
        assert status == -signal.SIGKILL
        after = version(folder)
        assert after in (before, point)
        found.add("new" if after == point else "before")
        before = after if full else None
    assert found == {"new", "before"}


def one_of_two(rank, folder, port, victim, call):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pair = fresh(kind=sgd, group=dist.group.WORLD)
    for number in (1, 2):
        mark(*pair, number)
        if (rank, number) == (victim, 2):
            kill_before(1, call)
        try:
            checkpoint.save(folder, *pair)
        except ActionError:
            assert number == 2


@pytest.mark.parametrize(("victim", "call", "left"), [(0, "replace", 1), (0, "unlink", 2), (1, "fsync", 1)])
def test_one_rank_of_two_is_killed_in_a_save(tmp_path, victim, call, left):
    port = free_port()
    children = [in_child(one_of_two, rank, tmp_path, port, victim, call) for rank in (0, 1)]
    statuses = [status_of(child) for child in children]
    assert statuses[victim] == -signal.SIGKILL
    assert statuses[1 - victim] == 0
    assert version(tmp_path) == left
    pair = fresh(kind=sgd)
    mark(*pair, 3)
    checkpoint.save(tmp_path, *pair)
    assert only_version(tmp_path) == 3


def test_a_refused_save_leaves_the_version_before_and_nothing_else(tmp_path, monkeypatch):
    """Also where the folder is behind a symbolic link."""
    pair = fresh(kind=sgd)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder = tmp_path / "link"
    mark(*pair, 1)
    checkpoint.save(folder, *pair)
    mark(*pair, 2)

    def full(*args):
        raise OSError(28, "No space left on device")

    for owner, name in ((FileSystemWriter, "finish"), (os, "replace"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(RuntimeError, match="No space left on device"):
                checkpoint.save(folder, *pair)
        assert only_version(folder) == 1
    checkpoint.save(folder, *pair)
    assert only_version(folder) == 2
    assert folder.is_symlink()
