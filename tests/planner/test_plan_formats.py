"""Plans that others eat: torch's engine trains by them to our weights, and settings have the form of their
documentation. What can't be said is said, or refused.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from planning_models import weights_after
from tiny_models import EXACT
from torch.distributed.pipelining import PipelineStage

from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.pipeline import LINKS, launch
from gpipe_bench.planner import Candidate, Model, Request, model_of
from gpipe_bench.planner.candidate import Grid
from gpipe_bench.planner.formats import FORMATS, Written, written
from gpipe_bench.planner.model import built

SMALL = {"num_layers": 7, "d_model": 16, "ffn_dim": 32, "num_heads": 4, "vocab_size": 32, "seq_len": 8}
REQUEST = Request(accelerators=2, memory_bytes=2**30, batch_size=16, link=LINKS["loopback"], optimizer="sgd")


def planned(
    schedule: str = "1f1b", cut: str = "3 3", num_microbatches: int = 4, num_workers: int = 2,
    stages_per_worker: int = 1, remat: tuple[str, ...] = (), **dimensions: int,
) -> Candidate:  # fmt: skip
    """Of so many layers in each stage."""
    ends = [0]
    for count in map(int, cut.split()):
        ends.append(ends[-1] + count)
    stages = tuple(map(range, ends[:-1], ends[1:]))
    grid = Grid(num_workers, **dimensions)
    return Candidate(
        grid=grid, schedule=schedule, stages_per_worker=stages_per_worker, num_microbatches=num_microbatches,
        microbatch_size=16 // num_microbatches // grid.replicas, cut=stages,
        remat=remat or ("never",) * len(stages),
    )  # fmt: skip


def llama() -> Model:
    return built("small", "llama", SMALL, 16)


def of(form: str, model: Model, candidate: Candidate, **more: Any) -> Written:
    request = replace(REQUEST, optimizer="adam", accelerators=candidate.grid.accelerators, **more)
    return written(form, model, candidate, request, "mine.py")


# torch's engine

WAYS = {
    "1f1b": planned(remat=("always", "never")),
    "few micro-batches": planned(num_microbatches=1),
    "zb-h1": planned("zb-h1", cut="2 4"),
    "interleaved": planned("interleaved", "1 2 1 2", stages_per_worker=2, remat=("except_last",) * 4),
    "in a V": planned("v-half", "2 1 1 2", stages_per_worker=2, remat=("always", "never") * 2),
    "tied in a V": planned("zb-v", "2 2 2 2", stages_per_worker=2, remat=("never",) * 4),
    "replicas": planned(cut="6", num_workers=1, dp=2),
    "shards": planned(cut="6", num_workers=1, fsdp=2, fsdp_level=3),
    "tied in shards": planned(cut="8", num_workers=1, fsdp=2, fsdp_level=3),
    "divided": planned(cut="6", num_workers=1, tp=2),
}
if not hasattr(PipelineStage, "_warmup_forward_vote"):
    del WAYS["in a V"], WAYS["tied in a V"]  # torch 2.11 greets itself there, which hangs over gloo


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, list[list[dict[str, torch.Tensor]]]]:
    """By way that is to be tested: of each rank the weights after torch's script and after ours."""
    items = [
        each for each in request.session.items if each.path == request.path and hasattr(each, "callspec")
    ]
    ways = [name for name in WAYS if any(each.callspec.params.get("way") == name for each in items)]
    scripts = []
    for name in ways:
        candidate = WAYS[name]
        kind = name.partition(" ")[0]
        model = model_of(f"planning_models:{kind if kind in ('divided', 'tied') else 'plain'}", 16)
        # Our engine shards no weight that layers share; replicas train to the same.
        whole = (
            replace(candidate, grid=Grid(candidate.grid.pp, candidate.grid.fsdp)) if model.ties else candidate
        )
        for form, way in (("torch", candidate), ("script", whole)):
            made = written(form, model, way, REQUEST)
            scripts.append((made.text, made.rows))
    ranks = launch(weights_after, 2, scripts, device="cpu")
    return {name: [[found[2 * way], found[2 * way + 1]] for found in ranks] for way, name in enumerate(ways)}


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_torch_trains_by_what_we_write_to_our_weights(way: str, trained: dict[str, Any]) -> None:
    seen = set()
    for theirs, ours in trained[way]:
        names = {name: parameter for name, parameter in ours.items() if name in theirs}
        assert theirs.keys() == names.keys(), "both hold the same layers"
        for name, parameter in theirs.items():
            assert parameter.dtype == torch.float64
            torch.testing.assert_close(
                parameter, names[name], **EXACT, msg=lambda text, n=name: f"{n}: {text}"
            )
            seen.add(name)
    assert len(seen) == 12 + way.startswith("tied"), "weight and bias of six layers, and of the embedding"


