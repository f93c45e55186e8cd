"""What processes do that divide parameters among them, along `fsdp` and along `tp`; `test_sharding` starts
four of them once, and eight of them for the whole grid, and reports each case as a test.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from mesh_grids import CLOSE, Part, joint_step, own_part
from ranks import TIMEOUT_S, raises
from tiny_models import Plain, everything, everything_batch, mlp_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpipe_bench import models
from gpipe_bench.models.llama import llama
from gpipe_bench.models.parallel import Gathered, tensor_parallel
from gpipe_bench.models.tasks import class_loss, token_loss
from gpipe_bench.models.transformer.lm import transformer_lm
from gpipe_bench.models.transformer.seq2seq import transformer_seq2seq
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.ranks.mesh.divided.gathering import Holders
from gpipe_bench.pipeline.stage.portals import Pop, PortalSequential, Stash

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss
UNEVEN = (7, 4)
M = 3
TRANSFORMER = {
    "num_layers": 4, "d_model": 8, "ffn_dim": 16, "num_heads": 4, "vocab_size": 11, "seq_len": 6,
}  # fmt: skip
AMOEBANET = {
    "num_layers": 3, "num_filters": 8, "num_classes": 10, "image_size": 67, "aux_head": True, "dropout": 0.2,
}  # fmt: skip
_MESHES: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def grid(**sizes: int) -> DeviceMesh:
    """A mesh of all ranks with these dimensions; what is left over are copies that do the same."""
    key = tuple(sizes.items())
    if key not in _MESHES:
        count = 1
        for size in sizes.values():
            count *= size
        shape = (dist.get_world_size() // count, *sizes.values())
        _MESHES[key] = init_device_mesh("cpu", shape, mesh_dim_names=("copies", *sizes))[tuple(sizes)]
    return _MESHES[key]


def on(mesh: DeviceMesh, layers: nn.Sequential, num_microbatches: int = M, **options: Any) -> Pipeline:
    options = {"cost": [1] * len(layers), "timeout_s": TIMEOUT_S, "bucket_bytes": 300, **options}
    return Pipeline(layers, mesh=mesh, num_microbatches=num_microbatches, **options)


def words(batch_size: int, seed: int = 0, tokens: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(11, (batch_size, tokens), generator=generator) for _ in range(2))  # type: ignore[return-value]


def transformer(**options: Any) -> nn.Sequential:
    """With biases and norms that are no zeros and ones, which hide what is lost."""
    model = transformer_lm(**{**TRANSFORMER, **options})
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_gradients(pipeline: Pipeline, wanted: Plain, rtol: float = 1e-13) -> None:
    """Every gradient of this rank, within `rtol` of the model's largest: some are nothing but rounding."""
    largest = max(float(g.abs().max()) for g in wanted.gradients.values() if g is not None)
    for name, parameter in pipeline.named_parameters():
        expected = wanted.gradients[name]
        if expected is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        error = float((whole(parameter.grad) - expected).abs().max())
        assert error <= rtol * largest, f"{name}: {error / largest:.3g} of the largest gradient"


def assert_steps(
    mesh: DeviceMesh,
    build: Callable[[], nn.Sequential],
    parts: Sequence[Part],
    loss_fn: Callable[..., Tensor],
    hows: Sequence[tuple[str, str, int | None]],
    *,
    prepare: Callable[[nn.Sequential], Any] = lambda model: model,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-13,
    num_microbatches: int = M,
) -> None:
    """Two steps that accumulate, with an evaluation between them, equal the plain model's."""
    plain = seeded(build, dtype)
    wanted = []
    for step in range(2):
        found = joint_step(plain, parts, loss_fn, num_microbatches, step=step)
        found.gradients = {name: None if g is None else g.clone() for name, g in found.gradients.items()}
        wanted.append(found)
    for schedule, remat, zero in hows:
        layers = seeded(build, dtype)
        prepare(layers)
        pipeline = on(mesh, layers, num_microbatches, schedule=schedule, remat=remat, zero=zero)
        for step in range(2):
            what = f"{schedule} {remat} zero={zero} step {step}"
            try:
                batch, target = own_part(pipeline, parts)
                loss = pipeline.step(batch, target, loss_fn)
                tolerance = CLOSE if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
                torch.testing.assert_close(loss.double(), wanted[step].loss, **tolerance)
                assert_gradients(pipeline, wanted[step], rtol)
                pipeline(batch)
                assert_gradients(pipeline, wanted[step], rtol)
            except Exception as error:
                raise AssertionError(what) from error
        pipeline.close()


