"""Parameters that processes divide among them, along `fsdp` and, where it is about both, along `tp`;
`test_sharding` runs the cases on four ranks.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from mesh_grids import (
    UNEVEN,
    M,
    Part,
    assert_gradients,
    assert_steps,
    grid,
    joint_step,
    local_of,
    on,
    own_part,
    transformer,
    whole,
    words,
)
from odd_layers import Add
from ranks import raises
from tiny_models import AMOEBANET, Plain, everything, everything_batch, mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gpipe_bench import models
from gpipe_bench.models.parallel import tensor_parallel
from gpipe_bench.models.tasks import class_loss, token_loss
from gpipe_bench.pipeline import ActionError, Pop, PortalSequential, Stash
from gpipe_bench.pipeline.mesh.reduce import Divided

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss
FSDP_HOWS = (
    ("gpipe", "always", 2), ("gpipe", "never", 3), ("1f1b", "always", 3), ("1f1b", "never", 2),
    ("zb-h1", "never", 2), ("zb-h1", "always", 2), ("interleaved", "never", 2), ("zb-v", "always", 2),
    ("gpipe", "always", 3), ("interleaved", "always", 3),
)  # fmt: skip


def gradients_of_shards() -> None:
    """Everything a layer may pass, with dropout and batch normalization, over uneven replicas."""
    parts = [everything_batch(n, seed=r) for r, n in enumerate(UNEVEN[:2])]
    assert_steps(grid(fsdp=2, pp=2), everything, parts, cross_entropy, FSDP_HOWS)


def gradients_of_shards_in_float32() -> None:
    """gloo knows no mean and no product before the sum, which float64 never asks of it."""
    parts = [words(n, seed=r) for r, n in enumerate(UNEVEN[:2])]
    hows = (("gpipe", "always", 2), ("zb-h1", "never", 2), ("1f1b", "always", 3))
    build = lambda: transformer(dropout=0.2)  # noqa: E731
    assert_steps(grid(fsdp=2, pp=2), build, parts, token_loss, hows, dtype=torch.float32, rtol=1e-5)


def gradients_of_shards_of_amoebanet() -> None:
    parts = []
    for replica, size in enumerate((4, 5)):
        generator = torch.Generator().manual_seed(replica)
        image = torch.randn(size, 3, 67, 67, generator=generator, dtype=torch.float64)
        parts.append((image, torch.randint(10, (size,), generator=generator)))
    hows = (("1f1b", "always", 2), ("gpipe", "never", 3))
    build = lambda: models.MODELS["amoebanet-d"](**AMOEBANET)  # noqa: E731
    assert_steps(grid(fsdp=2, pp=2), build, parts, class_loss, hows, num_microbatches=2, rtol=1e-12)


def gradients_of_shards_of_replicas() -> None:
    """dp beside fsdp: parts in two replicas each, for one process or two in the pipeline."""
    parts = [words(n, seed=r) for r, n in enumerate(UNEVEN)]
    build = lambda: transformer(dropout=0.2)  # noqa: E731
    hows = (("1f1b", "always", 2), ("zb-h1", "never", 2), ("gpipe", "always", 3))
    assert_steps(grid(dp=2, fsdp=2, pp=1), build, parts, token_loss, hows)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The collectives that the holders of parts begin, by their kind."""
    counts: Counter[str] = Counter()

    def count(name: str) -> Any:
        original = getattr(dist, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **options)

        return mock.patch.object(dist, name, counting)

    with count("all_gather_into_tensor"), count("reduce_scatter_tensor"):
        yield counts


