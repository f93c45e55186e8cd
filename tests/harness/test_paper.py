"""results/paper.csv is whole, and its numbers are the paper's; results/unknowns.toml: what it does not state.

The literals below were copied from the paper once more, by hand and not from the file.
"""

from __future__ import annotations

import pytest

from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.unknowns import load_unknowns, words


@pytest.fixture(scope="module")
def cells():
    return load_paper()


@pytest.fixture(scope="module")
def find(cells):
    found = {(c.source, *c.key): c for c in cells}
    return lambda table, row, column, source="paper": found[source, table, row, column]


AMOEBA = ("naive-1", "pipeline-1", "pipeline-2", "pipeline-4", "pipeline-8")
TRANSFORMER = ("naive-1", "pipeline-1", "pipeline-8", "pipeline-32", "pipeline-128")
STAGES = ("K=2", "K=4", "K=8")
FIGURE = ("naive-1", "pipeline-1", "pipeline-2", "pipeline-4", "pipeline-8")

PUBLISHED = [
    ("table1-amoebanet", "num_layers", AMOEBA, (18, 18, 18, 36, 72)),
    ("table1-amoebanet", "num_filters", AMOEBA, (208, 416, 544, 544, 512)),
    ("table1-amoebanet", "parameters", AMOEBA, (82e6, 318e6, 542e6, 1.05e9, 1.8e9)),
    ("table1-amoebanet", "parameter memory", AMOEBA, (1.05, 3.8, 6.45, 12.53, 24.62)),
    ("table1-amoebanet", "peak activation memory", AMOEBA, (6.26, 3.46, 8.11, 15.21, 26.24)),
    ("table1-transformer", "num_layers", TRANSFORMER, (3, 13, 103, 415, 1663)),
    ("table1-transformer", "parameters", TRANSFORMER, (282.2e6, 785.8e6, 5.3e9, 21.0e9, 83.9e9)),
    ("table1-transformer", "parameter memory", TRANSFORMER, (11.7, 8.8, 59.5, 235.1, 937.9)),
    ("table1-transformer", "peak activation memory", TRANSFORMER, (3.15, 6.4, 50.9, 199.9, 796.1)),
    ("table2-amoebanet", "M=1", STAGES, (1, 1.13, 1.38)),
    ("table2-amoebanet", "M=4", STAGES, (1.07, 1.26, 1.72)),
    ("table2-amoebanet", "M=32", STAGES, (1.21, 1.84, 3.48)),
    ("table2-transformer", "M=1", STAGES, (1, 1.07, 1.3)),
    ("table2-transformer", "M=4", STAGES, (1.7, 3.2, 4.8)),
    ("table2-transformer", "M=32", STAGES, (1.8, 3.4, 6.3)),
    ("table3-amoebanet", "M=32", STAGES, (1, 1.7, 2.7)),
    ("table3-transformer", "M=32", STAGES, (1, 1.8, 3.3)),
    ("figure3-amoebanet", "normalized throughput", ("naive-2", *FIGURE[2:]), (1, 1.156, 2.483, 3.442)),
    ("figure3-resnet101", "normalized throughput", FIGURE, (1, 0.80, 1.418, 2.182, 2.891)),
    ("nmt-batch", "260K tokens", ("BLEU", "NLL"), (30.92, 2.58)),
    ("nmt-batch", "1M tokens", ("BLEU", "NLL"), (31.86, 2.51)),
    ("nmt-batch", "4M tokens", ("BLEU", "NLL"), (32.71, 2.46)),
    ("amoebanet-b", "ImageNet top-1", ("v1", "v5"), (84.3, 84.4)),
    ("amoebanet-b", "ImageNet top-5", ("v5",), (97.0,)),
    ("control-stride", "ImageNet top-1", ("original strides", "moved stride"), (78.1, 82.7)),
    ("breakdown-v1", "load imbalance", ("K=2", "K=4"), (3.2, 10.9)),
]


@pytest.mark.parametrize(("table", "row", "columns", "values"), PUBLISHED)
def test_the_tables_are_the_papers(find, table, row, columns, values):
    assert tuple(find(table, row, column).value for column in columns) == values


CLAIMS = {"25x": ("table1-amoebanet", "pipeline-8", "naive-1"),
          "298x": ("table1-transformer", "pipeline-128", "naive-1"),
          "2.7x": ("table1-transformer", "pipeline-1", "naive-1"),
          "3.8": ("table1-amoebanet", "pipeline-1", "naive-1"),
          "5.6": ("table1-amoebanet", "pipeline-8", "pipeline-1")}  # fmt: skip


def test_the_claims_are_corrected_by_the_papers_printed_counts_and_by_nothing_else(cells, find):
    """Neither by our counts nor more sharply than the rounding of the printed ones allows."""
    claims = {c.printed: c for c in cells if c.table == "claims" and c.kind == "claim"}
    assert claims.keys() == CLAIMS.keys()
    for printed, (table, over, under) in CLAIMS.items():
        claim = claims[printed]
        above, below = find(table, "parameters", over), find(table, "parameters", under)
        low = (above.value - above.rounding) / (below.value + below.rounding)
        high = (above.value + above.rounding) / (below.value - below.rounding)
        quotient = find("claims", f"quotient of the printed counts, {claim.row}", claim.column)
        for value, error in (
            (claim.target, claim.target_rounding),
            (quotient.value, quotient.rounding),
        ):
            assert value == pytest.approx(above.value / below.value, rel=1e-3)
            assert (value - error, value + error) == pytest.approx((low, high), rel=2e-3)
        assert (quotient.kind, quotient.form) == ("identity", "evaluated")


def test_formulas_are_evaluated_right(cells):
    bubbles = [c for c in cells if c.row.startswith("bubble (K-1)/(M+K-1)")]
    assert len(bubbles) == 9
    for c in bubbles:
        stages, micro = int(c.column.removeprefix("K=")), int(c.row.rpartition("M=")[2])
        assert abs(100 * (stages - 1) / (micro + stages - 1) - c.value) <= c.rounding


def test_every_sentence_of_a_word_is_a_row_of_the_paper_and_has_one_word():
    rows = [row for one in load_unknowns().unknown for row in one.sentences]
    assert len(rows) == len(set(rows)) == len(words()) > 0
    assert set(rows) <= {
        cell.row for cell in load_paper() if cell.source == "paper" and cell.kind != "setting"
    }
    assert all(limit.range is not None and "claims" in limit.tables for _, limit in words().values())


# What is not stated


@pytest.fixture(scope="module")
def settings():
    return load_unknowns()


def test_stated_values_are_those_of_the_papers_numbers(settings):
    table = "table1-amoebanet"
    stated = {one.setting: one.value for one in settings.stated if table in one.tables}
    published = {
        cell.row: cell.value for cell in load_paper() if (cell.table, cell.column) == (table, "setting")
    }
    for row, setting in (("batch size", "batch_size"), ("micro-batches", "num_microbatches"),
                         ("image size", "image_size")):  # fmt: skip
        assert stated[setting] == published[row]
