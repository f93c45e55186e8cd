"""`plan`: how should a model be trained on given machines, and how long will a step take?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_bench.experiments.commands.output import DONE, tell, warn, write_text
from gpipe_bench.experiments.commands.size import (
    check_counts,
    find_own_modules,
    memory_bytes,
    model_options,
    precision,
    reserve_bytes,
    reserve_option,
    training_options,
)
from gpipe_bench.harness.report.grid import Grid, fill
from gpipe_bench.pipeline.plan.files import draw
from gpipe_bench.pipeline.plan.links import LINKS, Link
from gpipe_bench.pipeline.plan.named import NAMED
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.planner.formats import FORMATS, NAME, check_asked
from gpipe_bench.planner.request import MEASURED, Request, link_named, link_within

if TYPE_CHECKING:
    from gpipe_bench.planner.answer import Plan
    from gpipe_bench.planner.candidate import Candidate, Prediction
    from gpipe_bench.planner.formats import Written

GIB = 2**30
MOST_WORKERS, MOST_MICROBATCHES = 16, 6
"""Of the schedule that is drawn: it repeats itself."""
TOO_CLOSE = 0.03
"""Steps that differ by less may come in the other order: of 63 that ran, half were off by 1.9 % or more."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of ways; told apart with any eyes (Okabe and Ito)."""


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
    output.add_argument(
        "--format", choices=tuple(FORMATS), default="script",
        help="what it is: a script on this engine or on torch.distributed.pipelining, settings for "
        "torchtitan, or flags of Megatron-LM; only schedules that it has are tried, and what it can't do as "
        "planned is said; default: %(default)s",
    )  # fmt: skip
    output.add_argument("--frontier", type=Path, metavar="FILE.png", help="draw memory against time")


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what cannot be planned."""
    request = request_of(arguments)
    name = str(arguments.script or NAME)
    check_asked(arguments.format, arguments.schedule, request.optimizer, name)
    from gpipe_bench.planner.request import Space

    possible = tuple(name for name in Space.schedules if name in FORMATS[arguments.format].schedules)
    space = Space(
        schedules=tuple(arguments.schedule) or possible,
        microbatches=tuple(arguments.num_microbatches) or None,
        pp=tuple(arguments.pp) or None,
        tp=tuple(arguments.tp) or (1,),
        sharded=not arguments.no_fsdp,
    )
    if request.device_type != MEASURED:
        from gpipe_bench.planner.accelerators import accelerator

        accelerator(request.device_type, request.precision)
    import torch

    from gpipe_bench.planner.answer import plan
    from gpipe_bench.planner.measured import Timing, user_folder
    from gpipe_bench.planner.model import model_of

    torch.set_num_threads(1)
    find_own_modules()
    model = model_of(
        arguments.model, request.batch_size, arguments.num_layers, num_filters=arguments.num_filters
    )
    timing = Timing(seconds=arguments.probe_s, folder=user_folder(), fresh=arguments.fresh, shown=True)
    found = plan(model, request, space=space, shown=arguments.top, timing=timing, progress=_progress)
    written = found.written(arguments.format, name)
    if arguments.script is not None:
        write_text("--script", arguments.script, written.text)
        if written.rows:
            write_text("--script", arguments.script.with_suffix(".csv"), written.rows)
        warn(*(f"not as planned: {each}" for each in written.differs))
    if arguments.frontier is not None:
        draw_frontier(found, arguments.frontier)
    facts: dict[str, object] = {"command": written.command}
    if arguments.format != "script":
        facts |= {
            "script": written.text, "format": arguments.format, "schedule_file": written.rows,
            "not_as_planned": written.differs,
        }  # fmt: skip
    tell(arguments, [found.describe() | facts], lambda: text(found, written, arguments.script))
    return DONE


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


def text(plan: Plan, written: Written, path: Path | None = None) -> str:
    """All of it, then how to run it: the script, unless it was written to `path`, and the line that starts
    it.
    """
    parts = [_ways(plan), _cut(plan.best), _schedule(plan.best.candidate), _frontier(plan)]
    if path is not None:
        beside = f", with {path.with_suffix('.csv').name} beside it," * bool(written.rows)
        how = f"{path}{beside} trains so; start it with\n\n{written.command}"
    else:
        beside = f"the schedule, which lies beside it as .csv:\n\n{written.rows}\n" * bool(written.rows)
        how = (
            f"the script that trains so (--script FILE.py writes it):\n\n{written.text}\n{beside}"
            f"{written.command}"
        )
    return "\n\n".join([*(part for part in parts if part), how])


def seconds(value: float) -> str:
    """Three digits, in the unit that has them."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def title_of(candidate: Candidate) -> str:
    """A candidate in a few words."""
    twice = f" x {candidate.stages_per_worker}" if candidate.stages_per_worker > 1 else ""
    return f"{candidate.grid}, {candidate.schedule}{twice}"


