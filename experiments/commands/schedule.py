"""`schedule`: a schedule as a picture, checked, with what follows from it; to a file and from one.

A schedule can be judged before anything runs: whether it can be executed at all, how long a step is, how much
of it is bubble, and how many micro-batches a stage holds at a time. Durations are the usual ones for equal
stages, a forward and a recomputation one slot and a backward two, and messages take no time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import print_line
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.pipeline.plan.drawing import draw
from gpipe_bench.pipeline.plan.replay import SLOTS, replay
from gpipe_bench.pipeline.plan.schedule import SCHEDULES, Schedule
from gpipe_bench.pipeline.plan.table import from_csv, to_csv
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.plan.validate import validate

MOST_ACTIONS, MOST_SLOTS = 500_000, 2_000_000
"""Of a schedule, and of a picture: more would take minutes and gigabytes, and no terminal shows them."""


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what is no valid schedule."""
    schedule = _named(arguments) if arguments.source is None else _read(arguments)
    timeline = replay(schedule, SLOTS)
    slots = schedule.num_stages * round(timeline.makespan_s)
    if slots > MOST_SLOTS and not arguments.json:
        raise ValueError(f"that is a picture of {slots} slots; --json has the numbers without it")
    if arguments.csv is not None:
        _write(schedule, arguments.csv)
    facts = _facts(schedule, timeline)
    if arguments.json:
        print_line(json.dumps(facts).encode())
    else:
        print(_text(facts, draw(timeline)))
    return exits.DONE


def _named(arguments: argparse.Namespace) -> Schedule:
    """A built-in schedule, validated like any other."""
    known = ", ".join(SCHEDULES)
    if arguments.name is None:
        raise ValueError(f"no schedule; give one of {known}, or --from FILE")
    if arguments.name not in SCHEDULES:
        raise ValueError(f"unknown schedule {arguments.name!r}; known: {known}, or --from FILE reads yours")
    num_stages, num_microbatches = arguments.num_stages, arguments.num_microbatches
    if num_stages is None or num_microbatches is None:
        raise ValueError(f"{arguments.name} needs --num-stages K and --num-microbatches M")
    if num_stages > 0 and num_microbatches > 0 and 3 * num_stages * num_microbatches > MOST_ACTIONS:
        raise ValueError(
            f"--num-stages {num_stages} with --num-microbatches {num_microbatches} is more than "
            f"{MOST_ACTIONS} actions; give smaller numbers, the picture repeats itself"
        )
    options = {} if arguments.remat is None else {"remat": arguments.remat}
    schedule = SCHEDULES[arguments.name](num_stages, num_microbatches, **options)
    validate(schedule)
    return schedule


def _read(arguments: argparse.Namespace) -> Schedule:
    """The schedule of a file, if it can be executed."""
    path: Path = arguments.source
    given = (
        ("NAME", arguments.name),
        ("--num-stages", arguments.num_stages),
        ("--num-microbatches", arguments.num_microbatches),
    )
    superfluous = [option for option, value in given if value is not None]
    if superfluous:
        raise ValueError(f"--from {path} says it all; leave {', '.join(superfluous)} out")
    try:
        text = path.read_text(encoding="utf-8-sig")  # a spreadsheet may put a mark in front
    except OSError as error:
        raise ValueError(f"--from {path}: {error.strerror}; give a file that --csv wrote") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--from {path} is no text; give a file that --csv wrote") from error
    try:
        schedule = from_csv(text, path.stem, arguments.remat)
        total = sum(map(len, schedule.actions))
        if total > MOST_ACTIONS:
            raise ValueError(f"it holds {total} actions, more than {MOST_ACTIONS}; give a smaller schedule")
        validate(schedule)
    except ValueError as error:
        raise ValueError(f"--from {path}: {error}") from error
    return schedule


def _write(schedule: Schedule, path: Path) -> None:
    try:
        path.write_text(to_csv(schedule), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--csv {path}: {error.strerror}; give a file in a folder that exists") from error


def _facts(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """What follows from the schedule, as it is printed and as JSON."""
    return {
        "schedule": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "remat": schedule.remat,
        "makespan_slots": timeline.makespan_s,
        "bubble": timeline.bubble,
        "stages": [
            {
                "stage": stage,
                "in_flight": schedule.in_flight(stage),
                "live_activations": max(live for _, live in timeline.live_activations(stage)),
                "busy_slots": timeline.busy_s(stage),
                "actions": [str(action) for action in row],
            }
            for stage, row in enumerate(schedule.actions)
        ],
    }


def _text(facts: dict[str, Any], picture: str) -> str:
    title = (
        f"{facts['schedule']}: {facts['num_stages']} stages, {facts['num_microbatches']} micro-batches, "
        f"remat {facts['remat']}, valid"
    )
    lengths = ", ".join(f"{kind.value} {slots:g}" for kind, slots in SLOTS.items())
    lines = [
        [each["stage"], each["in_flight"], each["live_activations"], f"{each['busy_slots']:g}"]
        for each in facts["stages"]
    ]
    columns = ["stage", "micro-batches in flight", "live activations", "busy slots"]
    stages = Grid(columns=columns, lines=lines, right=frozenset({1, 2, 3})).text()
    result = (
        f"makespan {facts['makespan_slots']:g} slots, bubble {facts['bubble']:.1%} "
        f"(slots: {lengths}; equal stages, messages take no time)"
    )
    return f"{title}\n\n{picture}\n\n{result}\n\n{stages}"