# Megatron-LM


def spelled(layout: str) -> list[str]:
    """The stages of a layout, each as its letters: `x*n` stands for n of x, and `|` begins a stage."""
    assert re.fullmatch(r"[EtL](\*\d+)?([EtL|](\*\d+)?)*", layout)
    return re.sub(r"(\w)\*(\d+)", lambda found: found[1] * int(found[2]), layout).split("|")


def test_megatron_gets_a_layout_and_flags() -> None:
    candidate = planned(
        "interleaved", "1 3 2 3", stages_per_worker=2, fsdp=2, fsdp_level=3, dp=2,
        remat=("always", "except_last", "never", "always"),
    )  # fmt: skip
    made = of("megatron", llama(), candidate, precision="bfloat16")
    lines = [line.strip() for line in made.text.splitlines() if line.startswith("    ")]
    flags = dict(line.removeprefix("--").partition(" ")[::2] for line in lines)
    assert spelled(flags["pipeline-model-parallel-layout"].strip("'")) == ["E", "ttt", "tt", "ttL"]
    assert flags | {
        "num-layers": "7", "pipeline-model-parallel-size": "2", "tensor-model-parallel-size": "1",
        "micro-batch-size": "1", "global-batch-size": "16", "recompute-granularity": "full",
        "recompute-num-layers": "1", "data-parallel-sharding-strategy": "optim_grads_params",
        "num-distributed-optimizer-instances": "2", "bf16": "", "untie-embeddings-and-output-weights": "",
    } == flags  # fmt: skip
    assert all(f"# - {each}" in made.text for each in made.differs)
    assert made.command.startswith("source mine.py; torchrun --nproc-per-node 8 pretrain_gpt.py")
    tied = of("megatron", model_of("planning_models:tied", 16), planned(cut="5 3"))
    assert "'Et*4|t*2L'" in tied.text
    assert "untie" not in tied.text


# torchtitan


@dataclass(slots=True)
class Parallelism:
    """The names of torchtitan 0.3.0; another one is an AttributeError."""

    pipeline_parallel_degree: int = 1
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    tensor_parallel_degree: int = 1
    fsdp_reshard_after_forward: str = "default"
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_schedule_csv: str = ""
    module_fqns_per_model_part: Any = None
    pipeline_parallel_microbatch_size: int = 1


@dataclass(slots=True)
class Training:
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    mixed_precision_param: str = "bfloat16"
    disable_cuda_graphs: bool = False


class Config:
    def __init__(self) -> None:
        self.parallelism, self.training, self.activation_checkpoint = Parallelism(), Training(), "theirs"
        self.compile = type("Compile", (), {"enable": None})()
        layers = type("Layers", (), {"layers": [None] * SMALL["num_layers"]})()
        self.model_spec = type("Spec", (), {"model": layers})()


def settings(made: Written, monkeypatch: pytest.MonkeyPatch) -> Config:
    """What the function returns, among modules that stand for torchtitan's."""
    registry = ModuleType("torchtitan.models.llama3.config_registry")
    registry.llama3_debugmodel = Config  # type: ignore[attr-defined]
    again = ModuleType("torchtitan.distributed.activation_checkpoint")
    again.FullAC = type("FullAC", (), {"Config": lambda: "full"})  # type: ignore[attr-defined]
    for module in (registry, again):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.llama3", "torchtitan.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    space: dict[str, Any] = {"__file__": "/x/mine.py"}
    exec(made.text, space)
    return space["planned"]()


