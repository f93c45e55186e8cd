"""A plan as others eat it: a script on our engine or on torch's, settings for torchtitan and for Megatron-LM.

The scripts are whole: they build the model, cut it as planned, and take a few steps on zeros of the right
shape, where one's own batches go. The settings have the degrees, the cut and the schedule; model and data
stay the user's own.

What a format can't say is of three kinds. What each stage recomputes, and how parameters are cast, may be
said otherwise: `as_run` has the candidate and the request as the format has them, which are predicted again.
Where the other engine would train the same, but keep or take a little more than was planned, that stands at
the head of what is written (`Written.differs`). Where it would train something else, or not run at all, there
is a ValueError with what to ask instead.

Read in torch 2.13, torchtitan 0.3.0, Megatron-core 0.16.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from gpipe_bench.pipeline.plan.named import NAMED
from gpipe_bench.pipeline.plan.schedule import Schedule, to_csv
from gpipe_bench.planner.candidate import REMATS, WRAPPED, Candidate, by_schedule
from gpipe_bench.planner.request import DIMENSIONS, Request

if TYPE_CHECKING:
    from gpipe_bench.planner.model import Model, Source

NAME = "train.py"
"""Default file name of the script."""


class Written(NamedTuple):
    """A plan written in a format.

    Args:
        text: of the file
        command: the line that trains with it
        rows: of the schedule's file, which lies beside it as `.csv`; empty where it needs none
        differs: what is not as planned, a sentence each; it stands in the text too
    """

    text: str
    command: str
    rows: str = ""
    differs: tuple[str, ...] = ()


class Format(NamedTuple):
    """A way to write a plan, and what can be said in it at all."""

    write: Callable[[Model, Candidate, Request, str], Written]
    schedules: tuple[str, ...]
    optimizers: tuple[str, ...] = ("sgd", "rmsprop", "adam")
    remats: tuple[str, ...] = REMATS
    is_uniform: bool = False  # whether all stages recompute the same
    precisions: tuple[str, ...] = ("float32", "bfloat16", "bfloat16-pure")


def written(form: str, model: Model, candidate: Candidate, request: Request, name: str = NAME) -> Written:
    """A plan in a format of FORMATS, for a file of that name.

    Raises ValueError, with what to ask instead, where the format can't say it.
    """
    check_asked(form, (candidate.schedule,), request.optimizer, name, request.precision)
    candidate, request = as_run(form, model, candidate, request)
    return FORMATS[form].write(model, candidate, request, name)


def as_run(form: str, model: Model, candidate: Candidate, request: Request) -> tuple[Candidate, Request]:
    """Returns the candidate and request that run instead of a plan whose recomputation or casts the format
    can't express.

    Raises ValueError, with what to ask instead, for what it can't run at all.
    """
    known = FORMATS[form]
    if form == "script":
        if request.compiled and (candidate.fsdp > 1 or candidate.tp > 1):
            raise ValueError(
                "--format script: this engine keeps parameters of compiled layers whole; give --format "
                "torch, or leave --compiled out"
            )
        if candidate.fsdp > 1 and model.ties:
            raise ValueError(
                f"--format script: this engine shards no weight that layers of {model.name} share; give "
                "--format torch, or --no-fsdp"
            )
        request = replace(request, autocast=True)
    if form != "megatron" and candidate.tp > 1 and model.by_megatron:
        raise ValueError(f"--format {form} divides no layer of {model.name}; give --format megatron")
    remat = [each if each in known.remats else "blocks" for each in candidate.remat]
    if known.is_uniform:
        remat = [max(remat, key=REMATS.index)] * len(remat)
    return replace(candidate, remat=tuple(remat)), request


def check_asked(
    form: str, schedules: Sequence[str], optimizer: str, name: str = NAME, precision: str = "float32"
) -> None:
    """Raises ValueError for what a format does not have whatever the plan will be."""
    known, hidden = FORMATS[form], PurePath(name).stem
    if hidden in ("torch", "torchtitan", "gpipe_bench"):
        raise ValueError(f"--script {name} would hide the package {hidden}; give another name")
    if optimizer not in known.optimizers:
        raise ValueError(
            f"--format {form} knows the optimizers {', '.join(known.optimizers)}, not {optimizer}; "
            f"give --optimizer {known.optimizers[-1]}"
        )
    if precision not in known.precisions:
        raise ValueError(
            f"--format {form} knows the precisions {', '.join(known.precisions)}, not {precision}; leave "
            "--script and --format out, and scale the loss in a script of your own"
        )
    for each in schedules:
        if each in NAMED and each not in known.schedules:
            raise ValueError(
                f"--format {form} has no schedule {each}: leave --schedule out, or choose of "
                f"{', '.join(known.schedules)}"
            )


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


def _recomputed(model: Model, candidate: Candidate) -> list[str]:
    """Which layers run under a checkpoint, and what it keeps."""
    found = []
    for remat in WRAPPED:
        stages = [stage for stage, each in zip(candidate.cut, candidate.remat, strict=True) if each == remat]
        layers = sorted(model.blocks & {layer for stage in stages for layer in stage})
        if layers:
            found.append(f"{remat.upper()} = {layers}  # layers that are recomputed in the backward")
    if "selective" in candidate.remat:
        from gpipe_bench.planner.model import PRODUCTS

        names = tuple(dict.fromkeys(each.__name__.partition(".")[0] for each in PRODUCTS))
        found += [
            f"KEPT = {names}",
            "",
            "",
            "def products_kept():",
            "    kept = [getattr(torch.ops.aten, name).default for name in KEPT]",
            "    return create_selective_checkpoint_contexts(kept)",
            "",
        ]
    return found


def script(model: Model, candidate: Candidate, request: Request) -> str:
    """Python that takes steps as planned, on our engine."""
    mesh = _mesh(candidate)
    names = by_schedule(candidate.remat)
    remat = names if len(set(names)) > 1 else names[0]
    source = model.source
    body = [
        "torch.manual_seed(0)  # the same weights on every rank",
        *_model(source),
        f"mesh = init_device_mesh(device.type, {tuple(mesh.values())}, mesh_dim_names={tuple(mesh)})",
        *_prepared(model, candidate, request),
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
        "# An example batch; your DataLoader gives each replica (pipeline.grid.replica) its share",
        'for step in range(int(os.environ.get("STEPS", "3"))):',
        *_step(request.precision),
        "    optimizer.step()",
        "    optimizer.zero_grad()",
        "    if dist.get_rank() == 0:",
        '        print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)',
        "pipeline.close()",
    ]
    layers_of = "layers_of, " * source.is_foreign
    lines = [
        f'"""Trains {model.name} as planned: {_words(candidate)}."""',
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
        *_imports(model, candidate),
        "",
        _share(candidate, request),
        *_recomputed(model, candidate),
        "",
        "with start_process() as device:",
        *(f"    {line}" if line else "" for line in body),
        "",
    ]
    return "\n".join(lines)


_STAGE = '''
class Stage(nn.Module):
    """The layers of a stage; what they hand on as a tuple arrives as several arguments."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, *values):
        return self.layers(values[0] if len(values) == 1 else values)


