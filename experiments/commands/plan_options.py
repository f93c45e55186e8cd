"""The command-line options of `plan`, and the `Request` made from them.

An invalid value is refused in one line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpipe_bench.experiments.commands.output import check_counts
from gpipe_bench.pipeline.plan.links import LINKS, Link
from gpipe_bench.pipeline.plan.named import NAMED
from gpipe_bench.planner.candidate import REMATS
from gpipe_bench.planner.formats import FORMATS
from gpipe_bench.planner.request import MEASURED, Request, link_named, link_within

GIB = 2**30
MOST_GIB = 1e6
PRECISIONS = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "bfloat16-pure": "bfloat16-pure", "bf16-pure": "bfloat16-pure",
}  # fmt: skip


def options(verb: argparse.ArgumentParser) -> None:
    """Adds the options of `plan` to its parser."""
    add = verb.add_argument
    add(
        "model", metavar="MODEL",
        help="a published shape (gpt2-xl, llama-8b, unet-5-64 ...), transformer-lm or amoebanet-d with Table "
        "1's options, or your own as module:function",
    )  # fmt: skip
    add(
        "--num-layers", type=int, metavar="L",
        help="number of blocks: replaces a GPT-2 or Llama shape's own; required for transformer-lm and "
        "amoebanet-d",
    )  # fmt: skip
    add("--num-filters", type=int, metavar="D", help="of amoebanet-d, with --num-layers")
    add(
        "--bytes", action="store_true",
        help="only whether it fits as one pipeline over all accelerators, and where it is cut: in seconds, "
        "with nothing timed; by default under gpipe, everything recomputed, in the fewest micro-batches",
    )  # fmt: skip
    add = verb.add_argument_group("your machines").add_argument
    add("--accelerators", type=int, required=True, metavar="N", help="of all hosts together")
    add("--memory-gib", type=float, metavar="GIB", help="of each accelerator; needed without --card")
    add(
        "--card", metavar="TFLOPS,GIB,GB/S",
        help="an accelerator that has no name here: its peak in 16 bits, memory, and the memory's rate",
    )  # fmt: skip
    add(
        "--reserve-gib", type=float, metavar="GIB",
        help="held back on each for what is no tensor: context, kernels, workspaces, buffers of collectives; "
        "default: 1.5 of an accelerator that is named, else 0",
    )  # fmt: skip
    add("--hosts", type=int, default=1, metavar="N", help="default: %(default)s")
    add(
        "--device-type", default="measured", metavar="NAME",
        help="an accelerator by its name, such as h100, whose seconds are modelled (a roofline); default: "
        "measured, the layers are timed on this machine",
    )  # fmt: skip
    add(
        "--link", metavar="LINK",
        help="inside a host: nvlink, pcie, infiniband, ethernet or a preset; default: nvlink where the "
        "accelerator has it, else pcie; loopback where the layers are timed here",
    )  # fmt: skip
    add("--between", metavar="LINK", help="between hosts, likewise; needed with --hosts")
    add(
        "--network-cards", type=int, metavar="N", dest="cards",
        help="of a host; default: one for each accelerator where NVLink connects them, else 1",
    )  # fmt: skip
    add = verb.add_argument_group("how it is trained").add_argument
    add("--seq-len", type=int, metavar="T", help="tokens of an example, in the place of the shape's own")
    add(
        "--batch-size", type=int, metavar="N",
        help="examples of a mini-batch, of all replicas; may be left out with --bytes",
    )  # fmt: skip
    add("--optimizer", choices=("sgd", "rmsprop", "adam"), default="adam", help="default: %(default)s")
    add(
        "--precision", choices=tuple(PRECISIONS), default="float32", metavar="TYPE",
        help="float32; bf16 or fp16 mixed (weights stay float32, fp16 scales its loss); bf16-pure for "
        "everything in bfloat16; default: %(default)s",
    )  # fmt: skip
    add(
        "--compiled", action="store_true",
        help="layers run under torch.compile: bytes are those of eager layers, an upper estimate",
    )  # fmt: skip
    add = verb.add_argument_group(
        "what is tried", "everything by default, but for tensor parallelism; each may be repeated"
    ).add_argument
    add(
        "--schedule", action="append", default=[], metavar="NAME",
        help=f"only this one, of {', '.join(NAMED)}",
    )  # fmt: skip
    add(
        "--num-microbatches", action="append", type=int, default=[], metavar="M",
        help="only so many micro-batches, of each replica",
    )  # fmt: skip
    add(
        "--remat", action="append", choices=REMATS, default=[], metavar="WHAT",
        help=f"only this recomputation, of {', '.join(REMATS)}",
    )  # fmt: skip
    add("--pp", action="append", type=int, default=[], metavar="K", help="only so many workers of a pipeline")
    add(
        "--tp", action="append", type=int, default=[], metavar="N",
        help="so many accelerators that compute a layer together; needs a model that says how; default: 1",
    )  # fmt: skip
    add("--no-fsdp", action="store_true", help="every replica holds all parameters")
    add = verb.add_argument_group("how layers are timed, where no accelerator is named").add_argument
    add(
        "--probe-rounds", type=int, default=4, metavar="N",
        help="rounds of steps, each of every micro-batch size in every way; default: %(default)s",
    )  # fmt: skip
    add = verb.add_argument_group("what is printed and written").add_argument
    add("--top", type=int, default=5, metavar="N", help="plans to print; default: %(default)s")
    add("--script", type=Path, metavar="FILE.py", help="write the script that trains as planned")
    add(
        "--format", choices=tuple(FORMATS),
        help="what it is: a script on this engine or on torch.distributed.pipelining, settings for "
        "torchtitan, or flags of Megatron-LM; only what it can say is tried, and predicted as it runs there; "
        "default: script, where --script is given",
    )  # fmt: skip
    add(
        "--full", action="store_true",
        help="also where each number comes from, and the script",
    )  # fmt: skip


def request_of(arguments: argparse.Namespace) -> Request:
    """The request that the options describe. Raises ValueError, naming value and remedy."""
    check_counts(
        arguments, "accelerators", "batch_size", "hosts", "top", "num_layers", "num_filters", "pp", "tp",
        "num_microbatches", "cards", "probe_rounds",
    )  # fmt: skip
    if arguments.card is not None:
        from gpipe_bench.planner.accelerators import accelerator

        accelerator(arguments.card if "," in arguments.card else f"{arguments.card},")
        arguments.device_type = arguments.card
        if arguments.memory_gib is None:
            arguments.memory_gib = float(arguments.card.split(",")[1])
    if arguments.memory_gib is None:
        raise ValueError("--memory-gib is needed: the GiB of one accelerator, such as 24")
    device, precision = arguments.device_type, PRECISIONS[arguments.precision]
    if device != MEASURED:
        from gpipe_bench.planner.accelerators import accelerator

        try:
            accelerator(device, precision)
        except ValueError as error:
            raise ValueError(f"--device-type {device}: {error}") from error
    between = _link("--between", arguments.between, device) if arguments.between else None
    if arguments.hosts > 1 and between is None:
        raise ValueError(f"--hosts {arguments.hosts} needs --between LINK, such as infiniband")
    if arguments.hosts == 1 and between is not None:
        raise ValueError(f"--between {arguments.between}: there is one host; give --hosts N, or leave it out")
    held = arguments.reserve_gib
    reserve = None if held is None else _bytes("--reserve-gib", held, 0)
    memory = _bytes("--memory-gib", arguments.memory_gib, 2**-20)
    return Request(
        accelerators=arguments.accelerators, memory_bytes=memory,
        batch_size=arguments.batch_size, link=_link("--link", arguments.link, device),
        between=between, hosts=arguments.hosts, optimizer=arguments.optimizer,
        precision=precision, device_type=device, compiled=arguments.compiled,
        reserve_bytes=reserve, cards=arguments.cards,
    )  # fmt: skip


def _link(option: str, name: str | None, device_type: str) -> Link:
    try:
        if name is not None:
            return link_named(name, device_type)
        return LINKS["loopback"] if device_type == MEASURED else link_within(device_type)
    except ValueError as error:
        raise ValueError(f"{option}{f' {name}' if name else ''}: {error}") from error


def _bytes(option: str, gib: float, least: float) -> int:
    """Raises ValueError for a size that no accelerator has."""
    if not least <= gib < MOST_GIB:
        raise ValueError(f"{option} {gib:g}: give the GiB of one accelerator, such as 24")
    return int(gib * GIB)
