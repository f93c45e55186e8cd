"""The command line: parses, calls one verb, and turns what happens into an exit status.

A verb is a file beside this one: `options` adds what it takes, `run` does it. Only the verb that is called is
imported, so that `--help` and a typing error answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import give_up_unwritable, prepare_streams
from gpipe_bench.experiments.registry import spelled_out
from gpipe_bench.harness.places import own_results
from gpipe_bench.harness.signals import number_of, stopping


class Verb(NamedTuple):
    """What the help says of a verb."""

    text: str  # what it is for, in the list of verbs
    more: str = ""  # what its own help says besides, such as an example
    results: bool = True  # whether it reads or writes records; `--results` is taken by all, and told by these


VERBS = {
    "list": Verb("the experiments, and how long each profile of them takes on this machine"),
    "doctor": Verb("what this machine can run, and what it lacks"),
    "run": Verb(
        "run an experiment, then compare; what is on record is not run again",
        "Example: run table1 --only half=transformer. A run that was ended goes on from where it was.",
    ),
    "compare": Verb(
        "the paper's numbers, ours and a verdict for each, from records alone",
        "Example: compare table1 --results results/reference/cpu-2-cores shows ours; nothing is run.",
    ),
    "hypotheses": Verb("reasons for differences, tested: what each setting that the paper leaves open does"),
    "report": Verb("every number of the paper beside ours, as one HTML page and markdown"),
    "plan": Verb(
        "how to train a model on your machines, and how long a step will take",
        "Example: plan gpt2-xl --accelerators 4 --memory-gib 24 --batch-size 256 --device-type rtx4090 "
        "--link pcie --precision bf16. docs/plan.md has how to give a model of your own.",
        results=False,
    ),
    "size": Verb(
        "whether a model fits into your accelerators as one pipeline, and where to cut it",
        "Example: size gpt2-xl --accelerators 4 --memory-gib 24. `plan` also says how long a step takes, and "
        "tries replicas and shards.",
        results=False,
    ),
    "schedule": Verb(
        "draw and check a schedule: one row per worker, length, bubble, activations",
        "Example: schedule zb-v --workers 4 --microbatches 8.",
        results=False,
    ),
    "check-engine": Verb(
        "whether an engine is right: gradients, micro-batches, recomputation",
        "Takes seconds and times nothing. Example: check-engine my_engine:Engine.",
        results=False,
    ),
    "guard": Verb(
        "exact counters against the committed ones, and speed against another revision",
        "Without --base only the counters are checked. For a repository of your own: guard --repo . --base "
        "main --engine module:attribute.",
    ),
    "export": Verb("your records as one file, to send to somebody else"),
    "check": Verb("whether a file of records is whole, unaltered and can be true"),
}
"""In the order of the help: the paper first, then one's own model, engine and repository."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. Bad usage is one line on standard error."""
    prepare_streams()
    arguments = spelled_out(sys.argv[1:] if arguments is None else arguments)
    try:
        with stopping():
            called = next((word for word in arguments if word in VERBS), "")
            options = parser([called]).parse_args(arguments)
            options.arguments = arguments
            status: int = _module(options.verb).run(options)
            sys.stdout.flush()
    except ValueError as error:
        return complain(str(error))
    except ImportError as error:
        return complain(f"{error}; `doctor` says what is missing and how to get it")
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return exits.interrupted(number_of(error))
    except BrokenPipeError:  # the reader of a pipe has seen enough, as with `| head`
        return exits.READER_GONE
    except OSError as error:  # a full disk behind standard output, a folder that vanished
        return complain(str(error), exits.IO_FAILED)
    finally:
        give_up_unwritable()
    return status


def parser(called: Container[str] = VERBS) -> argparse.ArgumentParser:
    """All verbs, and the options of those that are called."""
    found = _Parser(
        prog="python -m experiments",
        description="Reproduce the tables and figures of GPipe (arXiv 1811.06965) and compare them with the "
        "paper; plan and check pipelines of your own. Begin with `doctor`, then `run table1`; "
        "`VERB --help` explains a verb.",
        epilog="exit status: 0 done, 1 a verdict or the guard failed where asked to assert, 2 bad usage, 3 a "
        "case failed, 74 output could not be written, 130 and 143 ended by SIGINT and SIGTERM",
        allow_abbrev=False,
    )
    verbs = found.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    for name, (text, more, results) in VERBS.items():
        described = f"{text[0].upper()}{text[1:]}.{' ' * bool(more)}{more}"
        verb = verbs.add_parser(name, help=text, description=described, allow_abbrev=False)
        if name not in called:
            continue
        verb.add_argument(
            "--results", type=Path, default=own_results(), metavar="DIR",
            help="folder of the records; default: results/local" if results else argparse.SUPPRESS,
        )  # fmt: skip
        verb.add_argument(
            "--json", action="store_true", help="JSON lines on standard output and nothing else"
        )
        _module(name).options(verb)
    return found


def complain(message: str, status: int = exits.BAD_USAGE) -> int:
    """One line on standard error; returns the status."""
    with contextlib.suppress(OSError):  # the exit status says it too
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where the options are explained."""

    def error(self, message: str) -> NoReturn:
        sys.exit(complain(f"{message}; see {self.prog} --help"))


def _module(verb: str) -> Any:
    return importlib.import_module(f"gpipe_bench.experiments.commands.{verb.replace('-', '_')}")
