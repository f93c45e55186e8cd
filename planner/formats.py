"""Writes a plan as a script on this engine or on torch's, or as settings for torchtitan or Megatron-LM.

The scripts are whole: they build the model, cut it as planned, and take a few steps on zeros of the right
shape, where one's own batches go. The settings have the degrees, the cut and the schedule; model and data
stay the user's own.

What a format can't say is of three kinds. What each stage recomputes, and how parameters are cast, is said
otherwise and predicted again (`as_run`). Where the other engine would train the same, but keep or take a
little more than was planned, that stands at the head of what is written (`Written.differs`). Where it would
train something else, or not run at all, there is a ValueError with what to ask instead.

Read in torch 2.13, torchtitan 0.3.0, Megatron-core 0.16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.pipeline.plan.named import NAMED
from gpipe_bench.pipeline.plan.schedule import Schedule, to_csv

from .candidate import REMATS, WRAPPED, Candidate, by_schedule
from .request import DIMENSIONS, Request

if TYPE_CHECKING:
    from gpipe_bench.pipeline.memory.workers import SharedWeight

    from .model import Model

TEMPLATES = Path(__file__).parent / "templates"
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
    """A way to write a plan, and what can be said in it at all.

    `facts` gives what the format's template names beside the plan, and how the plan differs there; `start` is
    what `torchrun` gets, after what stands `before` it.
    """

    facts: Callable[[Model, Candidate, Request], tuple[dict[str, Any], list[str]]]
    schedules: tuple[str, ...]
    before: str = ""
    start: str = "{name}"
    optimizers: tuple[str, ...] = ("sgd", "rmsprop", "adam")
    remats: tuple[str, ...] = REMATS
    is_uniform: bool = False  # whether all stages recompute the same
    precisions: tuple[str, ...] = ("float32", "bfloat16", "bfloat16-pure")


def written(form: str, model: Model, candidate: Candidate, request: Request, name: str = NAME) -> Written:
    """A plan in a format, for a file of that name; ValueError, with what to ask instead, if it can't."""
    check_asked(form, (candidate.schedule,), request.optimizer, name, request.precision)
    candidate, request = as_run(form, model, candidate, request)
    more, differs = FORMATS[form].facts(model, candidate, request)
    text = _render(form, model, candidate, request, more | {"differs": differs})
    path, known = PurePath(name), FORMATS[form]
    before, start = (
        each.replace("{name}", name).replace("{folder}", str(path.parent)).replace("{module}", path.stem)
        for each in (known.before, known.start)
    )
    rows = to_csv(candidate.rows(recomputes=False)) * more.get("from_file", False)
    line = before + command(request, start, candidate.grid.accelerators)
    return Written(text, line, rows, tuple(differs))


def as_run(form: str, model: Model, candidate: Candidate, request: Request) -> tuple[Candidate, Request]:
    """The candidate and request that run instead of a plan whose recomputation or casts the format can't
    express. ValueError, with what to ask instead, for what it can't run at all.
    """
    known = FORMATS[form]
    if form == "script":
        if request.compiled and (candidate.grid.fsdp > 1 or candidate.grid.tp > 1):
            raise ValueError(
                "--format script keeps parameters of compiled layers whole; give --format torch, or leave "
                "--compiled out"
            )
        if candidate.grid.fsdp > 1 and model.ties:
            raise ValueError(
                f"--format script: this engine shards no weight that layers of {model.name} share; give "
                "--format torch, or --no-fsdp"
            )
        request = replace(request, autocast=True)
    if form != "megatron" and candidate.grid.tp > 1 and model.by_megatron:
        raise ValueError(f"--format {form} divides no layer of {model.name}; give --format megatron")
    remat = [each if each in known.remats else "blocks" for each in candidate.remat]
    if known.is_uniform:
        remat = [max(remat, key=REMATS.index)] * len(remat)
    return replace(candidate, remat=tuple(remat)), request


def check_asked(
    form: str, schedules: Sequence[str], optimizer: str, name: str = NAME, precision: str = "float32"
) -> None:
    """Raises ValueError for what a format can't express, whatever the plan."""
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
            "--script and --format out, and write a script of your own"
        )
    for each in schedules:
        if each in NAMED and each not in known.schedules:
            others = ", ".join(known.schedules)
            raise ValueError(
                f"--format {form} has no schedule {each}: leave --schedule out, or choose of {others}"
            )


def command(request: Request, name: str = NAME, accelerators: int | None = None) -> str:
    """The command line that starts the script on each host that the plan uses."""
    number = accelerators or request.accelerators
    if number <= request.per_host:
        return f"torchrun --nproc-per-node {number} {name}"
    return (
        f"torchrun --nnodes {number // request.per_host} --nproc-per-node {request.per_host} "
        f"--rdzv-backend c10d --rdzv-endpoint HOST:29400 {name}"
    )


