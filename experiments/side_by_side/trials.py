"""How often `peers` calls one engine two different ones, on a machine that is busy with something else.

    python -m gpipe_bench.experiments.side_by_side.trials                 # go on; may be stopped at any time
    python -m gpipe_bench.experiments.side_by_side.trials --seconds 200   # begin no further trial after that
    python -m gpipe_bench.experiments.side_by_side.trials --summary       # what the records say
    python -m gpipe_bench.experiments.side_by_side.trials --write-docs    # the same, into docs/own-engine.md

A trial is a case of `peers` (two processes, a Transformer, M = 4, nothing re-materialized, 12 rounds) in
which torch's ScheduleGPipe takes part under three names, beside ours, while a neighbour multiplies matrices
in bursts of random length. A verdict is wrong when a ratio of two of the three names is certain to be other
than 1 (`control.verdict`). One line of JSON per finished trial; those on record are not run again.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from gpipe_bench.experiments.side_by_side.control import Target, held_still, verdict, void_by
from gpipe_bench.experiments.side_by_side.peers_models import MODELS
from gpipe_bench.harness.places import PUBLISHED, ROOT
from gpipe_bench.harness.record import Quantity
from gpipe_bench.harness.trials import Series, rate, timed

TRIALS = 20
NAMES = ("one", "another", "a third")
ROUNDS, NUM_MICROBATCHES, NUM_STAGES, SEED = 12, 4, 2, 1811

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
    said = {}
    for ratio in quantities:
        if set(ratio.name.split(" against ")) <= set(NAMES):
            assert ratio.value is not None
            wanted = Target("", {}, ratio.name, at_least=ratio.value >= 1, bound=1.0)
            certain = "within the noise" not in verdict(wanted, ratio, control)
            said[ratio.name] = "differ" if certain else "within the noise"
    return void_by(control), said


def trial(number: int) -> dict[str, Any]:
    """Runs one trial; its record."""
    from gpipe_bench.experiments.measuring.processes import run_processes
    from gpipe_bench.experiments.side_by_side.peers import outcome
    from gpipe_bench.experiments.side_by_side.peers_work import PeersJob, work
    from gpipe_bench.harness.experiment import Outcome

    model, options, size, _ = MODELS["transformer"]
    order = random.Random(number).sample(NAMES, len(NAMES))  # in which they are built
    engines = {"ours": ("ours", "never"), **dict.fromkeys(order, ("torch-gpipe", "never"))}

    def take(rounds: int) -> Outcome:
        job = PeersJob(
            model, options, size, NUM_STAGES, NUM_MICROBATCHES, engines, False, rounds, SEED + number
        )
        return outcome(job, run_processes(work, NUM_STAGES, job))

    def run() -> dict[str, Any]:
        with neighbour(number):
            found = held_still(take, ROUNDS)
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


def is_wrong(record: Mapping[str, Any]) -> bool:
    """Whether the trial called one engine two."""
    return not record["void"] and "differ" in record["said"].values()


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """How many trials there are, how many were wrong, with an exact 95 % interval, how the others ended."""
    ratios = sum(len(each["said"]) for each in records)
    lines = [f"{len(records)} of {TRIALS} trials, {ratios} ratios of one engine to itself"]
    if not records:
        return lines[0]
    states = Counter(
        (
            "contaminated"
            if each["void"]
            else "judged after a second measurement"
            if each["before"]
            else "judged"
        )
        for each in records
    )
    reaches = sorted(max(abs(1 - end) for end in each["ratios"]["control"][1:]) for each in records)
    excluded = sum(
        not low <= 1 <= high
        for each in records
        for name, (_, low, high) in each["ratios"].items()
        if name != "control"
    )
    seconds = sorted(each["duration_s"] for each in records)
    load_after = sorted(each["load_after"] for each in records)
    middle = len(records) // 2
    return "\n".join(
        [
            *lines,
            f"  wrong verdicts: {rate(sum(map(is_wrong, records)), len(records))}",
            "  " + ", ".join(f"{count} {state}" for state, count in states.items()),
            f"  intervals that exclude 1 before the rules: {excluded}",
            f"  the control's interval reaches to {reaches[middle]:.1%} from 1 (median)",
            f"  seconds per trial: median {seconds[middle]:.0f}; load average of "
            f"{records[-1]['cores']} cores: {load_after[middle]:.1f}",
        ]
    )


def _said(record: Mapping[str, Any]) -> str:
    word = "wrong" if is_wrong(record) else "contaminated" if record["void"] else "right"
    return f"{record['number']}: {word}"


SERIES = Series(
    program="gpipe_bench.experiments.side_by_side.trials",
    about=__doc__ or "",
    records=PUBLISHED / "peers" / "trials.jsonl",
    docs=ROOT / "docs" / "own-engine.md",
    plan=lambda: range(TRIALS),
    which=lambda record: int(record["number"]),
    ready=lambda: nullcontext(trial),
    said=_said,
    summary=summary,
)

if __name__ == "__main__":
    sys.exit(SERIES.main())
