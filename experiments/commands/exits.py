"""Exit statuses of the command line, which every verb returns and `cli` passes on."""

from __future__ import annotations

DONE, VERDICT_FAILED, BAD_USAGE, CASE_FAILED = 0, 1, 2, 3
"""Of what went as it should and of what the user asked to know."""

IO_FAILED, INTERRUPTED, READER_GONE = 74, 130, 141
"""What is expected of a program that could not write (sysexits.h), or that was stopped by the keyboard or a
closed pipe."""