def _render(
    form: str, model: Model, candidate: Candidate, request: Request, more: Mapping[str, Any]
) -> str:  # fmt: skip
    """The format's template, filled in with the plan and further values."""
    import jinja2

    from .model import PRODUCTS

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(repr=repr, tuple=tuple)
    facts, names = candidate.describe(), by_schedule(candidate.remat)
    words = json.dumps({key: facts[key] for key in ("schedule", "num_microbatches", "cut")})
    remats = list(zip(candidate.cut, candidate.remat, strict=True))
    sizes = {name: getattr(candidate.grid, name) for name in DIMENSIONS}
    return environment.get_template(f"{form}.j2").render(
        model=model,
        source=model.source,
        remat=names if len(set(names)) > 1 else names[0],
        candidate=candidate,
        request=request,
        words=words[1:-1].replace('"', ""),
        cut=facts["cut"],
        share=request.batch_size // candidate.grid.replicas,
        grid=candidate.grid,
        mesh={name: size for name, size in sizes.items() if size > 1 or name == "pp"},
        sequence=candidate.grid.tp > 1 and model.sequence_parallel(candidate.grid.tp),
        # the layers of each kind that run under a checkpoint, and what it keeps
        wrapped={
            kind: sorted(model.blocks & {layer for span, each in remats if each == kind for layer in span})
            for kind in WRAPPED
            if kind in candidate.remat
        },
        products=tuple(dict.fromkeys(each.__name__.partition(".")[0] for each in PRODUCTS)),
        **more,
    )


def _torch(model: Model, candidate: Candidate, request: Request) -> tuple[dict[str, Any], list[str]]:
    """A script on torch.distributed.pipelining."""
    schedule, from_file, differs = _by_torch(candidate)
    workers = [schedule.worker(stage) for stage in range(candidate.num_stages)]
    _check_torch(model, candidate, workers)
    if candidate.grid.dp > 1 and candidate.grid.fsdp == 1:
        differs.append("gradients of replicas are summed after the last backward, not during it")
    if any(type(each).__name__.startswith("BatchNorm") for layer in model.layers for each in layer.modules()):
        differs.append("averages of batch norm move with each micro-batch, and when torch looks for shapes")
    grid = candidate.grid
    return {
        "from_file": from_file,
        "workers": workers,
        "sharded": ("dp", "fsdp")[grid.dp == 1 :] if grid.fsdp > 1 else (),
        "half": request.gathers_half(grid.fsdp),
        "tied": sorted({layer for tie in model.ties for layer in tie.layers}),
    }, differs


def _check_torch(model: Model, candidate: Candidate, workers: Sequence[int]) -> None:
    """Raises ValueError for what torch's engine would train wrongly, or not at all."""
    ask = "give --format script"
    stage_of = [number for number, span in enumerate(candidate.cut) for _ in span]
    for tie in model.ties:
        if candidate.grid.fsdp > 1 and len({stage_of[layer] for layer in tie.layers}) > 1:
            raise ValueError(
                f"{_sharing('torch', model, tie)}, which is sharded in one stage alone; give --pp 1, or "
                "--no-fsdp"
            )
        if tie.trained and len({workers[stage_of[layer]] for layer in tie.layers}) > 1:
            raise ValueError(
                f"{_sharing('torch', model, tie)}, which torch's engine would train apart on each worker; "
                f"give --pp 1, --schedule zb-v (whose first worker has both ends of the model), or {ask[5:]}"
            )
    if any(getattr(layer, each, ()) for layer in model.layers for each in ("stashes", "pops")):
        raise ValueError(f"--format torch: {model.name} has portals, and torch's engine none; {ask}")
    if len(model.target.tensors) != 1:
        raise ValueError(
            f"--format torch: {model.name} has {len(model.target.tensors)} targets, and torch's engine takes "
            f"one tensor; {ask}"
        )


def _torchtitan(model: Model, candidate: Candidate, request: Request) -> tuple[dict[str, Any], list[str]]:
    """A module for torchtitan's --module, with a function for its --config."""
    blocks = _blocks("torchtitan", model)
    if model.ties and candidate.grid.pp > 1:
        raise ValueError(
            f"--format torchtitan: {model.name} shares weights, and torchtitan shares none over stages; give "
            "--pp 1, or --format script"
        )
    names = ["tok_embeddings", *(f"layers.{number}" for number in range(len(blocks)))]
    names += ["norm", "lm_head"] if blocks.stop == len(model.layers) - 2 else ["norm, lm_head"]
    parts = [", ".join(names[layer] for layer in stage).split(", ") for stage in candidate.cut]
    schedule, from_file, differs = _by_torch(candidate)
    in_a_v = candidate.stages_per_worker > 1 and schedule.worker(candidate.grid.pp) != 0
    placed = "ZBVZeroBubble" if in_a_v else "Interleaved1F1B" if candidate.stages_per_worker > 1 else "1F1B"
    if candidate.remat[0] == "selective":
        differs.append("every second product of a block is computed again, too")
    if request.gathers_half(candidate.grid.fsdp):
        differs.append("gradients are summed in float32")
    return {
        "from_file": from_file,
        "blocks": len(blocks),
        "placed": placed,
        "parts": parts,
        "tokens": model.inputs.tensors[0].shape[1],
    }, differs