def test_torchtitan_gets_names_of_modules_and_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = planned(
        "zb-v", "1 3 2 3", stages_per_worker=2, fsdp=2, fsdp_level=2, remat=("always",) * 3 + ("never",)
    )
    made = of("torchtitan", llama(), candidate)
    found = settings(made, monkeypatch)
    assert found.parallelism == Parallelism(
        pipeline_parallel_degree=2, data_parallel_shard_degree=2, fsdp_reshard_after_forward="never",
        pipeline_parallel_schedule="ZBVZeroBubble", pipeline_parallel_schedule_csv="/x/mine.csv",
        module_fqns_per_model_part=[
            ["tok_embeddings"], ["layers.0", "layers.1", "layers.2"], ["layers.3", "layers.4"],
            ["layers.5", "layers.6", "norm", "lm_head"],
        ],
        pipeline_parallel_microbatch_size=2,
    )  # fmt: skip
    assert found.training == Training(8, 16, 8, "float32", True)
    assert (found.activation_checkpoint, found.compile.enable) == ("full", False)
    assert (
        made.command
        == "PYTHONPATH=. torchrun --nproc-per-node 4 -m torchtitan.train --module mine --config planned"
    )
    found = settings(of("torchtitan", llama(), planned(cut="9", num_workers=1, dp=2)), monkeypatch)
    assert found.parallelism == Parallelism(
        data_parallel_replicate_degree=2, data_parallel_shard_degree=1, pipeline_parallel_microbatch_size=2
    )
    assert (found.training.local_batch_size, found.training.global_batch_size) == (2, 16)
    assert found.activation_checkpoint is None


# What can't be said


@pytest.mark.parametrize(
    ("form", "model", "candidate"),
    [
        ("torch", "tied", planned(cut="4 4")),
        ("torchtitan", "tied", planned(cut="4 4")),
        ("torchtitan", "plain", planned()),
        ("torchtitan", "bare", planned(cut="1 1")),
        ("script", "tied", WAYS["tied in shards"]),
        ("torch", "tied", planned(cut="4 4", fsdp=2, fsdp_level=3)),
        ("megatron", "tied", planned("zb-h1", "4 4")),
        ("megatron", "tied", planned("interleaved", "2 2 2 2", stages_per_worker=2, num_microbatches=3)),
    ],
)
def test_a_plan_that_can_not_be_said_is_refused_with_the_remedy(
    form: str, model: str, candidate: Candidate
) -> None:
    with pytest.raises(ValueError, match="--format"):
        of(form, model_of(f"planning_models:{model}", 4 * candidate.num_microbatches), candidate)
    with pytest.raises(ValueError, match="--format torchtitan knows the optimizers adam,"):
        written("torchtitan", llama(), planned(cut="4 5"), REQUEST)


def test_only_what_the_format_can_run_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "plan planning_models:tied --accelerators 2 --memory-gib 2.5 --batch-size 8 --device-type a10"
    options = "--link pcie --pp 2 --num-microbatches 4 --no-fsdp --format megatron"
    path = tmp_path / "flags.sh"
    assert main([*asked.split(), *options.split(), "--script", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert {each["schedule"] for each in found["plans"]} == {*FORMATS["megatron"].schedules}
    assert found["format"] == "megatron"
    assert found["script"] == path.read_text()
    assert err == "".join(f"warning: not as planned: {each}\n" for each in found["not_as_planned"])
    assert main([*asked.split(), *options.split(), "--schedule", "gpipe"]) == 2
    assert "--format megatron has no schedule gpipe: leave --schedule out" in capsys.readouterr().err
    assert main([*asked.split(), *options.split(), "--script", "torch.py"]) == 2
    assert "--script torch.py would hide the package torch; give another name" in capsys.readouterr().err
