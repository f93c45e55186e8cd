"""The page "Bring your own model": every snippet runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from own_models import library

PAGE = (Path(__file__).parents[1] / "docs" / "own-model.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^## (.*?)$|^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def sections() -> list[tuple[str, str]]:
    """Each snippet with the heading it stands under."""
    found, title = [], ""
    for heading, code in SNIPPETS:
        title = heading or title
        if code:
            found.append((title, code))
    return found


def test_the_page_has_its_snippets() -> None:
    titles = [title for title, _ in sections()]
    assert titles == [
        "A sequence of layers",
        *["A model of Hugging Face"] * 2,
        "Any module",
        "Portals: skips past stages",
    ]


@pytest.mark.parametrize(("title", "code"), sections(), ids=lambda text: text.splitlines()[0][:20])
def test_snippet(title: str, code: str) -> None:
    if "import transformers" in code:
        library()
    torch.manual_seed(0)
    exec(compile(code, f"docs/own-model.md, {title}", "exec"), {"__name__": "snippet"})
