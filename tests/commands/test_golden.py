"""What commands print, as texts under `tests/golden/`: a failure shows the difference that a user would see.

    python -m tests.commands.test_golden            writes all anew; the diff is what changed for users
    python -m tests.commands.test_golden compare    those whose command contains this word

Everything comes from the reference records or is modelled, so it is the same on every machine.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import sys
import tempfile
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.registry import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden"
REFERENCE = "results/reference/cpu-2-cores"
ON_PAPER = "--device-type a100 --memory-gib 40"  # roofline: no clock takes part
COMMANDS = [
    *(f"{verb} --help".strip() for verb in ("", *cli.VERBS)),
    "list --results EMPTY",
    *(f"compare {name} --results {REFERENCE}" for name in EXPERIMENTS),
    f"compare table3 --results {REFERENCE} --json",
    f"report --results {REFERENCE} --output EMPTY --no-figures",
    "schedule gpipe --workers 4 --microbatches 8 --remat always",
    "schedule zb-v --workers 4 --microbatches 8",
    f"plan gpt2 --accelerators 8 --hosts 2 --between infiniband --batch-size 64 --schedule 1f1b {ON_PAPER}",
    f"plan llama-7b --num-layers 4 --accelerators 4 --batch-size 16 --precision bf16 --tp 2 {ON_PAPER}",
    f"plan amoebanet-d --num-layers 6 --num-filters 64 --accelerators 2 --batch-size 32 {ON_PAPER}",
    f"plan gpt2-xl --accelerators 4 --batch-size 32 --bytes {ON_PAPER}",
    f"plan unet-5-64 --accelerators 2 --batch-size 8 --bytes --json {ON_PAPER}",
]
# Folders of this machine are no results, nor is how far a plan is, which a slow machine says.
VOLATILE = re.compile(
    rf"{re.escape(str(ROOT))}|{re.escape(tempfile.gettempdir())}/[^/\s]+|^(?:layers|ways) \d+/\d+\n", re.M
)


def said(line: str) -> str:
    """Status and both streams of a command, in this process."""
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # as `python`
    variables = {"NO_COLOR": "1", "COLUMNS": "120", "PATH": found}
    out, err = io.StringIO(), io.StringIO()
    with ExitStack() as stack:
        empty = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(mock.patch.object(sys, "argv", [str(ROOT / "experiments" / "__main__.py")]))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        stack.enter_context(chdir(ROOT))
        os.environ.pop("CI", None)
        try:
            status = cli.main(line.replace("EMPTY", empty).split())
        except SystemExit as end:
            status = end.code or 0
    text = f"gpipe-bench {line}\nstatus {status}\n{out.getvalue()}\n{err.getvalue()}\n"
    return re.sub(r"[ \t]+$", "", VOLATILE.sub("", text), flags=re.M).rstrip() + "\n"


def place(line: str) -> Path:
    name = line.replace(f" --results {REFERENCE}", "").replace(ON_PAPER, "").strip()
    return FOLDER / (re.sub(r"[^\w.]+", "-", name).strip("-") + ".txt")


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: place(line).stem)
def test_a_command_prints_what_it_printed(line: str) -> None:
    if line.endswith("--help") and sys.version_info[:2] != (3, 11):
        pytest.skip("argparse lays out help in another way")
    known, found = place(line).read_text(encoding="utf-8"), said(line)
    changed = difflib.unified_diff(known.splitlines(), found.splitlines(), "on record", "now", lineterm="")
    assert found == known, "\n".join(changed)


def test_every_text_is_of_a_command() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {place(line).name for line in COMMANDS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in COMMANDS:
        if all(word in each for word in sys.argv[1:]):
            place(each).write_text(said(each), encoding="utf-8")
