"""`check FILE`: whether a file of records is what it says, as a maintainer asks before taking it in.

Exit status 0: nothing speaks against it; 1: it is foreign, truncated, altered or implausible; 2: there is no
such file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpipe_bench.experiments.commands.output import DONE, VERDICT_FAILED, tell
from gpipe_bench.experiments.report.plausible import Remark, remarks
from gpipe_bench.harness.bundle import records_of, unpack


def options(verb: argparse.ArgumentParser) -> None:
    """Of the verb."""
    verb.add_argument("file", type=Path, metavar="FILE", help="what export wrote")


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError for a file that can't be read."""
    path = arguments.file
    try:
        found = remarks({name: records_of(name, content) for name, content in unpack(path).items()})
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; give a file that export wrote") from error
    except ValueError as error:
        found = [Remark("refused", str(error))]
    refused = any(remark.weight == "refused" for remark in found)
    lines = [
        f"{each.weight}: {each.text}" for each in sorted(found, key=lambda each: each.weight != "refused")
    ]
    lines += [f"check: {path}: {'not to be taken in' if refused else 'nothing speaks against it'}"]
    tell(
        arguments,
        [*(each._asdict() for each in found), {"file": str(path), "refused": refused}],
        lambda: "\n".join(lines),
    )
    return VERDICT_FAILED if refused else DONE