def remat_of(candidate: Candidate) -> str:
    """How many stages recompute how much."""
    words = dict.fromkeys(candidate.remat)
    if len(words) == 1:
        return next(iter(words))
    return ", ".join(f"{candidate.remat.count(word)} {word}" for word in words)


def _ways(plan: Plan) -> str:
    request, best = plan.request, plan.best
    lines = [
        [
            title_of(each.candidate), each.candidate.num_microbatches, remat_of(each.candidate),
            seconds(each.step_s), f"{seconds(each.low_s)} .. {seconds(each.high_s)}",
            f"{each.examples_per_s:.3g}", f"{each.peak / GIB:.2f}",
            _slower(each, best),
        ]
        for each in plan.predictions
    ]  # fmt: skip
    hosts = f" on {request.hosts} hosts" if request.hosts > 1 else ""
    held_back = ""
    if request.held_back_bytes:
        held_back = f"\n{request.held_back_bytes / GIB:g} GiB of each held back for what is no tensor"
    title = (
        f"{plan.model.name}: {plan.model.num_parameters:,} parameters on {request.accelerators} x "
        f"{request.memory_bytes / GIB:g} GiB{hosts}{held_back}\n{request.precision}, {request.optimizer}, "
        f"mini-batch {request.batch_size}" + (", layers compiled" if request.compiled else "")
    )
    notes = []
    if len(lines) > 1:
        notes += [
            "range: what is not known of the machine, for all plans alike; it says nothing about their order"
        ]
    if any(each.step_s / best.step_s - 1 < TOO_CLOSE for each in plan.predictions[1:]):
        notes += [
            f"~ less than {TOO_CLOSE:.0%} slower, as much as predictions err: these may come in any order"
        ]
    if (used := best.candidate.accelerators) < request.accelerators:
        notes += [f"the first uses {used} of {request.accelerators} accelerators"]
    notes += [f"{what}: {where}" for what, where in best.provenance.items()]
    notes += [
        f"{plan.tried} ways laid out, {plan.skipped} left out: above those here lie their bounds, or, where "
        "there are too many cuts to try, 95 % of their step with even stages"
    ]
    if any(each != "never" for each in best.candidate.remat):
        notes += ["a stage is recomputed as a whole"]
    if why := plan.model.why_whole(compiled=request.compiled):
        notes += [f"none with shards of parameters (fsdp), {why}"]
    notes = ["", *(fill(note, rest="  ") for note in notes)]
    columns = ["plan", "M", "recompute", "step", "range", "examples/s", "peak GiB", "slower"]
    return Grid(title=title, columns=columns, lines=lines, notes=notes, right=frozenset({1, 5, 6, 7})).text()


def _slower(each: Prediction, best: Prediction) -> str:
    """`+5.1%`, or `~ +1.6%` where the prediction's error is as large."""
    share = each.step_s / best.step_s - 1
    return "-" if each is best else f"{'~ ' * (share < TOO_CLOSE)}+{share:.1%}"