def loss_of(output, target):
    return loss_fn(output, target) / NUM_MICROBATCHES

'''


def _torch(model: Model, candidate: Candidate, request: Request, name: str) -> Written:
    """A script on torch.distributed.pipelining."""
    schedule, from_file = _rows(candidate)
    workers = [schedule.worker(stage) for stage in range(candidate.num_stages)]
    _check_torch(model, candidate, workers)
    differs = _by_torch(candidate, from_file)
    if candidate.dp > 1 and candidate.fsdp == 1:
        differs.append("gradients of replicas are summed after the last backward, not during it")
    if any(type(each).__name__.startswith("BatchNorm") for layer in model.layers for each in layer.modules()):
        differs.append("averages of batch norm move with each micro-batch, and when torch looks for shapes")
    source, mesh = model.source, _mesh(candidate)
    sharded = tuple(each for each in ("dp", "fsdp") if each in mesh) if candidate.fsdp > 1 else ()
    half = request.gathers_half(candidate.fsdp)
    cast = f", mp_policy=MixedPrecisionPolicy(param_dtype=torch.{request.precision})" * half
    device = [
        "cuda = torch.cuda.is_available()",
        'device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")',
        "if cuda:",
        "    torch.cuda.set_device(device)",
        'dist.init_process_group("nccl" if cuda else "gloo")',
    ]
    build = [
        "torch.manual_seed(0)  # the same weights on every rank",
        *_model(source),
        f"mesh = init_device_mesh(device.type, {tuple(mesh.values())}, mesh_dim_names={tuple(mesh)})",
        *_prepared(model, candidate, request),
        "stages, begin = [], 0",
        "for number, (count, worker) in enumerate(zip(CUT, WORKERS)):",
        "    mine, begin = [*layers][begin : begin + count], begin + count",
        '    if worker != mesh.get_local_rank("pp"):',
        "        continue",
        *(["    for layer in mine:", "        layer.compile()"] if request.compiled else []),
        "    stage = Stage(mine).to(device)",
    ]
    if sharded:
        tied = sorted({layer for tie in model.ties for layer in tie.layers})
        alone = f"*(m for n, m in enumerate(mine) if n not in {tied})" if tied else "*mine"
        build += [
            *(["    # layers that share a weight are sharded together, with the stage"] if tied else []),
            f"    for module in ({alone}, stage):",
            f"        fully_shard(module, mesh=mesh[{sharded if len(sharded) > 1 else sharded[0]!r}], "
            f"reshard_after_forward={candidate.fsdp_level == 3}{cast})",
        ]
    optimizer = _OPTIMIZERS[request.optimizer].replace("pipeline.parameters()", "parameters")
    made = "Schedule1F1B(stages[0]" if not from_file else "_PipelineScheduleRuntime(stages"
    last = workers[-1] * candidate.accelerators // candidate.num_workers
    step = (
        "schedule.step(*(given if is_first else ()), target=target if is_last else None, losses=losses, "
        "return_outputs=False)"
    )
    run = [
        '    group = mesh.get_group("pp")',
        "    stages.append(PipelineStage(stage, number, len(CUT), device, group=group))",
        "parameters = list({id(p): p for stage in stages for p in stage.submod.parameters()}.values())",
        f"schedule = {made}, NUM_MICROBATCHES, loss_fn=loss_of, scale_grads=False)",
        *(['schedule._load_csv(str(Path(__file__).with_suffix(".csv")))'] if from_file else []),
        "# foreach=True is faster, and takes memory that the plan has not counted",
        f"optimizer = torch.optim.{optimizer}",
        "is_first, is_last = (worker == mesh.get_local_rank('pp') for worker in (WORKERS[0], WORKERS[-1]))",
        "given = inputs if isinstance(inputs, tuple) else (inputs,)",
        'for step in range(int(os.environ.get("STEPS", "3"))):',
        "    losses = []",
        *_step("float32" if half else request.precision, step),
    ]
    if candidate.dp > 1 and not sharded:
        run += [
            "    for gradient in (p.grad for p in parameters if p.grad is not None):",
            f'        dist.all_reduce(gradient.div_({candidate.dp}), group=mesh.get_group("dp"))',
        ]
    run += [
        "    optimizer.step()",
        "    optimizer.zero_grad()",
        f"    if dist.get_rank() == {last}:  # has the last stage",
        '        print(f"step {step + 1}: loss {sum(losses).item():.6f}", flush=True)',
        "dist.destroy_process_group()",
    ]
    imports = [
        "import os",
        *(["from pathlib import Path"] if from_file else []),
        "",
        "import torch",
        "from torch import distributed as dist",
        "from torch import nn",
        "from torch.distributed.device_mesh import init_device_mesh",
        *(
            [f"from torch.distributed.fsdp import {'MixedPrecisionPolicy, ' * half}fully_shard"]
            if sharded
            else []
        ),
        "from torch.distributed.pipelining import PipelineStage",
        f"from torch.distributed.pipelining.schedules import {made.partition('(')[0]}",
        "from torch.utils._pytree import tree_map",
        "",
        *(["from gpipe_bench.pipeline import layers_of"] if source.is_foreign else []),
        source.imports,
        *_imports(model, candidate),
    ]
    facts = [
        _share(candidate, request),
        f"NUM_MICROBATCHES = {candidate.num_microbatches}",
        f"CUT = {[len(stage) for stage in candidate.cut]}  # layers of each stage",
        f"WORKERS = {workers}  # that hold them",
        *_recomputed(model, candidate),
        "",
    ]
    title = f'"""Trains {model.name} on torch.distributed.pipelining: {_words(candidate)}.{{}}"""'
    lines = [_headed(title, differs), "", *imports, "", *facts, _STAGE, *device, *build, *run, ""]
    return Written(
        "\n".join(lines), command(request, name, candidate.accelerators), to_csv(schedule) * from_file,
        tuple(differs),
    )  # fmt: skip


def _check_torch(model: Model, candidate: Candidate, workers: Sequence[int]) -> None:
    """Raises ValueError for what torch's engine would train wrongly, or not at all."""
    ask = "give --format script"
    stage_of = [number for number, span in enumerate(candidate.cut) for _ in span]
    for tie in model.ties:
        if candidate.fsdp > 1 and len({stage_of[layer] for layer in tie.layers}) > 1:
            raise ValueError(
                f"--format torch: layers {', '.join(map(str, tie.layers))} of {model.name} share a weight, "
                "which is sharded in one stage alone; give --pp 1, or --no-fsdp"
            )
        if tie.trained and len({workers[stage_of[layer]] for layer in tie.layers}) > 1:
            raise ValueError(
                f"--format torch: layers {', '.join(map(str, tie.layers))} of {model.name} share a weight, "
                "which torch's engine would train apart on each worker; give --pp 1, --schedule zb-v (whose "
                f"first worker has both ends of the model), or {ask[5:]}"
            )
    if any(getattr(layer, each, ()) for layer in model.layers for each in ("stashes", "pops")):
        raise ValueError(f"--format torch: {model.name} has portals, and torch's engine none; {ask}")
    if len(model.target.tensors) != 1:
        raise ValueError(
            f"--format torch: {model.name} has {len(model.target.tensors)} targets, and torch's engine takes "
            f"one tensor; {ask}"
        )


def _torchtitan(model: Model, candidate: Candidate, request: Request, name: str) -> Written:
    """A module for torchtitan's --module, with a function for its --config."""
    blocks = _blocks("torchtitan", model)
    if model.ties and candidate.num_workers > 1:
        raise ValueError(
            f"--format torchtitan: {model.name} shares weights, and torchtitan shares none over stages; give "
            "--pp 1, or --format script"
        )
    names = ["tok_embeddings", *(f"layers.{number}" for number in range(len(blocks)))]
    names += ["norm", "lm_head"] if blocks.stop == len(model.layers) - 2 else ["norm, lm_head"]
    parts = [", ".join(names[layer] for layer in stage).split(", ") for stage in candidate.cut]
    schedule, from_file = _rows(candidate)
    size, pipelined = candidate.microbatch_size(request.batch_size), candidate.num_workers > 1
    in_a_v = candidate.stages_per_worker > 1 and schedule.worker(candidate.num_workers) != 0
    placed = "ZBVZeroBubble" if in_a_v else "Interleaved1F1B" if candidate.stages_per_worker > 1 else "1F1B"
    again = {"never": "", "selective": "SelectiveAC", "blocks": "FullAC"}[candidate.remat[0]]
    differs = _by_torch(candidate, from_file)
    if candidate.remat[0] == "selective":
        differs.append("every second product of a block is computed again, too")
    if request.gathers_half(candidate.fsdp):
        differs.append("gradients are summed in float32")
    known = {"llama-8b": "llama3_8b", "llama-70b": "llama3_70b", "llama-405b": "llama3_405b"}.get(model.name)
    tokens = model.inputs.tensors[0].shape[1]
    settings: dict[str, object] = {
        "pipeline_parallel_degree": candidate.num_workers,
        "data_parallel_replicate_degree": candidate.dp,
        "data_parallel_shard_degree": candidate.fsdp,
        "tensor_parallel_degree": candidate.tp,
    }
    if candidate.fsdp > 1:
        settings["fsdp_reshard_after_forward"] = "always" if candidate.fsdp_level == 3 else "never"
    if pipelined:
        settings["pipeline_parallel_schedule"] = placed
    count = candidate.num_microbatches if pipelined else 1
    body = [
        "config = yours()",
        "found = len(config.model_spec.model.layers)",
        f'assert found == {len(blocks)}, f"this plan is for {len(blocks)} layers, not {{found}}"',
        "parallelism, training = config.parallelism, config.training",
        *(f"parallelism.{key} = {value!r}" for key, value in settings.items()),
    ]
    if pipelined:
        body += ["parallelism.module_fqns_per_model_part = ["]
        body += [*(f"    {part}," for part in parts), "]"]
        body += ["training.disable_cuda_graphs = True  # which pipelines exclude there"]
    if from_file:
        body += ['parallelism.pipeline_parallel_schedule_csv = str(Path(__file__).with_suffix(".csv"))']
    body += [
        f"parallelism.pipeline_parallel_microbatch_size = {size}",
        f"training.local_batch_size = {size * count}",
        f"training.global_batch_size = {request.batch_size}",
        f"training.seq_len = {tokens}",
        f'training.mixed_precision_param = "{request.precision.removesuffix("-pure")}"',
        f"config.activation_checkpoint = {f'{again}.Config()' if again else None}",
        f"config.compile.enable = {request.compiled}",
        "return config",
    ]
    lines = [
        _headed(f'"""Settings of torchtitan for {model.name}: {_words(candidate)}.{{}}"""', differs),
        "",
        *(["from pathlib import Path", ""] if from_file else []),
        *([f"from torchtitan.distributed.activation_checkpoint import {again}"] if again else []),
        f"from torchtitan.models.llama3.config_registry import {known or 'llama3_debugmodel'} as yours"
        + ("" if known else "  # <- in its place the settings of your model and data"),
        "",
        "",
        "def planned():",
        *(f"    {line}" for line in body),
        "",
    ]
    path = PurePath(name)
    started = f"-m torchtitan.train --module {path.stem} --config planned"
    return Written(
        "\n".join(lines), f"PYTHONPATH={path.parent} {command(request, started, candidate.accelerators)}",
        to_csv(schedule) * from_file, tuple(differs),
    )  # fmt: skip


def _megatron(model: Model, candidate: Candidate, request: Request, name: str) -> Written:
    """Flags of Megatron-LM, as an array of bash."""
    blocks, last = _blocks("megatron", model), len(model.layers) - 1
    count, workers = candidate.num_microbatches, candidate.num_workers
    if candidate.stages_per_worker > 1 and count % workers:
        raise ValueError(
            f"--format megatron: interleaved takes groups of {workers} micro-batches there, and {count} are "
            f"no multiple; give --num-microbatches {workers * (count // workers + 1)}, or --schedule 1f1b"
        )
    for tie in model.ties:
        if tie.layers != (0, last):
            raise ValueError(
                f"--format megatron: layers {', '.join(map(str, tie.layers))} of {model.name} share a "
                "weight, and Megatron shares one of embedding and output alone; give --format script"
            )
    parts = [
        "E" * (0 in stage) + _times("t", sum(layer in blocks for layer in stage)) + "L" * (last in stage)
        for stage in candidate.cut
    ]
    if not all(parts):
        raise ValueError(
            f"--format megatron: stage {parts.index('')} holds the last norm alone, which has no letter in a "
            "layout; give another --pp, or --format script"
        )
    differs = list[str]()
    flags: dict[str, object] = {
        "num-layers": len(blocks),
        "tensor-model-parallel-size": candidate.tp,
        "pipeline-model-parallel-size": workers,
        "micro-batch-size": candidate.microbatch_size(request.batch_size),
        "global-batch-size": request.batch_size,
        "optimizer": request.optimizer,
    }
    if workers > 1:
        flags["pipeline-model-parallel-layout"] = f"'{'|'.join(parts)}'"
    if request.precision == "bfloat16":
        flags["bf16"] = ""
    if not model.ties:
        flags["untie-embeddings-and-output-weights"] = ""
    if candidate.tp > 1 and model.sequence_parallel(candidate.tp):
        flags["sequence-parallel"] = ""
    if candidate.fsdp > 1:
        strategy = "optim_grads_params" if candidate.fsdp_level == 3 else "optim_grads"
        flags |= {
            "use-megatron-fsdp": "", "data-parallel-sharding-strategy": strategy,
            "use-distributed-optimizer": "", "ckpt-format": "fsdp_dtensor",
        }  # fmt: skip
        if candidate.dp > 1:
            flags["num-distributed-optimizer-instances"] = candidate.dp
    if any(each != "never" for each in candidate.remat):
        flags |= {
            "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1,
        }  # fmt: skip
    if request.compiled:
        differs.append("layers are not compiled: Megatron has kernels of its own")
    if request.precision == "bfloat16":
        differs.append("weights are kept in bfloat16 beside float32, not in float32 alone")
    if workers > 1:
        differs.append("the last norm is where the last block is, not before the output")
    about = [f"Flags of Megatron-LM for {model.name}: {_words(candidate)}."]
    about += ["Not as planned:", *(f"- {each}" for each in differs)] if differs else []
    lines = [
        *(f"# {line}" for each in about for line in textwrap.wrap(each, 110)),
        "PLAN=(",
        *(f"    --{flag} {value}".rstrip() for flag, value in flags.items()),
        ")",
        "",
    ]
    started = 'pretrain_gpt.py "${PLAN[@]}"  # and the flags of your model and data'
    return Written(
        "\n".join(lines),
        f"source {name}; {command(request, started, candidate.accelerators)}",
        "",
        tuple(differs),
    )


def _blocks(form: str, model: Model) -> range:
    """The layers between embedding and output, which are alike. ValueError unless the model is a decoder:
    tokens go in, and one layer stands before them and one or two behind.
    """
    kinds = [(type(layer), [p.shape for p in layer.parameters()]) for layer in model.layers]
    inputs = model.inputs.tensors
    reads = len(inputs) == 1 and len(inputs[0].shape) == 2 and not inputs[0].dtype.is_floating_point
    for stop in (len(kinds) - 1, len(kinds) - 2):
        if reads and stop > 1 and all(kind == kinds[1] for kind in kinds[1:stop]):
            return range(1, stop)
    raise ValueError(
        f"--format {form} is for decoders: tokens, one layer of embeddings, blocks that are alike, one or "
        f"two layers of output; {model.name} is none: give --format torch or script"
    )


def _times(letter: str, count: int) -> str:
    return f"{letter}*{count}" if count > 1 else letter * count


def _by_torch(candidate: Candidate, from_file: bool) -> list[str]:
    """Returns what torch's engine does differently from the plan, a sentence each."""
    differs = ["torch keeps a buffer for each message of a step"] * (candidate.num_workers > 1)
    if candidate.fsdp_level == 3 and from_file:
        differs.append("the parameters of a stage stay gathered from its first action to its last")
    return differs


def _rows(candidate: Candidate) -> tuple[Schedule, bool]:
    """The schedule without recomputations, for which others have no actions; and whether torch reads it from
    a file: its 1F1B alone, for as many micro-batches as workers or more, has the very order of ours.
    """
    named_there = candidate.schedule == "1f1b" and candidate.num_microbatches >= candidate.num_workers
    return candidate.rows(recomputes=False), not named_there and candidate.num_workers > 1


def _headed(title: str, differs: Sequence[str]) -> str:
    """Returns a docstring that tells what differs from the plan."""
    if not differs:
        return title.format("")
    return title.format("\n\nNot as planned:\n\n" + "\n".join(f"- {each}" for each in differs) + "\n")


def _mesh(candidate: Candidate) -> dict[str, int]:
    """Sizes of the mesh's dimensions that are larger than one, and of the pipeline's."""
    sizes = {name: getattr(candidate.grid, name) for name in DIMENSIONS}
    return {name: size for name, size in sizes.items() if size > 1 or name == "pp"}


def _words(candidate: Candidate) -> str:
    facts = candidate.describe()
    words = json.dumps({key: facts[key] for key in ("schedule", "num_microbatches", "cut")})
    return words[1:-1].replace('"', "")


def _share(candidate: Candidate, request: Request) -> str:
    return (
        f"SHARE = {request.batch_size // candidate.replicas}  # examples of a mini-batch that each of "
        f"{candidate.replicas} replicas takes"
    )


def _imports(model: Model, candidate: Candidate) -> list[str]:
    """Returns the imports for tensor parallelism of the zoo's layers, and for torch's checkpoints."""
    found = []
    if candidate.tp > 1 and model.source.options is not None:
        found.append("from gpipe_bench.models.parallel import tensor_parallel")
    wrapped = set(candidate.remat) & set(WRAPPED)
    if wrapped:
        package = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
        found.append(f"from {package} import checkpoint_wrapper")
    if "selective" in wrapped:
        found.append("from torch.utils.checkpoint import create_selective_checkpoint_contexts")
    return found


def _prepared(model: Model, candidate: Candidate, request: Request) -> list[str]:
    """Returns the lines that change layers before they become stages."""
    found = list[str]()
    if request.precision == "bfloat16-pure":
        found += ["for layer in layers:", "    layer.to(torch.bfloat16)"]
    if candidate.tp > 1:
        sequence = ", sequence=True" * model.sequence_parallel(candidate.tp)
        if model.source.options is not None:
            found.append(f'tensor_parallel(layers.to(device), mesh["tp"]{sequence})')
        else:
            found.append("layers = torch.nn.Sequential(*layers).to(device)")
            found.append('divide(layers, mesh["tp"])')
    if set(candidate.remat) & set(WRAPPED):
        found.append("layers = [*layers]")
    for remat, how in (("selective", ", context_fn=products_kept"), ("blocks", "")):
        if remat in candidate.remat:
            found += [f"for n in {remat.upper()}:", f"    layers[n] = checkpoint_wrapper(layers[n]{how})"]
    return found


def _model(source: Source) -> list[str]:
    """Returns the lines that make the layers, a batch and the loss."""
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


def _step(precision: str, step: str = "loss = pipeline.step(inputs, target, loss_fn)") -> list[str]:
    if precision in ("float32", "bfloat16-pure"):
        return [f"    {step}"]
    autocast = f"torch.autocast(device.type, dtype=torch.{precision}, cache_enabled=False)"
    return [f"    with {autocast}:", f"        {step}"]


_EVERY = tuple(NAMED)
FORMATS: dict[str, Format] = {
    "script": Format(
        lambda model, candidate, request, name: Written(
            script(model, candidate, request), command(request, name, candidate.accelerators)
        ),
        _EVERY,
    ),
    "torch": Format(_torch, _EVERY, remats=("never", *WRAPPED)),
    "torchtitan": Format(
        _torchtitan,
        tuple(name for name in NAMED if name != "naive"),
        ("adam",),
        ("never", *WRAPPED),
        is_uniform=True,
        precisions=("float32", "bfloat16"),
    ),
    "megatron": Format(
        _megatron,
        ("1f1b", "interleaved"),
        ("sgd", "adam"),
        ("never", "blocks"),
        is_uniform=True,
        precisions=("float32", "bfloat16"),
    ),
}
"""Formats by the names that `plan --format` takes."""
