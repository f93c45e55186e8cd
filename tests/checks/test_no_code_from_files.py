"""Nothing that is loaded may run code: records, figures' notes, checkpoints, the guard's files.

What a file could do is tested where it is loaded; this holds for all code at once, also for what comes later.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for name in ("experiments", "harness", "models", "pipeline", "planner")
    for path in (ROOT / name).rglob("*.py")
)

FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "jsonpickle"}

# Pickles between processes of one run, which run the same code anyway: no file of theirs outlives it.
BETWEEN_PROCESSES = {
    "pipeline/ranks/control.py": "shapes of boundary tensors, and what ranks tell each other outside of "
    "steps, over the run's own connections",
    "pipeline/stage/trees.py": "how a message is built, within what control.py sends",
    "pipeline/verify.py": "the state of layers, from each rank to all, over the run's own connections",
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
    found = {path.relative_to(ROOT).as_posix(): dangers(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name for name in found if found[name]} == set(BETWEEN_PROCESSES), found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from yaml import load",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "value = eval(text)",
    ],
)
def test_each_danger_is_seen(source):
    assert len(dangers(source)) == 1
