"""Layers that several processes compute together, along `tp`; `test_sharding` runs the cases on four ranks,
and the whole grid on eight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mesh_grids import (
    UNEVEN,
    assert_steps,
    grid,
    local_of,
    on,
    own_part,
    transformer,
    words,
)
from ranks import raises
from tiny_models import seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpipe_bench.models.llama import llama
from gpipe_bench.models.parallel import Gathered, tensor_parallel
from gpipe_bench.models.tasks import token_loss
from gpipe_bench.models.transformer.seq2seq import transformer_seq2seq


def two_layers(**options: Any) -> nn.Sequential:
    """Between an embedding and a classifier: each operation on tensors that are divided takes its time."""
    return transformer(num_layers=2, **options)


def gradients_of_divided_layers() -> None:
    mesh = grid(pp=2, tp=2)

    def divides(sequence: bool) -> Callable[[nn.Sequential], Any]:
        return lambda model: tensor_parallel(model, mesh["tp"], sequence=sequence)

    hows = (("gpipe", "always", None), ("1f1b", "never", None), ("zb-h1", "always", None))
    assert_steps(mesh, two_layers, [words(7)], token_loss, hows, prepare=divides(False))
    build = lambda: two_layers(attention="explicit", cut="sublayer")  # noqa: E731
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
    parts = [words(n, seed=r) for r, n in enumerate(UNEVEN[:2])]
    prepare = lambda model: tensor_parallel(model, mesh["tp"], sequence=True)  # noqa: E731
    hows = (("1f1b", "always", 2), ("gpipe", "never", 3), ("zb-h1", "never", 2))
    assert_steps(mesh, two_layers, parts, token_loss, hows, prepare=prepare)


def gradients_of_the_whole_grid() -> None:
    """Two replicas of two stages, each computed by two processes."""
    mesh = grid(dp=2, pp=2, tp=2)
    parts = [words(n, seed=r) for r, n in enumerate(UNEVEN[:2])]
    hows = (("1f1b", "always", None), ("gpipe", "never", None), ("zb-h1", "never", None))
    for sequence in (False, True):
        prepare = lambda model, sequence=sequence: tensor_parallel(  # noqa: E731
            model, mesh["tp"], sequence=sequence
        )
        assert_steps(mesh, two_layers, parts, token_loss, hows, prepare=prepare)


def masks_of_divided_layers() -> None:
    """What ranks hold together they drop alike, of what each has a part of each drops its own; and a
    recomputation drops what the forward dropped.
    """
    mesh = grid(pp=2, tp=2)
    for sequence in (False, True):
        seen: dict[str, list[Tensor]] = {}
        whole = seeded(lambda: transformer(dropout=0.4))
        for name, parameter in whole.named_parameters():
            if name.endswith("inner.bias"):  # no hidden unit is 0 that was not dropped
                nn.init.constant_(parameter, 100.0)
        layers = tensor_parallel(whole, mesh["tp"], sequence=sequence)
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


def layers_that_compute_something_else_are_refused() -> None:
    mesh = grid(pp=2, tp=2)
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


CASES = (
    gradients_of_divided_layers,
    gradients_of_divided_layers_in_shards,
    masks_of_divided_layers,
    layers_that_compute_something_else_are_refused,
)
OF_EIGHT = (gradients_of_the_whole_grid,)
