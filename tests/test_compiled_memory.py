"""What a compiled layer keeps: the model against a real compiled step on this machine, to the byte."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from refused import refused
from torch import Tensor, nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Boundary, Pipeline, Profiler, gpipe, pipeline_memory
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import LayerProfile

CELLS = {"num_layers": 3, "num_filters": 16, "image_size": 96, "num_classes": 10, "aux_head": True}
TEXT = {
    "num_layers": 1, "vocab_size": 512, "d_model": 64, "ffn_dim": 256, "num_heads": 4, "seq_len": 64,
    "attention": "explicit",
}  # fmt: skip


def kept_by_a_real_step(layer: nn.Module, values: Sequence[Tensor], is_tuple: bool, autocast: bool) -> int:
    """Bytes of the distinct storages that torch's own compiled layer saves, parameters left out."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    own = {tensor.untyped_storage()._cdata for tensor in (*layer.parameters(), *layer.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    precision = (
        torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
        if autocast
        else contextlib.nullcontext()
    )
    with precision, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(tuple(values) if is_tuple else values[0])
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in own)


def kept(profile: LayerProfile) -> int:
    return sum(profile.first.sizes[storage] for storage in profile.first.kept)


def inputs_of(profile: LayerProfile) -> list[Tensor]:
    made = [torch.randn(spec.shape, dtype=spec.dtype) for spec in profile.inputs.tensors]
    for tensor, spec in zip(made, profile.inputs.tensors, strict=True):
        tensor.requires_grad_(spec.requires_grad)
    return [made[first] for first in profile.inputs.same_as]


@pytest.mark.parametrize(
    ("model", "options", "index", "autocast"),
    [
        ("transformer-lm", TEXT, 1, False),
        ("transformer-lm", TEXT, 1, True),
        ("amoebanet-d", CELLS, 1, False),  # the first stem cell: padded convolutions, pools, statistics
        ("amoebanet-d", CELLS, 6, False),  # the auxiliary head, which hands two tensors on
    ],
    ids=["transformer", "transformer-bfloat16", "cell", "head"],
)
def test_a_real_compiled_step_keeps_the_same_bytes(
    model: str, options: dict[str, object], index: int, autocast: bool
) -> None:
    torch.manual_seed(0)
    layers = MODELS[model](**options)
    inputs, _ = example_batch(model, 2, **options)
    precision = torch.bfloat16 if autocast else None
    eager = Profiler(precision).chain(list(layers)[: index + 1], Boundary.of(inputs))[index]
    profile = Profiler(precision, compiled=True).layer(layers[index], eager.inputs)
    real = kept_by_a_real_step(layers[index], inputs_of(profile), profile.inputs.is_tuple, autocast)
    assert kept(profile) == real
    assert kept(profile) != kept(eager), "a case in which compiling makes no difference shows nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("remat", ["never", "always"])
def test_on_a_gpu_a_compiled_step_has_the_plain_gradients_and_takes_the_modelled_memory(remat: str) -> None:
    name, batch_size, num_microbatches = "transformer-lm", 8, 2
    options = {
        "num_layers": 4, "d_model": 1024, "ffn_dim": 4096, "num_heads": 16, "vocab_size": 8192,
        "seq_len": 512, "attention": "explicit",
    }  # fmt: skip
    torch.manual_seed(0)
    model = MODELS[name](**options).cuda()
    compute_loss = loss_fn(name, **options)
    batch, target = example_batch(name, batch_size, device="cuda", **options)

    def gradients(compile: bool) -> tuple[Pipeline, list[Tensor]]:
        pipeline = Pipeline(
            model, num_stages=1, num_microbatches=num_microbatches, remat=remat, compile=compile
        )
        model.zero_grad()
        pipeline.step(batch, target, compute_loss)
        return pipeline, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    _, wanted = gradients(compile=False)
    pipeline, found = gradients(compile=True)
    largest = max(float(gradient.abs().max()) for gradient in wanted)  # some are zero but for rounding
    for gradient, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, plain, rtol=0, atol=1e-5 * largest)

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    pipeline.step(batch, target, compute_loss)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before

    inputs, wanted_outputs = example_batch(name, batch_size // num_microbatches, device="meta", **options)
    with torch.device("meta"):
        shapes = MODELS[name](**options)
    layers, loss = Profiler(compiled=True).model(
        shapes, compute_loss, Boundary.of(inputs), Boundary.of(wanted_outputs)
    )
    (stage,) = pipeline_memory(layers, loss, (range(len(layers)),), gpipe(1, num_microbatches, remat))
    assert peak == pytest.approx(stage.working_set, rel=0.05)


class Gate(nn.Module):
    """Element-wise operations between two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.outer(y.sigmoid() * y.tanh())


def test_what_is_element_wise_leaves_no_tensor_of_its_own() -> None:
    rows, width = 32, 16
    size = rows * width * 4
    inputs = Boundary.of(torch.empty(rows, width, requires_grad=True))
    eager, compiled = (Profiler(compiled=each).layer(Gate(width), inputs) for each in (False, True))
    assert eager.free.forward_peak == 4 * size
    # The first product's result and what the second one reads, then that and the second one's result.
    assert compiled.free.forward_peak == 2 * size
    # Both keep the input and what the second product reads; then what both factors are computed from again,
    # or the two factors.
    assert kept(compiled) == 3 * size
    assert kept(eager) == 4 * size


def test_every_trace_ends_with_gradients_and_nothing_else() -> None:
    """What appears dies, but for the gradients of inputs and, in the first backward, of parameters."""
    inputs = Boundary.of(torch.empty(8, 4, requires_grad=True))
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    profile = Profiler(compiled=True).layer(layer, inputs)
    for trace, gradients in ((profile.first, profile.first.gradients), (profile.later, frozenset[int]())):
        alive = {*trace.inputs, *trace.outputs}
        for event in (*trace.forward, *trace.backward):
            alive.add(event - 1) if event > 0 else alive.discard(-event - 1)
        rest = {each for each in trace.input_gradients if each is not None}
        assert alive - {*trace.inputs, *trace.outputs} == rest | gradients
    assert profile.gradient_bytes == (4 * 4 + 4) * 4
    assert profile.parameter_bytes == profile.gradient_bytes
    # While a later gradient is added to the sum, all of the layer's are there: a compiled backward returns
    # them together.
    assert stage_bytes([profile]).backward.transients >= profile.gradient_bytes


def test_a_layer_that_only_views_is_profiled_as_it_is() -> None:
    inputs = Boundary.of(torch.empty(2, 3, 4, requires_grad=True))
    eager, compiled = (Profiler(compiled=each).layer(nn.Flatten(), inputs) for each in (False, True))
    one, other = (replace(each.first, sizes=(), shapes=()) for each in (compiled, eager))
    assert vars(one) == vars(other)


def test_several_views_of_one_tensor_are_refused() -> None:
    class Halve(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            made = x + 1
            return made[:2], made[2:]

    inputs = Boundary.of(torch.empty(4, 4, requires_grad=True))
    with refused(ValueError):
        Profiler(compiled=True).layer(Halve(), inputs)


def test_nothing_of_the_compiler_is_imported_before_a_layer_is_traced() -> None:
    code = (
        "import sys, gpipe_bench.experiments.table1.largest, gpipe_bench.pipeline.memory.compiled\n"
        "print([name for name in ('torch._inductor.compile_fx', 'torch._functorch.partitioners')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
