"""`plan`: how should a model be trained on given machines, and how long will a step take?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.asked import (
    check_counts,
    find_own_modules,
    memory_bytes,
    model_options,
    precision,
    reserve_bytes,
    reserve_option,
    training_options,
)
from gpipe_bench.experiments.commands.output import print_line
from gpipe_bench.pipeline.plan.links import LINKS, Link
from gpipe_bench.pipeline.plan.schedules.known import NAMED
from gpipe_bench.planner.request import MEASURED, Request
from gpipe_bench.planner.topology import link_named, link_within


def options(verb: argparse.ArgumentParser) -> None:
    """Of the verb."""
    model_options(verb)
    machines = verb.add_argument_group("your machines")
    machines.add_argument(
        "--accelerators", type=int, required=True, metavar="N", help="of all hosts together"
    )
    machines.add_argument("--memory-gib", type=float, required=True, metavar="GIB", help="of each")
    reserve_option(machines)
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
    training_options(training)
    tried = verb.add_argument_group(
        "what is tried", "everything by default, but for tensor parallelism; each may be repeated"
    )
    tried.add_argument(
        "--schedule", action="append", default=[], metavar="NAME",
        help=f"only this one, of {', '.join(NAMED)}",
    )  # fmt: skip
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


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what cannot be planned."""
    request = request_of(arguments)
    from gpipe_bench.planner.space import Space

    space = Space(
        schedules=tuple(arguments.schedule) or Space.schedules,
        microbatches=tuple(arguments.num_microbatches) or None,
        pp=tuple(arguments.pp) or None,
        tp=tuple(arguments.tp) or (1,),
        sharded=not arguments.no_fsdp,
    )
    if request.device_type != MEASURED:
        from gpipe_bench.planner.accelerators import accelerator

        accelerator(request.device_type, request.precision)
    import torch

    from gpipe_bench.experiments.commands.plan_text import text
    from gpipe_bench.planner.answer import plan
    from gpipe_bench.planner.kept import user_folder
    from gpipe_bench.planner.model import model_of
    from gpipe_bench.planner.timed import Timing

    torch.set_num_threads(1)
    find_own_modules()
    model = model_of(
        arguments.model, request.batch_size, arguments.num_layers, num_filters=arguments.num_filters
    )
    timing = Timing(seconds=arguments.probe_s, folder=user_folder(), fresh=arguments.fresh, shown=True)
    found = plan(model, request, space=space, shown=arguments.top, timing=timing, progress=_progress)
    if arguments.script is not None:
        _write("--script", arguments.script, found.script())
    if arguments.frontier is not None:
        from gpipe_bench.experiments.commands.plan_figure import draw_frontier

        draw_frontier(found, arguments.frontier)
    if arguments.json:
        print_line(json.dumps(found.describe()).encode())
    else:
        print(text(found))
    return exits.DONE


def request_of(arguments: argparse.Namespace) -> Request:
    """What the options ask. Raises ValueError, naming value and remedy."""
    check_counts(
        arguments, "accelerators", "batch_size", "hosts", "top", "num_layers", "num_filters", "pp", "tp",
        "num_microbatches",
    )  # fmt: skip
    device = arguments.device_type
    between = _link("--between", arguments.between, device) if arguments.between else None
    if arguments.hosts > 1 and between is None:
        raise ValueError(f"--hosts {arguments.hosts} needs --between LINK, such as infiniband")
    if arguments.hosts == 1 and between is not None:
        raise ValueError(f"--between {arguments.between}: there is one host; give --hosts N, or leave it out")
    return Request(
        accelerators=arguments.accelerators, memory_bytes=memory_bytes(arguments),
        batch_size=arguments.batch_size, link=_link("--link", arguments.link, device),
        between=between, hosts=arguments.hosts, optimizer=arguments.optimizer,
        precision=precision(arguments), device_type=device, compiled=arguments.compiled,
        reserve_bytes=reserve_bytes(arguments),
    )  # fmt: skip


def _link(option: str, name: str | None, device_type: str) -> Link:
    try:
        if name is not None:
            return link_named(name, device_type)
        return LINKS["loopback"] if device_type == MEASURED else link_within(device_type)
    except ValueError as error:
        raise ValueError(f"{option}{f' {name}' if name else ''}: {error}") from error


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
