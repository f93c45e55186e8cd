"""A verb's own parser with what all verbs have, and a typing error as one line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any, NoReturn

from gpipe_bench.experiments.commands import exits
from gpipe_bench.harness.places import own_results


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where the options are explained."""

    def error(self, message: str) -> NoReturn:
        sys.exit(complain(f"{message}; see {self.prog} --help"))


def complain(message: str, status: int = exits.BAD_USAGE) -> int:
    """One line on standard error; returns the status."""
    with contextlib.suppress(OSError):  # the exit status says it too
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


def add(verbs: Any, name: str, text: str, more: str = "", *, results: bool = True) -> argparse.ArgumentParser:
    """A verb.

    Args:
        text: what it is for, in the list of verbs
        more: what its own help says besides, such as an example
        results: whether it reads or writes records; `--results` is taken by all, and told by these
    """
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.{' ' * bool(more)}{more}",
        allow_abbrev=False,
    )  # fmt: skip
    verb.add_argument(
        "--results", type=Path, default=own_results(), metavar="DIR",
        help="folder of the records; default: results/local" if results else argparse.SUPPRESS,
    )  # fmt: skip
    verb.add_argument("--json", action="store_true", help="JSON lines on standard output and nothing else")
    return verb
