"""How often `peers` calls one engine two different ones, on a machine that is busy with something else.

    python tests/peers_trials.py                 go on; may be stopped at any time
    python tests/peers_trials.py --seconds 200   begin no further trial after that
    python tests/peers_trials.py --summary       what the records say
    python tests/peers_trials.py --write-docs    the same, into docs/own-engine.md

A trial is a case of `peers` (two processes, a Transformer, M = 4, nothing re-materialized, 12 rounds) in
which torch's ScheduleGPipe takes part under three names, beside ours, while a neighbour multiplies matrices
in bursts of random length. A verdict is wrong when one of the three names is called faster than another. One
line of JSON per finished trial; those on record are not run again.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median_high
from typing import Any

from trials import Series, rate, timed

from gpipe_bench.experiments.side_by_side import is_faster, side_by_side, void_by
from gpipe_bench.harness import PUBLISHED, ROOT
from gpipe_bench.harness.record import Quantity

TRIALS = 20
NAMES = ("one", "another", "a third")
ROUNDS, SEED = 12, 1811

# A third of the time on average, for a tenth of a second to two at a time.
_NEIGHBOUR = """
import random, sys, time
import torch
torch.set_num_threads(1)
generator, a = random.Random(int(sys.argv[1])), torch.rand(300, 300)
while True:
    end_s = time.monotonic() + generator.uniform(0.1, 1.0)
    while time.monotonic() < end_s:
        a @ a
    time.sleep(generator.uniform(0.2, 2.0))
"""


@contextmanager
def neighbour(seed: int) -> Iterator[None]:
    """Another program that needs the processor now and then, while this is entered."""
    process = subprocess.Popen([sys.executable, "-c", _NEIGHBOUR, str(seed)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def judged(quantities: Sequence[Quantity]) -> tuple[str, dict[str, str]]:
    """Why nothing is judged, or nothing; and what is said of each two names, whether either is faster."""
    control = next(each for each in quantities if each.name == "control")
    ratios = [each for each in quantities if set(each.name.split(" against ")) <= set(NAMES)]
    return void_by(control), {
        each.name: "within the noise" if is_faster(each, control) is None else "differ" for each in ratios
    }


def trial(number: int) -> dict[str, Any]:
    """Runs one trial; its record."""
    from gpipe_bench.experiments.engine_turns import work
    from gpipe_bench.experiments.peers import job_of, numbers
    from gpipe_bench.experiments.timed.steps import run_processes

    order = random.Random(number).sample(NAMES, len(NAMES))  # in which they are built
    key = {"model": "transformer", "where": "processes", "remat": "never", "num_microbatches": 4}
    engines = {"ours": ("ours", "never"), **dict.fromkeys(order, ("torch-gpipe", "never"))}
    job = job_of(key, None)._replace(engines=engines, seed=SEED + number)

    def run() -> dict[str, Any]:
        with neighbour(number):
            take = partial(run_processes, work, job.num_processes, job)
            found = side_by_side(take, partial(numbers, job, {}), ROUNDS)
        void, said = judged(found.quantities)
        ratios = [each for each in found.quantities if each.name in {*said, "control"}]
        return {
            "number": number,
            "built": order,
            "void": void,
            "before": found.details.get("before", ""),
            "said": said,
            "ratios": {each.name: [each.value, each.low, each.high] for each in ratios},
        }

    return timed(run)


def outcome(record: Mapping[str, Any]) -> str:
    """Whether the trial called one engine two."""
    return "contaminated" if record["void"] else "wrong" if "differ" in record["said"].values() else "right"


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """How many trials there are, how many were wrong, with an exact 95 % interval, how the others ended."""
    ratios = sum(len(each["said"]) for each in records)
    first = f"{len(records)} of {TRIALS} trials, {ratios} ratios of one engine to itself"
    if not records:
        return first
    wrong = sum(outcome(each) == "wrong" for each in records)
    judged = {True: "judged after a second measurement", False: "judged"}
    states = Counter("contaminated" if each["void"] else judged[bool(each["before"])] for each in records)
    intervals = [ends for each in records for name, ends in each["ratios"].items() if name != "control"]
    excluded = sum(not low <= 1 <= high for _, low, high in intervals)
    reach = median_high(max(abs(1 - end) for end in each["ratios"]["control"][1:]) for each in records)
    seconds, load = (median_high(each[name] for each in records) for name in ("duration_s", "load_after"))
    return "\n".join(
        [
            first,
            f"  wrong verdicts: {rate(wrong, len(records))}",
            "  " + ", ".join(f"{count} {state}" for state, count in states.items()),
            f"  intervals that exclude 1 before the rules: {excluded}",
            f"  the control's interval reaches to {reach:.1%} from 1 (median)",
            f"  seconds per trial: median {seconds:.0f}; load average of {records[-1]['cores']} cores: "
            f"{load:.1f}",
        ]
    )


SERIES = Series(
    program="python tests/peers_trials.py",
    about=__doc__ or "",
    records=PUBLISHED / "peers" / "trials.jsonl",
    docs=ROOT / "docs" / "own-engine.md",
    plan=lambda: range(TRIALS),
    which=lambda record: int(record["number"]),
    ready=lambda: nullcontext(trial),
    said=lambda record: f"{record['number']}: {outcome(record)}",
    summary=summary,
)

if __name__ == "__main__":
    sys.exit(SERIES.main())
