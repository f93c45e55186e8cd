"""`schedule`: a schedule as a picture, checked, with what follows from it; to a file and from one.

A schedule can be judged before anything runs: whether it can be executed at all, how long a step is, how much
of it is bubble, and how many micro-batches a worker holds at a time. Durations are the usual ones for equal
stages, a forward and a recomputation one slot and a backward two, and messages take no time.

`schedule check FILE` judges somebody else's list of actions: whether it comes to its end, with rings of so
many buffers and messages matched by their order, as NCCL does; and if not, who stands where, waiting for what
(`pipeline.plan.files`). Exit status 0: it does; 1: it does not; 2: the file holds no schedule.

Where a worker holds several stages, each is a part of what it would hold alone. So beside the slots of a
stage there are those of a whole share of the model, which make schedules with different numbers of stages
comparable.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpipe_bench.experiments.commands.output import DONE, VERDICT_FAILED, tell, write_text
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.pipeline.plan.edges import rings_of
from gpipe_bench.pipeline.plan.files import draw, read, stop_of, to_csv
from gpipe_bench.pipeline.plan.named import NAMED, SCHEDULES, named
from gpipe_bench.pipeline.plan.remat import REMAT_MODES, from_text, to_text
from gpipe_bench.pipeline.plan.schedule import Schedule, check_complete, validate
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline, svg

MOST_ACTIONS, MOST_SLOTS = 500_000, 2_000_000
"""Of a schedule, and of a picture: more would take minutes and gigabytes, and no terminal shows them."""


def options(verb: argparse.ArgumentParser) -> None:
    """Of the verb."""
    verb.add_argument("name", nargs="?", metavar="NAME", help=f"one of {', '.join(NAMED)}; none with --from")
    verb.add_argument(
        "file", nargs="?", type=Path, metavar="FILE",
        help="behind `check`: a schedule to judge, as --csv or torch writes it, or as zero-bubble or Primus "
        "print it",
    )  # fmt: skip
    verb.add_argument(
        "--buffers", type=int, metavar="N",
        help="with check: of each direction between two stages; default: one for every message",
    )  # fmt: skip
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
        "--from", dest="source", type=Path, metavar="FILE", help="read what `check` reads, and draw it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what is no valid schedule."""
    if arguments.name == "check":
        return _check(arguments)
    if arguments.file is not None or arguments.buffers is not None:
        raise ValueError(
            f"{arguments.file or '--buffers'} is for `schedule check FILE`; write that, or leave it out"
        )
    schedule = _named(arguments) if arguments.source is None else _read(arguments)
    timeline = replay(schedule, SLOTS)
    slots = schedule.num_workers * round(timeline.makespan_s)
    if slots > MOST_SLOTS and not arguments.json:
        raise ValueError(f"that is a picture of {slots} slots; --json has the numbers without it")
    facts = _facts(schedule, timeline)
    if arguments.csv is not None:
        write_text("--csv", arguments.csv, to_csv(schedule))
    if arguments.draw is not None:
        write_text("--draw", arguments.draw, svg(timeline, f"{_title(facts)}; {_length(facts)}"))
    tell(arguments, [facts], lambda: _text(facts, draw(timeline)))
    return DONE


def _named(arguments: argparse.Namespace) -> Schedule:
    """A built-in schedule, validated like any other."""
    known = ", ".join(NAMED)
    if arguments.name is None:
        raise ValueError(f"no schedule; give one of {known}, or --from FILE")
    if arguments.name not in NAMED:
        raise ValueError(f"unknown schedule {arguments.name!r}; known: {known}, or --from FILE reads yours")
    name, workers, stages = arguments.name, arguments.workers, arguments.num_stages
    each = NAMED[name].stages_per_worker or arguments.stages_per_worker or 2
    if workers is not None and stages is not None:
        raise ValueError(f"--workers {workers} and --num-stages {stages} say the same; give one of them")
    if stages is not None and stages % each:
        raise ValueError(
            f"--num-stages {stages} is no multiple of the {each} stages that a worker has in {name}; give "
            "--workers K"
        )
    num_workers = workers if stages is None else stages // each
    num_microbatches = arguments.num_microbatches
    if num_workers is None or num_microbatches is None:
        raise ValueError(
            f"{name} needs --workers K (or --num-stages K) and --microbatches M (or --num-microbatches M)"
        )
    if min(num_workers, num_microbatches) > 0 and 4 * num_workers * num_microbatches * each > MOST_ACTIONS:
        raise ValueError(
            f"--workers {num_workers} with --microbatches {num_microbatches} is more than {MOST_ACTIONS} "
            "actions; give smaller numbers, the picture repeats itself"
        )
    asked: dict[str, Any] = {} if arguments.remat is None else {"remat": from_text(arguments.remat)}
    if name in SCHEDULES and arguments.stages_per_worker is None:
        schedule = SCHEDULES[name](num_workers, num_microbatches, **asked)
    else:
        asked["stages_per_worker"] = arguments.stages_per_worker
        schedule = named(name, num_workers, num_microbatches, **asked)
    validate(schedule)
    return schedule


