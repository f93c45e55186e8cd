"""Random examples of layers, schedules, sizes and options; EXAMPLES=1000 asks for more, SEED for others."""

from __future__ import annotations

import os

from case_runner import watched
from joined_cases import Example
from torch import distributed as dist

NUMBER, SEED = int(os.environ.get("EXAMPLES", "12")), int(os.environ.get("SEED", "0"))


def wrong(example: Example, name: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """The first thing that is wrong with an example in this process, if any."""
    try:
        example.check(group)
    except Exception as error:
        return [f"{name} ({example}): {type(error).__name__}: {error}"]
    return []


def over_processes() -> list[str]:
    """What is wrong in this one of three."""
    groups = {3: dist.group.WORLD, 2: dist.new_group([0, 1])}
    found: list[str] = []
    for number in range(NUMBER):
        example = Example(SEED, number)
        if dist.get_rank() < example.num_workers:
            name = f"example {number}, rank {dist.get_rank()}"
            found += wrong(example, name, groups[example.num_workers])
    return found


def test_over_processes_every_number_is_the_plain_models() -> None:
    assert not [text for of_rank in watched(over_processes, 3) for text in of_rank]


def test_in_one_process_too() -> None:
    examples = [Example(SEED + 1, number) for number in range(NUMBER)]
    assert not [text for number, each in enumerate(examples) for text in wrong(each, f"example {number}")]
