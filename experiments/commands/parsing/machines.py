"""Options of the verbs that answer a question about a model or a schedule: `plan`, `size`, `schedule`.

What `plan` and `size` both take is called the same and means the same in both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpipe_bench.experiments.commands.parsing.options import add
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.plan.schedules.known import NAMED

_NAMES = ", ".join(NAMED)


def plan_options(verbs: Any) -> None:
    """Of `plan`."""
    verb = add(
        verbs, "plan", "how to train a model on your machines, and how long a step will take",
        "Example: plan gpt2-xl --accelerators 4 --memory-gib 24 --batch-size 256 --device-type rtx4090 "
        "--link pcie --precision bf16. docs/plan.md has how to give a model of your own.",
        results=False,
    )  # fmt: skip
    _model(verb)
    machines = verb.add_argument_group("your machines")
    machines.add_argument(
        "--accelerators", type=int, required=True, metavar="N", help="of all hosts together"
    )
    machines.add_argument("--memory-gib", type=float, required=True, metavar="GIB", help="of each")
    _reserve(machines)
    machines.add_argument("--hosts", type=int, default=1, metavar="N", help="default: %(default)s")
    machines.add_argument(
        "--device-type", default="measured", metavar="NAME",
        help="an accelerator by its name, such as h100, whose seconds are modelled (a roofline); default: "
        "measured, the layers are timed on this machine",
    )  # fmt: skip
    machines.add_argument(
        "--link", metavar="LINK",
        help="inside a host: nvlink, pcie, infiniband, ethernet or a preset; default: nvlink where the "
        "accelerator has it, else pcie; loopback where the layers are timed here",
    )  # fmt: skip
    machines.add_argument("--between", metavar="LINK", help="between hosts, likewise; needed with --hosts")
    training = verb.add_argument_group("how it is trained")
    training.add_argument(
        "--batch-size", type=int, required=True, metavar="N", help="examples of a mini-batch, of all replicas"
    )
    _training(training)
    tried = verb.add_argument_group(
        "what is tried", "everything by default, but for tensor parallelism; each may be repeated"
    )
    tried.add_argument(
        "--schedule", action="append", default=[], metavar="NAME", help=f"only this one, of {_NAMES}"
    )
    tried.add_argument(
        "--num-microbatches", action="append", type=int, default=[], metavar="M",
        help="only so many micro-batches, of each replica",
    )  # fmt: skip
    tried.add_argument(
        "--pp", action="append", type=int, default=[], metavar="K", help="only so many workers of a pipeline"
    )
    tried.add_argument(
        "--tp", action="append", type=int, default=[], metavar="N",
        help="so many accelerators that compute a layer together; needs a model that says how; default: 1",
    )  # fmt: skip
    tried.add_argument("--no-fsdp", action="store_true", help="every replica holds all parameters")
    clock = verb.add_argument_group("how layers are timed, where no accelerator is named")
    clock.add_argument(
        "--probe-s", type=float, default=60.0, metavar="S",
        help="seconds that may go into it, where they matter for the ranking; default: %(default)g",
    )  # fmt: skip
    clock.add_argument(
        "--fresh", action="store_true", help="time anew, though there are costs of the same model and machine"
    )
    output = verb.add_argument_group("what is printed and written")
    output.add_argument(
        "--top", type=int, default=5, metavar="N", help="plans to print; default: %(default)s"
    )
    output.add_argument(
        "--script", type=Path, metavar="FILE.py", help="write the script that trains as planned"
    )
    output.add_argument("--frontier", type=Path, metavar="FILE.png", help="draw memory against time")


def size_options(verbs: Any) -> None:
    """Of `size`."""
    verb = add(
        verbs, "size", "whether a model fits into your accelerators as one pipeline, and where to cut it",
        "Example: size gpt2-xl --accelerators 4 --memory-gib 24. `plan` also says how long a step takes, and "
        "tries replicas and shards.",
        results=False,
    )  # fmt: skip
    _model(verb, "; without it, the largest that fits is searched")
    machines = verb.add_argument_group("your machines")
    machines.add_argument(
        "--accelerators", "--num-stages", type=int, required=True, metavar="K",
        help="of the pipeline; where a schedule has two stages on each, there are twice as many stages",
    )  # fmt: skip
    machines.add_argument(
        "--memory-gib", "--cap-gib", type=float, required=True, metavar="GIB", help="of each"
    )
    _reserve(machines)
    machines.add_argument(
        "--device-type", metavar="NAME",
        help="an accelerator by its name, such as h100, whose attention keeps less; default: this CPU",
    )  # fmt: skip
    training = verb.add_argument_group("how it is trained")
    training.add_argument(
        "--batch-size", type=int, metavar="N",
        help="examples of a mini-batch; default: 32, Table 1's, or as many as your example has",
    )  # fmt: skip
    _training(training, default=None)
    training.add_argument("--num-microbatches", type=int, metavar="M", help="default: the fewest that fit")
    training.add_argument("--schedule", metavar="NAME", help=f"one of {_NAMES}; default: gpipe")
    training.add_argument(
        "--remat", metavar="WHICH",
        help=f"what is recomputed: {', '.join(REMAT_MODES)}, or one choice per stage as for the verb "
        "schedule; default: always",
    )  # fmt: skip


def schedule_options(verbs: Any) -> None:
    """Of `schedule`."""
    verb = add(
        verbs, "schedule", "draw and check a schedule: one row per worker, length, bubble, activations",
        "Example: schedule zb-v --workers 4 --microbatches 8.",
        results=False,
    )  # fmt: skip
    verb.add_argument("name", nargs="?", metavar="NAME", help=f"one of {_NAMES}; none with --from")
    verb.add_argument("--workers", type=int, metavar="K", help="processes or devices")
    verb.add_argument("--num-stages", type=int, metavar="K", help="instead: the stages of all workers")
    verb.add_argument(
        "--stages-per-worker", type=int, metavar="V", help="of interleaved and breadth-first; default: 2"
    )
    verb.add_argument(
        "--microbatches", "--num-microbatches", dest="num_microbatches", type=int, metavar="M",
        help="micro-batches of a mini-batch",
    )  # fmt: skip
    verb.add_argument(
        "--remat", metavar="WHICH",
        help=f"what is recomputed: {', '.join(REMAT_MODES)}, or one choice per stage, of these or of "
        "micro-batches: always,0-2+5,never; default: the schedule's, or as in the file",
    )  # fmt: skip
    verb.add_argument(
        "--csv", type=Path, metavar="FILE",
        help="write it, one line per worker, as torch reads it: 0F0,0F1,0B1",
    )  # fmt: skip
    verb.add_argument("--draw", type=Path, metavar="FILE.svg", help="write a picture of it")
    verb.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="read what --csv or torch writes"
    )


def _model(verb: argparse.ArgumentParser, without: str = "") -> None:
    """Which model, and how large."""
    verb.add_argument(
        "model", metavar="MODEL",
        help="a published shape (gpt2-xl, llama-8b, unet-5-64 ...), transformer-lm or amoebanet-d with Table "
        "1's options, or your own as module:function",
    )  # fmt: skip
    verb.add_argument(
        "--num-layers", type=int, metavar="L",
        help="blocks of GPT-2 or Llama, in the place of the shape's own; of transformer-lm and amoebanet-d"
        + without,
    )  # fmt: skip
    verb.add_argument("--num-filters", type=int, metavar="D", help="of amoebanet-d, with --num-layers")


def _reserve(machines: Any) -> None:
    """What of the memory is not planned with."""
    machines.add_argument(
        "--reserve-gib", type=float, metavar="GIB",
        help="of each, for what is no tensor: context, kernels, workspaces, buffers of collectives; default: "
        "1.5 of an accelerator that is named, else 0",
    )  # fmt: skip


def _training(group: Any, default: str | None = "adam") -> None:
    """What a step is made of besides the mini-batch."""
    said = default or "adam; rmsprop where the largest is searched"
    group.add_argument(
        "--optimizer", choices=("sgd", "rmsprop", "adam"), default=default, help=f"default: {said}"
    )
    group.add_argument(
        "--precision", default="float32", metavar="TYPE",
        help="of the activations (autocast): float32 or bfloat16, also fp32, bf16; default: %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--compiled", action="store_true",
        help="layers as torch.compile keeps them, each by itself; takes seconds more",
    )  # fmt: skip