def _megatron(model: Model, candidate: Candidate, request: Request) -> tuple[dict[str, Any], list[str]]:
    """Flags of Megatron-LM, as an array of bash."""
    blocks, last = _blocks("megatron", model), len(model.layers) - 1
    count, workers = candidate.num_microbatches, candidate.grid.pp
    if candidate.stages_per_worker > 1 and count % workers:
        raise ValueError(
            f"--format megatron: interleaved takes groups of {workers} micro-batches there, and {count} are "
            f"no multiple; give --num-microbatches {workers * (count // workers + 1)}, or --schedule 1f1b"
        )
    for tie in model.ties:
        if tie.layers != (0, last):
            raise ValueError(
                f"{_sharing('megatron', model, tie)}, and Megatron shares one of embedding and output alone; "
                "give --format script"
            )
    counts = [sum(layer in blocks for layer in stage) for stage in candidate.cut]
    parts = [
        "E" * (0 in stage) + (f"t*{number}" if number > 1 else "t" * number) + "L" * (last in stage)
        for stage, number in zip(candidate.cut, counts, strict=True)
    ]
    if not all(parts):
        raise ValueError(
            f"--format megatron: stage {parts.index('')} holds the last norm alone, which has no letter in a "
            "layout; give another --pp, or --format script"
        )
    differs = {
        "layers are not compiled: Megatron has kernels of its own": request.compiled,
        "weights are kept in bfloat16 beside float32, not in float32 alone": request.precision == "bfloat16",
        "the last norm is where the last block is, not before the output": workers > 1,
    }
    grid, recomputes = candidate.grid, candidate.remat[0] != "never"
    parameters = "optim_grads_params" if grid.fsdp_level == 3 else "optim_grads"
    flags = {
        f"--num-layers {len(blocks)}": True,
        f"--tensor-model-parallel-size {grid.tp}": True,
        f"--pipeline-model-parallel-size {workers}": True,
        f"--micro-batch-size {candidate.microbatch_size}": True,
        f"--global-batch-size {request.batch_size}": True,
        f"--optimizer {request.optimizer}": True,
        f"--pipeline-model-parallel-layout '{'|'.join(parts)}'": workers > 1,
        "--bf16": request.precision == "bfloat16",
        "--untie-embeddings-and-output-weights": not model.ties,
        "--sequence-parallel": grid.tp > 1 and model.sequence_parallel(grid.tp),
        "--use-megatron-fsdp": grid.fsdp > 1,
        f"--data-parallel-sharding-strategy {parameters}": grid.fsdp > 1,
        "--use-distributed-optimizer": grid.fsdp > 1,
        "--ckpt-format fsdp_dtensor": grid.fsdp > 1,
        f"--num-distributed-optimizer-instances {grid.dp}": grid.fsdp > 1 and grid.dp > 1,
        "--recompute-granularity full": recomputes,
        "--recompute-method uniform": recomputes,
        "--recompute-num-layers 1": recomputes,
    }
    return {"flags": [flag for flag, is_set in flags.items() if is_set]}, [w for w in differs if differs[w]]


def _sharing(form: str, model: Model, tie: SharedWeight) -> str:
    return f"--format {form}: layers {', '.join(map(str, tie.layers))} of {model.name} share a weight"


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


def _by_torch(candidate: Candidate) -> tuple[Schedule, bool, list[str]]:
    """The schedule without recomputations, for which others have no actions; whether torch reads it from a
    file (its 1F1B alone, for as many micro-batches as workers or more, has our order); and what torch's
    engine does differently from the plan, a sentence each.
    """
    named_there = candidate.schedule == "1f1b" and candidate.num_microbatches >= candidate.grid.pp
    from_file = not named_there and candidate.grid.pp > 1
    differs = ["torch keeps a buffer for each message of a step"] * (candidate.grid.pp > 1)
    if candidate.grid.fsdp_level == 3 and from_file:
        differs.append("the parameters of a stage stay gathered from its first action to its last")
    return candidate.rows(recomputes=False), from_file, differs


FORMATS: dict[str, Format] = {
    "script": Format(lambda *plan: ({}, []), tuple(NAMED)),
    "torch": Format(_torch, tuple(NAMED), remats=("never", *WRAPPED)),
    "torchtitan": Format(
        _torchtitan,
        tuple(name for name in NAMED if name != "naive"),
        "PYTHONPATH={folder} ",
        "-m torchtitan.train --module {module} --config planned",
        ("adam",),
        ("never", *WRAPPED),
        is_uniform=True,
        precisions=("float32", "bfloat16"),
    ),
    "megatron": Format(
        _megatron,
        ("1f1b", "interleaved"),
        "source {name}; ",
        'pretrain_gpt.py "${PLAN[@]}"  # and the flags of your model and data',
        ("sgd", "adam"),
        ("never", "blocks"),
        is_uniform=True,
        precisions=("float32", "bfloat16"),
    ),
}
"""Formats by the names that `plan --format` takes."""
