"""The command line: parses, calls one verb, and turns what happens into an exit status.

Nothing heavy is imported before a verb needs it; `--help` and a typing error answer at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import give_up_unwritable, prepare_streams
from gpipe_bench.experiments.commands.parsing.options import complain
from gpipe_bench.experiments.commands.parsing.parser import parser
from gpipe_bench.experiments.registry import spelled_out
from gpipe_bench.harness.report.width import width_of, within
from gpipe_bench.harness.signals import number_of, stopping

AS_WIDE_AS_IT_IS = ("report", "export")
"""Verbs that write text into files, whatever the terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. Bad usage is one line on standard error."""
    prepare_streams()
    arguments = spelled_out(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parser().parse_args(arguments)
        options.arguments = arguments
        columns = None if options.verb in AS_WIDE_AS_IT_IS else width_of(sys.stdout)
        with stopping(), within(columns):
            status = _verb(options.verb)(options)
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


def _verb(name: str) -> Callable[[argparse.Namespace], int]:
    if name == "list":
        from gpipe_bench.experiments.commands.list import run
    elif name == "doctor":
        from gpipe_bench.experiments.commands.doctor import run
    elif name == "compare":
        from gpipe_bench.experiments.commands.compare import run
    elif name == "hypotheses":
        from gpipe_bench.experiments.commands.hypotheses import run
    elif name == "report":
        from gpipe_bench.experiments.commands.report import run
    elif name == "size":
        from gpipe_bench.experiments.commands.size import run
    elif name == "plan":
        from gpipe_bench.experiments.commands.plan import run
    elif name == "schedule":
        from gpipe_bench.experiments.commands.schedule import run
    elif name == "guard":
        from gpipe_bench.experiments.commands.guard import run
    elif name == "check-engine":
        from gpipe_bench.experiments.commands.exchange.check_engine import run
    elif name == "export":
        from gpipe_bench.experiments.commands.exchange.export import run
    elif name == "check":
        from gpipe_bench.experiments.commands.exchange.check import run
    else:
        from gpipe_bench.experiments.commands.run import run
    return run
