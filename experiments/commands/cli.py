"""The command line: parses, calls one verb, and turns what happens into an exit status.

Nothing heavy is imported before a verb needs it; `--help` and a typing error answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import give_up_unwritable, prepare_streams
from gpipe_bench.harness.places import own_results
from gpipe_bench.harness.running.stopping import number_of, stopping
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.plan.schedules.known import NAMED

PROFILES = ("smoke", "short", "full")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. Bad usage is one line on standard error."""
    prepare_streams()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = _parser().parse_args(arguments)
        options.arguments = arguments
        with stopping():
            status = _verb(options.verb)(options)
            sys.stdout.flush()
    except ValueError as error:
        return _complain(str(error))
    except ImportError as error:
        return _complain(f"{error}; `doctor` says what is missing and how to get it")
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return exits.interrupted(number_of(error))
    except BrokenPipeError:  # the reader of a pipe has seen enough, as with `| head`
        return exits.READER_GONE
    except OSError as error:  # a full disk behind standard output, a folder that vanished
        return _complain(str(error), exits.IO_FAILED)
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(_complain(f"{message}; see {self.prog} --help"))


def _complain(message: str, status: int = exits.BAD_USAGE) -> int:
    with contextlib.suppress(OSError):  # the exit status says it too
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m experiments",
        description="Reproduce the tables and figures of GPipe (arXiv 1811.06965), and compare.",
        epilog="exit status: 0 done, 1 a verdict failed under --assert, 2 bad usage, 3 a case failed, "
        "130 and 143 ended by SIGINT and SIGTERM",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = _add(verbs, "list", "what there is, and how long it takes")
    verb.add_argument(
        "--models", action="store_true", help="the model zoo instead: layers and exact parameters"
    )

    verb = _add(verbs, "doctor", "what this machine can run, and what it lacks")
    verb.add_argument(
        "--device", choices=("auto", "cuda"), default="auto",
        help="cuda: what .ci/gpu would run here, how long each step takes and what it needs",
    )  # fmt: skip

    verb = _add(verbs, "run", "run an experiment; what is on record is not run again")
    verb.add_argument("name", metavar="NAME", help="an experiment, see list")
    verb.add_argument("--profile", choices=PROFILES, default="short", help="default: %(default)s")
    verb.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )
    verb.add_argument("--engine", metavar="NAME", help="the engine under test, where an experiment runs one")
    verb.add_argument("--data", type=Path, metavar="PATH", help="your own images, where it trains on some")
    verb.add_argument("--text", type=Path, metavar="PATH", help="your own text, likewise")
    verb.add_argument(
        "--parallel-text", type=Path, metavar="PATH", help="its translation, line by line, to train on pairs"
    )
    verb.add_argument(
        "--only", action="append", default=[], metavar="KEY=VALUE",
        help="only the cases with this value; the same key again adds a value, another key narrows",
    )  # fmt: skip
    verb.add_argument("--fresh", action="store_true", help="run again what is on record")
    verb.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="cases at the same time, where an experiment times nothing; default there: cores, at most 8",
    )
    verb.add_argument(
        "--assert",
        dest="assert_",
        action="store_true",
        help="exit with 1 if a verdict is `above` or `below`, after printing",
    )

    verb = _add(verbs, "compare", "paper | ours | verdict, from records alone")
    verb.add_argument("name", metavar="NAME", help="an experiment, see list")
    verb.add_argument("--profile", choices=PROFILES, help="default: that of the latest record")
    verb.add_argument("--engine", metavar="NAME", help="of several runs the latest in which it took part")
    verb.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    verb.add_argument(
        "--machines",
        nargs="+",
        metavar="MACHINE",
        help="several machines in one table: names under results/reference, local, folders, files of export",
    )

    verb = _add(
        verbs, "hypotheses", "tested reasons for differences: settings of the model against the paper"
    )
    verb.add_argument("name", metavar="NAME", help="an experiment, see list")
    verb.add_argument("--all", action="store_true", help="every combination, not the nearest few")

    verb = _add(verbs, "report", "every number of the paper beside ours, as one HTML page and markdown")
    verb.add_argument("--output", type=Path, metavar="DIR", help="default: the results folder")
    verb.add_argument(
        "--with", dest="with_", action="append", default=[], type=Path, metavar="FILE",
        help="also the records of a file that export wrote; may be repeated",
    )  # fmt: skip
    verb.add_argument("--engine", metavar="NAME", help="first of all the runs in which it took part")
    verb.add_argument("--no-figures", action="store_true", help="numbers and timelines only")

    verb = _add(verbs, "guard", "exact counters against the committed ones; speed against another revision")
    verb.add_argument(
        "--base", metavar="REF", help="time the working tree against where it left this revision"
    )
    verb.add_argument(
        "--update",
        action="store_true",
        help="write the committed counters anew; the reason goes into the commit",
    )
    verb.add_argument(
        "--only", action="append", default=[], metavar="BENCHMARK", help="time only this one; may be repeated"
    )
    verb.add_argument(
        "--removed",
        action="append",
        default=[],
        metavar="BENCHMARK",
        help="a benchmark of the base that is gone on purpose",
    )
    verb.add_argument(
        "--budget-s", type=float, default=150.0, metavar="S", help="time for all rounds; default: %(default)g"
    )
    verb.add_argument("--history", type=Path, metavar="DIR", help="also write files for trend tools there")
    verb.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also add the result to this file, as to a job's summary",
    )
    verb.add_argument(
        "--require-conclusive", action="store_true", help="exit with 1 where nothing can be told, too"
    )
    verb.add_argument("--repo", type=Path, metavar="DIR", help="guard another repository, with:")
    verb.add_argument("--engine", metavar="MODULE:ATTRIBUTE", help="its engine, by this project's benchmarks")
    verb.add_argument(
        "--benchmarks", type=Path, metavar="FILE", help="functions of its own, a dictionary BENCHMARKS"
    )
    verb.add_argument(
        "--path", action="append", default=[], metavar="FOLDER",
        help="where its modules are, below DIR; default: DIR and DIR/src",
    )  # fmt: skip
    verb.add_argument("--build", metavar="COMMAND", help="run in the base's checkout before it is timed")

    verb = _add(verbs, "check-engine", "whether an engine is right: gradients, micro-batches, recomputation")
    verb.add_argument("engine", metavar="MODULE:ATTRIBUTE", help="your engine, or a known one")
    verb.add_argument(
        "--timeout-s", type=float, default=30.0, metavar="S",
        help="after which a step counts as hung; default: %(default)g",
    )  # fmt: skip

    verb = _add(verbs, "export", "your records as one file, to send to somebody else")
    verb.add_argument("name", nargs="*", metavar="NAME", help="experiments; default: all on record")
    verb.add_argument("--output", type=Path, metavar="FILE.zip", help="default: the results folder's name")

    verb = _add(verbs, "check", "whether a file of records is whole, unaltered and can be true")
    verb.add_argument("file", type=Path, metavar="FILE", help="one that export wrote")

    verb = _add(verbs, "size", "the largest model for your accelerators, or where to cut one you have")
    verb.add_argument(
        "model", metavar="MODEL",
        help="transformer-lm or amoebanet-d, with Table 1's options; a published shape (gpt2, llama-70b, "
        "unet-5-64 ...); one's own as module:function",
    )  # fmt: skip
    verb.add_argument("--num-stages", type=int, required=True, metavar="K", help="accelerators")
    verb.add_argument("--cap-gib", type=float, required=True, metavar="GIB", help="memory of each")
    verb.add_argument("--num-layers", type=int, metavar="L", help="of a given model; without it, search")
    verb.add_argument("--num-filters", type=int, metavar="D", help="of a given AmoebaNet")
    verb.add_argument(
        "--batch-size", type=int, metavar="N",
        help="of a shape or one's own model; default: 32, or as many as the example has",
    )  # fmt: skip
    verb.add_argument(
        "--optimizer", choices=("sgd", "rmsprop", "adam"),
        help="default: rmsprop for Table 1's models, adam for others",
    )  # fmt: skip
    verb.add_argument("--num-microbatches", type=int, metavar="M", help="default: what needs least memory")
    verb.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the activations (autocast); default: %(default)s",
    )
    verb.add_argument(
        "--schedule", choices=NAMED, help="of a given model: what each worker holds; without it, gpipe"
    )
    verb.add_argument(
        "--remat", metavar="WHICH", help="with --schedule: as for the verb schedule; default: never"
    )
    verb.add_argument(
        "--compiled", action="store_true", help="layers as torch.compile keeps and fuses them; takes seconds"
    )

    verb = _add(verbs, "plan", "how to train a model on your machines, and how long a step will take")
    verb.add_argument(
        "model",
        metavar="MODEL",
        help="a published shape (gpt2-xl, llama-8b ...), or your own: module:function",
    )
    verb.add_argument("--accelerators", type=int, required=True, metavar="N", help="on all hosts together")
    verb.add_argument("--memory-gib", type=float, required=True, metavar="GIB", help="of each")
    verb.add_argument(
        "--batch-size", type=int, required=True, metavar="N", help="examples of a mini-batch, of all replicas"
    )
    verb.add_argument(
        "--optimizer", choices=("sgd", "rmsprop", "adam"), default="adam", help="default: %(default)s"
    )
    verb.add_argument(
        "--precision", default="float32", metavar="TYPE",
        help="of the activations (autocast): float32 or bfloat16, also fp32, bf16; default: %(default)s",
    )  # fmt: skip
    verb.add_argument(
        "--device-type", default="measured", metavar="NAME",
        help="an accelerator by its name, such as h100, under a roofline; default: measured, the layers are "
        "timed on this machine",
    )  # fmt: skip
    verb.add_argument("--hosts", type=int, default=1, metavar="N", help="default: %(default)s")
    verb.add_argument(
        "--link", metavar="LINK",
        help="inside a host: nvlink, pcie, infiniband, ethernet or a preset; default: nvlink, or loopback "
        "where the layers are timed here",
    )  # fmt: skip
    verb.add_argument("--between", metavar="LINK", help="between hosts, likewise")
    verb.add_argument("--num-layers", type=int, metavar="L", help="blocks of GPT-2 or Llama, not the shape's")
    verb.add_argument(
        "--schedule", action="append", default=[], metavar="NAME", help="only this one; may be repeated"
    )
    verb.add_argument(
        "--num-microbatches", action="append", type=int, default=[], metavar="M", help="likewise"
    )
    verb.add_argument(
        "--pp", action="append", type=int, default=[], metavar="K", help="workers of a pipeline, likewise"
    )
    verb.add_argument(
        "--tp", action="append", type=int, default=[], metavar="N",
        help="accelerators that compute a layer together, which needs a plan of yours; default: 1",
    )  # fmt: skip
    verb.add_argument("--no-fsdp", action="store_true", help="every replica holds all parameters")
    verb.add_argument("--compiled", action="store_true", help="layers as torch.compile keeps them")
    verb.add_argument("--top", type=int, default=5, metavar="N", help="plans to print; default: %(default)s")
    verb.add_argument(
        "--script", type=Path, metavar="FILE.py", help="write the script that trains as planned"
    )
    verb.add_argument("--frontier", type=Path, metavar="FILE.png", help="draw memory against time")

    verb = _add(
        verbs, "schedule", "draw and check a schedule: one row per worker, length, bubble, activations"
    )
    verb.add_argument("name", nargs="?", metavar="NAME", help=f"{', '.join(NAMED)}; none with --from")
    verb.add_argument("--workers", type=int, metavar="K", help="processes or devices")
    verb.add_argument("--num-stages", type=int, metavar="K", help="instead: the stages of all workers")
    verb.add_argument(
        "--stages-per-worker", type=int, metavar="V", help="of interleaved and breadth-first; default: 2"
    )
    verb.add_argument("--microbatches", "--num-microbatches", dest="num_microbatches", type=int, metavar="M")
    verb.add_argument(
        "--remat",
        metavar="WHICH",
        help=f"{', '.join(REMAT_MODES)}, or one choice per stage, of these or of micro-batches: always,0-2+5,"
        "never; default: the schedule's, or as in the file",
    )
    verb.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write it, one line per worker, as torch reads it: 0F0,0F1,0B1",
    )
    verb.add_argument("--draw", type=Path, metavar="FILE.svg", help="write a picture of it")
    verb.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="read what --csv or torch writes"
    )
    return parser


def _add(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    verb.add_argument(
        "--results", type=Path, default=own_results(), metavar="DIR", help="default: results/local"
    )
    verb.add_argument("--json", action="store_true", help="JSON lines on standard output and nothing else")
    return verb