def _read(arguments: argparse.Namespace) -> Schedule:
    """The schedule of a file, if it can be executed."""
    _alone(arguments, f"--from {arguments.source}", ("name",))
    schedule, _ = _of_file(f"--from {arguments.source}", arguments.source, arguments)
    try:
        validate(schedule)
    except ValueError as error:
        raise ValueError(f"--from {arguments.source}: {error}") from error
    return schedule


def _alone(arguments: argparse.Namespace, what: str, more: tuple[str, ...]) -> None:
    """`ValueError` for options that say what a file says already."""
    names = (*more, "workers", "num_stages", "stages_per_worker", "num_microbatches")
    options = {"name": "NAME", "source": "--from", "num_microbatches": "--microbatches"}
    given = [
        options.get(name, f"--{name.replace('_', '-')}")
        for name in names
        if getattr(arguments, name) is not None
    ]
    if given:
        raise ValueError(f"{what} says it all; leave {', '.join(given)} out")


def _of_file(what: str, path: Path, arguments: argparse.Namespace) -> tuple[Schedule, str]:
    """The schedule of a file, whether it can be executed or not, and its form."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # a spreadsheet may put a mark in front
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror}; give a file that --csv wrote") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is no text; give a file that --csv wrote") from error
    try:
        remat = None if arguments.remat is None else from_text(arguments.remat)
        schedule, form = read(text, path.stem, remat)
        total = sum(map(len, schedule.actions))
        if total > MOST_ACTIONS:
            raise ValueError(f"it holds {total} actions, more than {MOST_ACTIONS}; give a smaller schedule")
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    return schedule, form


def _check(arguments: argparse.Namespace) -> int:
    """`schedule check FILE`."""
    path, buffers = arguments.file, arguments.buffers
    if path is None:
        raise ValueError("schedule check needs a FILE to judge; to draw one of ours give its name")
    if buffers is not None and buffers < 1:
        raise ValueError(f"--buffers is {buffers}; a worker that receives needs at least 1")
    _alone(arguments, str(path), ("source",))
    schedule, form = _of_file(str(path), path, arguments)
    facts: dict[str, Any] = {"file": str(path), "form": form, "given_buffers": buffers}
    try:
        check_complete(schedule)
    except ValueError as error:
        facts |= {"verdict": "incomplete", "why": [str(error)]}
        tell(arguments, [facts], lambda: f"{path}, {form}: incomplete\n  {facts['why'][0]}")
        return VERDICT_FAILED
    stop = stop_of(schedule, buffers)
    timeline = replay(schedule if stop is None else stop.done(schedule), SLOTS)
    stands = {} if stop is None else {wait.worker: wait.action for wait in stop.waits}
    given = "" if buffers is None else f" with {buffers} buffer{'s' * (buffers > 1)}"
    if stop is None:
        sizes = [(key[1], rings.tight.num_slots) for key, rings in rings_of(schedule).items()]
        needs = {
            name: max((number for back, number in sizes if back == way), default=0)
            for name, way in (("activations", False), ("gradients", True))
        }
        facts |= {"verdict": "runs", "why": [], "buffers": needs} | _facts(schedule, timeline)
        title = f"{_title(facts)}; {_length(facts)}"
    else:
        facts |= {
            "verdict": "mixes up messages" if stop.circle[0].why == "order" else "stops",
            "why": list(stop.words()),
            "taken": list(stop.taken),
            "stands": {str(worker): str(action) for worker, action in stands.items()},
        }
        title = f"{path.name}{given}: {facts['verdict']}; {facts['why'][0]}"
    if arguments.draw is not None:
        write_text("--draw", arguments.draw, svg(timeline, title, stands=stands))
    if arguments.csv is not None:
        write_text("--csv", arguments.csv, to_csv(schedule))

    def text() -> str:
        slots = schedule.num_workers * round(timeline.makespan_s)
        picture = draw(timeline, stands=stands) if slots <= MOST_SLOTS else "(too long for a picture)"
        if stop is None:
            head = f"{path}, {form}: runs to its end{given}, messages in one order for each pair of workers"
            rings = ", ".join(f"{number} for {name}" for name, number in facts["buffers"].items())
            return f"{head}\n\n{_text(facts, picture)}\n\nbuffers that every ring comes out with: {rings}"
        total = sum(map(len, schedule.actions))
        head = f"{path}, {form}: {facts['verdict']}{given} after {sum(stop.taken)} of {total} actions"
        return "\n".join([head, *(f"  {line}" for line in facts["why"]), "", picture])

    tell(arguments, [facts], text)
    return DONE if stop is None else VERDICT_FAILED


def _facts(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """What follows from the schedule, as it is printed and as JSON."""
    share = schedule.num_workers / schedule.num_stages
    facts = {
        "schedule": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "remat": to_text(schedule.remat),
        "makespan_slots": timeline.makespan_s,
        "bubble": timeline.bubble,
        "stages": [
            {
                "stage": stage,
                "in_flight": schedule.in_flight(stage),
                "live_activations": max(live for _, live in timeline.live_activations(stage)),
                "busy_slots": timeline.busy_s(stage),
                "actions": [str(action) for action in schedule.row(stage)],
            }
            for stage in range(schedule.num_stages)
        ],
    }
    if schedule.placement:
        facts |= {
            "num_workers": schedule.num_workers,
            "placement": list(schedule.placement),
            "makespan_shares": timeline.makespan_s * share,
            "workers": [
                {
                    "worker": worker,
                    "stages": list(schedule.stages_of(worker)),
                    "live_activations": max(live for _, live in timeline.worker_live_activations(worker)),
                    "busy_slots": timeline.worker_busy_s(worker),
                    "actions": [str(action) for action in row],
                }
                for worker, row in enumerate(schedule.actions)
            ],
        }
    return facts


def _title(facts: dict[str, Any]) -> str:
    workers = f" on {facts['num_workers']} workers" if "num_workers" in facts else ""
    return (
        f"{facts['schedule']}: {facts['num_stages']} stages{workers}, {facts['num_microbatches']} "
        f"micro-batches, remat {facts['remat']}, valid"
    )


def _length(facts: dict[str, Any]) -> str:
    shares = f", {facts['makespan_shares']:g} of a worker's whole share" if "num_workers" in facts else ""
    return f"makespan {facts['makespan_slots']:g} slots{shares}, bubble {facts['bubble']:.1%}"


def _text(facts: dict[str, Any], picture: str) -> str:
    lengths = ", ".join(f"{kind.value} {slots:g}" for kind, slots in SLOTS.items())
    if "workers" not in facts:
        columns = ["stage", "micro-batches in flight", "live activations", "busy slots"]
        lines = [
            [each["stage"], each["in_flight"], each["live_activations"], f"{each['busy_slots']:g}"]
            for each in facts["stages"]
        ]
    else:
        share = facts["num_workers"] / facts["num_stages"]
        columns = ["worker", "stages", "live activations", "of a whole share", "busy slots"]
        lines = [
            [
                each["worker"], " ".join(map(str, each["stages"])), each["live_activations"],
                f"{each['live_activations'] * share:g}", f"{each['busy_slots']:g}",
            ]
            for each in facts["workers"]
        ]  # fmt: skip
    table = Grid(columns=columns, lines=lines, right=frozenset(range(1, len(columns)))).text()
    result = f"{_length(facts)} (slots: {lengths}; equal stages, messages take no time)"
    return f"{_title(facts)}\n\n{picture}\n\n{result}\n\n{table}"
