"""The random examples of `joined_cases`, each right or not, over processes and in one.

    PYTHONPATH=. python tests/support/random_examples.py joined --examples 500 --seed 1

prints what is wrong, and how many examples were right.
"""

from __future__ import annotations

import argparse
import sys
import time

import joined_cases
from torch import distributed as dist

from gpipe_bench.pipeline import launch

KINDS = {"joined": joined_cases.Example}
NUM_PROCESSES = 3


def wrong(kind: str, seed: int, index: int, group: dist.ProcessGroup | None = None) -> list[str]:
    """The first thing that is wrong with an example in this process, if any."""
    example = KINDS[kind](seed, index)
    try:
        problems = example.problems(group)
    except Exception as error:
        problems = [f"{type(error).__name__}: {error}"]
    rank = "" if group is None else f"rank {dist.get_rank()}: "
    return [f"example {index} ({example}): {rank}{text}" for text in problems[:1]]


def over_processes(kind: str, seed: int, first: int, number: int) -> list[str]:
    """Examples `first` and the following, in every process; what is wrong in this one."""
    groups = {3: dist.group.WORLD, 2: dist.new_group([0, 1])}
    found: list[str] = []
    for index in range(first, first + number):
        size = KINDS[kind](seed, index).num_workers
        if dist.get_rank() < size:
            found += wrong(kind, seed, index, groups[size])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="in one process")
    asked = parser.parse_args()
    start, numbers = time.monotonic(), (asked.first, asked.examples)
    if asked.alone:
        found = [
            text for i in range(asked.examples) for text in wrong(asked.kind, asked.seed, asked.first + i)
        ]
    else:
        of_ranks = launch(
            over_processes, NUM_PROCESSES, asked.kind, asked.seed, *numbers, pin=False, device="cpu"
        )
        found = [text for of_rank in of_ranks for text in of_rank]
    print("\n".join(found))
    examples = {text.split()[1] for text in found}
    seconds = time.monotonic() - start
    print(f"{asked.examples - len(examples)} of {asked.examples} examples right, {seconds:.0f} s")
    return bool(examples)


if __name__ == "__main__":
    sys.exit(main())
