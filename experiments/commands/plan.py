"""`plan`: how should a model be trained on given machines, and how long will a step take?"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from dataclasses import replace
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
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.pipeline.plan.files import draw
from gpipe_bench.pipeline.plan.links import LINKS, Link
from gpipe_bench.pipeline.plan.named import NAMED
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.planner.candidate import REMATS
from gpipe_bench.planner.formats import FORMATS, NAME, check_asked
from gpipe_bench.planner.request import MEASURED, Request, link_named, link_within

if TYPE_CHECKING:
    from gpipe_bench.planner.answer import Plan
    from gpipe_bench.planner.candidate import Candidate, Prediction
    from gpipe_bench.planner.formats import Written

GIB = 2**30
MOST_WORKERS, MOST_MICROBATCHES = 16, 6
"""Of the schedule that is drawn: it repeats itself."""
WIDTH = 100
"""Of an answer."""
MOST_LINES = 9
"""Workers whose memory is printed."""
EVERY_S = 10.0
WORDS = {
    "never": "nothing", "selective": "all but products", "blocks": "blocks", "always": "stages",
    "except_last": "stages but for the last micro-batch",
}  # fmt: skip
"""What is recomputed, as people say it."""
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
    machines.add_argument("--memory-gib", type=float, metavar="GIB", help="of each; needed without --card")
    machines.add_argument(
        "--card", metavar="TFLOPS,GIB,GB/S",
        help="an accelerator that has no name here: its peak in 16 bits, memory, and the memory's rate",
    )  # fmt: skip
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
    machines.add_argument(
        "--cards", type=int, metavar="N",
        help="network cards of a host; default: one for each accelerator where NVLink connects them, else 1",
    )  # fmt: skip
    training = verb.add_argument_group("how it is trained")
    training.add_argument(
        "--seq-len", type=int, metavar="T", help="tokens of an example, in the place of the shape's own"
    )
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
        help="seconds after which no further round of steps is timed; default: %(default)g",
    )  # fmt: skip
    output = verb.add_argument_group("what is printed and written")
    output.add_argument(
        "--top", type=int, default=5, metavar="N", help="plans to print; default: %(default)s"
    )
    output.add_argument(
        "--script", type=Path, metavar="FILE.py", help="write the script that trains as planned"
    )
    output.add_argument(
        "--format", choices=tuple(FORMATS),
        help="what it is: a script on this engine or on torch.distributed.pipelining, settings for "
        "torchtitan, or flags of Megatron-LM; only what it can say is tried, and predicted as it runs there; "
        "default: script, where --script is given",
    )  # fmt: skip
    output.add_argument(
        "--full", action="store_true",
        help="also the schedule, what less memory costs, where each number comes from, and the script",
    )  # fmt: skip
    output.add_argument("--frontier", type=Path, metavar="FILE.png", help="draw memory against time")


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what cannot be planned."""
    request = request_of(arguments)
    name, form = str(arguments.script or NAME), arguments.format or "script"
    is_written = bool(arguments.script or arguments.format)
    if is_written:
        check_asked(form, arguments.schedule, request.optimizer, name, request.precision)
        request = replace(request, autocast=form == "script")
    from gpipe_bench.planner.request import Space

    known = FORMATS[form]
    possible = tuple(each for each in Space.schedules if not is_written or each in known.schedules)
    space = Space(
        schedules=tuple(arguments.schedule) or possible,
        microbatches=tuple(arguments.num_microbatches) or None,
        pp=tuple(arguments.pp) or None,
        tp=tuple(arguments.tp) or (1,),
        remats=known.remats if is_written else REMATS,
        sharded=not arguments.no_fsdp,
    )
    import torch

    from gpipe_bench.planner.answer import MOST_POINTS, plan
    from gpipe_bench.planner.measured import Timing
    from gpipe_bench.planner.model import model_of

    torch.set_num_threads(1)
    find_own_modules()
    model = model_of(
        arguments.model,
        request.batch_size,
        arguments.num_layers,
        num_filters=arguments.num_filters,
        seq_len=arguments.seq_len,
    )
    found = plan(
        model, request, space=space, shown=arguments.top,
        timing=Timing(seconds=arguments.probe_s, shown=True),
        points=MOST_POINTS if arguments.full or arguments.frontier else 1, progress=_Progress(),
    )  # fmt: skip
    facts: dict[str, object] = {}
    written = None
    if is_written:
        as_run, written = found.as_run(form), found.written(form, name)
        facts = {
            "command": written.command, "format": form, "script": written.text,
            "schedule_file": written.rows, "not_as_planned": written.differs, "as_run": as_run.describe(),
        }  # fmt: skip
        if as_run is not found.best:
            warn(
                f"as --format {form} runs it: {seconds(as_run.step_s)} a step, {as_run.peak / GIB:.2f} GiB, "
                f"{remat_of(as_run.candidate)} recomputed"
            )
        warn(*(f"not as planned: {each}" for each in written.differs))
    if arguments.script is not None and written is not None:
        write_text("--script", arguments.script, written.text)
        if written.rows:
            write_text("--script", arguments.script.with_suffix(".csv"), written.rows)
    if arguments.frontier is not None:
        draw_frontier(found, arguments.frontier)
    tell(
        arguments, [found.describe() | facts],
        lambda: text(found, written, arguments.script, full=arguments.full),
    )  # fmt: skip
    return DONE


