"""The command line as a whole: every verb with its options."""

from __future__ import annotations

from gpipe_bench.experiments.commands.parsing.engines import check_engine_options, guard_options
from gpipe_bench.experiments.commands.parsing.machines import plan_options, schedule_options, size_options
from gpipe_bench.experiments.commands.parsing.options import Parser
from gpipe_bench.experiments.commands.parsing.records import (
    check_options,
    compare_options,
    doctor_options,
    export_options,
    hypotheses_options,
    list_options,
    report_options,
    run_options,
)

VERBS = (
    list_options, doctor_options, run_options, compare_options, hypotheses_options, report_options,
    plan_options, size_options, schedule_options, check_engine_options, guard_options, export_options,
    check_options,
)  # fmt: skip
"""In the order of the help: the paper first, then one's own model, engine and repository."""


def parser() -> Parser:
    """Of all verbs. Nothing heavy is imported for it."""
    found = Parser(
        prog="python -m experiments",
        description="Reproduce the tables and figures of GPipe (arXiv 1811.06965) and compare them with the "
        "paper; plan and check pipelines of your own. Begin with `doctor`, then `run table1`; "
        "`VERB --help` explains a verb.",
        epilog="exit status: 0 done, 1 a verdict or the guard failed where asked to assert, 2 bad usage, 3 a "
        "case failed, 74 output could not be written, 130 and 143 ended by SIGINT and SIGTERM",
        allow_abbrev=False,
    )
    verbs = found.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    for options in VERBS:
        options(verbs)
    return found
