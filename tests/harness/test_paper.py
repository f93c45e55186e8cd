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

BREAKDOWN = {"computation": 65.6, "recompute": 22.5, "bubble": 4.1, "load imbalance": 3.2, "setup": 2.9,
             "weight update": 1.7}  # fmt: skip
TRANSFER = {"CIFAR-10": 99.0, "CIFAR-100": 91.3, "Stanford Cars": 94.6, "Oxford Pets": 95.9, "Food-101": 93.0,
            "FGVC Aircraft": 92.7, "Birdsnap": 83.6}  # fmt: skip
CLASSES = {"ImageNet-2012": 1000, "CIFAR-10": 10, "CIFAR-100": 100, "Stanford Cars": 196, "Oxford Pets": 37,
           "Food-101": 101, "FGVC Aircraft": 100, "Birdsnap": 500}  # fmt: skip
TRAINING = {"ImageNet-2012": 1_281_167, "CIFAR-10": 50_000, "CIFAR-100": 50_000, "Stanford Cars": 8_144,
            "Oxford Pets": 3_680, "Food-101": 75_750, "FGVC Aircraft": 6_667, "Birdsnap": 47_386}  # fmt: skip
PREVIOUS = {"ImageNet-2012": 83.9, "CIFAR-10": 98.5, "CIFAR-100": 89.3, "Stanford Cars": 94.8,
            "Oxford Pets": 93.8, "Food-101": 90.4, "FGVC Aircraft": 92.9, "Birdsnap": 80.2}  # fmt: skip
NMT = {"T(6,8192,16)": 400e6, "T(24,8192,16)": 1.3e9, "T(12,16384,32)": 1.3e9, "T(32,16384,32)": 3e9,
       "T(64,16384,32)": 6e9}  # fmt: skip


@pytest.mark.parametrize(("table", "row", "columns", "values"), PUBLISHED)
def test_the_tables_are_the_papers(find, table, row, columns, values):
    assert tuple(find(table, row, column).value for column in columns) == values


def test_the_lists_are_the_papers(cells):
    def column(table, name):
        return {c.row: c.value for c in cells if (c.table, c.column, c.source) == (table, name, "paper")}

    assert column("breakdown-v5", "share of the step") == BREAKDOWN
    assert sum(BREAKDOWN.values()) == pytest.approx(100)
    assert column("transfer", "top-1") == {"ImageNet-2012": 84.4, **TRANSFER}
    assert column("transfer", "top-1 in v1") == TRANSFER
    assert column("transfer", "classes") == CLASSES
    assert column("transfer", "training examples") == TRAINING
    assert column("nmt-models", "parameters") == NMT
    assert column("nmt-models", "partitions") == dict(
        zip(
            ["T(12,16384,32)", "T(24,8192,16)", "T(32,16384,32)", "T(64,16384,32)"],
            [2, 4, 8, 16],
            strict=True,
        )
    )


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


def test_the_peers_numbers_are_a_second_reference(find):
    def peer(table, row, *columns):
        return [find(table, row, column, "torchgpipe").value for column in columns]

    assert peer("table1-amoebanet", "parameters", *AMOEBA[1:]) == [319.0e6, 542.7e6, 1.06e9, 1.84e9]
    assert peer("table1-amoebanet", "parameter memory", *AMOEBA[1:]) == [3.57, 6.07, 11.80, 20.62]
    assert peer("table1-amoebanet", "peak activation memory", *AMOEBA[1:]) == [0.91, 3.39, 6.91, 10.83]
    assert peer("table2-amoebanet", "M=1", *STAGES) == [1, 1.004, 0.932]
    assert peer("table2-amoebanet", "M=4", *STAGES) == [1.539, 1.666, 2.621]
    assert peer("table2-amoebanet", "M=32", *STAGES) == [1.773, 2.709, 4.953]
    assert peer("table2-amoebanet", "M=1 throughput", "K=2") == [26.733]
    assert peer("table2-amoebanet", "M=32 throughput", "K=8") == [132.413]
    assert peer("figure3-resnet101", "normalized throughput", *FIGURE) == [1, 0.853, 1.414, 2.774, 4.294]
    assert peer("figure3-resnet101", "throughput", "naive-1") == [95.862]


def test_what_the_paper_contradicts_itself_on_is_not_comparable(cells):
    barred = {(c.table, c.row, c.column) for c in cells if not c.comparable}
    assert barred == {
        ("table1-amoebanet", "parameter memory", "naive-1"),
        ("table1-amoebanet", "parameter memory", "pipeline-8"),
        ("growth", "AmoebaNet of Figure 1", "parameters"),
    }


def test_formulas_are_evaluated_right(cells):
    bubbles = [c for c in cells if c.row.startswith("bubble (K-1)/(M+K-1)")]
    assert len(bubbles) == 9
    for c in bubbles:
        stages, micro = int(c.column.removeprefix("K=")), int(c.row.rpartition("M=")[2])
        assert abs(100 * (stages - 1) / (micro + stages - 1) - c.value) <= c.rounding


def test_the_previous_best_are_the_papers(cells):
    previous = {c.row: c.value for c in cells if (c.table, c.column) == ("transfer", "previous best")}
    assert previous == PREVIOUS


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


def test_an_unknown_allows_its_values_and_no_others(settings):
    micro = settings.find("table1-transformer", "num_microbatches")
    assert micro.allows(32)
    assert not micro.allows(64)
    assert micro.ends == micro.allowed
    cap = settings.find("table1-amoebanet", "memory_cap_bytes")
    assert cap.ends == (7.31e9, 2**33)
    assert cap.allows(8e9)
    assert not cap.allows(9e9)
    assert not cap.allows("8 GB")
    head = settings.find("table1-amoebanet", "auxiliary_head")
    assert head.allows(True)
    assert not head.allows(1)


def test_stated_values_are_those_of_the_papers_numbers(settings):
    table = "table1-amoebanet"
    stated = {one.setting: one.value for one in settings.stated if table in one.tables}
    published = {
        cell.row: cell.value for cell in load_paper() if (cell.table, cell.column) == (table, "setting")
    }
    for row, setting in (("batch size", "batch_size"), ("micro-batches", "num_microbatches"),
                         ("image size", "image_size")):  # fmt: skip
        assert stated[setting] == published[row]
