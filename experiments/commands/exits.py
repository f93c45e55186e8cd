"""Exit statuses of the command line, which every verb returns and `cli` passes on."""

from __future__ import annotations

DONE, VERDICT_FAILED, BAD_USAGE, CASE_FAILED = 0, 1, 2, 3
"""Of what went as it should and of what the user asked to know."""

IO_FAILED, READER_GONE = 74, 141
"""What is expected of a program that could not write (sysexits.h), or whose reader left a pipe."""


def interrupted(number: int) -> int:
    """What is expected of a program that this signal ended: 130 for the keyboard's."""
    return 128 + number
