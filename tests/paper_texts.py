"""The texts that the paper's numbers were copied from, as places and table cells.

Transcriptions differ: one is markdown with tables as HTML and a reader's notes between the lines, one plain
lines with tables as pipes. `read` makes the same of both, so that `check_paper` can ask for a place.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SIGNATURES = {
    "v1": "GPipe first divides a mini-batch of size N into T micro-batches",
    "v5": "Massive Massively Multilingual Machine Translation",
}
"""A sentence by which each text is known, whatever its file is called."""

MISREAD = {
    ("v5", "(18, 836)"): "(18, 416)",
    ("v5", "(72, 312)"): "(72, 512)",
    ("v5", "78.8M"): "785.8M",
    ("v5", "94.0"): "94.6",
    ("v5", "Biosnap"): "Birdsnap",
    ("v5", "# Clusters"): "# Classes",
}
"""What the transcription of v5 has, and what the typeset table or v1's text has in its place."""


@dataclass(frozen=True, slots=True)
class Text:
    """One version: its places (section, Figure n, Table n, abstract) as plain text, its tables as cells."""

    places: Mapping[str, str]
    grids: Mapping[str, list[list[str]]]

    @property
    def whole(self) -> str:
        cells = " ".join(" ".join(row) for grid in self.grids.values() for row in grid)
        return " ".join([*self.places.values(), cells])


def plain(text: str) -> str:
    """The text without mark-up: `$224\\times 224$` is `224x224`, `84.4\\%` is `84.4%`."""
    text = html.unescape(text)
    text = re.sub(r"\\(?:mathrm|text|textbf)\s*", "", text)
    for mark, sign in (("\\times", "x"), ("×", "x"), ("Γ—", "x"), ("\\%", "%"), ("\\gg", ">>"),
                       ("\\geq", ">="), ("\\epsilon", "epsilon"), ("’", "'"), ("−", "-")):  # fmt: skip
        text = text.replace(mark, sign)
    text = re.sub(r"[${}\\*]", "", text)
    text = re.sub(r"(?<=\d)\s*x\s*(?=\d)", "x", text)
    return re.sub(r"\s+", " ", text).strip()


def squashed(text: str) -> str:
    """For sentences: no mark-up, no white space, no capitals."""
    return re.sub(r"\s+", "", plain(text)).casefold()


_HEADING = re.compile(r"(?:#+ )?(\d+(?:\.\d+)*)\.? [A-Z]")


def read(raw: str) -> Text:
    """Places and tables of a text in markdown or plain lines; a reader's notes in it are left out."""
    raw = re.sub(r"^```.*?^```", "", raw, flags=re.DOTALL | re.MULTILINE)
    places: dict[str, list[str]] = {"abstract": []}
    grids: dict[str, list[list[str]]] = {}
    section, last_caption, pipes = "abstract", "", []
    for line in raw.splitlines():
        line = line.strip()
        if line.startswith((">", "![")) or not line:
            continue
        if line.startswith("|"):
            cells = [plain(cell) for cell in line.strip("|").split("|")]
            if not all(set(cell) <= set("-: ") for cell in cells):
                pipes.append(cells)
            continue
        if "<table" in line:
            rows = re.findall(r"<tr>(.*?)</tr>", line)
            grids[last_caption] = [
                [plain(c) for c in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows
            ]
            continue
        caption = re.match(r"(Table|Figure) (\d+): ", line)
        if caption:
            name = f"{caption[1]} {caption[2]}"
            places.setdefault(name, []).append(line)
            last_caption = name
            if caption[1] == "Table" and pipes:
                grids[name], pipes = pipes, []
            continue
        heading = _HEADING.match(line)
        if heading and len(line) < 80:
            section = f"section {heading[1]}"
        elif re.match(r"(?:#+ )?(References|Acknowledgments)\b", line) and len(line) < 40:
            section = "references"
        places.setdefault(section, []).append(line)
    return Text(
        {name: plain(" ".join(lines)) for name, lines in places.items() if name != "references"}, grids
    )


def texts_in(folder: Path) -> dict[str, tuple[Text, str]]:
    """The texts of a folder by their name, each with the digest of its file."""
    found = {}
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        decoded = raw.decode("utf-8", "replace")
        name = next((name for name, words in SIGNATURES.items() if words in decoded), None)
        if name is not None:
            found[name] = (read(decoded), hashlib.sha256(raw).hexdigest())
    return found