def collectives_are_counted() -> None:
    """Three layers and four micro-batches: what each way of going through them costs."""
    parts = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(4)]
    mesh = grid(fsdp=4, pp=1)
    expected = {
        ("gpipe", "always", 2): (3, 3), ("1f1b", "never", 2): (3, 3), ("zb-h1", "always", 2): (3, 3),
        ("gpipe", "always", 3): (36, 12), ("1f1b", "never", 3): (24, 12),
    }  # fmt: skip
    for (schedule, remat, zero), (gathers, scatters) in expected.items():
        layers = seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.float32)
        pipeline = on(mesh, layers, 4, schedule=schedule, remat=remat, zero=zero)
        for _ in range(2):
            with counted() as found:
                pipeline.step(*own_part(pipeline, parts), mse_loss)
            wanted = {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": scatters}
            assert {name: wanted[name] for name in found} == found, (schedule, remat, zero, found)
            assert zero == 2 or len(found) == 2  # torch's own gathers have other names in other versions
        with counted() as found:
            pipeline(own_part(pipeline, parts)[0])
        assert found == ({} if zero == 2 else {"all_gather_into_tensor": 12}), (zero, found)


def short_shares() -> None:
    """Fewer examples than micro-batches on one replica; with zero=3 all must call a layer equally often."""
    build = lambda: mlp(dropout=0.0)  # noqa: E731
    for zero in (2, 3):
        pipeline = on(grid(fsdp=2, pp=2), seeded(build), 4, schedule="1f1b", zero=zero)
        for sizes in ((2, 5), (4, 7), (3, 1)):
            parts = [mlp_batch(n, seed=r) for r, n in enumerate(sizes)]
            wanted = joint_portals(seeded(build), parts)
            pipeline.step(*own_part(pipeline, parts), mse_loss)
            assert_gradients(pipeline, wanted)
            pipeline(own_part(pipeline, parts)[0])
            pipeline.zero_grad()
        pipeline.close()


def training_goes_on_after_evaluation() -> None:
    """Weights, not only gradients: what an optimizer changes must be what the next step and the next
    evaluation use, with clipping and with optimizers that take many parameters at once.
    """
    parts = [everything_batch(n, seed=r) for r, n in enumerate(UNEVEN[:2])]
    plain = seeded(everything)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9, foreach=True)
    ways = [
        on(grid(fsdp=2, pp=2), seeded(everything), schedule=schedule, remat="always", zero=zero)
        for schedule, zero in (("1f1b", 2), ("zb-h1", 2), ("gpipe", 3))
    ]
    ours = [torch.optim.SGD(p.parameters(), lr=0.3, momentum=0.9, foreach=True) for p in ways]
    for step in range(3):
        joint_step(plain, parts, cross_entropy, M, step=step)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        theirs.step()
        theirs.zero_grad()
        for pipeline, optimizer in zip(ways, ours, strict=True):
            batch, target = own_part(pipeline, parts)
            pipeline.step(batch, target, cross_entropy)
            torch.testing.assert_close(pipeline.clip_grad_norm_(0.1), norm, rtol=1e-12, atol=0)
            pipeline(batch)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in pipeline.named_parameters():
                torch.testing.assert_close(
                    whole(parameter), plain.get_parameter(name), rtol=1e-9, atol=1e-12, msg=name
                )
            assert all(isinstance(p, DTensor) for p in pipeline.parameters())


def norms_of_parts() -> None:
    """Of every kind, where gradients are missing or a process has none of a tensor; those of layers divided
    along tp too, whose small parameters every process has.
    """
    parts = [words(4, seed=r) for r in range(2)]
    meshes = ((grid(fsdp=2, pp=2), False), (grid(pp=2, tp=2), True), (grid(fsdp=2, pp=1, tp=2), True))
    for mesh, divides in meshes:
        plain, layers = seeded(transformer), seeded(transformer)
        if divides:
            tensor_parallel(layers, mesh["tp"], sequence=True)
        plain[1].requires_grad_(False)
        layers[1].requires_grad_(False)
        pipeline = on(mesh, layers)
        used = parts[: pipeline.grid.replicas]
        wanted = joint_step(plain, used, token_loss, M)
        pipeline.step(*own_part(pipeline, used), token_loss)
        for norm_type in (1.0, 3.0, 0.0, float("inf"), -float("inf"), 2.0):
            norms = [
                0.0 if g is None else float(torch.linalg.vector_norm(g, norm_type))
                for g in wanted.gradients.values()
            ]
            expected = torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type)
            max_norm = 0.01 if norm_type == 2.0 else float("inf")
            found = pipeline.clip_grad_norm_(max_norm, norm_type)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        scale = min(1.0, 0.01 / (float(expected) + 1e-6))
        wanted.gradients = {k: None if g is None else g * scale for k, g in wanted.gradients.items()}
        assert_gradients(pipeline, wanted, 1e-12)
        pipeline.close()


