"""Sessions of gpipe-bench. They only shell out, so everything here also works without nox.

nox -s table1                       reproduce Table 1 (installs once, then runs)
nox -s table1 -- --profile smoke    arguments after -- go to the command
nox -s tests -- --all               the second tier of tests, too
nox -s tests -- -k partition        ... or to pytest, which then runs both tiers in one process
nox -s table1 -- --here             use this interpreter and what it has installed (a GPU container)
nox --no-venv -s table1             the same
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests", "lint"]

ROOT = Path(__file__).parent
# nox makes an environment per session; torch is gigabytes, so all sessions share this one instead.
VENV = ROOT / ".venv"
# Files that other programs read, by the schema that they have to keep.
SCHEMAS = {
    "github-workflows": (
        *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(".github/workflows/*.yml"))),
        "docs/examples/guard-your-engine.yml",
    ),
    "github-actions": ("action.yml",),
    "citation-file-format": ("CITATION.cff",),
}
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

REGISTRY = runpy.run_path(str(ROOT / "experiments" / "registry.py"))  # by its path: nothing is installed yet


def prepare(session: nox.Session) -> tuple[str, list[str]]:
    """The Python to use and the arguments left for it; installs the project when something changed."""
    arguments = [argument for argument in session.posargs if argument != "--here"]
    if "--here" in session.posargs or "--no-venv" in sys.argv:
        return sys.executable, arguments
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = hashlib.sha256(sys.version.encode())
    for name in ("pyproject.toml", "constraints.txt"):
        wanted.update((ROOT / name).read_bytes())
    stamp = VENV / "installed.sha256"
    if not stamp.exists() or stamp.read_text() != wanted.hexdigest():
        session.log("once: installs torch and what else the project needs into .venv, which takes minutes")
        session.run(sys.executable, "-m", "venv", "--clear", str(VENV), external=True)
        install = ("-m", "pip", "install", "--constraint", "constraints.txt", "--editable", ".[dev]")
        session.run(str(python), *install, external=True)
        stamp.write_text(wanted.hexdigest())
    return str(python), arguments


def run_python(session: nox.Session, *command: str, passed: bool = True) -> None:
    """With the session's own arguments behind it, if they are to be `passed`."""
    python, arguments = prepare(session)
    variables = {name: os.environ.get(name, value) for name, value in THREADS.items()}
    variables["PYTHONDONTWRITEBYTECODE"] = ""  # or each process compiles all of it, which takes seconds
    session.run(python, *command, *(arguments if passed else ()), external=True, env=variables)


def usable_cores(session: nox.Session) -> str:
    """As many as the harness may keep busy, at most eight: each process of a session holds a torch."""
    asked = "from gpipe_bench.harness.environment import usable_cores; print(min(usable_cores(), 8))"
    said = session.run(prepare(session)[0], "-c", asked, external=True, silent=True)
    return str(said).split()[-1]


def experiment_session(name: str) -> None:
    @nox.session(name=name, venv_backend="none", tags=["paper"], default=False)
    def run(session: nox.Session) -> None:
        run_python(session, "-m", "experiments", "run", name)

    run.__doc__ = REGISTRY["title"](name)


for _name in REGISTRY["EXPERIMENTS"]:
    experiment_session(_name)


@nox.session(venv_backend="none", tags=["paper"], default=False)
def report(session: nox.Session) -> None:
    """Every number of the paper beside ours: one HTML page and a CSV file, from records alone."""
    run_python(session, "-m", "experiments", "report")


@nox.session(venv_backend="none", tags=["ci"])
def tests(session: nox.Session) -> None:
    """The public behaviour once; with -- --all also what is marked `deep`, or `alone` on the machine."""
    arguments = prepare(session)[1]
    if arguments not in ([], ["--all"]):
        run_python(session, "-m", "pytest")
        return
    # Each process begins with a share of the list, so files stay together; who is done takes from the others.
    # The second tier waits a quarter of its time, for processes and signals: one more has a core then.
    processes = int(usable_cores(session)) + bool(arguments)
    side_by_side = ("--numprocesses", str(processes), "--dist", "worksteal")
    suite = ("-m", "pytest", "--ignore", "tests/checks")
    which = "not alone" if arguments else "not alone and not deep"
    run_python(session, *suite, *side_by_side, "-m", which, passed=False)
    if arguments:
        run_python(session, *suite, "-m", "alone", passed=False)


