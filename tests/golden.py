"""What users see, as digests: the proof that a change of structure changes no result.

    python -m tests.golden                  compare with tests/golden.txt; status 1 names what differs
    python -m tests.golden --write          make the digests anew; the commit says which changed, and why
    python -m tests.golden --keep FOLDER    also keep each text there, to see by `diff` what differs
    python -m tests.golden --only compare   commands that contain this word alone

Everything comes from the reference records or is modelled, so it is the same on every machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpipe_bench.experiments.registry import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = Path(__file__).with_suffix(".txt")
REFERENCE = "results/reference/cpu-2-cores"

VERBS = (
    "list", "doctor", "run", "compare", "hypotheses", "report", "plan", "size", "schedule", "check-engine",
    "guard", "export", "check",
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
# Seconds that a search took and texts that name this checkout are no results.
VOLATILE = re.compile(rf'{re.escape(str(ROOT))}|{re.escape(tempfile.gettempdir())}/[^/]+|"search_s":[^,}}]*')


def commands(page: Path) -> dict[str, list[str]]:
    """Each command line by what it is called in the digests; `page` is where the report goes."""
    lines = [f"{verb} --help" for verb in ("", *VERBS)]
    lines += [f"list --json --results {page / 'empty'}"]
    for name in EXPERIMENTS:
        lines += [f"compare {name} --results {REFERENCE}{way}" for way in ("", " --json", " --markdown")]
        lines += [f"hypotheses {name} --all --json --results {REFERENCE}"]
    for name in SCHEDULES:
        lines += [
            f"schedule {name} --workers 4 --microbatches 8{way}" for way in ("", " --json", " --remat always")
        ]
    lines += [f"plan {asked} {ON_PAPER}" for asked in PLANS]
    lines += [f"size {asked} --memory-gib 40 --json" for asked in SIZES]
    return {line.replace(str(page), "").strip(): line.split() for line in lines}


def said(arguments: list[str]) -> str:
    """Status and both streams of one command, without what is no result."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # as `python`
    environment = (
        {name: value for name, value in os.environ.items() if name != "CI"} | threads | {"PATH": found}
    )
    done = subprocess.run(
        [sys.executable, "-m", "experiments", *arguments],
        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return VOLATILE.sub("", f"status {done.returncode}\n{done.stdout}\n{done.stderr}")


def texts(only: str, folder: Path) -> dict[str, str]:
    """What each command says, by its name; the files of the report as further texts."""
    asked = {name: words for name, words in commands(folder).items() if only in name}
    with ThreadPoolExecutor(os.cpu_count()) as several:
        found = dict(zip(asked, several.map(said, asked.values()), strict=True))
    if only in "report":
        out = folder / "page"
        found["report"] = said(["report", "--results", REFERENCE, "--output", str(out), "--no-figures"])
        found |= {f"report {path.name}": path.read_text() for path in sorted(out.iterdir()) if path.is_file()}
    return found


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = texts(options.only, Path(folder))
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (options.keep / re.sub(r"[^\w.-]+", "_", name)).write_text(text)
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in found.items()}
    lines = DIGESTS.read_text().splitlines() if DIGESTS.exists() else []
    known = {name: digest for digest, name in (line.split(" ", 1) for line in lines)}
    if options.write:
        kept = known | digests if options.only else digests
        DIGESTS.write_text("".join(f"{digest} {name}\n" for name, digest in kept.items()))
    expected = {name for name in known if options.only in name}
    changed = [name for name in sorted(expected | set(digests)) if known.get(name) != digests.get(name)]
    print(*(f"differs: {name}" for name in changed), f"{len(digests)} texts, {len(changed)} differ", sep="\n")
    return 1 if changed and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
