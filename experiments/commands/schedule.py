"""`schedule`: a schedule as a picture, checked, with what follows from it; to a file and from one.

Durations are the usual ones for equal stages, a forward and a recomputation one slot and a backward two, and
messages take no time. Slots of a worker's whole share of the model make schedules with different numbers of
stages comparable.

`--from FILE` judges somebody else's list of actions, in torch's form: whether it can be executed, and if not,
who waits for what there. Exit status 0: it can; 1: it cannot; 2: the file holds no schedule.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.pipeline.plan.named import NAMED, SCHEDULES, named, suggestion
from gpipe_bench.pipeline.plan.schedule import (
    REMAT_MODES,
    Schedule,
    from_csv,
    from_text,
    most_alive_of,
    to_csv,
    to_text,
)
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline, draw
from gpipe_bench.pipeline.plan.walk import validate

from ..drawing import charts
from .output import DONE, VERDICT_FAILED, check_counts, screen_width, tell, write_text

MOST_ACTIONS, MOST_SLOTS = 500_000, 2_000_000
"""Most actions of a schedule, and most slots of a picture: more would take minutes and gigabytes."""


def options(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("name", nargs="?", metavar="NAME", help=f"one of {', '.join(NAMED)}; none with --from")
    add("--workers", type=int, metavar="K", help="processes or devices")
    add("--stages-per-worker", type=int, metavar="V", help="of interleaved and breadth-first; default: 2")
    add("--microbatches", type=int, metavar="M", help="of a mini-batch")
    add(
        "--remat", metavar="WHICH",
        help=f"what is recomputed: {', '.join(REMAT_MODES)}, or one of them for each stage, such "
        "as always,except_last,never; default: the schedule's, or as in the file",
    )  # fmt: skip
    add(
        "--csv", type=Path, metavar="FILE",
        help="write it, one line per worker, as torch reads it: 0F0,0F1,0B1",
    )  # fmt: skip
    add("--draw", type=Path, metavar="FILE.svg", help="write a picture of it")
    add(
        "--from", dest="source", type=Path, metavar="FILE",
        help="judge and draw this one, as --csv or torch writes it",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what is no valid schedule."""
    path: Path | None = arguments.source
    schedule = _named(arguments) if path is None else _read(path, arguments)
    try:
        validate(schedule)
    except ValueError as error:
        found = {"file": str(path), "verdict": "cannot be executed", "why": str(error)}
        tell(arguments, [found], lambda: f"{path} cannot be executed: {found['why']}")
        return VERDICT_FAILED
    timeline = replay(schedule, SLOTS)
    slots = schedule.num_workers * round(timeline.makespan_s)
    if slots > MOST_SLOTS and not arguments.json:
        raise ValueError(f"that is a picture of {slots} slots; --json has the numbers without it")
    facts = _facts(schedule, timeline)
    if arguments.csv is not None:
        write_text("--csv", arguments.csv, to_csv(schedule))
    if arguments.draw is not None:
        picture = io.StringIO()
        charts({_title(facts): timeline}, "slots").savefig(picture, format="svg")
        write_text("--draw", arguments.draw, picture.getvalue())
    tell(arguments, [facts], lambda: _text(facts, draw(timeline)))
    return DONE


def _named(arguments: argparse.Namespace) -> Schedule:
    known = ", ".join(NAMED)
    if arguments.name is None:
        raise ValueError(f"no schedule; give one of {known}, or --from FILE")
    if arguments.name not in NAMED:
        close = suggestion(arguments.name, NAMED)
        raise ValueError(
            f"unknown schedule {arguments.name!r}{close}; known: {known}, or --from FILE reads yours"
        )
    name, workers, number = arguments.name, arguments.workers, arguments.microbatches
    if workers is None or number is None:
        raise ValueError(f"{name} needs --workers K and --microbatches M")
    check_counts(arguments, "workers", "microbatches", "stages_per_worker")
    each = NAMED[name].stages_per_worker or arguments.stages_per_worker or 2
    if 4 * workers * number * each > MOST_ACTIONS:
        raise ValueError(
            f"--workers {workers} with --microbatches {number} is more than {MOST_ACTIONS} actions; give "
            "smaller numbers, the picture repeats itself"
        )
    asked: dict[str, Any] = {} if arguments.remat is None else {"remat": from_text(arguments.remat)}
    if name in SCHEDULES and arguments.stages_per_worker is None:
        return SCHEDULES[name](workers, number, **asked)
    return named(name, workers, number, stages_per_worker=arguments.stages_per_worker, **asked)