@nox.session(venv_backend="none", tags=["ci"], default=False)
def checks(session: nox.Session) -> None:
    """What is not behaviour: pages and their generated tables, packaging, sessions, rules for all code."""
    side_by_side = ("--numprocesses", usable_cores(session), "--dist", "loadfile")  # one builds the wheel
    run_python(session, "-m", "pytest", "tests/checks", *side_by_side)


@nox.session(name="cuda-without-gpu", venv_backend="none", tags=["ci"], default=False)
def cuda_without_gpu(session: nox.Session) -> None:
    """The GPU path over torch's CUDA build, without a GPU: downloads 540 MB once, then takes minutes."""
    run_python(session, "tests/cuda_without_gpu")


@nox.session(venv_backend="none", tags=["ci"])
def lint(session: nox.Session) -> None:
    """ruff, mypy (strict on pipeline, planner and harness), import directions, and files that others read."""
    python, arguments = prepare(session)
    if arguments:
        session.error(f"lint takes no arguments, got {' '.join(arguments)}")
    session.run(python, "-m", "ruff", "format", "--check", ".", external=True)
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "-m", "mypy", external=True)
    session.run(python, "-c", "from importlinter.cli import lint_imports_command as c; c()", external=True)
    for schema, files in SCHEMAS.items():
        check = ("-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}")
        session.run(python, *check, *files, external=True)


@nox.session(venv_backend="none", tags=["ci"], default=False)
def docs(session: nox.Session) -> None:
    """The pages as a site, in build/site: a link, a heading or a public name that is not there fails it."""
    python, arguments = prepare(session)
    pages = ROOT / "build" / "pages"  # each under its own path, so that links between pages hold
    shutil.rmtree(pages, ignore_errors=True)
    not_shown = shutil.ignore_patterns("local", "*.jsonl", "__pycache__")
    for folder in ("docs", "examples", "results", ".github"):
        shutil.copytree(ROOT / folder, pages / folder, ignore=not_shown)
    for file in (*ROOT.glob("*.md"), ROOT / "CITATION.cff", ROOT / "LICENSE", ROOT / "action.yml"):
        shutil.copy(file, pages)
    variables = {
        "NO_MKDOCS_2_WARNING": "1",
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",  # ruff lays out signatures
    }
    build = ("-m", "mkdocs", "build", "--strict", *arguments)
    session.run(python, *build, external=True, env=variables)


@nox.session(venv_backend="none", tags=["ci"], default=False)
def smoke(session: nox.Session) -> None:
    """Every experiment's smoke profile, as a user starts it; as many at a time as there are cores."""
    cores = usable_cores(session)  # installs, too, before several sessions would at once
    results = Path(session.create_tmp()).resolve() / "results"
    shutil.rmtree(results, ignore_errors=True)
    arguments = [*session.posargs, *(["--here"] if "--no-venv" in sys.argv else [])]
    command = ("-m", "tests.smoke", "--cores", cores, "--results", str(results), *arguments)
    session.run(sys.executable, *command, external=True, env={**THREADS, **os.environ})


@nox.session(venv_backend="none", tags=["ci"], default=False)
def documented(session: nox.Session) -> None:
    """The commands, the Python and the examples that the pages show, as they are printed."""
    run_python(session, "-m", "tests.documented", "--jobs", usable_cores(session))


@nox.session(venv_backend="none", tags=["ci"], default=False)
def guard(session: nox.Session) -> None:
    """Exact counters; with -- --base REF also the engine's speed against that revision."""
    run_python(session, "-m", "experiments", "guard")


@nox.session(venv_backend="none", tags=["dev"], default=False)
def bench(session: nox.Session) -> None:
    """Micro-benchmarks; also into results/local/bench.json, or -- --benchmark-json FILE."""
    command = ["-m", "pytest", "tests/benchmarks", "--benchmark-enable", "--benchmark-only"]
    command += ["--benchmark-columns=min,median,iqr,rounds,iterations", "--benchmark-sort=name"]
    if not any(argument.startswith("--benchmark-json") for argument in session.posargs):
        local = ROOT / "results" / "local"
        local.mkdir(parents=True, exist_ok=True)
        command.append(f"--benchmark-json={local / 'bench.json'}")
    run_python(session, *command)


@nox.session(venv_backend="none", tags=["dev"], default=False)
def machine(session: nox.Session) -> None:
    """What this machine can run."""
    run_python(session, "-m", "experiments", "list", "--machine")
