"""Runs what the pages tell a reader to type, as it is printed, with what the README's commands install.

    python -m tests.documented                     every page and every example
    python -m tests.documented README.md           one of them
    python -m tests.documented --list              what there is

Each page gets a fresh clone of the last commit, without records of its own, in which `.venv` is the one that
nox has made. Its blocks are run from top to bottom:

- `console`: by bash, line by line. A line whose comment begins with `needs` is not run, and the report says
  so. `gpipe-bench run NAME` is run with `--profile smoke`. A session of nox that `.ci/run` or
  `tests/smoke.py` starts as it is printed is left to them. What several pages show is run once.
- `python` behind a line that names a file, such as `train.py`: written there and committed to main.
- other `python` blocks: one program, in their order.

Nothing is forked, replaced or imported first. The exit status is 1 if any of them failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from gpipe_bench.experiments.registry import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv" / "bin" / "python"
BLOCK = re.compile(r"(?ms)^```(\w+)\n(.*?)^```")
# The page of a new experiment: its test takes that experiment through every command.
ELSEWHERE = ("docs/adding-an-experiment.md",)
PAGES = [
    name
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "README.md")
    if (name := str(path.relative_to(ROOT))) not in ELSEWHERE
]
# Sessions that others start, word for word.
STARTED_BY = dict.fromkeys(("tests", "lint", "checks", "guard", "smoke", "docs"), ".ci/run")
STARTED_BY["documented"] = "this file"
STARTED_BY |= dict.fromkeys(EXPERIMENTS, "tests/smoke.py")
STARTED_BY["cuda-without-gpu"] = "the nightly job, as it downloads 540 MB"
EXAMPLES = {  # what a reader types for each file under examples/
    "examples/own_engine.py": ["cd examples && gpipe-bench check-engine own_engine:FillDrain"],
    "examples/own_model_plan.py": ["python examples/own_model_plan.py"],
    "examples/two_processes.py": 2 * ["torchrun --nproc-per-node 2 examples/two_processes.py checkpoint"],
}


class Step(NamedTuple):
    """A command for bash, and why it is not run, if it is not."""

    command: str
    skipped: str = ""


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """Language and text of every block of a page, and the file that the line in front of it names, if any."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n")[2]
        named = re.findall(r"`(\w+\.py)`", before) if before.endswith(":") else []
        yield match[1], match[2], named[-1] if named else ""


def files(page: str) -> dict[str, str]:
    """The files that a page shows, by name."""
    return {file: text for language, text, file in blocks(page) if language == "python" and file}


def program(page: str) -> str:
    """The Python of a page that is no file."""
    return "\n".join(text for language, text, file in blocks(page) if language == "python" and not file)


def step(line: str) -> Step:
    """A line of a console block, as it is run."""
    command, _, comment = (part.strip() for part in line.partition("  #"))
    words = shlex.split(command.rpartition("&& ")[2])
    if comment.startswith("needs"):
        return Step(command, comment)
    if words[:2] == ["nox", "-s"] and all(word in STARTED_BY for word in words[2:]):
        return Step(command, f"by {STARTED_BY[words[2]]}")
    if words[1:4] == ["-m", "pip", "install"]:
        return Step(command, "it would replace what is installed; the checks install the wheel")
    if words[:2] == ["gpipe-bench", "run"] and "--profile" not in words:
        command += " --profile smoke"
    return Step(command)


def printed(page: str) -> list[Step]:
    """The lines of a page's console blocks, and the sessions of its tables."""
    lines = [
        line
        for language, text, _ in blocks(page)
        if language == "console"
        for line in text.replace("\\\n", " ").splitlines()
    ]
    lines += re.findall(r"(?m)^\| `(nox -s [\w-]+)` \|", (ROOT / page).read_text(encoding="utf-8"))
    return [step(line) for line in lines if line.strip()]


