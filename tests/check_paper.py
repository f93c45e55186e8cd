"""Holds results/paper.csv and results/unknowns.toml against the texts that they were copied from.

    python tests/check_paper.py FOLDER > results/paper-check.txt

FOLDER has the texts of both versions of the paper.
They are not part of this repository; the output is, and a test holds it to the present files. The check
shares no code with the loader: it reads the rows as they stand and looks for each printed form at the place
that the row cites, in the very cell where that is a table. Exit status 1 if a number is not found.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper_forms import Cell, cell_of, patterns
from paper_texts import MISREAD, Text, squashed, texts_in

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAPER, UNKNOWNS, OUTPUT = RESULTS / "paper.csv", RESULTS / "unknowns.toml", RESULTS / "paper-check.txt"

LOOKED_AT = ("table", "row", "column", "value", "printed", "unit", "location", "form")
QUOTED = ("tables", "setting", "value", "source", "quote")

FOUND, AMBIGUOUS, ELSEWHERE, MISSING = "found", "ambiguous", "elsewhere", "NOT FOUND"
TRANSCRIPTION, PICTURE, UNPRINTED, NO_TEXT = "misread", "in a picture", "not printed", "no text"
MEANING = {
    FOUND: "the printed form stands at the cited place, in the cited cell where that is a table",
    AMBIGUOUS: "it stands at the cited place more than once; the words beside it do not say which is meant",
    ELSEWHERE: "it stands in the cited version, at another place",
    TRANSCRIPTION: "the transcription has another form, known to be misread from the typeset table",
    PICTURE: "the cited place is a picture, of which the text has the caption only",
    UNPRINTED: "the file says itself that it is read off a figure, evaluated or derived",
    NO_TEXT: "not in the texts at hand: arXiv's v5 where it differs from NeurIPS, other projects, theory",
    MISSING: "neither at the cited place nor in the cited version",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one row or one quotation; `place` is where, `words` what stands there."""

    name: str
    printed: str
    location: str
    status: str
    words: str = ""


def in_cell(row: Mapping[str, str], version: str, text: Text, cell: Cell) -> Finding | None:
    """The row's number in its cell; None where the text has no such table."""
    grid = text.grids.get(cell.table)
    if grid is None:
        return None
    # The head of a lower half is the nearest one above; a table with one head has it in its first line.
    start = next((i for i, line in enumerate(grid) if cell.head and line[0].startswith(cell.head)), 0)
    rows = [
        [MISREAD.get((version, value), value) if i == 0 or line is grid[start] else value
         for i, value in enumerate(line)] for line in grid[start:]
    ]  # fmt: skip
    labelled = next((line for line in rows[1:] if cell.label.casefold() in line[0].casefold()), None)
    column = cell.column
    if isinstance(column, str):
        heads = [value.casefold() for value in rows[0]]
        column = next((i for i, value in enumerate(heads) if value.startswith(column.casefold())), -1)
    if labelled is None or not 0 <= column < len(labelled):
        return finding(row, MISSING, f"no cell {cell.label!r} / {cell.column!r} in {cell.table}")
    value = labelled[column]
    status, words = FOUND, f"{cell.table}: {labelled[0]} = {value}"
    if (version, value) in MISREAD:
        status, words = (
            TRANSCRIPTION,
            f"{cell.table}: {labelled[0]} = {value}, typeset {MISREAD[version, value]}",
        )
        value = MISREAD[version, value]
    wanted = row["printed"]
    if cell.part is not None:
        value = re.findall(r"\d+", value)[cell.part]
    elif not re.search(rf"(?<![\d.,]){re.escape(wanted)}(?![\d,]|\.\d)", value):
        status = MISSING
    if cell.part is not None and value != wanted:
        status = MISSING
    return finding(row, status, words)


def finding(row: Mapping[str, str], status: str, words: str = "") -> Finding:
    name = f"{row['table']} | {row['row']} | {row['column']}"
    return Finding(name, row["printed"], row["location"], status, words)


