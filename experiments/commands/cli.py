"""The command line: parses, calls one verb, and turns what happens into an exit status.

A verb is a file beside this one: `options` adds what it takes, `run` does it. Only the verb that is called is
imported, so that help and a typing error answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import gpipe_bench
from gpipe_bench.harness import own_results
from gpipe_bench.harness.processes import number_of, stopping
from gpipe_bench.pipeline.plan.named import suggestion

from ..registry import EXPERIMENTS, program, spelled_out
from .output import (
    BAD_USAGE,
    DONE,
    IO_FAILED,
    READER_GONE,
    give_up_unwritable,
    interrupted,
    prepare_streams,
    say,
)


class Verb(NamedTuple):
    text: str  # what it is for, in the list of verbs
    example: str  # what to type behind the name of the program
    more: str = ""  # a sentence for its own help
    results: bool = True  # whether it reads or writes records; `--results` is taken by all, and told by these


VERBS = {
    "list": Verb(
        "the experiments and how long they take here; --machine: what this machine lacks",
        "list --machine",
    ),
    "run": Verb(
        "run an experiment, then compare",
        "run table1 --only half=transformer",
        "What is on record is not run again, and a run that was ended goes on from where it was. An "
        "experiment's name alone does the same: table1.",
    ),
    "compare": Verb(
        "the paper's numbers, ours and a verdict for each, from records alone",
        "compare table1 --full",
        "Shows your own records, or those that come with the project where you have none.",
    ),
    "report": Verb(
        "every number of the paper beside ours, as one HTML page and a CSV file", "report --output page"
    ),
    "plan": Verb(
        "how to train a model on your machines, how long a step takes; --bytes: if it fits",
        "plan gpt2-xl --accelerators 4 --memory-gib 24 --batch-size 256 --device-type rtx4090 --precision "
        "bf16",
        "docs/plan.md says how to give a model of your own.",
        results=False,
    ),
    "schedule": Verb(
        "draw and check a schedule: one row per worker, length, bubble, activations",
        "schedule zb-v --workers 4 --microbatches 8",
        results=False,
    ),
    "check-engine": Verb(
        "whether an engine is right: gradients, micro-batches, recomputation",
        "check-engine my_engine:Engine",
        "Takes seconds and times nothing. docs/own-engine.md says what an engine is.",
        results=False,
    ),
    "guard": Verb(
        "exact counters against the committed ones, and speed against another revision",
        "guard --repo . --base main --benchmarks benchmarks.py",
        "Without --base only the counters are checked. docs/guard.md has a workflow for your CI.",
    ),
}
"""Verbs in the order of the help."""

GROUPS = {
    "The paper": ("list", "run", "compare", "report"),
    "Your model": ("plan", "schedule"),
    "Your engine and repository": ("check-engine", "guard"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. Bad usage is one line on standard error."""
    prepare_streams()
    arguments = spelled_out(sys.argv[1:] if arguments is None else arguments)
    try:
        with stopping():
            if not arguments:
                say(overview())
                return DONE
            first = arguments[0]
            if first not in VERBS and not first.startswith("-"):
                close = suggestion(first, [*VERBS, *EXPERIMENTS])
                raise ValueError(f"unknown verb {first!r}{close}; `{program()}` alone says what there is")
            called = next((word for word in arguments if word in VERBS), "")
            options = parser([called]).parse_args(arguments)
            options.arguments, options.is_own = arguments, options.results is None
            options.results = options.results or own_results()
            status: int = _module(options.verb).run(options)
            sys.stdout.flush()
    except ValueError as error:
        return complain(str(error))
    except ImportError as error:
        return complain(f"{error}; `{program()} list --machine` says what is missing and how to get it")
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return interrupted(number_of(error))
    except BrokenPipeError:  # the reader of a pipe has seen enough, as with `| head`
        return READER_GONE
    except OSError as error:  # a full disk behind standard output, a folder that vanished
        return complain(str(error), IO_FAILED)
    finally:
        give_up_unwritable()
    return status


def overview() -> str:
    """The verbs and the commands to type first, in one screen."""
    name = program()
    first = (
        ("list --machine", "what this machine can run, and what it lacks"),
        ("compare table1", "the paper's Table 1 beside our numbers; nothing is run"),
        ("run table1", "the same numbers, made here in a few minutes"),
    )
    lines = [
        f"gpipe-bench {gpipe_bench.__version__}: reproduces the numbers of GPipe (arXiv 1811.06965),",
        "plans and checks pipelines of your own, and guards their speed.",
        "",
        "Type first:",
        *(f"  {f'{name} {command}':<{len(name) + 16}}  {what}" for command, what in first),
    ]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {verb:<14}{VERBS[verb].text}" for verb in verbs)]
    return "\n".join(
        [
            *lines,
            "",
            "`--help` behind a verb has its options and an example. To train a model of your own take",
            "`gpipe_bench.pipeline.Pipeline`; examples/two_processes.py is a whole training.",
        ]
    )


def parser(called: Container[str] = VERBS) -> argparse.ArgumentParser:
    """All verbs, and the options of those that are called."""
    name = program()
    found = _Parser(
        prog=name,
        epilog="exit status: 0 done, 1 a verdict (--assert), guard, engine, schedule or machine failed, 2 "
        "bad usage, 3 a case failed, 74 output could not be written, 130 and 143 ended by SIGINT and SIGTERM",
        allow_abbrev=False,
    )
    found.add_argument("--version", action="version", version=f"gpipe-bench {gpipe_bench.__version__}")
    verbs = found.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb_name, (text, example, more, results) in VERBS.items():
        described = f"{text[0].upper()}{text[1:]}.{' ' * bool(more)}{more}"
        verb = verbs.add_parser(verb_name, description=described, allow_abbrev=False)
        verb.example = f"{name} {example}"
        if verb_name not in called:
            continue
        verb.add_argument(
            "--results", type=Path, metavar="DIR",
            help="folder of the records; default: results/local" if results else argparse.SUPPRESS,
        )  # fmt: skip
        verb.add_argument(
            "--json", action="store_true", help="JSON lines on standard output and nothing else"
        )
        _module(verb_name).options(verb)
    return found


def complain(message: str, status: int = BAD_USAGE) -> int:
    """Prints one line on standard error; returns the status."""
    with contextlib.suppress(OSError):  # the exit status says it too
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where the options are explained. The help is the overview, and of a
    verb its options and an example.
    """

    example = ""

    def error(self, message: str) -> NoReturn:
        sys.exit(complain(f"{message}; see {self.prog} --help"))

    def format_help(self) -> str:
        if self.prog == program():
            return f"{overview()}\n\n{self.epilog}\n"
        return f"{super().format_help()}\nexample:\n  {self.example}\n"  # in a line, to be copied


def _module(verb: str) -> Any:
    return importlib.import_module(f"gpipe_bench.experiments.commands.{verb.replace('-', '_')}")
