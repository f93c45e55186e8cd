"""Writes docs/api.md and docs/architecture.svg from the sources: `python docs/generate.py`.

The reference is the docstrings of the public names, the picture the imports between packages. Both are read
from the syntax alone, so that nothing is imported and all versions of Python write the same; a test compares.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("experiments", "planner", "harness", "pipeline", "models")
NAME = "gpipe_bench."

# The reference ----------------------------------------------------------------------------------------------

# Module -> names, where a package does not list its own in `_HOMES`.
FACES = {
    "pipeline.checkpoint": ("save", "load"),
    "harness.experiment": ("Experiment", "Case", "RunOptions", "Outcome", "Plot"),
    "harness.record": ("Quantity", "Record"),
    "harness.verdict": ("Answer", "Comparison"),
    "harness.store": ("Store",),
    "harness.guard": ("Judgement",),
    "experiments.engines.setup": ("Setup", "Engine"),
}
ABOUT = {
    "pipeline": "Train a sequence of layers as a pipeline; schedules, replay and memory",
    "pipeline.checkpoint": "Save and load a training, with any number of stages",
    "planner": "How to train a model on given machines",
    "models": "The paper's models and some others",
    "harness": "Experiments, records, verdicts: what an experiment of your own is made of",
    "experiments.engines.setup": "What an engine of your own is given and gives",
}
HEAD = """# Reference