def request_of(arguments: argparse.Namespace) -> Request:
    """What the options ask. Raises ValueError, naming value and remedy."""
    check_counts(
        arguments, "accelerators", "batch_size", "hosts", "top", "num_layers", "num_filters", "pp", "tp",
        "num_microbatches", "cards",
    )  # fmt: skip
    if arguments.card is not None:
        from gpipe_bench.planner.accelerators import accelerator

        accelerator(arguments.card if "," in arguments.card else f"{arguments.card},")
        arguments.device_type = arguments.card
        if arguments.memory_gib is None:
            arguments.memory_gib = float(arguments.card.split(",")[1])
    if arguments.memory_gib is None:
        raise ValueError("--memory-gib is needed: the GiB of one accelerator, such as 24")
    device = arguments.device_type
    if device != MEASURED:
        from gpipe_bench.planner.accelerators import accelerator

        try:
            accelerator(device, precision(arguments))
        except ValueError as error:
            raise ValueError(f"--device-type {device}: {error}") from error
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
        reserve_bytes=reserve_bytes(arguments), cards=arguments.cards,
    )  # fmt: skip


def _link(option: str, name: str | None, device_type: str) -> Link:
    try:
        if name is not None:
            return link_named(name, device_type)
        return LINKS["loopback"] if device_type == MEASURED else link_within(device_type)
    except ValueError as error:
        raise ValueError(f"{option}{f' {name}' if name else ''}: {error}") from error


class _Progress:
    """On a terminal one line that is written over; elsewhere a line every ten seconds."""

    def __init__(self) -> None:
        self.said_s = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        words = f"{what} {done}/{total}"
        if sys.stderr.isatty():
            print(f"\r{words:<30}", end="\r" if done + 1 >= total else "", file=sys.stderr, flush=True)
        elif time.monotonic() - self.said_s > EVERY_S:
            self.said_s = time.monotonic()
            print(words, file=sys.stderr, flush=True)


def text(plan: Plan, written: Written | None = None, path: Path | None = None, *, full: bool = False) -> str:
    """The best one in a few sentences, the next ones, its memory by stage, and how to start it; with `full`
    all that is known. No line is wider than WIDTH, but those of a script.
    """
    parts = [_best(plan), _next(plan), _cut(plan.best)]
    if full:
        parts += [_schedule(plan.best.candidate), _frontier(plan), _notes(plan)]
    command = plan.command() if written is None else written.command
    if path is not None:
        beside = f", with {path.with_suffix('.csv').name} beside it," * bool(written and written.rows)
        parts.append(f"{path}{beside} trains so; start it with\n\n{command}")
    elif written is not None:
        beside = f"the schedule, which lies beside it as .csv:\n\n{written.rows}\n" * bool(written.rows)
        parts.append(
            f"the file that trains so (--script FILE writes it):\n\n{written.text}\n{beside}{command}"
        )
    else:
        form, *others = plan.forms() or ("",)
        how = f"--script {NAME}{f' --format {form}' * (form != 'script')} writes it"
        how += f" (--format {', '.join(others)})" if others else ""
        parts.append(f"{how if form else 'no format here writes it'}; start it with\n\n{command}")
    return "\n\n".join(part for part in parts if part)


