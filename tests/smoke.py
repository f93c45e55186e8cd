"""Runs every experiment's smoke profile by the command that a user types, some at a time.

    python -m tests.smoke --cores 2 --results DIR [arguments of `nox -s NAME -- ...`]

Exit status: 1 where one of them fails, or where one that ends well has put nothing on record.
"""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = runpy.run_path(str(ROOT / "experiments" / "registry.py"))["EXPERIMENTS"]


def run(name: str, results: Path, arguments: list[str]) -> tuple[bool, str]:
    """Whether it went well, and what it says."""
    command = ["-s", name, "--", "--profile", "smoke", "--results", str(results), *arguments]
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "nox", *command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    kept = (results / f"{name}.jsonl").exists()
    head = f"nox {' '.join(command)}: exit status {done.returncode} after {time.monotonic() - start_s:.0f} s"
    return done.returncode == 0 and kept, f"{head}{'' if kept else ', nothing on record'}\n{done.stdout}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="smoke", description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=int, default=1, metavar="N", help="experiments at a time")
    parser.add_argument("--results", type=Path, required=True, metavar="DIR")
    options, more = parser.parse_known_args()
    failed = False
    with ThreadPoolExecutor(options.cores) as pool:
        for each in as_completed([pool.submit(run, name, options.results, more) for name in EXPERIMENTS]):
            went_well, said = each.result()
            print(said, flush=True)
            failed |= not went_well
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
