"""What torch's real allocator, streams and ProcessGroupNCCL say of the engine, without a device.

Collected and skipped wherever that runtime is not loaded; `nox -s cuda-without-gpu` loads it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import over_nccl
import pytest
import torch
from counting import counting, held_up, runtime
from made_up_steps import job_of
from torch import Tensor, distributed, nn

from gpipe_bench.experiments.paper import steps
from gpipe_bench.experiments.paper.workloads import Configuration
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Boundary, Kind, Pipeline, Profiler, devices, gpipe, launch, pipeline_memory
from gpipe_bench.pipeline.memory.profile import precision
from gpipe_bench.pipeline.ranks.failure import nccl_options
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.planner.probes import time_step

pytestmark = pytest.mark.skipif(runtime() is None, reason="needs the runtime of nox -s cuda-without-gpu")
HERE = Path(__file__).parent
LM = {
    "num_layers": 4, "d_model": 512, "ffn_dim": 2048, "num_heads": 8, "vocab_size": 2048, "seq_len": 128,
    "attention": "explicit",
}  # fmt: skip
SMALL = {"num_layers": 4, "d_model": 32, "ffn_dim": 64, "num_heads": 4, "vocab_size": 64, "seq_len": 16}
BUSY_S = 0.3  # that a device is kept from going on, while the host looks
MODEL_ERROR = 0.03  # of the memory model, against the allocator


def lm(options: dict[str, Any] = SMALL, **changed: Any) -> tuple[Pipeline, Callable[[], Tensor]]:
    """A pipeline of four stages, on as many devices as there are, and a step of it from the host's memory."""
    torch.manual_seed(0)
    count = torch.cuda.device_count()
    places = [f"cuda:{stage % count}" for stage in range(4)] if count > 1 else "cuda"
    arguments = {"num_stages": 4, "num_microbatches": 4, "devices": places, **changed}
    pipeline = Pipeline(MODELS["transformer-lm"](**options), **arguments)
    batch, target = example_batch("transformer-lm", 8, **options)
    loss = loss_fn("transformer-lm", **options)
    return pipeline, lambda: pipeline.step(batch, target, loss)


def held_up_in_a_step(take: Callable[[], object]) -> dict[str, int]:
    """When three steps have been taken, in which much is found out and made once."""
    for _ in range(3):
        take()
    with counting() as found:
        take()
    assert found["launches"] > 100
    return held_up(found)


def test_nothing_of_a_drivers_is_loaded_or_open() -> None:
    """A GPU in the machine is none of our business."""
    torch.cuda.init()
    assert "without a device" in torch.cuda.get_device_name()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    beside = Path(os.environ["LD_LIBRARY_PATH"])
    of_cuda = [Path(name) for name in mapped if Path(name).name.startswith(("libcu", "libnv", "libnccl"))]
    assert len(of_cuda) > 5
    assert {path.parent for path in of_cuda} == {beside}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            assert not os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia")


