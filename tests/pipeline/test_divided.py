"""Parameters divided over processes: whole layers in parts along `fsdp`, and parts of layers along `tp`. That
training is the plain model's is the table of `test_over_processes`.
"""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from case_runner import Outcomes, assert_passed, named
from ranks import assert_gradients, grid, joint_step, on, own_part, raises, transformer, words
from tiny_models import mlp_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpipe_bench.models.parallel import Gathered, tensor_parallel
from gpipe_bench.models.tasks import token_loss
from gpipe_bench.models.transformer.seq2seq import transformer_seq2seq
from gpipe_bench.pipeline import ActionError

pytestmark = pytest.mark.processes  # four at a time
cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss


# Whole layers in parts


def collectives_are_counted() -> None:
    """Three layers and four micro-batches: what each way of going through them costs."""
    parts = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(4)]
    counts: Counter[str] = Counter()

    def counting(name: str) -> Any:
        original = getattr(dist, name, None)

        def count(*arguments: Any, **options: Any) -> Any:
            counts[name.split("_")[0]] += 1
            return original(*arguments, **options)

        return mock.patch.object(dist, name, count, create=original is None)

    for schedule, remat, zero, gathers, scatters in (
        ("gpipe", "always", 2, 3, 3), ("zb-h1", "always", 2, 3, 3), ("gpipe", "always", 3, 36, 12),
        ("1f1b", "never", 3, 24, 12),
    ):  # fmt: skip
        layers = seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.float32)
        pipeline = on(grid(fsdp=4, pp=1), layers, 4, schedule=schedule, remat=remat, zero=zero)
        pipeline.step(*own_part(pipeline, parts), mse_loss)
        with ExitStack() as counted:
            for name in ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
                         "reduce_scatter_single"):  # fmt: skip  # in several versions of torch
                counted.enter_context(counting(name))
            counts.clear()
            pipeline.step(*own_part(pipeline, parts), mse_loss)
            assert counts == {"all": gathers, "reduce": scatters}, (schedule, remat, zero, counts)
            counts.clear()
            pipeline(own_part(pipeline, parts)[0])
            assert counts == {"all": 3 if zero == 2 else 12}, (zero, counts)


def norms_of_parts() -> None:
    """Of every kind, where gradients are missing or a process has none of a tensor; those of layers divided
    along tp too, whose small parameters every process has.
    """
    for mesh in (grid(fsdp=2, pp=2), grid(pp=2, tp=2), grid(fsdp=2, pp=1, tp=2)):
        plain, layers = seeded(transformer), seeded(transformer)
        if "tp" in mesh.mesh_dim_names:
            tensor_parallel(layers, mesh["tp"], sequence=True)
        for each in (plain, layers):
            each[1].requires_grad_(False)
        pipeline = on(mesh, layers)
        parts = [words(4, seed=r) for r in range(pipeline.grid.replicas)]
        wanted = joint_step(plain, parts, token_loss, 3)
        pipeline.step(*own_part(pipeline, parts), token_loss)
        for norm_type in (1.0, 3.0, 0.0, float("inf"), -float("inf")):
            norms = [
                torch.zeros((), dtype=torch.float64) if g is None else torch.linalg.vector_norm(g, norm_type)
                for g in wanted.gradients.values()
            ]
            expected = torch.linalg.vector_norm(torch.stack(norms), norm_type)
            found = pipeline.clip_grad_norm_(float("inf"), norm_type)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        assert_gradients(pipeline, wanted)


def what_cannot_be_sharded_is_refused() -> None:
    mesh, tied, mixed, turning = grid(fsdp=2, pp=2), transformer(), transformer(), transformer()
    tied[-1].linear.weight = tied[0].table.weight
    mixed[1].attention.query.to(torch.float16)
    turning[1].phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    sparse = nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 11))
    of_replicas = grid(dp=2, pp=2)
    for where, layers, options, text in (
        (mesh, tied, {}, "are one weight, which cannot be divided"),
        (mesh, mixed, {}, "the parameters of layer layer_0 are of torch.float16 and torch.float32"),
        (mesh, turning, {}, "layer_0.phase is torch.complex64, and fsdp sums parts of real numbers"),
        (mesh, sparse, {}, "0 is a Embedding with sparse=True, and fsdp sums dense gradients"),
        (mesh, None, {"schedule": "zb-h1", "zero": 3}, "zb-h1 has I and W, and with zero=3 the"),
        (mesh, None, {"compile": True}, "compile= makes programs of layers"),
        (mesh, None, {"zero": 1}, "zero=1 is not known; choose one of 2, 3"),
        (of_replicas, None, {"zero": 3}, "zero=3 divides along the dimension 'fsdp' of a mesh, and there is"),
    ):  # fmt: skip
        with raises(ValueError, text):
            on(where, layers or transformer(), **options)


class Expert(nn.Module):
    """Uses one of two layers, by the replica."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if dist.get_rank() < 2 else self.b(x)


class Skipping(nn.Sequential):
    """Runs none of its layers on one replica."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if dist.get_rank() < 2 else x


def what_not_all_replicas_use_is_refused_by_all() -> None:
    """Parameters and layers, also where their sizes fit. Nobody waits, and all say the same."""
    parts = [mlp_batch(8, seed=r) for r in range(2)]
    for layer, text in (
        (
            Expert(),
            "replica 1 sums the gradients of b.0.bias, b.0.weight, b.1.bias, b.1.weight of layer 1 (Ex",
        ),
        (Skipping(nn.Linear(6, 6)), "replica 0 sums the gradients of 0.bias, 0.weight of layer 1 (Skipping)"),
    ):
        for zero in (2, 3):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "pp"))  # ends with the step
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Linear(6, 6), copy.deepcopy(layer), nn.Tanh(), nn.Linear(6, 6))
            pipeline = on(mesh, layers.double(), 2, zero=zero, cost=[1, 1, 1, 3])
            with raises((ValueError, ActionError), text):
                for _ in range(2):  # the last stage may have finished its part of the first
                    pipeline.step(*own_part(pipeline, parts), mse_loss)