def _cut(best: Prediction) -> str:
    candidate = best.candidate
    workers, lines = candidate.rows(1, recomputes=False), []
    for worker in range(candidate.num_workers):
        mine = workers.stages_of(worker)
        spans = [candidate.cut[stage] for stage in mine]
        lines.append(
            [
                worker, " ".join(map(str, mine)),
                " ".join(f"{span.start}-{span.stop - 1}" for span in spans),
                " ".join(candidate.remat[stage] for stage in mine),
                f"{best.peak_bytes[worker] / GIB:.2f}", best.peak_when[worker],
            ]
        )  # fmt: skip
    parts = ", ".join(
        f"{part} {share / best.step_s:.1%}"
        for part, share in best.parts_s.items()
        if share > 5e-4 * best.step_s
    )
    return Grid(
        title=f"the first: {title_of(candidate)}",
        columns=["worker", "stages", "layers", "recompute", "peak GiB", "at"],
        lines=lines,
        notes=["", f"of the step: {parts}"] if parts else [],
        right=frozenset({4}),
    ).text()


def _schedule(candidate: Candidate) -> str:
    """Its first few micro-batches, in slots."""
    if not 1 < candidate.num_workers <= MOST_WORKERS:
        return ""
    count = min(candidate.num_microbatches, max(MOST_MICROBATCHES, candidate.num_workers))
    less = "" if count == candidate.num_microbatches else f", drawn with {count} micro-batches"
    return f"its schedule in slots{less}\n\n{draw(replay(candidate.rows(count), SLOTS))}"


def _frontier(plan: Plan) -> str:
    if len(plan.frontier) < 2:
        return ""
    lines = [
        [
            f"{point.peak / GIB:.2f}", seconds(point.step_s), title_of(point.candidate),
            point.candidate.num_microbatches, remat_of(point.candidate),
        ]
        for point in plan.frontier
    ]  # fmt: skip
    return Grid(
        title="with less memory", columns=["GiB", "step", "plan", "M", "recompute"], lines=lines,
        right=frozenset({0, 3}),
    ).text()  # fmt: skip


def draw_frontier(plan: Plan, path: Path) -> None:
    """Writes a PNG, SVG or PDF, as the name says: peaks against seconds, one mark per way that nothing beats.

    Raises:
        ValueError: a folder that is not there, or a kind of file that nobody writes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = plan.frontier
    memory = [point.peak / GIB for point in points]
    seconds = [point.step_s for point in points]
    axes.step(memory, seconds, where="post", color="0.6", linewidth=1.2, zorder=1)
    names = list(dict.fromkeys(title_of(point.candidate) for point in points))
    for name, colour in zip(names, COLOURS * (1 + len(names) // len(COLOURS)), strict=False):
        mine = [i for i, point in enumerate(points) if title_of(point.candidate) == name]
        low = [seconds[i] - points[i].low_s for i in mine]
        high = [points[i].high_s - seconds[i] for i in mine]
        axes.errorbar(
            [memory[i] for i in mine], [seconds[i] for i in mine], yerr=(low, high), fmt="o", color=colour,
            markersize=6, elinewidth=1, capsize=2, label=name, zorder=2,
        )  # fmt: skip
    cap = plan.request.usable_bytes / GIB
    axes.axvline(cap, color="0.3", linestyle="--", linewidth=1)
    axes.annotate(
        f"{cap:g} GiB", (cap, 1), xycoords=("data", "axes fraction"), xytext=(-4, -4),
        textcoords="offset points", ha="right", va="top", color="0.3",
    )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("peak of the fullest accelerator, GiB")
    axes.set_ylabel("seconds of a step, predicted")
    axes.set_title(
        f"{plan.model.name} on {plan.request.accelerators} accelerators, mini-batch "
        f"{plan.request.batch_size}\n"
        f"fastest: {title_of(plan.best.candidate)}, M = {plan.best.candidate.num_microbatches}",
        fontsize=10,
    )
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"--frontier {path}: {error}; give a name such as frontier.png") from error
