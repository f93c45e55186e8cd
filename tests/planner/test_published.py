"""What others published: bytes of blocks by Megatron's formulas and beside the tensors that autograd saves
(arXiv 2205.05198, section 4, counts 16 bits everywhere), and ways of one cluster that they ran, in the order
of our predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from pandas import DataFrame
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpipe_bench.experiments.beyond.plan import choices, sweeps
from gpipe_bench.models import MODELS, SHAPES
from gpipe_bench.models.parallel import tensor_parallel
from gpipe_bench.pipeline.memory.profile import attention_of, fake_copy
from gpipe_bench.planner import Request, Space, link_named, model_of, plan
from gpipe_bench.planner.model import built

# What a block keeps

PAGE = Path(__file__).parents[2] / "results" / "README.md"
MIB = 2**20
LLAMA, LLAMA_OPTIONS = SHAPES["llama-8b"]
# A block alone, and few words: neither the depth nor the vocabulary takes part in what it keeps.
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-3 175B": (
        "gpt2",
        {"num_layers": 1, "d_model": 12_288, "num_heads": 96, "vocab_size": 128, "seq_len": 2048},
    ),
    "Llama 3 8B": (LLAMA, {**LLAMA_OPTIONS, "num_layers": 1, "vocab_size": 128, "seq_len": 8192}),
}
CASES = [
    (block, precision, attention, tp)
    for block in BLOCKS
    for precision in ("float32", "bfloat16")
    for attention in ("flash", "math")
    for tp in ((1,) if block.startswith("GPT") else (1, 8))  # no plan for GPT-2 divides its layers
]


@contextmanager
def ranks(count: int) -> Iterator[Any]:
    """The mesh of a group of which this process is the only one that is real."""
    if count == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def saved_bytes(block: str, precision: str, attention: str, tp: int) -> int:
    """Of all tensors that autograd saves in a forward pass on fake tensors, each storage once, without
    the parameters and the block's input, which its neighbour holds.
    """
    builder, options = BLOCKS[block]
    with torch.device("meta"):
        layer = MODELS[builder](**options)[1]
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        seen[storage._cdata] = storage.nbytes()
        kept.append(storage)  # so that no other takes its place
        return tensor

    kept: list[Any] = []
    with ranks(tp) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        layers = nn.Sequential(fake_copy(layer))
        if mesh is not None:
            tensor_parallel(layers, mesh, sequence=True)  # as in a plan
        inputs = torch.empty(1, options["seq_len"] // tp, options["d_model"], requires_grad=True)
        with (
            attention_of(attention),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False),
        ):
            layers(inputs)
        for tensor in (inputs, *map(local, layers.parameters())):
            seen.pop(tensor.untyped_storage()._cdata, None)
    return sum(seen.values())


def planned_bytes(block: str, precision: str, attention: str, tp: int) -> int:
    builder, options = BLOCKS[block]
    model = replace(built(block, builder, options, 1), attention=attention)
    return model.profile_of(1, precision, tp=tp).layers[1].first.kept_inside


def megatrons_bytes(block: str, precision: str, attention: str) -> int:
    """34 sbh, and 5 as^2 b more with the weights of all pairs, for GPT; the block's own input is not counted.

    Of the 34, 32 are of two bytes and two are masks; so are four of the five. Float32 has four bytes for two.
    Under autocast a norm's input stays in float32, and each graph holds a copy of each weight in 16 bits.
    Torch's attention by pairs holds scaled copies of queries and keys.
    """
    _, options = BLOCKS[block]
    tokens, width, heads = options["seq_len"], options["d_model"], options["num_heads"]
    each = tokens * width
    size = 4 if precision == "float32" else 2
    found = each * (16 * size + 2 - 4)
    if size == 2:
        found += each * (2 + 2) + 12 * width**2 * 2
    if attention == "math":
        found += heads * tokens**2 * (2 * size + 1) + each * 2 * size
    return found


@pytest.mark.parametrize(("block", "precision", "attention", "tp"), CASES)
def test_a_block_keeps_what_autograd_saves(block: str, precision: str, attention: str, tp: int) -> None:
    planned = planned_bytes(block, precision, attention, tp)
    assert planned == pytest.approx(saved_bytes(block, precision, attention, tp), rel=1e-3)
    formula = "-"
    if block.startswith("GPT"):
        expected = megatrons_bytes(block, precision, attention)
        assert planned == pytest.approx(expected, rel=0.03)
        formula = f"{expected / MIB:,.0f}"
    row = f"| {block} | {precision} | {attention} | {tp} | {planned / MIB:,.0f} | {formula} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines()


# Sweeps

ORDERS = {"GPT 181B on 384 A100": (0.5, 0.05), "GPT 1.3B on 8 V100, recomputed": (0.3, 0.08)}
"""By sweep: the least rank correlation, and the most regret."""


def test_every_way_of_a_sweep_says_what_it_was() -> None:
    for name, steps in sweeps().items():
        assert len(steps) >= 5, name
        assert {*ORDERS} <= {each for each, ways in sweeps().items() if len({way.tp for way in ways}) > 1}
        for step in steps:
            assert step.source
            assert step.differs
            assert step.pp * step.dp * step.fsdp * step.tp == step.accelerators
            assert step.batch_size % (step.dp * step.fsdp * step.num_microbatches) == 0
            assert bool(step.speed) != bool(step.step_s)


@pytest.mark.parametrize("name", ORDERS)
def test_ways_over_tensor_parallelism_come_in_the_order_that_others_measured(name: str) -> None:
    least, most = ORDERS[name]
    steps = sweeps()[name]
    order = choices(
        DataFrame(
            {
                "model": name,
                "predicted": [step.predicted()[0] / step.batch_size for step in steps],
                "measured": [step.measured_s / step.batch_size for step in steps],
            }
        )
    ).iloc[0]
    assert order["rank correlation"] >= least, order
    assert order.regret <= most, order


def test_cards_of_two_generations_are_as_far_apart_as_somebody_measured() -> None:
    steps = sweeps()["MPT on 8 A100 and 8 H100, 4096 tokens"]
    found = {
        device: mean(step.predicted()[0] / step.measured_s for step in steps if step.device == device)
        for device in ("a100", "h100")
    }
    assert found["h100"] / found["a100"] == pytest.approx(1, abs=0.1), found


@pytest.mark.parametrize(
    ("name", "device", "accelerators", "batch_size"),
    [("llama-8b", "h100-500w", 8, 16), ("llama-8b", "a100", 64, 64)],
)
def test_what_ran_fits_by_what_a_user_can_say(
    name: str, device: str, accelerators: int, batch_size: int
) -> None:
    """Rows of torchtitan on cards of 80 GB, of which 1.5 GiB are held back."""
    request = Request(
        accelerators=accelerators, memory_bytes=80 * 10**9, batch_size=batch_size, precision="bfloat16",
        link=link_named("nvlink", device), device_type=device, hosts=accelerators // 8,
        between=link_named("infiniband", device) if accelerators > 8 else None,
    )  # fmt: skip
    space = Space(pp=(1,), schedules=("1f1b",), microbatches=(1,), fewer=False)
    found = plan(model_of(name, batch_size), request, space=space, shown=1)
    assert found.best.peak <= request.usable_bytes
    assert found.best.candidate.grid.fsdp > 1