def a_steady_step_waits_for_nothing_and_takes_no_memory_from_the_device() -> None:
    """No synchronization, no cudaMalloc, no copy that holds up the host."""
    for schedule, remat in (("gpipe", "always"), ("1f1b", "never"), ("zb-h1", "always"), ("zb-h1", "never")):
        _, take = lm(schedule=schedule, remat=remat)
        assert held_up_in_a_step(take) == {}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_steady_step_over_nccl_waits_for_nothing(schedule: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each stage")
    for found, queues in launch(over_nccl.steady_step, min(torch.cuda.device_count(), 4), schedule, "always"):
        assert held_up(found) == {}
        assert queues == 32, "the variable was there before the device was used"


def test_a_link_is_measured_as_a_pipelines_messages_find_it() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    for source, thread_blocks in launch(over_nccl.link_of, 2):
        assert "measured between neighbouring ranks" in source
        assert thread_blocks == {nccl_options(distributed.ProcessGroupNCCL, sums=False).config.max_ctas}


@pytest.mark.parametrize("grid", ["--dp 2 --pp 2", "--fsdp 2 --pp 2", "--pp 2 --tp 2"])
def test_the_script_of_the_page_on_grids_walks(grid: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    page = (HERE.parents[1] / "docs" / "grid.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    done = torchrun(4, script, *grid.split())
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("loss") == 3


def torchrun(ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    """A script in so many processes."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return subprocess.run(
        list(map(str, (*launcher, *command))), env={**os.environ, "FAKE_GPUS": str(ranks)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def a_device_waits_for_what_another_one_sends_it() -> None:
    """What the receiver is given behind a copy is not over while the sender's device is busy."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    source, target, transfers = torch.device("cuda", 0), torch.device("cuda", 1), devices.Transfers()
    tensor = torch.zeros(8, device=source)
    devices.hold(source, 0.01)  # which finds out how fast it is
    devices.synchronize(source)
    devices.hold(source, BUSY_S)
    sent, marks = transfers.send((tensor,), target)
    transfers.receive(sent, marks, target)
    behind = devices.mark(target)
    assert not behind.query(), "the receiver does not wait"
    devices.synchronize(target)
    assert behind.query()


def memory_that_another_stream_still_reads_is_not_given_away() -> None:
    """A tensor that came, was used and is gone leaves its place only when the device has used it."""
    device, transfers = devices.exact("cuda"), devices.Transfers()
    devices.hold(device, 0.01)
    devices.synchronize(device)

    def received() -> int:
        sent, marks = transfers.send((torch.zeros(2**20),), device)
        transfers.receive(sent, marks, device)
        return sent[0].data_ptr()

    place = received()
    devices.hold(device, BUSY_S)
    places = {received() for _ in range(2)}
    assert place not in places or len(places) == 2
    devices.hold(device, BUSY_S)
    assert len({received(), received()}) == 2, "the memory of a tensor is given away while it is used"
    devices.synchronize(device)


def ten_steps_keep_no_more_memory_than_one() -> None:
    def held(steps: int) -> list[int]:
        for _ in range(steps):
            take()
        return [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]

    for schedule in ("gpipe", "1f1b"):
        _, take = lm(schedule=schedule)
        assert held(3) == held(10), "memory is kept from step to step"


def test_a_rank_takes_its_own_device_and_waits_for_messages_on_it() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    first, second = launch(over_nccl.behind_a_message, 2)
    assert (first[0], second[0]) == (0, 1), "each rank's current device is its own"
    assert not second[1], "the device of rank 1 went on before the message was sent"


def a_timed_step_is_over_on_the_device() -> None:
    device = devices.exact("cuda")
    devices.hold(device, 0.01)
    assert time_step(lambda: devices.hold(device, BUSY_S), (), device=device) > BUSY_S / 2


def seconds_of_a_layer_are_those_of_the_device() -> None:
    """And its backward is the one that a pipeline takes: it adds up no gradients of its inputs."""
    kernel_s = float(os.environ.get("FAKE_KERNEL_US", "0")) * 1e-6
    model = nn.Sequential(*_middle_layers())
    launched: dict[nn.Module, int] = {}  # by the last backward of each
    take = steps._Taken.take

    def counted(taken: Any, kind: Kind) -> None:
        with counting() as found:
            take(taken, kind)
        if kind is Kind.B:
            launched[taken._layer] = found["launches"]

    x = torch.zeros(2, 4, 8, 8, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps._Taken, "take", counted)
        found = steps.alone(model, lambda y, t: y.sum(), x, x, x.device)
    in_pipeline = _launches_of_backwards(x)
    for index in range(1, len(model) - 1):  # the first has no gradient of its inputs, the last has the loss
        alone = launched[model[index]]
        assert alone == in_pipeline[index], type(model[index]).__name__
        assert found[index][Kind.B] == pytest.approx(alone * kernel_s, abs=1e-6)


def _middle_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    made = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)
    return [layer.cuda() for layer in made]


def _launches_of_backwards(x: Tensor) -> dict[int, int]:
    """Of each stage's last backward in a steady step of a pipeline that has each layer as a stage."""
    model = _middle_layers()
    launched: dict[int, int] = {}
    backward = Stage.backward

    def counted(stage: Stage, *arguments: Any) -> Any:
        with counting() as found:
            given = backward(stage, *arguments)
        launched[stage.index] = found["launches"]
        return given

    pipeline = Pipeline(
        model, num_stages=len(model), num_microbatches=2, cost=[1] * len(model), devices="cuda"
    )
    batch = torch.cat([x, x])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "backward", counted)
        for _ in range(3):
            pipeline.step(batch, batch, lambda y, t: y.sum())
    return launched


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"), [("transformer-lm", LM), ("resnet101", {}), ("amoebanet-d", {"num_layers": 6})]
)
def test_the_allocator_agrees_with_the_memory_model(
    name: str, options: dict[str, Any], half: torch.dtype | None
) -> None:
    assert memory_error(name, options, half=half) == pytest.approx(0, abs=MODEL_ERROR)


def memory_error(
    name: str = "transformer-lm", options: dict[str, Any] = LM, *, more: float = 0.0,
    half: torch.dtype | None = None, attention: str = "efficient",
) -> float:  # fmt: skip
    """Of the memory model for a step of one stage, relative to what the allocator says; with a share of the
    modelled bytes held beside it.
    """
    loss = loss_fn(name, **options)
    with torch.device("meta"):
        shapes = MODELS[name](**options)
    microbatch = (Boundary.of(each) for each in example_batch(name, 4, device="meta", **options))
    profiles, of_loss = Profiler(half, attention).model(shapes, loss, *microbatch)
    (stage,) = pipeline_memory(profiles, of_loss, (range(len(profiles)),), gpipe(1, 2, "always"))
    held: list[Tensor] = []

    def loss_that_holds(output: Tensor, target: Tensor) -> Tensor:
        held[:] = [torch.empty(int(more * stage.working_set), dtype=torch.uint8, device=target.device)]
        return loss(output, target)

    pipeline = Pipeline(MODELS[name](**options).cuda(), num_stages=1, num_microbatches=2)
    batch, target = example_batch(name, 8, device="cuda", **options)
    with torch.autocast("cuda", half, enabled=half is not None):
        pipeline.step(batch, target, loss)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        pipeline.step(batch, target, loss_that_holds)
    return (torch.cuda.max_memory_allocated() - before) / stage.working_set - 1


@pytest.mark.parametrize(("how", "ranks"), [("item", 3), ("ahead", 2), ("sum", 2)])
def test_a_rank_that_stops_ends_the_others_in_time(how: str, ranks: int) -> None:
    """Not with an abort of torch's watchdog, a minute later. Replicas that wait for each other's host before
    a step cannot say which one is late.
    """
    if torch.cuda.device_count() < ranks:
        pytest.skip("NCCL needs a GPU for each rank")
    for seconds, error in launch(over_nccl.beside_one_that_stops, ranks, how)[::2]:
        named = "on rank 1 failed: rank 1 did not answer" in error
        assert named or (how == "sum" and "a collective failed: Timed out" in error), error
        assert seconds < 15.0


# What holds, and the mistake that is planted to see whether it is found


_receive, _forward, _kept = devices.Transfers.receive, Stage.forward, list[Any]()


def _keep_the_first_inputs(stage: Stage, m: int, *arguments: Any) -> Any:
    given = _forward(stage, m, *arguments)
    if m == 0:
        _kept.append(stage._microbatches[m].inputs)
    return given


@pytest.mark.filterwarnings("ignore:.*before the host had asked")
@pytest.mark.parametrize(
    ("check", "owner", "name", "mistake"),
    [
        (a_steady_step_waits_for_nothing_and_takes_no_memory_from_the_device,
         devices, "pinned", lambda tensor: tensor),
        (a_device_waits_for_what_another_one_sends_it,
         devices.Transfers, "receive", lambda self, tensors, _, target: _receive(self, tensors, (), target)),
        (memory_that_another_stream_still_reads_is_not_given_away,
         devices, "record_stream", lambda *_: None),
        (ten_steps_keep_no_more_memory_than_one, Stage, "forward", _keep_the_first_inputs),
        (a_timed_step_is_over_on_the_device, devices, "synchronize", lambda device: None),
        (seconds_of_a_layer_are_those_of_the_device, devices, "hold", lambda device, seconds: None),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)  # fmt: skip
def test_it_holds_and_a_planted_mistake_is_found(
    check: Callable[[], None], owner: Any, name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(AssertionError):
        check()


def test_a_clock_that_has_risen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is held longer, and where that does not help somebody is told."""
    cycles_per_s = devices._cycles_per_s(devices.exact("cuda"))
    monkeypatch.setattr(devices, "_cycles_per_s", lambda device: cycles_per_s / 4)
    seconds_of_a_layer_are_those_of_the_device()
    monkeypatch.setattr(devices, "_cycles_per_s", lambda device: cycles_per_s / 1e6)
    x = torch.zeros(2, 4, 8, 8, device="cuda")
    with pytest.warns(UserWarning, match="had begun with layers 0, 1, .* before the host had asked"):
        steps.alone(_middle_layers(), lambda y, t: y.sum(), x, x, x.device)


def test_the_state_of_the_gpus_is_read_before_and_after_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(["before", "after"])
    monkeypatch.setattr(steps, "of_gpus", lambda: next(states))
    taken = steps.work(job_of(Configuration(2, 2, 4), device="cuda"))
    assert [taken.gpu[when] for when in ("before", "after")] == ["before", "after"]


def test_a_missing_index_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "exact", torch.device)
    with pytest.raises(ValueError, match="have moved from cuda to cuda:0"):
        lm(devices="cuda")[1]()


def test_a_tenth_more_memory_than_modelled_is_found() -> None:
    assert memory_error(more=0.1) > MODEL_ERROR


def test_autocast_of_a_cpu_in_the_memory_model_of_a_gpu_is_found() -> None:
    assert memory_error(half=torch.bfloat16, attention="cpu") > MODEL_ERROR


def test_the_memory_model_computes_in_32_bits_what_autocast_does_on_a_gpu() -> None:
    norm = nn.functional
    taken: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: norm.log_softmax(x, -1),
        "sum": torch.sum, "cumsum": lambda x: x.cumsum(0), "layer_norm": lambda x: norm.layer_norm(x, (8,)),
        "rms_norm": lambda x: norm.rms_norm(x, (8,)), "group_norm": lambda x: norm.group_norm(x, 2),
        "normalize": norm.normalize, "norm": torch.norm, "vector_norm": torch.linalg.vector_norm,
        "power": lambda x: x**2, "square": torch.square, "exp": torch.exp, "log": torch.log,
        "rsqrt": torch.rsqrt, "softplus": norm.softplus, "gelu": norm.gelu, "silu": norm.silu,
        "mean": torch.mean, "relu": torch.relu, "matmul": lambda x: x @ x.t(),
        "interpolate": lambda x: norm.interpolate(x[None, None], scale_factor=2),
        "loss": lambda x: norm.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device)),
        "error": lambda x: norm.mse_loss(x, x), "dropout": norm.dropout,
    }  # fmt: skip
    here, there = (torch.ones(4, 8, dtype=torch.bfloat16, device=device) for device in ("cpu", "cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        wanted = {name: call(there).dtype for name, call in taken.items()}
    with precision(torch.bfloat16, "flash"):
        assert {name: call(here).dtype for name, call in taken.items()} == wanted
