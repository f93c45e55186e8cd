"""`plan`: how should a model be trained on given machines, and how long will a step take?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import print_line
from gpipe_bench.experiments.planning.links import link_named
from gpipe_bench.experiments.planning.request import MEASURED, Request
from gpipe_bench.pipeline.plan.links import Link

GIB = 2**30
PRECISIONS = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what cannot be planned."""
    request = request_of(arguments)
    from gpipe_bench.experiments.planning.searching.space import Space

    space = Space(
        schedules=tuple(arguments.schedule) or Space.schedules,
        microbatches=tuple(arguments.num_microbatches) or None,
        pp=tuple(arguments.pp) or None,
        tp=tuple(arguments.tp) or (1,),
        sharded=not arguments.no_fsdp,
    )
    if request.device_type != MEASURED:
        from gpipe_bench.experiments.planning.accelerators import accelerator

        accelerator(request.device_type)
    import torch

    from gpipe_bench.experiments.planning.answer import plan
    from gpipe_bench.experiments.planning.models import model_of
    from gpipe_bench.experiments.planning.shown.text import text

    torch.set_num_threads(1)
    sys.path.insert(0, "")  # one's own model, from the folder in which this was started
    model = model_of(arguments.model, request.batch_size, arguments.num_layers)
    found = plan(model, request, space=space, shown=arguments.top, progress=_progress)
    if arguments.script is not None:
        _write("--script", arguments.script, found.script())
    if arguments.frontier is not None:
        from gpipe_bench.experiments.planning.shown.figure import draw_frontier

        draw_frontier(found, arguments.frontier)
    if arguments.json:
        print_line(json.dumps(found.describe()).encode())
    else:
        print(text(found))
    return exits.DONE


def request_of(arguments: argparse.Namespace) -> Request:
    """What the options ask. Raises ValueError, naming value and remedy."""
    if not 0 < arguments.memory_gib < 1e6:
        raise ValueError(
            f"--memory-gib {arguments.memory_gib:g}: give the GiB of one accelerator, such as 24"
        )
    for option in ("accelerators", "batch_size", "hosts", "top"):
        if getattr(arguments, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} {getattr(arguments, option)}: give 1 or more")
    device = arguments.device_type
    between = _link("--between", arguments.between, device) if arguments.between else None
    if arguments.hosts > 1 and between is None:
        raise ValueError(f"--hosts {arguments.hosts} needs --between LINK, such as infiniband")
    if arguments.precision not in PRECISIONS:
        raise ValueError(f"--precision {arguments.precision}: choose one of {', '.join(PRECISIONS)}")
    default = "loopback" if device == MEASURED else "nvlink"
    return Request(
        accelerators=arguments.accelerators, memory_bytes=int(arguments.memory_gib * GIB),
        batch_size=arguments.batch_size, link=_link("--link", arguments.link or default, device),
        between=between, hosts=arguments.hosts, optimizer=arguments.optimizer,
        precision=PRECISIONS[arguments.precision], device_type=device, compiled=arguments.compiled,
    )  # fmt: skip


def _link(option: str, name: str, device_type: str) -> Link:
    try:
        return link_named(name, device_type)
    except ValueError as error:
        raise ValueError(f"{option} {name}: {error}") from error


def _progress(what: str, done: int, total: int) -> None:
    """On a terminal alone, one line that is written over."""
    if not sys.stderr.isatty():
        return
    words = f"{what} {done}/{total}"
    print(f"\r{words:<30}", end="\r" if done + 1 >= total else "", file=sys.stderr, flush=True)


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; give a file in a folder that exists") from error
