"""The documentation leads to what is there, stays short and readable; nothing that is loaded runs code."""

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
SOURCES |= {
    path.relative_to(ROOT / "gpipe_bench"): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "gpipe_bench" / "conformance").glob("*.py"))
}
# By their names, what stands in them; in a folder alone nothing.
MODULES = {".".join(folder.parts): "" for source in SOURCES for folder in source.parents}
MODULES |= {
    ".".join(source.with_suffix("").parts).removesuffix(".__init__"): text for source, text in SOURCES.items()
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub("`[^`\n]*`", "", page.read_text(encoding="utf-8"))  # code may look like a link
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_a_section_lead_to_its_heading(page: Path) -> None:
    """GitHub names a heading by its words, in small letters, with a dash for every space."""
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        text = (page.parent / target).read_text(encoding="utf-8") if target else page.read_text("utf-8")
        headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", text))
        known = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        known |= {*re.findall(r'<a id="([^"]+)">', text)}
        assert anchor in known, f"{target}#{anchor}"


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
        if name.partition(".")[0] in heads and not name.endswith((".py", ".md", ".html", ".toml"))
        if not is_there(name, path)
    ]
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("package", ["pipeline", "planner", "models"])
def test_the_reference_has_every_public_name(package: str) -> None:
    """That they are there is what `nox -s docs` fails without."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    shown = re.findall(r"(?m)^::: gpipe_bench\.(\S+)$", text)
    assert len(shown) == len(set(shown))
    assert {f"{package}.{name}" for name in import_module(f"gpipe_bench.{package}").__all__} <= set(shown)


def test_users_are_shown_public_names_alone() -> None:
    """Where things live may change: pages, examples and generated scripts import from the packages."""
    paths = [page for page in PAGES if page.name != "reference.md"] + [*ROOT.glob("examples/*.py")]
    paths += ROOT.glob("planner/templates/*.j2")
    shown = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}
    for package in ("pipeline", "planner"):
        known = {*import_module(f"gpipe_bench.{package}").__all__, "checkpoint"}
        imports = rf"(?m)^[ f\"]*from gpipe_bench\.{package} import (\([^)]*\)|[^\n\"]+)"
        for path, text in shown.items():
            named = set(re.findall(rf"gpipe_bench\.{package}\.(\w+(?:\.\w+)*)", text))
            for found in re.findall(imports, text):
                named |= {name.strip() for name in re.sub(r"\{%.*?%\}", "", found).strip("()").split(",")}
            assert named - {""} <= known, path


MOST_WORDS, LONGEST_SENTENCE = 10_000, 35


def test_the_pages_are_short_enough_to_be_read() -> None:
    """Prose, that is; blocks of code and rows of tables are looked up, not read."""
    words = {}
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        text = re.sub(r"(?ms)^```.*?^```|<!--.*?-->|^\|.*?$", "", page.read_text(encoding="utf-8"))
        words[page.name] = len(text.split())
    assert min(words.values()) > 100, words
    assert sum(words.values()) <= MOST_WORDS, words


def sentences(text: str) -> list[str]:
    """Of the paragraphs and lists of a page; code, tables and headings hold none. What stands before a colon
    or a semicolon can be read alone.
    """
    text = re.sub(r"(?ms)^```.*?^```|<!--.*?-->", "\n\n", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\d\. )", text):
        if not paragraph.lstrip().startswith(("|", "#")):
            found += re.split(r"(?<=[.!?:;])[*`\")]*\s+", " ".join(paragraph.split()))
    return found


def test_no_sentence_of_the_readme_is_long() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [each for each in sentences(text) if len(each.split()) > LONGEST_SENTENCE] == []


NOT_OURS = ("The server socket", "argument 'input'", "Connection closed by peer")  # torch's words


def test_what_the_page_about_symptoms_shows_is_what_the_program_prints() -> None:
    """Numbers and names differ; three words in a row of every part between them stand in the source."""
    printed = re.sub(r"\"\s*\n\s*f?\"", "", "\n".join(SOURCES.values()))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        text for text in re.findall(r"`([^`\n]+)`", page) if len(text.split()) > 4 and "--w" not in text
    ]
    assert len(quoted) > 15
    lost = []
    for text in quoted:
        words = re.sub(r"\.\.\.|\S*[\d()]\S*", "|", text).split()
        threes = [" ".join(words[i : i + 3]) for i in range(len(words) - 2)]
        found = [three in printed for three in threes if "|" not in three]
        if sum(found) < 0.6 * len(found) and not any(other in text for other in NOT_OURS):
            lost.append(text)
    assert lost == []


FILES = sorted(
    path
    for name in ("experiments", "harness", "models", "pipeline", "planner")
    for path in (ROOT / name).rglob("*.py")
)

FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "jsonpickle"}

# Pickles between processes of one run, which run the same code anyway: no file of theirs outlives it; and
# code that torch has just written.
NOT_FROM_FILES = {
    "pipeline/ranks/ends.py": "shapes of boundary tensors, over the run's own connections",
    "pipeline/ranks/wire.py": "what ranks tell each other outside of steps, over the same",
    "pipeline/model/parts.py": "what torch.fx writes for a part of the user's model",
    "pipeline/stage/trees.py": "how a message is built, within what ends.py sends",
    "pipeline/ranks/launch.py": "results of the processes that it has started, over their own pipe",
    "experiments/engines/trials.py": "what processes that it has started tell, in a folder of its own",
    "pipeline/checkpoint.py": "an unpickler that finds no code, in front of the one of torch",
}


def dangers(source: str) -> list[str]:
    """Every way to run code from a file that the source contains, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{node.lineno}: {name}" for name in names if name.partition(".")[0] in FORBIDDEN]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if (
            name in ("eval", "exec", "compile")
            or (name == "torch.load" and given.get("weights_only") != "True")
            or (name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False")
        ):
            found.append(f"{node.lineno}: {name}")
    return found


def test_no_module_can_run_what_it_loads():
    found = {path.relative_to(ROOT).as_posix(): dangers(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name for name in found if found[name]} == set(NOT_FROM_FILES), found
