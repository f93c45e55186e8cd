"""`plan`: how should a model be trained on given machines, and how long will a step take? With `--bytes`
only whether it fits as one pipeline over all accelerators, and where it is cut; no layer is timed for that.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.pipeline.plan.named import NAMED
from gpipe_bench.planner.candidate import REMATS
from gpipe_bench.planner.formats import FORMATS, NAME, check_asked
from gpipe_bench.planner.request import MEASURED, Request, Space, check, divisors, link_named, link_within

from .output import DONE, check_counts, screen_width, tell, warn, write_text

if TYPE_CHECKING:
    from gpipe_bench.planner.answer import Plan
    from gpipe_bench.planner.candidate import Candidate, Prediction
    from gpipe_bench.planner.formats import Written
    from gpipe_bench.planner.model import Model
    from gpipe_bench.planner.search import Found

GIB = 2**30
MOST_GIB = 1e6
PRECISIONS = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "bfloat16-pure": "bfloat16-pure", "bf16-pure": "bfloat16-pure",
}  # fmt: skip
WIDTH = 100  # columns of an answer
MOST_LINES = 9  # workers whose memory is printed
EVERY_S = 10.0  # between two lines of progress
WORDS = {
    "never": "nothing", "selective": "all but products", "blocks": "blocks", "always": "stages",
    "except_last": "stages but for the last micro-batch",
}  # fmt: skip
"""Words for what is recomputed, by kind of re-materialization."""
TOO_CLOSE = 0.03
"""Of steps that differ by less, either may be faster: half of 61 predictions were off by 1.7 % or more."""


def options(verb: argparse.ArgumentParser) -> None:
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
        "default: 1.5 with --device-type or --card, else 0",
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
    several = partial(add, action="append", default=[])
    several("--schedule", metavar="NAME", help=f"only this one, of {', '.join(NAMED)}")
    several("--num-microbatches", type=int, metavar="M", help="only so many micro-batches, of each replica")
    several(
        "--remat", choices=REMATS, metavar="WHAT", help=f"only this recomputation, of {', '.join(REMATS)}"
    )
    several("--pp", type=int, metavar="K", help="only so many workers of a pipeline")
    several(
        "--tp", type=int, metavar="N",
        help="accelerators that divide a layer; the model must define how it is divided; default: 1",
    )  # fmt: skip
    add("--no-fsdp", action="store_true", help="every replica holds all parameters")
    add = verb.add_argument_group("how layers are timed, where no accelerator is named").add_argument
    add(
        "--probe-rounds", type=int, default=4, metavar="N",
        help="how often each step is timed (steps differ in micro-batch size and cut); default: %(default)s",
    )  # fmt: skip
    add = verb.add_argument_group("what is printed and written").add_argument
    add("--top", type=int, default=5, metavar="N", help="plans to print; default: %(default)s")
    add("--script", type=Path, metavar="FILE.py", help="write the script that trains as planned")
    add(
        "--format", choices=tuple(FORMATS),
        help="what --script writes: a script on this engine or on torch.distributed.pipelining, settings for "
        "torchtitan, or flags of Megatron-LM; only plans that the format can express are tried, and are "
        "predicted as that program runs them; default: script, where --script is given",
    )  # fmt: skip
    add("--full", action="store_true", help="also where each number comes from, and the script")


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what cannot be planned."""
    if arguments.bytes:
        return _only_bytes(arguments)
    if arguments.batch_size is None:
        raise ValueError("--batch-size is needed: the examples of a mini-batch, such as 32; or give --bytes")
    request, possible = request_of(arguments), Space.schedules
    remats: tuple[str, ...] = REMATS
    name, form = str(arguments.script or NAME), arguments.format or "script"
    is_written = bool(arguments.script or arguments.format)
    if is_written:
        check_asked(form, arguments.schedule, request.optimizer, name, request.precision)
        request, remats = replace(request, autocast=form == "script"), FORMATS[form].remats
        possible = tuple(each for each in possible if each in FORMATS[form].schedules)
        if unsupported := [each for each in arguments.remat if each not in remats]:
            raise ValueError(f"--remat {unsupported[0]} with --format {form}: use one of {', '.join(remats)}")
    space = Space(
        schedules=tuple(arguments.schedule) or possible, possible=possible,
        microbatches=tuple(arguments.num_microbatches) or None,
        pp=tuple(arguments.pp) or None, tp=tuple(arguments.tp) or (1,),
        remats=tuple(arguments.remat) or remats, sharded=not arguments.no_fsdp,
    )  # fmt: skip
    from gpipe_bench.planner.answer import plan

    found = plan(
        _model(arguments), request, space=space, shown=arguments.top, rounds=arguments.probe_rounds,
        shown_rounds=True, progress=_progress(),
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
        if arguments.script is not None:
            write_text("--script", arguments.script, written.text)
            if written.rows:
                write_text("--script", arguments.script.with_suffix(".csv"), written.rows)
    tell(
        arguments, [found.describe() | facts],
        lambda: text(found, written, arguments.script, full=arguments.full),
    )  # fmt: skip
    return DONE


def _model(arguments: argparse.Namespace) -> Model:
    """The model that the options name. The user's own modules are found in the working directory."""
    import torch

    from gpipe_bench.planner.model import model_of

    torch.set_num_threads(1)
    if "" not in sys.path:
        sys.path.insert(0, "")
    found = model_of(
        arguments.model, arguments.batch_size, arguments.num_layers, num_filters=arguments.num_filters,
        seq_len=arguments.seq_len,
    )  # fmt: skip
    if found.why_not_one is not None:
        warn(f"{found.name} takes no micro-batches of one example, which are left out: {found.why_not_one}")
    return found


def request_of(arguments: argparse.Namespace) -> Request:
    """The request that the options describe. Raises ValueError, naming value and remedy."""
    check_counts(
        arguments, "accelerators", "batch_size", "hosts", "top", "num_layers", "num_filters", "pp", "tp",
        "num_microbatches", "cards", "probe_rounds",
    )  # fmt: skip
    from gpipe_bench.planner.accelerators import accelerator

    if arguments.card is not None:
        accelerator(arguments.card if "," in arguments.card else f"{arguments.card},")
        arguments.device_type = arguments.card
        if arguments.memory_gib is None:
            arguments.memory_gib = float(arguments.card.split(",")[1])
    if arguments.memory_gib is None:
        raise ValueError("--memory-gib is needed: the GiB of one accelerator, such as 24")
    device, precision = arguments.device_type, PRECISIONS[arguments.precision]
    name = arguments.link or ("loopback" if device == MEASURED else "")
    with _about(f"--device-type {device}"):
        if device != MEASURED:
            accelerator(device, precision)
    with _about(f"--link {arguments.link}" if arguments.link else "--link"):
        link = link_named(name, device) if name else link_within(device)
    with _about(f"--between {arguments.between}"):
        between = link_named(arguments.between, device) if arguments.between else None
    if arguments.hosts > 1 and between is None:
        raise ValueError(f"--hosts {arguments.hosts} needs --between LINK, such as infiniband")
    if arguments.hosts == 1 and between is not None:
        raise ValueError(f"--between {arguments.between}: there is one host; give --hosts N, or leave it out")
    given = {"memory-gib": (arguments.memory_gib, 2**-20), "reserve-gib": (arguments.reserve_gib, 0)}
    for option, (gib, least) in given.items():
        if gib is not None and not least <= gib < MOST_GIB:
            raise ValueError(f"--{option} {gib:g}: give the GiB of one accelerator, such as 24")
    held = arguments.reserve_gib
    return Request(
        accelerators=arguments.accelerators,
        memory_bytes=int(arguments.memory_gib * GIB), batch_size=arguments.batch_size or 1, link=link,
        between=between, hosts=arguments.hosts, optimizer=arguments.optimizer,
        precision=precision, device_type=device, compiled=arguments.compiled,
        reserve_bytes=None if held is None else int(held * GIB), cards=arguments.cards,
    )  # fmt: skip


@contextmanager
def _about(option: str) -> Iterator[None]:
    """Puts the option before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _progress() -> Callable[[str, int, int], None]:
    """Shows progress: on a terminal in one line that is overwritten, elsewhere a line every ten seconds."""
    said_s = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal said_s
        words = f"{what} {done}/{total}"
        if sys.stderr.isatty():
            print(f"\r{words:<30}", end="\r" if done + 1 >= total else "", file=sys.stderr, flush=True)
        elif time.monotonic() - said_s > EVERY_S:
            said_s = time.monotonic()
            print(words, file=sys.stderr, flush=True)

    return show


def text(plan: Plan, written: Written | None = None, path: Path | None = None, *, full: bool = False) -> str:
    """The best plan in a few sentences, the next plans, the best one's memory by worker, and its command;
    with `full` also where each number comes from. Only lines of a script are wider than WIDTH.
    """
    parts = [_best(plan), _next(plan), _cut(plan.best)]
    if full:
        notes = [f"{what}: {where}" for what, where in plan.best.provenance.items()]
        notes += [f"{plan.tried} ways to train tried, {plan.skipped} left out as slower than one of them"]
        parts.append("\n".join(map(fill, notes)))
    command = plan.command() if written is None else written.command
    if path is not None:
        beside = f", with {path.with_suffix('.csv').name} beside it," * bool(written and written.rows)
        parts.append(f"{path}{beside} trains by this plan; start it with\n\n{command}")
    elif written is not None:
        beside = f"the schedule, which lies beside it as .csv:\n\n{written.rows}\n" * bool(written.rows)
        parts.append(
            f"the file for this plan (--script FILE writes it):\n\n{written.text}\n{beside}{command}"
        )
    else:
        form, *others = plan.forms() or ("",)
        of_form = "" if form == "script" else f" --format {form}"
        how = f"--script {NAME}{of_form} writes a plan for {'that format' if of_form else 'this engine'}"
        how += f" (other formats: {', '.join(others)})" if others else ""
        how = fill(f"{how if form else 'no --format writes this plan'}; start it with")
        parts.append(f"{how}\n\n{command}")
    return "\n\n".join(part for part in parts if part)


def _best(plan: Plan) -> str:
    request, best = plan.request, plan.best
    used = best.candidate.grid.accelerators
    device = "accelerators of this machine" if request.device_type == MEASURED else request.device_type
    hosts = f"{request.per_host} x {device}"
    if request.hosts > 1:
        cards = f"{request.cards_per_host} network card{'s' * (request.cards_per_host > 1)}"
        hosts = f"{request.hosts} hosts of {hosts} with {cards} each"
    parts = sorted(best.parts_s.items(), key=lambda each: -each[1])
    why = ", ".join(f"{part} {s / best.step_s:.0%}" for part, s in parts[:3] if s > 0.01 * best.step_s)
    trained = request.precision + ", compiled" * request.compiled
    count = best.candidate.num_microbatches
    lines = [
        f"{plan.model.name}, {plan.model.num_parameters:,} parameters, {trained}, {request.optimizer}, "
        f"mini-batch {request.batch_size}, on {hosts}, "
        f"{request.memory_bytes / GIB:g} GiB each, {request.held_back_bytes / GIB:g} held back",
        f"{title_of(best.candidate)}, {count} micro-batch{'es' * (count > 1)}, recomputing "
        f"{remat_of(best.candidate)}: {seconds(best.step_s)} a step ({seconds(best.low_s)} to "
        f"{seconds(best.high_s)}), {best.examples_per_s:.3g} examples/s, {best.peak / GIB:.2f} GiB.",
        f"Of the step: {why}."
        + f" It uses {used} of {request.accelerators} accelerators." * (used < request.accelerators),
    ]
    return "\n".join(fill(line) for line in lines)


def _next(plan: Plan) -> str:
    shares = [(each, each.step_s / plan.best.step_s - 1) for each in plan.predictions[1:]]
    lines = [
        [
            title_of(each.candidate), each.candidate.num_microbatches, remat_of(each.candidate),
            seconds(each.step_s), f"{each.peak / GIB:.2f}",
            f"{'~ ' * (slower < TOO_CLOSE)}+{slower:.1%}",
        ]
        for each, slower in shares
    ]  # fmt: skip
    if not lines:
        return ""
    close = any(slower < TOO_CLOSE for _, slower in shares)
    notes = ["", f"~ less than {TOO_CLOSE:.0%} slower, as much as predictions err"] if close else []
    columns = ["the next", "M", "recompute", "step", "GiB", "slower"]
    return Grid(columns=columns, lines=lines, notes=notes, right=frozenset({1, 4, 5})).text()


def fill(line: str) -> str:
    return textwrap.fill(line, min(WIDTH, screen_width()), subsequent_indent="  ", break_on_hyphens=False)


def seconds(value: float) -> str:
    """A number of seconds as text with three digits, in s, ms or us."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def title_of(candidate: Candidate) -> str:
    if candidate.grid.pp == 1:
        return str(candidate.grid)
    per_worker = f" x {candidate.stages_per_worker}" if candidate.stages_per_worker > 1 else ""
    return f"{candidate.grid}, {candidate.schedule}{per_worker}"


def remat_of(candidate: Candidate) -> str:
    """How many stages recompute how much."""
    words = dict.fromkeys(candidate.remat)
    if len(words) == 1:
        return WORDS[next(iter(words))]
    return ", ".join(f"{WORDS[word]} x {candidate.remat.count(word)}" for word in words)


def _cut(best: Prediction) -> str:
    candidate = best.candidate
    workers, lines = candidate.rows(1, recomputes=False), []
    shown = sorted({*range(MOST_LINES - 1), best.fullest, candidate.grid.pp - 1})
    for worker in (each for each in shown if each < candidate.grid.pp):
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
    columns = ["worker", "stages", "layers", "recompute", "peak GiB", "peak at"]
    return Grid(title="memory of the best plan", columns=columns, lines=lines, right=frozenset({4})).text()


# Bytes alone

EAGER_BYTES = ", layers compiled (bytes of eager ones, an upper estimate)"
OF_REQUEST = ("accelerators", "memory_bytes", "batch_size", "optimizer", "precision", "compiled")
PARTS = ("parameters", "optimizer_state", "gradients", "boundary", "activations", "transients", "buffers")


def _only_bytes(arguments: argparse.Namespace) -> int:
    """Plans one pipeline over all accelerators. Raises ValueError for options that have no meaning for it."""
    for option in ("pp", "tp", "hosts", "between", "cards", "script", "format", "no_fsdp"):
        given = getattr(arguments, option)
        if given not in (None, [], False, 1):
            words = f"--{option.replace('_', '-')}" + (f" {given}" if given is not True else "")
            raise ValueError(f"{words}: --bytes plans one pipeline over all accelerators; leave out either")
    for option in ("schedule", "remat", "num_microbatches"):
        if several := getattr(arguments, option)[1:]:
            words = f"--{option.replace('_', '-')} {several[0]}"
            raise ValueError(f"{words}: --bytes takes one of them; leave the others out")
    from gpipe_bench.planner.answer import as_on

    request, model = request_of(arguments), _model(arguments)
    request = replace(request, batch_size=model.batch_size)
    model = as_on(model, request)
    space = Space(
        schedules=tuple(arguments.schedule) or ("gpipe",),
        pp=(request.accelerators,),
        sharded=False,
        microbatches=tuple(arguments.num_microbatches) or None,
        remats=tuple(arguments.remat) or ("always",),
    )
    found = _placed(model, request, space)
    tell(arguments, [facts(model, request, found)], lambda: text_of_bytes(model, request, found))
    return DONE


def _placed(model: Model, request: Request, space: Space) -> Found:
    """The cut with the smallest peak, in the fewest micro-batches that fit unless `space` gives their number.

    Raises ValueError, naming remedies, where nothing fits.
    """
    from gpipe_bench.planner.answer import nothing_fits, on_engine, smallest

    check(request, on_engine(model, request, space), len(model.layers))

    def with_smallest_peak(within: Space) -> Found:
        found = smallest(model, request, within)
        assert found is not None, "`check` has refused more stages than layers"
        return found

    first = with_smallest_peak(space)
    if first.peak > request.usable_bytes:
        raise ValueError(nothing_fits(model, request, space, first, as_one=True))
    for count in divisors(model.batch_size)[:-1] if space.microbatches is None else ():
        fewer = with_smallest_peak(replace(space, microbatches=(count,)))
        if fewer.peak <= request.usable_bytes:
            return fewer
    return first


def text_of_bytes(model: Model, request: Request, found: Found) -> str:
    """Table of the workers: their stages and layers, and the parts of their fullest moment in GiB."""
    remat = found.candidate.remat[0]  # the same on all stages
    recomputed = {"always": "all recomputed", "never": "nothing recomputed"}
    what = recomputed.get(remat, f"re-materialization {remat}")
    count = found.candidate.num_microbatches
    title = (
        f"{model.name}: {model.num_parameters:,} parameters under {found.candidate.schedule} on "
        f"{request.accelerators} x {request.memory_bytes / GIB:g} GiB (modelled)\n{request.precision}, "
        f"{request.optimizer}, mini-batch {request.batch_size} in {count} "
        f"micro-batch{'es' * (count > 1)}, {what}"
        + EAGER_BYTES * request.compiled
        + f", {model.attention} attention" * (model.attention != "cpu")
        + f", {request.held_back_bytes / GIB:g} GiB held back" * bool(request.held_back_bytes)
    )
    lines = []
    for worker, (stages, memory) in enumerate(zip(found.homes, found.memory, strict=True)):
        gib = [f"{getattr(memory, part) / GIB:.2f}" for part in ("peak", *PARTS)]
        lines.append([worker, " ".join(map(str, stages)), found.layers_of(worker), memory.when, *gib])
    headers = ["worker", "stages", "layers", "at", "peak GiB", *(part.replace("_", " ") for part in PARTS)]
    if all(stages == (worker,) for worker, stages in enumerate(found.homes)):
        headers = ["stage", *headers[2:]]
        lines = [[line[0], *line[2:]] for line in lines]
    first = headers.index("peak GiB")
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers) - set(range(first))).text()


def facts(model: Model, request: Request, found: Found) -> dict[str, Any]:
    """What `text_of_bytes` shows as plain data, in bytes."""
    way = found.candidate
    return {
        "model": model.name,
        "num_parameters": model.num_parameters,
        **{name: getattr(request, name) for name in OF_REQUEST},
        "reserve_bytes": request.held_back_bytes,
        "num_microbatches": way.num_microbatches,
        "schedule": way.schedule,
        "remat": way.remat[0],
        "layers_per_stage": [len(stage) for stage in way.cut],
        "workers": [
            {"stages": list(stages), "peak": memory.peak, **asdict(memory)}
            for stages, memory in zip(found.homes, found.memory, strict=True)
        ],
    }