The public names, by the package they come from, as in `from gpipe_bench.pipeline import Pipeline`. What is
not here may change. Made from the docstrings by `python docs/generate.py`.
"""


def api() -> str:
    """The page."""
    sections: dict[str, list[tuple[str, str]]] = {}  # heading -> names and their homes
    for package in ("pipeline", "planner", "models"):
        for name, home in sorted(homes(package).items(), key=lambda each: each[0].lower()):
            sections.setdefault(package, []).append((name, f"{package}.{home}"))
    for module, names in FACES.items():
        package = module if module in ABOUT else module.partition(".")[0]
        sections.setdefault(package, []).extend((name, module) for name in names)
    parts, contents = [], []
    for package in ABOUT:
        names = sections[package]
        contents.append(
            f"- `{NAME}{package}`: " + ", ".join(f"[{n}](#{anchor(package, n)})" for n, _ in names)
        )
        parts.append(f"## `{NAME}{package}`\n\n{ABOUT[package]}.")
        for name, home in names:
            source = home if package == "harness" else ""
            parts.append(f'<a id="{anchor(package, name)}"></a>\n\n{entry(name, home, source)}')
    return "\n\n".join([HEAD.rstrip(), "\n".join(contents), *parts]) + "\n"


def anchor(package: str, name: str) -> str:
    return f"{package}.{name}".replace(".", "-")


def homes(package: str) -> dict[str, str]:
    """The public names of a package that looks them up on first use, with the modules they live in."""
    for node in parsed(ROOT / package / "__init__.py").body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in ("_NAMES", "_HOMES")
        ):
            found = ast.literal_eval(node.value)
            if all(isinstance(home, str) for home in found.values()):
                return found
            return {name: home for home, names in found.items() for name in names}
    raise ValueError(f"{package}/__init__.py has neither _NAMES nor _HOMES")


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def entry(name: str, module: str, source: str = "") -> str:
    """A name with its signature and docstring; of a class also its public methods."""
    base = ROOT.joinpath(*module.split("."))
    body = parsed(base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py").body
    where = f"\n\nfrom `{NAME}{source}`" if source else ""
    for place, node in enumerate(body):
        match node:
            case ast.FunctionDef() if node.name == name:
                return f"### {name}{where}\n\n{code(signature(node))}\n\n{documented(node)}"
            case ast.ClassDef() if node.name == name:
                return f"### {name}{where}\n\n{of_class(node)}"
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if (
                found == name
            ):
                said = body[place + 1] if place + 1 < len(body) else None
                text = ""
                if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant):
                    text = prose(str(said.value.value))
                kind = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
                return "\n\n".join(filter(None, [f"### {name}{where}", code(f"{name}{kind}"), text]))
    raise ValueError(f"{module} has no {name}; docs/generate.py lists it")


def of_class(node: ast.ClassDef) -> str:
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    made = next((signature(each) for each in methods if each.name == "__init__"), "")
    head = f"class {node.name}{made.removeprefix('def __init__').removesuffix(' -> None')}"
    if fields and not made:
        head = "\n".join([f"class {node.name}:", *(f"    {ast.unparse(each)}" for each in fields)])
    parts = [code(head), documented(node)]
    for each in methods:
        if each.name.startswith("_") or not ast.get_docstring(each):
            continue
        names = [d.id for d in each.decorator_list if isinstance(d, ast.Name)]
        shown = each.name if "property" in names else signature(each).removeprefix("def ")
        parts.append(f"**`{shown}`**\n\n{documented(each)}")
    return "\n\n".join(filter(None, parts))


def signature(node: ast.FunctionDef) -> str:
    """On a line, or with a line for each argument where that is too long."""
    given = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
    arguments = [re.sub(r"^(\w+: .*?)=", r"\1 = ", each) for each in split_arguments(given)]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name}({', '.join(arguments)}){returns}"
    if len(line) < 100:
        return line
    return f"def {node.name}(\n" + "".join(f"    {each},\n" for each in arguments) + f"){returns}"


def split_arguments(text: str) -> list[str]:
    """At the commas that are in no bracket."""
    found, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [each.strip() for each in found]


def code(text: str) -> str:
    return f"```python\n{text}\n```"


def documented(node: ast.FunctionDef | ast.ClassDef) -> str:
    return prose(ast.get_docstring(node) or "")


def prose(text: str) -> str:
    """A docstring as markdown: paragraphs, and `name: what it is` lines below a heading as a list."""
    parts = []
    for block in re.split(r"\n\s*\n", textwrap.dedent(text.strip("\n"))):
        head, *rest = block.split("\n")
        inner = textwrap.dedent("\n".join(rest))
        if rest and head.endswith(":") and all(line.startswith("    ") for line in rest):
            items = re.split(r"\n(?! )", inner)
            parts.append(f"{head}\n\n" + "\n".join(f"- {listed(item)}" for item in items))
        elif block.startswith("    "):
            parts.append(code(textwrap.dedent(block)))
        else:
            parts.append(" ".join(line.strip() for line in block.split("\n")))
    return "\n\n".join(parts)


def listed(item: str) -> str:
    """`- name: what it is`, in one line."""
    words = " ".join(item.split())
    name, colon, rest = words.partition(": ")
    return f"`{name}`: {rest}" if colon and re.fullmatch(r"[\w.*, ]+", name) else words


# The picture ------------------------------------------------------------------------------------------------

COLOURS = {
    "experiments": "#e8f1fb", "planner": "#eaf6ec", "harness": "#fdf3df", "pipeline": "#fbe9ec",
    "models": "#f1ecf9",
}  # fmt: skip
WORDS = {
    "experiments": "tables and figures of the paper, guard, command line",
    "planner": "how to train a model on given machines",
    "harness": "runs, records, verdicts, pages",
    "pipeline": "the engine",
    "models": "AmoebaNet, Transformers, ResNet",
    "pipeline.plan": "schedules, replay, partitions",
    "pipeline.stage": "what an action does",
    "pipeline.ranks": "processes and messages",
    "pipeline.mesh": "replicas, shards",
    "pipeline.memory": "bytes without a device",
    "pipeline.model": "models of any kind, cut",
    "pipeline.api": "steps, checkpoints",
}
WIDTH, MARGIN, NARROW = 980, 16, 260
BOX, TALL, RISE, GAP = 190, 52, 36, 48


class Place(NamedTuple):
    x: float
    y: float
    wide: float
    tall: float


def targets(path: Path) -> set[str]:
    """What a file imports of ours, for type checks too, without the package's name."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(NAME[:-1]):
            found |= {f"{node.module}.{alias.name}.".removeprefix(NAME) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {f"{each.name}.".removeprefix(NAME) for each in node.names if each.name.startswith(NAME)}
    return found


def imports() -> dict[str, set[str]]:
    """The parts that each part imports: packages, folders of `pipeline`, and `Pipeline`, which joins these.
    The few modules beside the folders that these share (errors, devices ...) are no part.
    """
    folders = [path.name for path in sorted((ROOT / "pipeline").iterdir()) if any(path.glob("*.py"))]
    of: dict[Path, str] = {path: p for p in PACKAGES for path in (ROOT / p).rglob("*.py") if p != "pipeline"}
    of |= {path: f"pipeline.{each}" for each in folders for path in (ROOT / "pipeline" / each).rglob("*.py")}
    beside = {path.stem: path for path in (ROOT / "pipeline").glob("*.py") if path.stem != "__init__"}
    used = {name for path, part in of.items() if part.startswith("pipeline.") for name in targets(path)}
    shared = [name for name in beside if any(each.startswith(f"pipeline.{name}.") for each in used)]
    of |= {path: "pipeline.api" for name, path in beside.items() if name not in shared}
    found: dict[str, set[str]] = {part: set() for part in of.values()}
    for path, part in sorted(of.items()):
        for name in targets(path):
            package, inner, *_ = name.split(".")
            other = f"pipeline.{inner}" if package == "pipeline" and part.startswith("pipeline.") else package
            if other in found or other == "pipeline":
                found[part].add(other)
    return {part: others - {part} for part, others in found.items()}


def layers(below: dict[str, set[str]]) -> list[list[str]]:
    """Rows from top to bottom: whoever imports stands above what it imports, each as near to its importers as
    it can.
    """
    above = {part: [other for other in below if part in below[other]] for part in below}

    def depth(part: str) -> int:
        return 1 + max(map(depth, above[part]), default=-1)

    rows: list[list[str]] = []
    for number in range(1 + max(map(depth, below))):
        row = sorted(part for part in below if depth(part) == number)
        if rows:
            place = {
                part: (index + 0.5) / len(row_above)
                for row_above in rows
                for index, part in enumerate(row_above)
            }
            row.sort(key=lambda part: sum(place[each] for each in above[part]) / len(above[part]))
        rows.append(row)
    return rows


def without_detours(below: dict[str, set[str]]) -> dict[str, set[str]]:
    """Only the imports that do not follow from two others, which would draw over everything."""

    def reached(part: str) -> set[str]:
        return below[part].union(*(reached(each) for each in below[part]))

    return {part: {each for each in others if not any(each in reached(b) for b in others - {each})}
            for part, others in below.items()}  # fmt: skip


def architecture() -> str:
    """The picture: packages in rows, and the folders of `pipeline` in rows inside of it."""
    found = imports()
    inner = {part: others for part, others in found.items() if part.startswith("pipeline.")}
    outer = {part: found[part] for part in PACKAGES if part != "pipeline"}
    outer["pipeline"] = set().union(*inner.values()) - set(inner)
    inner = without_detours({part: others & set(inner) for part, others in inner.items()})
    outer = without_detours(outer)
    shapes: list[str] = []
    places: dict[str, Place] = {}
    top = float(MARGIN)
    for row in layers(outer):
        rows = layers(inner) if "pipeline" in row else []
        tall = TALL + len(rows) * (TALL + RISE) + 8 * bool(rows)
        room, left = WIDTH - MARGIN * (len(row) + 1), float(MARGIN)
        for part in row:
            is_large = part == "pipeline" and len(row) > 1
            wide = room - NARROW * (len(row) - 1) if is_large else NARROW if rows else room / len(row)
            places[part] = Place(left, top, wide, tall if part == "pipeline" else TALL)
            shapes.append(box(part, places[part], COLOURS[part]))
            for number, names in enumerate(rows if part == "pipeline" else []):
                for index, name in enumerate(names):
                    x = left + wide / len(names) * (index + 0.5) - BOX / 2
                    places[name] = Place(x, top + TALL + 8 + number * (TALL + RISE), BOX, TALL)
                    shapes.append(box(name, places[name], "#ffffff"))
            left += wide + MARGIN
        top += tall + GAP
    edges = [(part, each) for below in (outer, inner) for part in below for each in sorted(below[part])]
    height = top - GAP + 2 * MARGIN + 8
    note = (
        "arrows: imports; those that follow from others, and small modules that folders share, are left out"
    )
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">',
            "<!-- Made from the imports by docs/generate.py. -->",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" ',
            'orient="auto"><path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
            *shapes,
            *(arrow(places[part], places[each]) for part, each in edges),
            f'<text x="{MARGIN}" y="{height - 12:g}" font-size="12" fill="#666">{note}</text>',
            "</svg>\n",
        ]
    )