def _best(plan: Plan) -> str:
    request, best = plan.request, plan.best
    used = best.candidate.accelerators
    device = "accelerators of this machine" if request.device_type == MEASURED else request.device_type
    hosts = f"{request.hosts} hosts of {request.per_host} x {device}"
    if request.hosts > 1:
        hosts += f" with {request.cards_per_host} network card{'s' * (request.cards_per_host > 1)} each"
    parts = sorted(best.parts_s.items(), key=lambda each: -each[1])
    why = ", ".join(f"{part} {s / best.step_s:.0%}" for part, s in parts[:3] if s > 0.01 * best.step_s)
    trained = request.precision + ", compiled" * request.compiled
    lines = [
        f"{plan.model.name}, {plan.model.num_parameters:,} parameters, {trained}, {request.optimizer}, "
        f"mini-batch {request.batch_size}, on {hosts if request.hosts > 1 else hosts.partition(' of ')[2]}, "
        f"{request.memory_bytes / GIB:g} GiB each, {request.held_back_bytes / GIB:g} held back",
        f"{title_of(best.candidate)}, {best.candidate.num_microbatches} micro-batches, recomputing "
        f"{remat_of(best.candidate)}: {seconds(best.step_s)} a step ({seconds(best.low_s)} to "
        f"{seconds(best.high_s)}), {best.examples_per_s:.3g} examples/s, {best.peak / GIB:.2f} GiB.",
        f"Of the step: {why}."
        + f" It uses {used} of {request.accelerators} accelerators." * (used < request.accelerators),
    ]
    return "\n".join(fill(line, WIDTH) for line in lines)


def _next(plan: Plan) -> str:
    best = plan.best
    lines = [
        [
            title_of(each.candidate), each.candidate.num_microbatches, remat_of(each.candidate),
            seconds(each.step_s), f"{each.peak / GIB:.2f}", _slower(each, best),
        ]
        for each in plan.predictions[1:]
    ]  # fmt: skip
    if not lines:
        return ""
    close = any(each.step_s / best.step_s - 1 < TOO_CLOSE for each in plan.predictions[1:])
    notes = ["", f"~ less than {TOO_CLOSE:.0%} slower, as much as predictions err"] if close else []
    columns = ["the next", "M", "recompute", "step", "GiB", "slower"]
    return (
        Grid(title="", columns=columns, lines=lines, notes=notes, right=frozenset({1, 4, 5}))
        .text()
        .lstrip("\n")
    )


def _notes(plan: Plan) -> str:
    notes = [f"{what}: {where}" for what, where in plan.best.provenance.items()]
    notes += [f"{plan.tried} ways laid out, {plan.skipped} left out, which take longer than those"]
    return "\n".join(fill(note, WIDTH) for note in notes)


def fill(line: str, width: int) -> str:
    return textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False)


def seconds(value: float) -> str:
    """Three digits, in the unit that has them."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def title_of(candidate: Candidate) -> str:
    """A candidate in a few words."""
    if candidate.num_workers == 1:
        return str(candidate.grid)
    twice = f" x {candidate.stages_per_worker}" if candidate.stages_per_worker > 1 else ""
    return f"{candidate.grid}, {candidate.schedule}{twice}"


def remat_of(candidate: Candidate) -> str:
    """How many stages recompute how much."""
    words = dict.fromkeys(candidate.remat)
    if len(words) == 1:
        return WORDS[next(iter(words))]
    return ", ".join(f"{WORDS[word]} x {candidate.remat.count(word)}" for word in words)


def _slower(each: Prediction, best: Prediction) -> str:
    """`+5.1%`, or `~ +1.6%` where the prediction's error is as large."""
    share = each.step_s / best.step_s - 1
    return "-" if each is best else f"{'~ ' * (share < TOO_CLOSE)}+{share:.1%}"


def _cut(best: Prediction) -> str:
    candidate = best.candidate
    workers, lines = candidate.rows(1, recomputes=False), []
    shown = sorted({*range(MOST_LINES - 1), best.fullest, candidate.num_workers - 1})
    for worker in (each for each in shown if each < candidate.num_workers):
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
    return Grid(
        title="memory of the first",
        columns=["worker", "stages", "layers", "recompute", "GiB", "at"],
        lines=lines,
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
