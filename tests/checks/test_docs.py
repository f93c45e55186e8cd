"""The documentation leads to what is there: links, files, and modules, which docstrings name too."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")])
PACKAGES = ("experiments", "harness", "models", "pipeline", "planner")
SOURCES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
# By their names, what stands in them; in a folder alone nothing.
MODULES = {".".join(folder.parts): "" for source in SOURCES for folder in source.parents}
MODULES |= {
    ".".join(source.with_suffix("").parts).removesuffix(".__init__"): text for source, text in SOURCES.items()
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(
        r"`((?:experiments|harness|pipeline|planner|models|results|docs|tests)/[\w./-]+\.\w+)`", text
    ):
        assert name.startswith("results/local/") or (ROOT / name).exists(), name


def is_there(name: str, beside: Path) -> bool:
    """Whether a dotted name leads to a module, or to a word in one: from the root, from a package, or from
    the folder of the file that says it.
    """
    for root in ("", *PACKAGES, ".".join(beside.parent.parts)):
        whole = f"{root}.{name.removeprefix('gpipe_bench.')}".strip(".")
        module, _, word = whole.rpartition(".")
        for owner in (module, module.rpartition(".")[0]):  # a class stands between them
            if whole in MODULES or re.search(rf"\b{word}\b", MODULES.get(owner, "")):
                return True
    return False


def test_modules_that_are_named_exist() -> None:
    """A name counts as one of ours if it begins with a package, or with a folder in one; but `pipeline` is
    what examples call their `Pipeline`.
    """
    heads = {part for source in SOURCES for part in source.parts[:-1][:2]} | {"gpipe_bench"}
    heads.remove("pipeline")
    texts = {page.relative_to(ROOT): page.read_text(encoding="utf-8") for page in PAGES} | SOURCES
    lost = [
        f"{path}: {name}"
        for path, text in texts.items()
        for name in re.findall(r"`([a-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?`", text)
        if name.partition(".")[0] in heads and not name.endswith((".py", ".md", ".html"))
        if not is_there(name, path)
    ]
    assert not lost, "\n".join(lost)


def test_nobody_is_told_to_install_a_name_that_is_not_ours_on_any_index() -> None:
    texts = [*(page.read_text(encoding="utf-8") for page in PAGES), *SOURCES.values()]
    assert [line for text in texts for line in re.findall(r"pip install [\"']?gpipe-bench.*", text)] == []


@pytest.mark.parametrize("package", ["pipeline", "planner"])
def test_every_public_name_is_there_and_known_to_a_type_checker(package: str) -> None:
    module = import_module(f"gpipe_bench.{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    imports = [
        node
        for node in ast.walk(ast.parse(SOURCES[Path(package, "__init__.py")]))
        if isinstance(node, ast.ImportFrom)
    ]
    typed = {
        (alias.name, f"{node.module}")
        for node in imports
        if (node.module or "").startswith("gpipe_bench.")
        for alias in node.names
    }
    homes = module._HOMES
    if package == "planner":
        homes = {name: home for home, names in homes.items() for name in names}
    assert typed == {(name, f"gpipe_bench.{package}.{home}") for name, home in homes.items()}


def test_users_are_shown_public_names_alone() -> None:
    """Where things live may change: pages, examples and generated scripts import from the packages."""
    paths = [*PAGES, *ROOT.glob("docs/**/*.py")]
    shown = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}
    generator = (ROOT / "planner" / "answer.py").read_text(encoding="utf-8")
    shown[Path("planner/answer.py")] = generator[generator.index("\ndef script(") :]
    for package in ("pipeline", "planner"):
        known = {*import_module(f"gpipe_bench.{package}").__all__, "checkpoint"}
        imports = rf"(?m)^[ f\"]*from gpipe_bench\.{package} import (\([^)]*\)|[^\n\"]+)"
        for path, text in shown.items():
            named = set(re.findall(rf"gpipe_bench\.{package}\.(\w+(?:\.\w+)*)", text))
            for found in re.findall(imports, text):
                named |= {name.strip() for name in re.sub(r"\{\w+\}", "", found).strip("()").split(",")}
            assert named - {""} <= known, path
