"""Exit statuses, standard output that holds results and nothing else, and streams that can be written to.

Experiments call code that prints, and libraries that write to the file descriptor; under --json none of that
may stand between the JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from gpipe_bench.harness.report.grid import SCREEN, within

DONE, VERDICT_FAILED, BAD_USAGE, CASE_FAILED = 0, 1, 2, 3
"""Exit statuses of all verbs, in the order of the names; 1 also where the machine lacks something."""

IO_FAILED, READER_GONE = 74, 141
"""Exit statuses of a program that could not write (sysexits.h), or whose reader closed the pipe."""


def interrupted(number: int) -> int:
    """Exit status of a program that this signal ended: 130 for an interrupt from the keyboard."""
    return 128 + number


def prepare_streams() -> None:
    """Makes the standard streams take any text. A stream that the caller closed (`>&-`) gets /dev/null: else
    the next file that is opened takes its number, and a library prints into a file of records.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  # lives as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stream that a test put there
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def give_up_unwritable() -> None:
    """Drops what a standard stream could not write: the interpreter would fail again when it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def lines_only() -> Iterator[Callable[[bytes], None]]:
    """Yields a function that writes a line to standard output; whatever else is printed goes to stderr."""
    stdout = sys.stdout
    stdout.flush()
    try:
        descriptor: int | None = stdout.fileno()
    except (io.UnsupportedOperation, AttributeError):  # captured inside this process
        descriptor = None
    if descriptor is None:
        with contextlib.redirect_stdout(sys.stderr):
            yield lambda line: _write(stdout, line)
        return
    kept = os.dup(descriptor)
    sys.stderr.flush()
    os.dup2(sys.stderr.fileno(), descriptor)
    try:
        with open(kept, "wb", closefd=False) as out, contextlib.redirect_stdout(sys.stderr):

            def emit(line: bytes) -> None:
                out.write(line + b"\n")
                out.flush()

            yield emit
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def tell(arguments: argparse.Namespace, lines: Iterable[object], text: Callable[[], str]) -> None:
    """Prints a verb's result: a line of JSON for each of `lines` if `--json` asks for it, else the text."""
    if not arguments.json:
        with within(screen_width()):
            say(text())
        return
    try:
        from msgspec.json import encode
    except ImportError:  # `list --machine` reports that msgspec is missing
        for line in lines:
            print_line(json.dumps(line, default=asdict).encode())
    else:
        for line in lines:
            print_line(encode(line))


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """`ValueError` for an option that is given with a number below 1, alone or in a list."""
    for name in names:
        given = getattr(arguments, name)
        for number in given if isinstance(given, list) else [given]:
            if number is not None and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} {number}: give 1 or more")


def screen_width() -> int:
    """Columns that text for people takes: a terminal's, at most those of `SCREEN`."""
    return min(SCREEN, shutil.get_terminal_size().columns) if sys.stdout.isatty() else SCREEN


def say(text: str) -> None:
    print(text, flush=True)


def warn(*lines: str) -> None:
    """Prints each line as a warning on standard error."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


def write_text(option: str, path: Path, text: str) -> None:
    """Writes the file that an option names. Raises ValueError where it can't be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; give a file in a folder that exists") from error


def print_line(line: bytes) -> None:
    """Writes one line of JSON to standard output, in UTF-8 whatever the locale says."""
    sys.stdout.flush()
    _write(sys.stdout, line)


def _write(stream: object, line: bytes) -> None:
    buffer = getattr(stream, "buffer", None)
    if buffer is not None:
        buffer.write(line + b"\n")
        buffer.flush()
    else:
        stream.write(line.decode() + "\n")  # type: ignore[attr-defined]
