"""The wheel: everything inside `gpipe_bench`, data included, beside a user's packages of the same names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel of the working tree installs."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "local", "figures")
    for name in ("gpipe_bench", "experiments", "harness", "models", "pipeline", "results"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    # Into a folder: the same as unpacking the wheel, without asking the registry for a build environment.
    build = [
        "-c",
        "import setuptools; setuptools.setup()",
        "-q",
        "build",
        "--build-lib",
        str(folder / "site"),
    ]
    subprocess.run([sys.executable, *build], cwd=tree, check=True, capture_output=True, timeout=300)
    return folder / "site"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A user's folder with packages that have the names of ours."""
    for name in ("models", "pipeline", "harness", "experiments"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "raise RuntimeError('the user\\'s own package was taken')\n"
        )
    return tmp_path


def run(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from gpipe_bench.experiments.commands.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip


def test_all_that_is_installed_lies_in_one_package(site: Path) -> None:
    assert [path.name for path in site.iterdir()] == ["gpipe_bench"]
    for path in (
        "results/paper.csv",
        "results/guard/counters.json",
        "harness/report/templates/report.html.j2",
    ):
        assert (site / "gpipe_bench" / path).read_bytes() == (ROOT / path).read_bytes()
    modules = {
        path.relative_to(ROOT) for name in ("pipeline", "experiments") for path in (ROOT / name).rglob("*.py")
    }
    assert {path.relative_to(site / "gpipe_bench") for path in site.rglob("*.py")} >= modules


def test_a_user_with_packages_of_the_same_names_runs_and_compares(site: Path, elsewhere: Path) -> None:
    ran = run(site, elsewhere, "run", "figure2", "--profile", "smoke", "--only", "part=bubble", "--json")
    assert ran.returncode == 0, ran.stderr
    kept = elsewhere / "results" / "local" / "figure2.jsonl"
    assert len(kept.read_text().splitlines()) == len(ran.stdout.splitlines()) > 0

    reference = site / "gpipe_bench" / "results" / "reference" / "cpu-2-cores"
    compared = run(site, elsewhere, "compare", "table1", "--json", "--results", str(reference))
    assert compared.returncode == 0, compared.stderr
    cells = [json.loads(line) for line in compared.stdout.splitlines()]
    assert any(cell["printed"] == "318M" and cell["verdict"] == "identity" for cell in cells)


def test_a_checkout_without_symbolic_links_works_too(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "gpipe_bench").mkdir(parents=True)
    shutil.copy(ROOT / "gpipe_bench" / "__init__.py", tree / "gpipe_bench")
    for name in ("pipeline", "harness"):
        (tree / "gpipe_bench" / name).write_text(f"../{name}")  # what git leaves where links are not possible
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import gpipe_bench.pipeline.plan.schedule as schedule, gpipe_bench.harness.places as places\n"
        "print(schedule.__file__, places.ROOT)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(tree / "pipeline" / "plan" / "schedule.py"), str(tree)]