FSDP_HOWS = (
    ("gpipe", "always", 2), ("gpipe", "never", 3), ("1f1b", "always", 3), ("1f1b", "never", 2),
    ("zb-h1", "never", 2), ("zb-h1", "always", 2), ("interleaved", "never", 2), ("zb-v", "always", 2),
    ("gpipe", "always", 3), ("interleaved", "always", 3),
)  # fmt: skip


def gradients_of_shards() -> None:
    """Everything a layer may pass, with dropout and batch normalization, over uneven replicas."""
    parts = [everything_batch(n, seed=r) for r, n in enumerate(UNEVEN)]
    assert_steps(grid(fsdp=2, pp=2), everything, parts, cross_entropy, FSDP_HOWS)


def gradients_of_shards_in_float32() -> None:
    """gloo knows no mean and no product before the sum, which float64 never asks of it."""
    parts = [words(n, seed=r) for r, n in enumerate(UNEVEN)]
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
    parts = [words(n, seed=r) for r, n in enumerate((7, 4, 5, 6))]
    build = lambda: transformer(dropout=0.2)  # noqa: E731
    hows = (("1f1b", "always", 2), ("zb-h1", "never", 2), ("gpipe", "always", 3))
    assert_steps(grid(dp=2, fsdp=2, pp=1), build, parts, token_loss, hows)


def gradients_of_divided_layers() -> None:
    mesh = grid(pp=2, tp=2)

    def divides(sequence: bool) -> Callable[[nn.Sequential], Any]:
        return lambda model: tensor_parallel(model, mesh["tp"], sequence=sequence)

    hows = (("gpipe", "always", None), ("1f1b", "never", None), ("zb-h1", "always", None))
    assert_steps(mesh, transformer, [words(7)], token_loss, hows, prepare=divides(False))
    build = lambda: transformer(attention="explicit", cut="sublayer")  # noqa: E731
    hows = (("interleaved", "never", None), ("zb-h1", "never", None))
    assert_steps(mesh, build, [words(7)], token_loss, hows, prepare=divides(True))
    build = lambda: llama(  # noqa: E731
        num_layers=2, d_model=8, ffn_dim=12, num_heads=4, num_kv_heads=2, vocab_size=11
    )
    for sequence in (False, True):
        assert_steps(mesh, build, [words(7)], token_loss, hows[:1], prepare=divides(sequence))
    pairs = [((words(5)[0], words(5, 1, 4)[0]), words(5, 2, 4)[0])]
    for tables, sequence in ((2, False), (3, True)):
        build = lambda tables=tables: transformer_seq2seq(  # noqa: E731
            num_layers=1, ffn_dim=8, num_heads=2, head_dim=2, d_model=6, vocab_size=11, num_tables=tables
        )
        assert_steps(mesh, build, pairs, token_loss, hows[1:], prepare=divides(sequence))


def gradients_of_divided_layers_in_shards() -> None:
    """fsdp around tp: each process has a part of a part."""
    mesh = grid(fsdp=2, pp=1, tp=2)
    parts = [words(n, seed=r) for r, n in enumerate(UNEVEN)]
    prepare = lambda model: tensor_parallel(model, mesh["tp"], sequence=True)  # noqa: E731
    hows = (("1f1b", "always", 2), ("gpipe", "never", 3), ("zb-h1", "never", 2))
    assert_steps(mesh, transformer, parts, token_loss, hows, prepare=prepare)


