"""What `plan` and `size` both read from the command line, with one refusal for each value that is none."""

from __future__ import annotations

import argparse
import sys

GIB = 2**30
PRECISIONS = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
MOST_GIB = 1e6


def memory_bytes(arguments: argparse.Namespace) -> int:
    """Of one accelerator. `ValueError` for what none has."""
    if not 2**-20 <= arguments.memory_gib < MOST_GIB:
        raise ValueError(
            f"--memory-gib {arguments.memory_gib:g}: give the GiB of one accelerator, such as 24"
        )
    return int(arguments.memory_gib * GIB)


def reserve_bytes(arguments: argparse.Namespace) -> int | None:
    """Held back of it; None where nobody says. `ValueError` for less than nothing."""
    if arguments.reserve_gib is None:
        return None
    if not 0 <= arguments.reserve_gib < MOST_GIB:
        raise ValueError(
            f"--reserve-gib {arguments.reserve_gib:g}: give the GiB of each accelerator that are not for "
            "tensors, 0 or more"
        )
    return int(arguments.reserve_gib * GIB)


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """`ValueError` for an option that is given with a number below 1, alone or in a list."""
    for name in names:
        given = getattr(arguments, name)
        for number in given if isinstance(given, list) else [given]:
            if number is not None and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} {number}: give 1 or more")


def precision(arguments: argparse.Namespace) -> str:
    """The name that the library has for it. `ValueError` for one that is not known."""
    if arguments.precision not in PRECISIONS:
        raise ValueError(f"--precision {arguments.precision}: choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[arguments.precision]


def find_own_modules() -> None:
    """Makes one's own modules importable from the folder in which this was started."""
    if "" not in sys.path:
        sys.path.insert(0, "")