# Parts of layers


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def masks_of_divided_layers() -> None:
    """What ranks hold together they drop alike, of what each has a part of each drops its own; and a
    recomputation drops what the forward dropped.
    """
    mesh = grid(pp=2, tp=2)
    for sequence in (False, True):
        seen: dict[str, list[Tensor]] = {}
        layers = seeded(lambda: transformer(dropout=0.4))
        for name, parameter in layers.named_parameters():
            if name.endswith("inner.bias"):  # no hidden unit is 0 that was not dropped
                nn.init.constant_(parameter, 100.0)
        for name, module in tensor_parallel(layers, mesh["tp"], sequence=sequence).named_modules():
            if name.endswith("outer"):
                found = seen[name] = []
                module.register_forward_pre_hook(
                    lambda _, inputs, found=found: found.append(local(inputs[0]) == 0)
                )
            elif name in ("layer_1", "layer_3"):
                found = seen[name] = []
                module.register_forward_hook(lambda _, inputs, y, found=found: found.append(local(y)))
        pipeline = on(mesh, layers, 2, remat="always")
        pipeline.step(*own_part(pipeline, [words(4)]), token_loss)
        others: list[Any] = [None, None]
        dist.all_gather_object(others, seen, group=mesh.get_group("tp"))
        assert any(seen.values())
        for name, found in seen.items():
            if not found:  # another rank's
                continue
            forward, again = found[:2], found[2:]
            assert len(forward) == len(again) == 2, name
            assert all(map(torch.equal, forward, reversed(again))), name
            alike = list(map(torch.equal, others[0][name], others[1][name]))
            assert any(alike) == all(alike) == (not name.endswith("outer") and not sequence), name
            assert not torch.equal(forward[0], forward[1]), name


def layers_that_are_divided_in_part_are_refused() -> None:
    mesh = grid(pp=2, tp=2)
    tp = mesh["tp"]
    wrong = transformer()
    for i in range(4):
        feed_forward = wrong.get_submodule(f"layer_{i}.feed_forward")
        parallelize_module(feed_forward, tp, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
    with raises(ValueError, "a plain tensor, and optimizers do not take both together"):
        on(mesh, wrong)
    for i in range(4):
        feed_forward = wrong.get_submodule(f"layer_{i}.feed_forward")
        parallelize_module(feed_forward, mesh["pp"], {"norm": Gathered(Replicate())})
    with raises(ValueError, "which is not the 'tp' of the pipeline's mesh"):
        on(mesh, wrong)
    with raises(ValueError, "no layer is divided over them"):
        on(mesh, transformer())


def what_tensor_parallel_refuses() -> None:
    mesh = grid(pp=2, tp=2)
    one_table = transformer_seq2seq(
        num_layers=1, ffn_dim=8, num_heads=2, head_dim=2, d_model=6, vocab_size=11, num_tables=1
    )
    for layers, where, text in (
        (transformer(num_heads=3, d_model=12), mesh["tp"], "attention.num_heads is 3, which tp=2 does not"),
        (nn.Sequential(nn.Linear(2, 2)), mesh["tp"], "no plan is known for layer 0 (Linear)"),
        (one_table, mesh["tp"], "are one weight, which would be divided twice"),
        (transformer(), mesh, "the mesh has 2 dimensions: give the one of the tensor parallelism"),
    ):
        with raises(ValueError, text):
            tensor_parallel(layers, where)
    odd = tensor_parallel(transformer(), mesh["tp"], sequence=True)
    with raises(ValueError, "sequences of 5 tokens cannot be divided over tp=2"):
        odd[0](words(2, tokens=5)[0])


class Heads(nn.Module):
    """Attention whose `view(..., -1)` takes any number of columns."""

    def __init__(self, head_dim: int | None) -> None:
        super().__init__()
        self.num_heads = 4
        if head_dim is not None:
            self.head_dim = head_dim
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)
        return self.out(nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


def heads_of_the_whole_layer_are_refused() -> None:
    mesh = grid(pp=2, tp=2)
    plan = {"query": ColwiseParallel(), "out": RowwiseParallel()}

    def heads(head_dim: int | None) -> nn.Sequential:
        layers = nn.Sequential(Heads(head_dim), Heads(head_dim)).double()
        for layer in layers:
            parallelize_module(layer, mesh["tp"], plan)
        return layers

    with raises(ValueError, "0.num_heads is 4, the heads of the whole layer"):
        on(mesh, heads(2))
    divided = heads(2)
    for layer in divided:
        layer.num_heads //= 2
    on(mesh, divided).close()
    with pytest.warns(UserWarning, match=r"0.num_heads=4 is divided by tp=2 can't be told"):
        on(mesh, heads(None)).close()


# What leaves a mesh with groups that are cut makes that mesh itself.
CASES = named(
    collectives_are_counted, norms_of_parts, what_cannot_be_sharded_is_refused,
    what_not_all_replicas_use_is_refused_by_all, masks_of_divided_layers,
    layers_that_are_divided_in_part_are_refused, what_tensor_parallel_refuses,
    heads_of_the_whole_layer_are_refused,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)
