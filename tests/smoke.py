"""Runs every experiment's smoke profile, as many at a time as there are cores.

    python -m tests.smoke --results DIR --cores 2 [more arguments of `experiments run`]

Each of its processes runs one experiment after the other, and what these start is forked: a fresh process for
each command and for all that it starts would spend most of the time importing torch. That fresh ones do as
well is what `tests/test_distributed.py`, `tests/test_packaging.py` and `tests/test_examples.py` say.

Exit status: the highest of the experiments'.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack

from gpipe_bench.experiments.registry import EXPERIMENTS

_open = ExitStack()  # for as long as a process lives


def begin() -> None:
    """Before the first experiment of a process."""
    from tests.forked import fork_server, forking

    _open.enter_context(forking())
    fork_server()  # now, so that what its processes say on standard error is not lost with an experiment's


def run(name: str, arguments: list[str]) -> tuple[int, str]:
    """Exit status and output of one experiment."""
    from tests.command_line import call

    start_s = time.monotonic()

    # Cores are busy with other experiments; `--jobs` would start processes for cases beside each other.
    status, out, err = call("run", name, "--profile", "smoke", "--jobs", 1, *arguments)
    head = f"run {name}: exit status {status} after {time.monotonic() - start_s:.0f} s"
    return status, f"{head}\n{err}{out}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="smoke", description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=int, default=1, metavar="N", help="experiments at a time")
    options, more = parser.parse_known_args()
    worst = 0
    with ProcessPoolExecutor(options.cores, multiprocessing.get_context("spawn"), begin) as pool:
        try:
            runs = [pool.submit(run, name, more) for name in EXPERIMENTS]
            for each in as_completed(runs):
                status, said = each.result()
                print(said, flush=True)
                worst = max(worst, status)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return worst


if __name__ == "__main__":
    sys.exit(main())