def what_cannot_be_sharded_is_refused() -> None:
    mesh = grid(fsdp=2, pp=2)
    tied = transformer()
    tied[-1].linear.weight = tied[0].table.weight
    with raises(ValueError, "are one weight, which cannot be divided"):
        on(mesh, tied)
    mixed = transformer()
    mixed[1].attention.query.to(torch.float16)
    with raises(ValueError, "the parameters of layer layer_0 are of torch.float16 and torch.float32"):
        on(mesh, mixed)
    with raises(ValueError, "zb-h1 has I and W, and with zero=3 the parameters are gone before W"):
        on(mesh, transformer(), schedule="zb-h1", zero=3)
    with raises(ValueError, "compile= makes programs of layers"):
        on(mesh, transformer(), compile=True)
    with raises(ValueError, "zero=1 is not known; choose one of 2, 3"):
        on(mesh, transformer(), zero=1)
    with raises(ValueError, "zero=3 divides along the dimension 'fsdp' of a mesh, and there is none"):
        on(grid(dp=2, pp=2), transformer(), zero=3)
    turning, words_of = transformer(), nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 11))
    turning[1].phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with raises(ValueError, "layer_0.phase is torch.complex64, and fsdp sums parts of real numbers"):
        on(mesh, turning)
    with raises(ValueError, "0 is a Embedding with sparse=True, and fsdp sums dense gradients"):
        on(mesh, words_of)


class Expert(nn.Module):
    """Uses one of two layers, by the replica."""

    def __init__(self, other: int = 6) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, other), nn.Linear(other, 6))

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
            "replica 1 sums the gradients of b.0.bias, b.0.weight, b.1.bias, b.1.weight of layer 1 (Exp",
        ),
        (Expert(9), "replica 0 sums the gradients of a.bias, a.weight of layer 1 (Expert)"),
        (Skipping(nn.Linear(6, 6)), "replica 0 sums the gradients of 0.bias, 0.weight of layer 1 (Skipping)"),
    ):
        for zero in (2, 3):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "pp"))  # ends with the step
            torch.manual_seed(0)
            layers = (nn.Linear(6, 6), copy.deepcopy(layer), nn.Tanh(), nn.Linear(6, 6))
            pipeline = on(mesh, nn.Sequential(*layers).double(), 2, zero=zero, cost=[1, 1, 1, 3])
            with raises((ValueError, ActionError), text):
                for _ in range(2):  # the last stage may have finished its part of the first
                    pipeline.step(*own_part(pipeline, parts), mse_loss)