def check_row(row: Mapping[str, str], texts: Mapping[str, Text], pair: tuple[str, str] | None) -> Finding:
    """Whether the row's printed form stands where the row says."""
    if row["form"] in ("read off", "evaluated", "derived"):
        return finding(row, UNPRINTED, row["form"])
    version = next((name for name in texts if row["location"].startswith(name)), "")
    if not version:
        return finding(row, NO_TEXT)
    text = texts[version]
    named = re.search(r"\b(section [\d.]+|Table \d|Figure \d|abstract)(.*)", row["location"])
    place, rest = (named[1].rstrip("."), named[2]) if named else ("", "")
    if version in ("v1", "v5"):
        cell = cell_of(row, place) if not rest.endswith("caption") else None
        found = in_cell(row, version, text, cell) if cell else None
        if found:
            return found
        here = text.places.get(place)
        if here and place.startswith("Table") and place not in text.grids:
            return finding(row, PICTURE, here)
    else:  # a page, which may have no sections
        here = text.places.get(place) or text.whole
    if row["form"] == "words":
        return words_in(row, here, text)
    for pattern in patterns(row, pair):
        hits = list(re.finditer(pattern, here or ""))
        if hits:
            return chosen(row, here or "", hits)
    if place.startswith("Figure"):
        return finding(row, PICTURE, "a bar of the figure")
    for pattern in patterns(row, pair):
        if hit := re.search(pattern, text.whole):
            return finding(row, ELSEWHERE, around(text.whole, hit))
    return finding(row, MISSING)


def chosen(row: Mapping[str, str], here: str, hits: Sequence[re.Match[str]]) -> Finding:
    """Of several places the one that has most of the row's own words around it."""
    if len(hits) == 1:
        return finding(row, FOUND, around(here, hits[0]))
    if len({hit[0] for hit in hits}) == 1 and hits[0][0].startswith("("):  # (L, D), a model's name
        return finding(row, FOUND, f"{len(hits)} times: " + around(here, hits[0]))
    words = set(re.findall(r"\w{4,}", f"{row['row']} {row['column']}".casefold()))
    scores = [sum(word in around(here, hit, 48).casefold() for word in words) for hit in hits]
    best = [hit for hit, score in zip(hits, scores, strict=True) if score == max(scores)]
    status = FOUND if len(best) == 1 else AMBIGUOUS
    times = f"1 of {len(hits)}: " if status == FOUND else f"{len(hits)} times: "
    return finding(row, status, times + around(here, best[0]))


def words_in(row: Mapping[str, str], here: str | None, text: Text) -> Finding:
    wanted = squashed(row["printed"])
    times = squashed(here or "").count(wanted)
    if times:
        return finding(
            row, FOUND if times == 1 else AMBIGUOUS, "the words" if times == 1 else f"{times} times"
        )
    return finding(row, ELSEWHERE if wanted in squashed(text.whole) else MISSING)


def around(text: str, hit: re.Match[str], width: int = 24) -> str:
    words = text[max(0, hit.start() - width) : hit.end() + width].strip()
    return f"...{words.encode('ascii', 'ignore').decode()}..."


def check(rows: Sequence[Mapping[str, str]], texts: Mapping[str, Text]) -> list[Finding]:
    """A finding for each row, in the file's order."""
    models: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row["row"] in ("num_layers", "num_filters"):
            models.setdefault((row["table"], row["column"]), {})[row["row"]] = row["printed"]
    pairs = {key: (both["num_layers"], both["num_filters"]) for key, both in models.items() if len(both) == 2}
    return [
        check_row(
            row, texts, pairs.get((row["table"], row["column"])) if row["row"].startswith("num_") else None
        )
        for row in rows
    ]


def check_stated(entries: Sequence[Mapping[str, str]], texts: Mapping[str, Text]) -> list[Finding]:
    """A finding for each setting that unknowns.toml says the paper states: whether its words are there."""
    found = []
    for entry in entries:
        version, _, place = str(entry["source"]).partition(" ")
        place = place if place.startswith(("Table", "Figure")) else f"section {place}"
        row = {
            "table": ", ".join(entry["tables"]),
            "row": str(entry["setting"]),
            "column": str(entry["value"]),
            "printed": str(entry["quote"]),
            "location": f"{version} {place}",
        }
        if version not in texts:
            found.append(finding(row, NO_TEXT))
            continue
        text = texts[version]
        here = text.places.get(place, "") + " ".join(" ".join(line) for line in text.grids.get(place, []))
        found.append(words_in(row, here, text))
    return found


