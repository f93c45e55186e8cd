"""A candidate as a script that trains with it, and the line that starts it.

The script is whole: it builds the model, cuts it as planned, and takes a few steps on zeros of the right
shape, where one's own batches go.
"""

from __future__ import annotations

import json

from gpipe_bench.planner.candidate import Candidate
from gpipe_bench.planner.model import Model, Source
from gpipe_bench.planner.request import Request
from gpipe_bench.planner.topology import DIMENSIONS

NAME = "train.py"
"""What the script is called where nobody says."""

_OPTIMIZERS = {
    "sgd": "SGD(pipeline.parameters(), lr=1e-3, foreach=False)",
    "rmsprop": "RMSprop(pipeline.parameters(), lr=1e-3, momentum=0.9, foreach=False)",
    "adam": "Adam(pipeline.parameters(), lr=1e-3, foreach=False)",
}


def command(request: Request, name: str = NAME, accelerators: int | None = None) -> str:
    """The line that starts the script on every host, or on as many as so many accelerators are on."""
    number = accelerators or request.accelerators
    if number <= request.per_host:
        return f"torchrun --nproc-per-node {number} {name}"
    return (
        f"torchrun --nnodes {number // request.per_host} --nproc-per-node {request.per_host} "
        f"--rdzv-backend c10d --rdzv-endpoint HOST:29400 {name}"
    )


def script(model: Model, candidate: Candidate, request: Request) -> str:
    """Python that takes steps as planned."""
    sizes = {name: getattr(candidate.grid, name) for name in DIMENSIONS}
    mesh = {name: size for name, size in sizes.items() if size > 1 or name == "pp"}
    remat = candidate.remat if len(set(candidate.remat)) > 1 else candidate.remat[0]
    source, facts = model.source, candidate.describe()
    words = json.dumps({key: facts[key] for key in ("schedule", "num_microbatches", "cut")})
    words = words[1:-1].replace('"', "")
    body = [
        "torch.manual_seed(0)  # the same weights on every rank",
        *_model(source),
        f"mesh = init_device_mesh(device.type, {tuple(mesh.values())}, mesh_dim_names={tuple(mesh)})",
        *(_divided(source) if candidate.tp > 1 else []),
        "pipeline = Pipeline(",
        f"    layers, mesh=mesh, schedule={candidate.schedule!r}, "
        f"num_microbatches={candidate.num_microbatches},",
        f"    num_stages={candidate.num_stages}, num_workers={candidate.num_workers}, devices=device,",
        f"    remat={remat!r},",
        f"    partition={[len(stage) for stage in candidate.cut]},",
        *([f"    zero={candidate.fsdp_level},"] if candidate.fsdp > 1 else []),
        *(["    compile=True,"] if request.compiled else []),
        ")",
        "# foreach=True is faster, and takes memory that the plan has not counted",
        f"optimizer = torch.optim.{_OPTIMIZERS[request.optimizer]}",
        'for step in range(int(os.environ.get("STEPS", "3"))):',
        *_step(request.precision),
        "    optimizer.step()",
        "    optimizer.zero_grad()",
        "    if dist.get_rank() == 0:",
        '        print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)',
        "pipeline.close()",
    ]
    layers_of = "layers_of, " * source.is_foreign
    zoo_plan = candidate.tp > 1 and source.options is not None
    lines = [
        f'"""Trains {model.name} as planned: {words}."""',
        "",
        "import os",
        "",
        "import torch",
        "from torch import distributed as dist",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.utils._pytree import tree_map",
        "",
        f"from gpipe_bench.pipeline import Pipeline, {layers_of}start_process",
        source.imports,
        *(["from gpipe_bench.models.parallel import tensor_parallel"] if zoo_plan else []),
        "",
        f"SHARE = {request.batch_size // candidate.replicas}  # examples of a mini-batch that each of "
        f"{candidate.replicas} replicas takes",
        "",
        "with start_process() as device:",
        *(f"    {line}" if line else "" for line in body),
        "",
    ]
    return "\n".join(lines)


def _model(source: Source) -> list[str]:
    """What makes the layers, a batch and the loss."""
    if source.options is not None:
        options = f", **{source.options!r}" if source.options else ""
        return [
            f"layers = MODELS[{source.called!r}]({options[2:]})",
            f"inputs, target = example_batch({source.called!r}, SHARE, device=device{options})",
            f"loss_fn = loss_fn({source.called!r}{options})",
        ]
    divide = ", divide" * source.divides
    lines = [f"layers, inputs, target, loss_fn{divide} = {source.called}()"]
    if not source.has_loss:
        lines = [
            f"layers, inputs = {source.called}()",
            "target, loss_fn = torch.zeros(SHARE), lambda output, _: output.float().mean()",
        ]
    return [
        "# the whole model on every rank, which keeps its stages of it",
        *lines,
        *(["layers = layers_of(layers)"] if source.is_foreign else []),
        "",
        "",
        "def zeros(tensor):  # your own batches go here",
        "    return torch.zeros(SHARE, *tensor.shape[1:], dtype=tensor.dtype, device=device)",
        "",
        "",
        "inputs, target = tree_map(zeros, (inputs, target))",
    ]


def _divided(source: Source) -> list[str]:
    """What makes the layers tensor parallel: the zoo's plan, or one's own."""
    if source.options is not None:
        return ['tensor_parallel(layers.to(device), mesh["tp"])']
    return ["layers = torch.nn.Sequential(*layers).to(device)", 'divide(layers, mesh["tp"])']


def _step(precision: str) -> list[str]:
    step = "loss = pipeline.step(inputs, target, loss_fn)"
    if precision == "float32":
        return [f"    {step}"]
    autocast = f"torch.autocast(device.type, dtype=torch.{precision}, cache_enabled=False)"
    return [f"    with {autocast}:", f"        {step}"]