def box(part: str, at: Place, fill: str) -> str:
    """A part with its name and what it is for."""
    name = part.removeprefix("pipeline.") + "/"
    name, words = ("Pipeline" if part == "pipeline.api" else name), WORDS[part]
    text = f'<text x="{at.x + at.wide / 2:g}" text-anchor="middle"'
    return (
        f'<rect x="{at.x:g}" y="{at.y:g}" width="{at.wide:g}" height="{at.tall:g}" rx="8" fill="{fill}" '
        f'stroke="#888"/>\n{text} y="{at.y + 21:g}" font-size="15" font-weight="bold">{name}</text>\n'
        f'{text} y="{at.y + 40:g}" font-size="12" fill="#444">{words}</text>'
    )


def arrow(above: Place, below: Place) -> str:
    """From the bottom of whoever imports to the top of what is imported."""

    def lean(at: Place, towards: float) -> float:
        middle, most = at.x + at.wide / 2, at.wide / 2 - 14
        return middle + max(-most, min(most, (towards - middle) * 0.4))

    x1 = lean(above, below.x + below.wide / 2)
    x2 = lean(below, x1)
    line = f"M{x1:.0f} {above.y + above.tall:.0f} L{x2:.0f} {below.y:.0f}"
    return f'<path d="{line}" stroke="#555" fill="none" marker-end="url(#tip)"/>'


PAGES = {"api.md": api, "architecture.svg": architecture}

if __name__ == "__main__":
    for file, make in PAGES.items():
        (ROOT / "docs" / file).write_text(make(), encoding="utf-8")
