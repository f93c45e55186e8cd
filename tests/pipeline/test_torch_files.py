"""Schedule files of torch's pipeline runtime, both ways, without processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpipe_bench.pipeline import NAMED, Action, Schedule, from_csv, named, to_csv, validate
from gpipe_bench.pipeline.plan.named import loop, vee

NUM_WORKERS, NUM_MICROBATCHES = 2, 4
V = ("ZBVZeroBubble", "DualPipeV")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A process group that sends nothing: torch asks it for rank and size."""
    dist.init_process_group("fake", rank=0, world_size=NUM_WORKERS, store=FakeStore())
    yield
    dist.destroy_process_group()


def theirs(name: str) -> schedules._PipelineScheduleRuntime:
    """torch's schedule of that name, as rank 0 has it."""
    place = vee(NUM_WORKERS) if name in V else loop(NUM_WORKERS, 2)
    stages = [
        PipelineStage(torch.nn.Linear(2, 2), stage, len(place), torch.device("cpu"))
        for stage, worker in enumerate(place)
        if worker == 0
    ]
    make = schedules.get_schedule_class(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(stages, NUM_MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)  # type: ignore[call-arg, return-value]


def dumped(name: str, path: Path, form: str = "compute_only") -> Schedule:
    theirs(name)._dump_csv(str(path), format=form)  # type: ignore[arg-type]
    found = from_csv(path.read_text(), name)
    validate(found)
    return found


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("Interleaved1F1B", "interleaved"), ("ZBVZeroBubble", "zb-v"), ("DualPipeV", "dualpipe-v"),
        ("LoopedBFS", "breadth-first"), ("InterleavedZeroBubble", None),
    ],
)  # fmt: skip
def test_torchs_files_are_read_as_the_schedules_of_that_name(
    name: str, ours: str | None, tmp_path: Path
) -> None:
    found = dumped(name, tmp_path / "torch.csv")
    assert (found.num_workers, found.num_microbatches) == (NUM_WORKERS, NUM_MICROBATCHES)
    assert found.placement == (vee(NUM_WORKERS) if name in V else loop(NUM_WORKERS, 2))
    # With the messages and all else that torch adds to it, it says the same.
    assert dumped(name, tmp_path / "lowered.csv", "compute_comms").placement == found.placement
    if ours is not None:
        assert found.actions == named(ours, NUM_WORKERS, NUM_MICROBATCHES).actions


@pytest.mark.parametrize("ours", [name for name in NAMED if NAMED[name].stages_per_worker != 1])
def test_our_files_are_read_by_torch(ours: str, tmp_path: Path) -> None:
    """Its runtime finds the same rows, and messages for all of them."""
    schedule = named(ours, NUM_WORKERS, NUM_MICROBATCHES)
    path = tmp_path / "ours.csv"
    path.write_text(to_csv(schedule))
    name = "ZBVZeroBubble" if schedule.placement == vee(NUM_WORKERS) else "Interleaved1F1B"
    runtime = theirs(name)
    runtime._load_csv(str(path), format="compute_only")
    rows = {rank: [str(action) for action in row] for rank, row in runtime.pipeline_order.items()}
    assert rows == {worker: [str(action) for action in row] for worker, row in enumerate(schedule.actions)}
    lowered = [str(action) for row in runtime.pipeline_order_with_comms.values() for action in row]
    assert sum("SEND_F" in action for action in lowered) == sum("RECV_F" in action for action in lowered) > 0


def test_cells_that_torch_may_write() -> None:
    text = "0F0,,(0F1;0B0)OVERLAP_F_B, 0B1 ,0SEND_F1,1RECV_B0,0UNSHARD,0RESHARD,0REDUCE_GRAD,0WAIT_RECV_F1"
    assert from_csv(text).actions == (tuple(map(Action.parse, ("0F0", "0F1", "0B0", "0B1"))),)
    for wrong in ("0F0xyz", "(0F0;0B0)", "(0F0,0B0)OVERLAP_F_B", "0SEND_F", "SEND_F0", "()OVERLAP_F_B"):
        with pytest.raises(ValueError, match="is not an action"):
            from_csv(f'0F1,"{wrong}",0B1')


def test_a_recomputation_is_a_cell_of_its_own() -> None:
    schedule = named("zb-v", 2, 3, remat="except_last")
    assert "3R1,3I1,3W1" in to_csv(schedule)
    assert from_csv(to_csv(schedule), "zb-v") == schedule
