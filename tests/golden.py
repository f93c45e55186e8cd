"""What users see, as digests: the proof that a change of structure changes no result.

    python -m tests.golden                  compare with tests/golden.txt; status 1 names what differs
    python -m tests.golden --write          make the digests anew; the commit says which changed, and why
    python -m tests.golden --keep FOLDER    also keep each text there, to see by `diff` what differs
    python -m tests.golden --only compare   commands that contain this word alone

Everything comes from the reference records or is modelled, so it is the same on every machine; with another
version of Python sums may differ in their last digits. `test_golden.py` compares them in every run.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.registry import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = Path(__file__).with_suffix(".txt")
REFERENCE = "results/reference/cpu-2-cores"

VERBS = (
    "list", "run", "compare", "report", "plan", "schedule", "check-engine", "guard",
)  # fmt: skip
SCHEDULES = (
    "naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
    "dualpipe-v",
)  # fmt: skip
ON_PAPER = "--device-type a100 --memory-gib 40 --json"  # roofline: no clock takes part
PLANS = (
    "gpt2-medium --accelerators 4 --batch-size 64 --schedule gpipe --schedule 1f1b --num-microbatches 16",
    "gpt2-medium --accelerators 4 --batch-size 64 --pp 4 --schedule zb-h1 --num-microbatches 8 --no-fsdp",
    "gpt2 --accelerators 8 --hosts 2 --between infiniband --batch-size 64 --schedule 1f1b",
    "llama-7b --num-layers 4 --accelerators 4 --batch-size 32 --precision bf16 --pp 2 --num-microbatches 8",
    "llama-7b --num-layers 4 --accelerators 4 --batch-size 16 --precision bf16 --tp 2 --schedule 1f1b",
    "transformer-lm --num-layers 8 --accelerators 2 --batch-size 32 --schedule interleaved --schedule gpipe",
    "amoebanet-d --num-layers 6 --num-filters 64 --accelerators 2 --batch-size 32 --schedule gpipe",
    "unet-5-64 --accelerators 2 --batch-size 8 --schedule gpipe --num-microbatches 4",
)
SIZES = (
    "gpt2-xl --accelerators 4 --batch-size 32",
    "llama-8b --accelerators 8 --batch-size 32 --precision bf16 --schedule 1f1b",
    "transformer-lm --num-layers 48 --accelerators 8 --batch-size 32",
    "amoebanet-d --num-layers 18 --num-filters 256 --accelerators 4 --batch-size 128",
)
# Texts that name this checkout are no results, nor is how far a plan is, which a slow machine says.
VOLATILE = re.compile(
    rf"{re.escape(str(ROOT))}|{re.escape(tempfile.gettempdir())}/[^/]+|^(?:layers|ways) \d+/\d+\n", re.M
)


def commands(page: Path) -> dict[str, list[str]]:
    """Each command line by what it is called in the digests; `page` is where the report goes."""
    lines = [f"{verb} --help" for verb in ("", *VERBS)]
    lines += [f"list --json --results {page / 'empty'}"]
    for name in EXPERIMENTS:
        lines += [f"compare {name} --results {REFERENCE}{way}" for way in ("", " --json")]
    for name in SCHEDULES:
        lines += [
            f"schedule {name} --workers 4 --microbatches 8{way}" for way in ("", " --json", " --remat always")
        ]
    lines += [f"plan {asked} {ON_PAPER}" for asked in PLANS]
    lines += [f"plan {asked} --bytes --memory-gib 40 --json" for asked in SIZES]
    return {line.replace(str(page), "").strip(): line.split() for line in lines}


def called(words: Sequence[str]) -> str:
    """Status and both streams of one command, in this process, without what is no result."""
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # as `python`
    variables = {"NO_COLOR": "1", "COLUMNS": "120", "PATH": found}
    out, err = io.StringIO(), io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(mock.patch.object(sys, "argv", [str(ROOT / "experiments" / "__main__.py")]))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        stack.enter_context(chdir(ROOT))
        os.environ.pop("CI", None)
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code or 0
    return VOLATILE.sub("", f"status {status}\n{out.getvalue()}\n{err.getvalue()}")


def texts(chosen: Callable[[str], bool], folder: Path) -> dict[str, str]:
    """What each command says whose name is `chosen`; the files of the report are further texts."""
    found = {name: called(words) for name, words in commands(folder).items() if chosen(name)}
    if chosen("report"):
        out = folder / "page"
        found["report"] = called(["report", "--results", REFERENCE, "--output", str(out), "--no-figures"])
        found |= {f"report {path.name}": path.read_text() for path in sorted(out.iterdir()) if path.is_file()}
    return found


def known() -> dict[str, str]:
    """The digests on record, by the names of their texts."""
    lines = DIGESTS.read_text().splitlines() if DIGESTS.exists() else []
    return {name: digest for digest, name in (line.split(" ", 1) for line in lines)}


def digests(texts: dict[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = texts(lambda name: options.only in name, Path(folder))
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (options.keep / re.sub(r"[^\w.-]+", "_", name)).write_text(text)
    now, before = digests(found), {name: each for name, each in known().items() if options.only in name}
    if options.write:
        kept = known() | now if options.only else now
        DIGESTS.write_text("".join(f"{digest} {name}\n" for name, digest in kept.items()))
    changed = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    print(*(f"differs: {name}" for name in changed), f"{len(now)} texts, {len(changed)} differ", sep="\n")
    return 1 if changed and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
