"""The check of the paper's numbers against the texts: its output is current; it tells right from wrong."""

from __future__ import annotations

import pytest
from check_paper import (
    AMBIGUOUS,
    ELSEWHERE,
    FOUND,
    LOOKED_AT,
    MEANING,
    MISSING,
    NO_TEXT,
    OUTPUT,
    PICTURE,
    QUOTED,
    TRANSCRIPTION,
    UNPRINTED,
    check,
    check_stated,
    digest,
    files,
    main,
)
from paper_texts import read

from gpipe_bench.harness.paper import COLUMNS

V5 = r"""
# 1 Introduction
It holds  $25\times$  more, and  $84.4\%$  of 12 images. A reader's note follows.
>  it says 99.9% here
# 3 Performance
We used  $224\times 224$  pixels, a batch size of 128 and 128 runs. AmoebaNet has 7 cells. Of other networks, which are
not described here, it is known that some have 7.
![](picture)
Figure 2: Throughput of naive-1 and others, 36x in all.
Table 1: Sizes. Each needs 12 bytes.
<table><tr><td>NVIDIA GPUs</td><td>Naive-1</td><td>Pipeline-1</td></tr><tr><td>AmoebaNet-D (L, D)</td><td>(18, 208)</td><td>(18, 836)</td></tr><tr><td># of Model Parameters</td><td>82M</td><td>318M</td></tr><tr><td>Cloud TPUv3</td><td>Naive-1</td><td>Pipeline-1</td></tr><tr><td># of Model Parameters</td><td>282.2M</td><td>78.8M</td></tr></table>
Table 4: A chart
# References
[1] 77 things
"""  # noqa: E501

V1 = """
4.2. Performance

It reached 0.8. The load imbalance was 3.2%.

| | Naive-1 | Pipeline-1 |
|---|---|---|
| AmoebaNet-D (L, F) | (6, 208) | (6, 416) |

Table 1: Sizes in words.
"""


@pytest.fixture(scope="module")
def texts():
    return {"v5": read(V5), "v1": read(V1)}


def row(printed, location, unit="ratio", table="t", name="r", column="c", **changes):
    given = {
        "table": table,
        "row": name,
        "column": column,
        "printed": printed,
        "location": location,
        "unit": unit,
    }
    return {**dict.fromkeys(COLUMNS, ""), **given, **changes}


def of_table_1(table, name, column, printed, unit="parameters", version="v5"):
    return row(printed, f"{version} Table 1", unit, table, name, column)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (row("25x", "v5 section 1"), FOUND),
        (row("26x", "v5 section 1"), MISSING),
        (row("5x", "v5 section 1"), MISSING),  # not the end of 25x
        (row("25x", "v5 section 3"), ELSEWHERE),
        (row("77", "v5 section 1"), MISSING),  # of the references
        (row("7", "v5 section 3"), AMBIGUOUS),
        (row("1", "v5 Figure 2"), PICTURE),  # a bar, and no part of naive-1
        (row("a batch size of 64", "v5 section 3", form="words", value="1"), MISSING),
        (row("3.442", "v1 Figure 3", form="read off"), UNPRINTED),
        (row("30.92", "arXiv v5 Table 5"), NO_TEXT),
        (of_table_1("table1-transformer", "parameters", "naive-1", "282.2M"), FOUND),
        (of_table_1("table1-transformer", "parameters", "naive-1", "82M"), MISSING),  # of the upper half
        (of_table_1("table1-amoebanet", "num_filters", "pipeline-1", "416", "filters"), TRANSCRIPTION),
        (of_table_1("table1-v1", "num_filters", "pipeline-1", "416", "filters", "v1"), FOUND),
    ],
)
def test_a_number_is_found_where_it_stands_and_nowhere_else(texts, given, status):
    (found,) = check([given], texts)
    assert found.status == status, found


def test_the_words_of_a_stated_setting_are_looked_up(texts):
    entry = {"tables": ["t"], "setting": "s", "value": 128, "source": "v5 3", "quote": "a batch size of 128"}
    wrong = {**entry, "source": "v5 1"}
    assert [one.status for one in check_stated([entry, wrong], texts)] == [FOUND, ELSEWHERE]


def test_the_committed_output_is_of_the_present_files():
    """In its digests, and row by row, so that no row was left out; and every number was accounted for."""
    lines = OUTPUT.read_text(encoding="ascii").splitlines()
    rows, stated = files()
    digests = [line.split()[2] for line in lines if line.startswith(("paper.csv ", "unknowns.toml "))]
    assert digests == [digest(rows, LOOKED_AT), digest(stated, QUOTED)], (
        f"python tests/check_paper.py FOLDER-OF-TEXTS > results/{OUTPUT.name} makes it anew"
    )
    start = next(i for i, line in enumerate(lines) if line.startswith("Numbers of paper.csv")) + 2
    for line, given in zip(lines[start:], rows, strict=False):
        name = f"{given['table']} | {given['row']} | {given['column']}; {given['printed']}"
        assert line.startswith(tuple(f"{status}; {name}" for status in MEANING if status != MISSING))
    start = next(i for i, line in enumerate(lines) if line.startswith("Settings that")) + 2
    for line, entry in zip(lines[start:], stated, strict=False):
        assert line.startswith(f"{FOUND}; {', '.join(entry['tables'])} | {entry['setting']} | ")


def test_a_reworded_note_leaves_the_digest_alone_and_another_number_does_not():
    given = row("25x", "v5 section 1")
    before = digest([given], LOOKED_AT)
    assert digest([{**given, "note": "reworded"}], LOOKED_AT) == before
    assert digest([{**given, "printed": "26x"}], LOOKED_AT) != before


def test_without_the_texts_it_says_what_it_lacks(tmp_path, capsys):
    assert main([]) == 2
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([str(tmp_path)]) == 2
    assert "no text of v1, v5" in capsys.readouterr().err