_NUMBER = re.compile(r"(?<![\w.,^])\d+(?:,\d{3})*(?:\.\d+)?(?![\d^])|10\^\d")
_CITATION = re.compile(
    r"\[[\d, ]+\]|\([12]\d{3}\)|(?:Section|Figures?|Tables?) \d+(?:\.\d+)*\w?|https?://\S+"
)


def without_row(rows: Sequence[Mapping[str, str]], texts: Mapping[str, Text]) -> list[str]:
    """Numbers of both versions that stand nowhere in the file: not as a value, nor in a name or a note."""
    known = {
        number.replace(",", "")
        for row in rows
        for field in LOOKED_AT
        for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", row[field].replace("^", " 10^"))
    }
    known |= {f"10^{digit}" for digit in range(10)}
    missing = []
    for version in ("v1", "v5"):
        text = texts[version]
        cells = [(name, " | ".join(" | ".join(line) for line in grid)) for name, grid in text.grids.items()]
        for place, body in [*text.places.items(), *cells]:
            body = re.sub(rf"^#* ?{re.escape(place.removeprefix('section '))}\b", "", body)
            body = _CITATION.sub("", body)
            for hit in _NUMBER.finditer(body):
                if hit[0].replace(",", "") not in known:
                    misread = any(version == where and hit[0] in form for where, form in MISREAD)
                    why = "; misread, see above" if misread else ""
                    missing.append(f"{version} {place}; {hit[0]}; {around(body, hit)}{why}")
    return missing


def files() -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """The rows of paper.csv, and what unknowns.toml says is stated."""
    with PAPER.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return rows, tomllib.loads(UNKNOWNS.read_text(encoding="utf-8"))["stated"]


def digest(entries: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> str:
    """Of what the check looks at, so that a note may be reworded where the texts are not at hand."""
    looked_at = [[entry[field] for field in fields] for entry in entries]
    return hashlib.sha256(json.dumps(looked_at).encode()).hexdigest()


def report(folder: Path) -> tuple[str, bool]:
    """The whole output, and whether every number was accounted for."""
    found = texts_in(folder)
    if missing := {"v1", "v5"} - found.keys():
        raise ValueError(f"no text of {', '.join(sorted(missing))} in {folder}")
    texts = {name: text for name, (text, _) in found.items()}
    rows, entries = files()
    findings = check(rows, texts)
    stated = check_stated(entries, texts)
    counts = Counter(one.status for one in [*findings, *stated])
    lines = [
        "The numbers of paper.csv and the words of unknowns.toml, looked up in the texts:",
        "python tests/check_paper.py FOLDER-OF-TEXTS > results/paper-check.txt",
        "",
        f"paper.csv     sha256 {digest(rows, LOOKED_AT)}  {', '.join(LOOKED_AT)}",
        f"unknowns.toml sha256 {digest(entries, QUOTED)}  {', '.join(QUOTED)} of what is stated",
        *(f"text          sha256 {known}  {name}" for name, (_, known) in found.items()),
        "",
        *(f"{counts[status]:4} {status}: {meaning}" for status, meaning in MEANING.items()),
        "",
        "'1 of 3': the place with most of the row's words beside it; '3 times': always in one model's name.",
        "",
        "Numbers of paper.csv: status; table | row | column; printed; place; what stands there",
        "",
        *map(_line, findings),
        "",
        "Settings that unknowns.toml calls stated: status; tables | setting | value; words; place",
        "",
        *map(_line, stated),
        "",
        "Numbers of both versions that stand nowhere in paper.csv: place; number; what stands there",
        "",
        *without_row(rows, texts),
    ]
    return "\n".join(lines) + "\n", not counts[MISSING]


def _line(one: Finding) -> str:
    printed = one.printed.replace("×", "x")
    return "; ".join([one.status, one.name, printed, one.location, one.words]).rstrip("; ")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python tests/check_paper.py FOLDER-OF-TEXTS", file=sys.stderr)
        return 2
    try:
        text, complete = report(Path(arguments[0]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(text)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