def _read(path: Path, arguments: argparse.Namespace) -> Schedule:
    """The schedule of a file, whether it can be executed or not."""
    for option in ("name", "workers", "stages_per_worker", "microbatches"):
        if getattr(arguments, option) is not None:
            said = "NAME" if option == "name" else f"--{option.replace('_', '-')}"
            raise ValueError(f"--from {path} says it all; leave {said} out")
    try:
        text = path.read_text(encoding="utf-8-sig")  # a spreadsheet may put a mark in front
        schedule = from_csv(text, path.stem, None if arguments.remat is None else from_text(arguments.remat))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a file that --csv wrote") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text; give a file that --csv wrote") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    total = sum(map(len, schedule.actions))
    if total > MOST_ACTIONS:
        raise ValueError(f"{path} holds {total} actions, more than {MOST_ACTIONS}; give a smaller schedule")
    return schedule


def _facts(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    share = schedule.num_workers / schedule.num_stages
    return {
        "schedule": schedule.name,
        "num_stages": schedule.num_stages,
        "num_workers": schedule.num_workers,
        "placement": [schedule.worker(stage) for stage in range(schedule.num_stages)],
        "num_microbatches": schedule.num_microbatches,
        "remat": to_text(schedule.remat),
        "makespan_slots": timeline.makespan_s,
        "makespan_shares": timeline.makespan_s * share,
        "bubble": timeline.bubble,
        "workers": [
            {
                "worker": worker,
                "stages": list(schedule.stages_of(worker)),
                "live_activations": most_alive_of(row),
                "busy_slots": sum(map(timeline.busy_s, schedule.stages_of(worker))),
                "actions": [str(action) for action in row],
            }
            for worker, row in enumerate(schedule.actions)
        ],
    }


def _title(facts: dict[str, Any]) -> str:
    return (
        f"{facts['schedule']}: {facts['num_stages']} stages on {facts['num_workers']} workers, "
        f"{facts['num_microbatches']} micro-batches, remat {facts['remat']}, valid"
    )


def folded(picture: str) -> str:
    """The picture in as many blocks as a screen takes; slots are not divided."""
    rows = [line.partition("| ")[::2] for line in picture.splitlines()]
    slot = 1 + max(len(each) for _, grid in rows for each in grid.split())
    width = max(1, (screen_width() - len(rows[0][0]) - 2) // slot) * slot
    blocks = [
        "\n".join(f"{name}| {grid[start : start + width]}".rstrip() for name, grid in rows)
        for start in range(0, max(len(grid) for _, grid in rows), width)
    ]
    return "\n\n".join(blocks)


def _text(facts: dict[str, Any], picture: str) -> str:
    slots, shares = facts["makespan_slots"], facts["makespan_shares"]
    of_share = f", {shares:g} of a worker's whole share" if shares != slots else ""
    lengths = ", ".join(f"{kind.value} {slots:g}" for kind, slots in SLOTS.items())
    result = (
        f"makespan {slots:g} slots{of_share}, bubble {facts['bubble']:.1%}\n"
        f"  (slots: {lengths}; equal stages, messages take no time)"
    )
    share = facts["num_workers"] / facts["num_stages"]
    columns = ["worker", "stages", "live activations", "of a whole share", "busy slots"]
    lines = [
        [
            each["worker"], " ".join(map(str, each["stages"])), each["live_activations"],
            f"{each['live_activations'] * share:g}", f"{each['busy_slots']:g}",
        ]
        for each in facts["workers"]
    ]  # fmt: skip
    table = Grid(columns=columns, lines=lines, right=numbers(columns)).text()
    return f"{_title(facts)}\n\n{folded(picture)}\n\n{result}\n\n{table}"
