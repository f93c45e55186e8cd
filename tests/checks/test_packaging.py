"""The wheel: everything inside `gpipe_bench`, data included, beside a user's packages of the same names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import their_repository

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`gpipe-bench` of a fresh environment with a wheel of the working tree and this one's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "local", "figures")
    for name in ("gpipe_bench", "experiments", "harness", "models", "pipeline", "planner", "results"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    pip, quiet = [sys.executable, "-m", "pip", "--disable-pip-version-check"], {"check": True, "timeout": 300}
    # Without asking the registry for a build environment.
    build = ["wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder), str(tree)]
    subprocess.run([*pip, *build], **quiet)
    (wheel,) = folder.glob("gpipe_bench-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], **quiet)
    python = str(folder / "venv" / "bin" / "python")
    subprocess.run(
        [*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", str(wheel)], **quiet
    )
    (site,) = (folder / "venv" / "lib").glob("python3.*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "venv" / "bin" / "gpipe-bench"


@pytest.fixture
def site(program: Path) -> Path:
    """Where it is installed."""
    (found,) = (program.parents[1] / "lib").glob("python3.*/site-packages")
    return found


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A user's folder with packages that have the names of ours."""
    for name in ("models", "pipeline", "planner", "harness", "experiments"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "raise RuntimeError('the user\\'s own package was taken')\n"
        )
    return tmp_path


def run(program: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # byte code in a repository is a change of it
    return subprocess.run(
        [program, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=600,
        env=environment, check=False,
    )  # fmt: skip


def test_all_that_is_installed_lies_in_one_package(site: Path) -> None:
    names = {path.name for path in site.iterdir() if not path.name.endswith((".dist-info", ".pth"))}
    assert names == {"gpipe_bench"}
    for path in (
        "results/paper.csv",
        *(f"results/{path.name}" for path in (ROOT / "results").glob("*.toml")),
        "results/guard/counters.json",
        "harness/report/templates/report.html.j2",
        "planner/templates/script.j2",
    ):
        assert (site / "gpipe_bench" / path).read_bytes() == (ROOT / path).read_bytes()
    modules = {
        path.relative_to(ROOT)
        for name in ("pipeline", "planner", "experiments")
        for path in (ROOT / name).rglob("*.py")
    }
    assert {
        path.relative_to(site / "gpipe_bench") for path in (site / "gpipe_bench").rglob("*.py")
    } >= modules


def test_a_user_with_packages_of_the_same_names_runs_and_compares(
    program: Path, site: Path, elsewhere: Path
) -> None:
    ran = run(program, elsewhere, "table1", "--profile", "smoke", "--only", "half=transformer", "--json")
    assert ran.returncode == 0, ran.stderr
    kept = elsewhere / "results" / "local" / "table1.jsonl"
    assert len(kept.read_text().splitlines()) == len(ran.stdout.splitlines()) > 0

    reference = site / "gpipe_bench" / "results" / "reference" / "cpu-2-cores"
    compared = run(program, elsewhere, "compare", "table1", "--json", "--results", reference)
    assert compared.returncode == 0, compared.stderr
    cells = [json.loads(line) for line in compared.stdout.splitlines()]
    assert any(cell["printed"] == "318M" and cell["verdict"] == "identity" for cell in cells)
    shown = run(program, elsewhere, "compare", "table2").stdout
    assert "records that came with the project (cpu-2-cores); yours: " in shown
    assert "table2-transformer" in shown
    usage = run(program, elsewhere, "check-engine", "--help").stdout.split()
    assert usage[:3] == ["usage:", f"{program}", "check-engine"]


def test_it_examines_and_guards_an_engine_that_has_a_folder_models_of_its_own(
    program: Path, tmp_path: Path
) -> None:
    theirs = their_repository.make(tmp_path / "theirs")
    shutil.copy(ROOT / "examples" / "own_engine.py", theirs)
    (theirs / "fast_pipe.py").write_text("import models\nfrom own_engine import FillDrain\n")
    their_repository.commit(theirs, "an engine")
    asked = run(program, theirs, "check-engine", "fast_pipe:FillDrain")
    assert (asked.returncode, asked.stderr) == (0, ""), asked.stdout
    said = asked.stdout.splitlines()[0]
    assert re.fullmatch(r"fast_pipe:FillDrain: \d+ cases passed, \d+ cannot be asked", said), said
    guarded = run(
        program, theirs, "guard", "--repo", ".", "--base", "HEAD", "--benchmarks", "benchmarks.py",
        "--budget-s", "1",
    )  # fmt: skip
    assert guarded.returncode == 0, guarded.stderr
    assert "both are the same code, so any difference is noise" in guarded.stdout
    assert guarded.stdout.splitlines()[-1].startswith("guard: ")


WITHOUT_AN_EXTRA = """
import importlib, sys
for name in ("torchvision", "sentencepiece", "pandas", "seaborn", "matplotlib", "sklearn", "jinja2"):
    sys.modules[name] = None
for package in ("pipeline", "planner", "models"):
    module = importlib.import_module(f"gpipe_bench.{package}")
    assert [getattr(module, name) for name in module.__all__]
from gpipe_bench.experiments.commands.cli import main
for line in ("list", "compare table2", "schedule zb-v --workers 4 --microbatches 8", "guard --help",
             "plan --help", "plan gpt2 --bytes --num-layers 2 --accelerators 2 --memory-gib 8"):
    try:
        assert main(line.split()) == 0, line
    except SystemExit as error:
        assert error.code == 0, line
"""


def test_the_engine_the_planner_and_what_reads_records_need_no_extra(tmp_path: Path) -> None:
    """What only experiments need is the extra of that name."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_AN_EXTRA], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_checkout_without_symbolic_links_works_too(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "gpipe_bench").mkdir(parents=True)
    shutil.copy(ROOT / "gpipe_bench" / "__init__.py", tree / "gpipe_bench")
    for name in ("pipeline", "harness"):
        (tree / "gpipe_bench" / name).write_text(f"../{name}")  # what git leaves where links are not possible
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import gpipe_bench.pipeline.plan.schedule as schedule, gpipe_bench.harness as harness\n"
        "print(schedule.__file__, harness.ROOT)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(tree / "pipeline" / "plan" / "schedule.py"), str(tree)]


def test_every_folder_with_modules_is_a_package() -> None:
    """Others are found when imported, and overlooked by what checks the directions of imports."""
    folders = {path.parent for part in ("experiments", "harness", "models", "pipeline", "planner")
               for path in (ROOT / part).rglob("*.py")}  # fmt: skip
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
