"""How a number of results/paper.csv looks in a text, and where the tables of the texts have it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


def patterns(row: Mapping[str, str], pair: tuple[str, str] | None) -> Iterator[str]:
    """Regular expressions for the printed form, the surest first."""
    body = re.match(r"[\d.,]+(?:e-?\d+|\^\d+)?", row["printed"])
    number = body[0] if body else row["printed"]
    suffix = row["printed"][len(number) :].strip().lstrip("-")
    digits = re.escape(number)
    if power := re.fullmatch(r"([\d.]+)e-(\d+)", number):
        digits = rf"{re.escape(power[1])}x10\^-{power[2]}"
    alone = rf"(?<![\d.,^]){digits}(?![\d%]|[.,]\d)"
    if pair:
        yield rf"\({pair[0]}, ?{pair[1]}\)"
    if row["unit"] in ("parameters", "tokens", "examples") and suffix:
        long = {"M": "M|million", "B": "B|billion"}.get(suffix, suffix)
        yield rf"(?<![\d.,]){digits}[ -]?(?:{long})\b"
        return
    words = {
        "%": "%", "ratio": "(?:x|times)", "GB": "GB", "GiB": "G", "bytes/parameter": "bytes",
        "epochs": "epochs", "heads": "attention heads", "layers": "layer", "stages": "partitions",
        "micro-batches": "micro-batches",
        "languages": "(?:languages|language pairs)", "steps": "steps", "runs": "(?:times|fine-tuning runs)",
        "examples": "examples", "pixels": f"x{digits}",
    }  # fmt: skip
    if row["unit"] in words:
        yield rf"(?<![\d.,]){digits}[ -]?{words[row['unit']]}"
    if row["unit"] == "examples":
        yield rf"batch size (?:of |was )?{digits}(?!\d)"
    if not re.search(r"Figure \d", row["location"]):  # a bar's height is no number of the caption
        yield alone


@dataclass(frozen=True, slots=True)
class Cell:
    """Where a row of the file stands in a table of the text: below which head, beside which label."""

    table: str
    head: str
    label: str
    column: str | int
    part: int | None = None


_MEMORY = {"parameters": "# of Model Parameters", "maximum parameters": "# of Model Parameters",
           "peak activation memory": "Peak Activation Memory"}  # fmt: skip
_TRANSFER = {"training examples": "# Train", "test examples": "# Test", "classes": "# Cl",
             "top-1": "Accuracy", "top-1 in v1": "Our Model", "previous best": "Previous",
             "previous best, with other data": "Previous"}  # fmt: skip
_MODELS = {"image size": "Image Size", "parameters": "# Parameters", "top-1": "Top-1", "top-5": "top-5"}


def cell_of(row: Mapping[str, str], place: str) -> Cell | None:
    """The cell of a row that cites a table which the texts have as cells."""
    table, name, column = row["table"], row["row"], row["column"]
    if place == "Table 1" and table.startswith("table1-") and column.startswith(("naive-", "pipeline-")):
        head = {"table1-transformer": "Cloud TPUv3", "table1-amoebanet": "NVIDIA GPUs"}.get(table, "")
        if table == "table1-transformer" and name == "num_layers":
            return Cell(place, head, "Transformer-L", column)
        if name.startswith(("num_layers", "num_filters")):
            return Cell(place, head, "AmoebaNet-D", column, part=int(name == "num_filters"))
        if name == "parameter memory":
            return Cell(place, head, "Model Parameter Memory", column)
        if name in _MEMORY:
            return Cell(place, head, _MEMORY[name], column)
    if place in ("Table 2", "Table 3") and re.fullmatch(r"table[23]-\w+", table) and column.startswith("K="):
        first = 1 if table.endswith("amoebanet") else 4
        return Cell(place, "", name.replace("=", " = "), first + ("K=2", "K=4", "K=8").index(column))
    if table == "transfer" and column in _TRANSFER:
        return Cell(place, "", name.removeprefix("Oxford "), _TRANSFER[column])
    if table == "imagenet-models" and column in _MODELS:
        return Cell(place, "", name.partition(" (")[0], _MODELS[column])
    return None
