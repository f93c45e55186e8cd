"""`check-engine`: in seconds, whether an engine does what it must, before anything is timed.

Exit status 0: everything that the engine does not refuse is right; 1: something is wrong, or it refuses
everything; 2: the name leads to no engine; 3: it raised, hung or ended its process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import print_line, say
from gpipe_bench.experiments.engines.examination import BROKEN, CANNOT, Row, examination, faults


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError for a name that leads nowhere."""
    if arguments.timeout_s <= 0:
        raise ValueError(f"--timeout-s is {arguments.timeout_s:g}; give seconds, such as 30")
    rows = examination(arguments.engine, arguments.timeout_s)
    if arguments.json:
        for row in rows:
            print_line(json.dumps(asdict(row)).encode())
        print(conclusion(arguments.engine, rows), file=sys.stderr)
    else:
        say(conclusion(arguments.engine, rows))
        say("\n".join(lines(rows)))
    return status(rows)


def conclusion(engine: str, rows: Sequence[Row]) -> str:
    """One line: what is wrong first of all, or that nothing is."""
    bad = faults(rows)
    if not bad:
        cannot = sum(row.verdict == CANNOT for row in rows)
        besides = f", {cannot} that it can't" if cannot else ""
        return f"{engine}: {sum(row.verdict == 'ok' for row in rows)} checks passed{besides}"
    first = bad[0]
    if first.verdict == CANNOT:
        return f"{engine}: it can do nothing that was asked: {first.text}"
    more = f" (and {len(bad) - 1} more below)" if len(bad) > 1 else ""
    return f"{engine}: {first.text} [{first.check}, {first.place}]{more}"


def lines(rows: Sequence[Row]) -> list[str]:
    """A line for every check, by place."""
    width = max(len(row.check) for row in rows)
    found, place = [], ""
    for row in rows:
        if row.place != place:
            place = row.place
            found.append(f"\nin {place}" if row.place == "one process" else f"\nover {place}, a stage each")
        verdict = "can't:" if row.verdict == CANNOT else row.verdict
        found.append(f"  {row.check:{width}}  {verdict:9}  {row.text}")
    return found


def status(rows: Sequence[Row]) -> int:
    """Of the verb."""
    bad = {row.verdict for row in faults(rows)}
    if BROKEN in bad:
        return exits.CASE_FAILED
    return exits.VERDICT_FAILED if bad else exits.DONE