class Twins(nn.Module):
    """A weight that one layer uses twice, and a parameter that it does not use at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu_())


def layers_of_many_kinds() -> None:
    """Weights that a layer uses twice, layers without parameters or without gradients, changes in place,
    and portals.
    """
    mesh = grid(fsdp=2, pp=2)
    parts = [mlp_batch(n, seed=r) for r, n in enumerate(UNEVEN[:2])]

    def build() -> nn.Sequential:
        frozen = nn.Linear(6, 6).requires_grad_(False)
        return PortalSequential(
            Twins(), nn.ReLU(inplace=True), Stash("a", nn.Linear(6, 6)), nn.Linear(6, 6),
            nn.LeakyReLU(inplace=True), frozen, Pop("a", Add()), Twins(),
        )  # fmt: skip

    hows = (("gpipe", "never", 2), ("1f1b", "always", 3), ("zb-h1", "never", 2))
    for schedule, remat, zero in hows:
        plain = seeded(build)
        pipeline = on(mesh, seeded(build), schedule=schedule, remat=remat, zero=zero)
        for _ in range(2):
            wanted = joint_portals(plain, parts)
            pipeline.step(*own_part(pipeline, parts), mse_loss)
            assert_gradients(pipeline, wanted)
        pipeline.close()


def joint_portals(plain: nn.Sequential, parts: Sequence[Part]) -> Plain:
    """As `joint_step`, of a model that draws nothing and is no chain."""
    examples = sum(len(batch) for batch, _ in parts)
    for batch, target in parts:
        (mse_loss(plain(batch), target) * (len(batch) / examples)).backward()
    return Plain(torch.zeros(()), gradients={name: p.grad for name, p in plain.named_parameters()})


def states_are_divided_under_plain_names() -> None:
    plain = seeded(transformer)
    for mesh, divides in ((grid(fsdp=2, pp=2), False), (grid(pp=2, tp=2), True)):
        layers = seeded(transformer)
        if divides:
            tensor_parallel(layers, mesh["tp"])
        pipeline = on(mesh, layers)
        batch, target = own_part(pipeline, [words(4), words(4)])
        pipeline.step(batch, target, token_loss)
        pipeline(batch)
        state = pipeline.state_dict()
        assert state.keys() <= plain.state_dict().keys()
        for name, value in state.items():
            assert isinstance(value, DTensor), name
            assert torch.equal(value.full_tensor(), plain.state_dict()[name]), name
        pipeline.load_state_dict({name: value * 2 for name, value in state.items()})
        for name, parameter in pipeline.named_parameters():
            assert torch.equal(whole(parameter), plain.state_dict()[name] * 2), name


def an_infinite_gradient_is_seen_by_all() -> None:
    """Scaled gradients: a part that is infinite keeps every rank from its step."""
    for mesh, divides in ((grid(fsdp=2, pp=2), False), (grid(pp=2, tp=2), True)):
        layers = seeded(transformer, torch.float32)
        if divides:
            tensor_parallel(layers, mesh["tp"])
        pipeline = on(mesh, layers)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        scaler = pipeline.scaler(init_scale=8.0)
        before = {name: whole(p).clone() for name, p in pipeline.named_parameters()}
        for spoils in (True, False):
            batch, target = own_part(pipeline, [words(4), words(4)])
            pipeline.step(batch, target, token_loss, scaler=scaler)
            if spoils and dist.get_rank() == 0:
                local_of(next(pipeline.parameters()).grad)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = [torch.equal(whole(p), before[name]) for name, p in pipeline.named_parameters()]
            assert all(same) if spoils else not all(same)
            assert scaler.get_scale() == 4.0


def a_rank_that_cannot_divide_is_named_by_the_others() -> None:
    """Of two; on a mesh of its own, which ends with the failure."""
    every = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2, 1), mesh_dim_names=("copies", "fsdp", "pp")
    )
    mesh, breaks = every["fsdp", "pp"], dist.get_rank() % 2 == 1
    broken = mock.Mock(side_effect=ArithmeticError("the fuse has blown"))
    with mock.patch.object(Divided, "divide", broken) if breaks else nullcontext():
        kind = ArithmeticError if breaks else ActionError
        with raises(kind, "the fuse has blown"):
            on(mesh, seeded(mlp)).step(*mlp_batch(7), mse_loss)


CASES = (
    gradients_of_shards,
    gradients_of_shards_in_float32,
    gradients_of_shards_of_amoebanet,
    gradients_of_shards_of_replicas,
    collectives_are_counted,
    short_shares,
    training_goes_on_after_evaluation,
    norms_of_parts,
    what_cannot_be_sharded_is_refused,
    what_not_all_replicas_use_is_refused_by_all,
    layers_of_many_kinds,
    states_are_divided_under_plain_names,
    an_infinite_gradient_is_seen_by_all,
    a_rank_that_cannot_divide_is_named_by_the_others,
)