def steps(name: str) -> list[Step]:
    """What is run of a page or an example, in its order."""
    if name in EXAMPLES:
        return [Step(line) for line in EXAMPLES[name]]
    return [once(each, name) for each in printed(name)] + [Step("python ../page.py")] * bool(program(name))


def once(each: Step, name: str) -> Step:
    """The step, which is not run if an earlier page has the same one with the same files."""
    here = files("README.md") | files(name)
    for page in PAGES[: PAGES.index(name)]:
        there = files("README.md") | files(page)
        if each in printed(page) and all(here.get(word) == there.get(word) for word in each.command.split()):
            return each if each.skipped else Step(each.command, f"as on {page}")
    return each


def run(name: str) -> tuple[bool, str]:
    """Whether a page or an example ran, and what is said of it."""
    said, passed = [], True
    with tempfile.TemporaryDirectory(prefix="documented-") as folder:
        clone = Path(folder) / "gpipe-bench"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        (clone / ".venv").symlink_to(ROOT / ".venv")
        shown = files("README.md") | (files(name) if name in PAGES else {})
        for file, text in shown.items():
            (clone / file).write_text(text, encoding="utf-8")
        author = ("-c", "user.name=reader", "-c", "user.email=reader@example.com")
        for words in (("checkout", "-q", "-B", "main"), ("add", *shown), ("commit", "-q", "-m", "my files")):
            subprocess.run(["git", *author, *words], cwd=clone, check=True)
        text = program(name) if name in PAGES else ""
        (clone.parent / "page.py").write_text(text, encoding="utf-8")
        start = f". {PYTHON.with_name('activate')}\n"
        if "import transformers" in text:
            start += without_torchvision(clone.parent)
        for each in steps(name):
            if each.skipped:
                said.append(f"  not run           {each.command}: {each.skipped}")
                continue
            begin_s = time.monotonic()
            status, out = bash(start + each.command, clone)
            said.append(f"  status {status:3d}  {time.monotonic() - begin_s:4.0f} s  {each.command}")
            if status:
                passed = False
                said.append(out)
    return passed, "\n".join([f"{name}: {'passed' if passed else 'FAILED'}", *said])


def bash(script: str, folder: Path) -> tuple[int, str]:
    """The exit status of a script and what it printed."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script], cwd=folder, env=variables,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def without_torchvision(folder: Path) -> str:
    """What makes bash use the same packages without torchvision; nothing where torchvision can be imported.

    transformers imports it where it is installed. The registry's is built for CUDA and fails beside a CPU
    build of torch, so that the page tells a reader to remove it there.
    """
    if subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0:
        return ""
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([PYTHON, "-c", asked], capture_output=True, text=True, check=True).stdout
    others = folder / "packages"
    others.mkdir()
    for package in Path(found.strip()).iterdir():
        if not package.name.startswith("torchvision"):
            (others / package.name).symlink_to(package)
    return f'export PYTHONPATH={others}:{ROOT}\npython() {{ {PYTHON} -S "$@"; }}\n'


def main() -> int:
    parser = argparse.ArgumentParser(prog="documented", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a page or an example")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time (%(default)s)")
    parser.add_argument("--list", action="store_true", help="show what is run, and run nothing")
    options = parser.parse_args()
    known = [name for name in (*PAGES, *EXAMPLES) if steps(name)]
    for name in options.names:
        if name not in known:
            parser.error(f"{name} has no commands and is no example; there are {', '.join(known)}")
    chosen = options.names or known
    if options.list:
        for name in chosen:
            print(
                name,
                *(f"  {'not run: ' * bool(each.skipped)}{each.command}" for each in steps(name)),
                sep="\n",
            )
        return 0
    settings = ("pyproject.toml", "constraints.txt")
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *settings], cwd=ROOT, check=False).returncode:
        parser.error(f"commit {' and '.join(settings)} first: a clone's sessions would install .venv anew")
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(run, name): name for name in chosen}
        for each in as_completed(runs):
            passed, said = each.result()
            print(said, flush=True)
            failed += [] if passed else [runs[each]]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} ran", *failed, sep=", failed: ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