def gradients_of_the_whole_grid() -> None:
    """Two replicas of two stages, each computed by two processes."""
    mesh = grid(dp=2, pp=2, tp=2)
    parts = [words(n, seed=r) for r, n in enumerate(UNEVEN)]
    hows = (("1f1b", "always", None), ("gpipe", "never", None), ("zb-h1", "never", None))
    for sequence in (False, True):
        prepare = lambda model, sequence=sequence: tensor_parallel(  # noqa: E731
            model, mesh["tp"], sequence=sequence
        )
        assert_steps(mesh, transformer, parts, token_loss, hows, prepare=prepare)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The collectives that the holders of parts begin, by their kind."""
    counts: Counter[str] = Counter()

    def count(name: str) -> Any:
        original = getattr(Holders, name)

        def counting(*arguments: Any) -> Any:
            counts[name] += 1
            return original(*arguments)

        return mock.patch.object(Holders, name, counting)

    with count("gather"), count("scatter"), count("sum_copies"):
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
            assert found == {"gather": gathers, "scatter": scatters}, (schedule, remat, zero, found)
        with counted() as found:
            pipeline(own_part(pipeline, parts)[0])
        assert found == {"gather": 3 if zero == 2 else 12}, (zero, found)


def training_goes_on_after_evaluation() -> None:
    """Weights, not only gradients: what an optimizer changes must be what the next step and the next
    evaluation use, with clipping and with optimizers that take many parameters at once.
    """
    parts = [everything_batch(n, seed=r) for r, n in enumerate(UNEVEN)]
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


def masks_of_divided_layers() -> None:
    """What ranks hold together they drop alike, of what each has a part of each drops its own; and a
    recomputation drops what the forward dropped.
    """
    mesh = grid(pp=2, tp=2)
    for sequence in (False, True):
        seen: dict[str, list[Tensor]] = {}
        layers = tensor_parallel(seeded(lambda: transformer(dropout=0.4)), mesh["tp"], sequence=sequence)
        for name, module in layers.named_modules():
            found = seen[name] = []
            if name.endswith("outer"):
                module.register_forward_pre_hook(
                    lambda _, inputs, found=found: found.append(local_of(inputs[0]) == 0)
                )
            elif name in ("layer_1", "layer_3"):
                module.register_forward_hook(
                    lambda _, inputs, output, found=found: found.append(output.detach())
                )
            else:
                del seen[name]
        pipeline = on(mesh, layers, 2, remat="always")
        pipeline.step(*own_part(pipeline, [words(4)]), token_loss)
        others: list[Any] = [None, None]
        dist.all_gather_object(others, seen, group=mesh.get_group("tp"))
        found_any = False
        for name, found in seen.items():
            if not found:  # another rank's
                continue
            found_any = True
            forward, again = found[:2], found[2:]
            assert len(forward) == len(again) == 2, name
            for one, other in zip(forward, reversed(again), strict=True):
                assert torch.equal(one, other), name
            alike = [torch.equal(a, b) for a, b in zip(others[0][name], others[1][name], strict=True)]
            assert all(alike) if not (name.endswith("outer") or sequence) else not any(alike), name
            assert not torch.equal(forward[0], forward[1]), name
        assert found_any


def local_of(tensor: Tensor) -> Tensor:
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


class Heads(nn.Module):
    """Attention whose `view(..., -1)` takes any number of columns."""

    def __init__(self, head_dim: int | None = 2) -> None:
        super().__init__()
        self.num_heads = 4
        if head_dim is not None:
            self.head_dim = head_dim
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)
        return self.out(nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


def layers_that_compute_something_else_are_refused() -> None:
    mesh = grid(pp=2, tp=2)
    plan = {"query": ColwiseParallel(), "out": RowwiseParallel()}

    def heads(head_dim: int | None = 2) -> nn.Sequential:
        layers = nn.Sequential(Heads(head_dim), Heads(head_dim)).double()
        for layer in layers:
            parallelize_module(layer, mesh["tp"], plan)
        return layers

    with raises(ValueError, "0.num_heads is 4, the heads of the whole layer"):
        on(mesh, heads())
    divided = heads()
    for layer in divided:
        layer.num_heads //= 2
    on(mesh, divided).close()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        on(mesh, heads(None)).close()
    assert any("0.num_heads=4 is divided by tp=2 can't be told" in str(each.message) for each in found)
    with raises(ValueError, "no layer is divided over them"):
        on(mesh, transformer())
    wrong = transformer()
    plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
    for i in range(4):
        parallelize_module(wrong.get_submodule(f"layer_{i}.feed_forward"), mesh["tp"], plan)
    with raises(ValueError, "a plain tensor, and optimizers do not take both together"):
        on(mesh, wrong)
    for i in range(4):
        parallelize_module(
            wrong.get_submodule(f"layer_{i}.feed_forward"), mesh["pp"], {"norm": Gathered(Replicate())}
        )
    with raises(ValueError, "which is not the 'tp' of the pipeline's mesh"):
        on(mesh, wrong)
    with raises(ValueError, "layer_0.attention.num_heads is 3, which tp=2 does not divide"):
        tensor_parallel(transformer(num_heads=3, d_model=12), mesh["tp"])
    with raises(ValueError, "no plan is known for layer 0 (Linear)"):
        tensor_parallel(nn.Sequential(nn.Linear(2, 2)), mesh["tp"])
    with raises(ValueError, "are one weight, which would be divided twice"):
        tensor_parallel(
            transformer_seq2seq(
                num_layers=1, ffn_dim=8, num_heads=2, head_dim=2, d_model=6, vocab_size=11, num_tables=1
            ),
            mesh["tp"],
        )
    with raises(ValueError, "the mesh has 2 dimensions: give the one of the tensor parallelism"):
        tensor_parallel(transformer(), mesh)
    odd = tensor_parallel(transformer(), mesh["tp"], sequence=True)
    with raises(ValueError, "sequences of 5 tokens cannot be divided over tp=2"):
        odd[0](words(2, tokens=5)[0])


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
    with raises(ValueError, 'schedule="auto" may choose one with I and W'):
        on(mesh, transformer(), num_stages=2, schedule="auto", zero=3)
    for compiles in (True, "graphs"):
        with raises(ValueError, "compile= makes programs of layers"):
            on(mesh, transformer(), compile=compiles)
    with raises(ValueError, "zero=1 is not known; choose one of 2, 3"):
        on(mesh, transformer(), zero=1)
    with raises(ValueError, "zero=3 divides along the dimension 'fsdp' of a mesh, and there is none"):
        on(grid(dp=2, pp=2), transformer(), zero=3)
    with raises(ValueError, "reduction='tree' adds up whole gradients"):
        on(mesh, transformer(), reduction="tree")


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
    parts = [mlp_batch(n, seed=r) for r, n in enumerate(UNEVEN)]

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


class Add(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


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


CASES = (
    gradients_of_shards,
    gradients_of_shards_in_float32,
    gradients_of_shards_of_amoebanet,
    gradients_of_shards_of_replicas,
    gradients_of_divided_layers,
    gradients_of_divided_layers_in_shards,
    collectives_are_counted,
    training_goes_on_after_evaluation,
    norms_of_parts,
    masks_of_divided_layers,
    layers_that_compute_something_else_are_refused,
    what_cannot_be_sharded_is_refused,
    layers_of_many_kinds,
    states_are_divided_under_plain_names,
    an_infinite_gradient_is_seen_by_all,
)
OF_EIGHT = (gradients_of_the_whole_grid,)
