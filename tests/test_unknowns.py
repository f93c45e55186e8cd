"""results/unknowns.toml: what the paper does not state, each with its allowed values and their reason."""

from __future__ import annotations

import pytest

from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.unknowns import load_unknowns


@pytest.fixture(scope="module")
def settings():
    return load_unknowns()


def test_every_entry_belongs_to_a_table_of_the_paper(settings):
    tables = {cell.table for cell in load_paper()}
    for one in (*settings.unknown, *settings.stated):
        assert set(one.tables) <= tables, one.setting


def test_what_the_paper_states_is_no_unknown(settings):
    with pytest.raises(ValueError, match=r"num_microbatches of table1-amoebanet .* v1 Table 1 states 16"):
        settings.find("table1-amoebanet", "num_microbatches")
    with pytest.raises(ValueError, match=r"num_stages of breakdown-v5 .* states 2"):
        settings.find("breakdown-v5", "num_stages")
    with pytest.raises(ValueError, match=r"has no unknown setting 'colour' .* it has: .*gradient_copies"):
        settings.find("table1-amoebanet", "colour")


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


GOOD = """
[[unknown]]
tables = ["t"]
setting = "s"
allowed = [1, 2]
later = [9]
reason = "because"
sources = ["v1 3"]
[[stated]]
tables = ["t"]
setting = "u"
value = 3
source = "v1 3"
quote = "three"
[[hypothesis]]
name = "three of them"
tables = ["t"]
settings = { s = 9 }
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "allowed = [1, 2]",
            "allowed = [1, 2]\nrange = [1, 2]",
            r"s must have either .* at `\$.unknown\[0\]`",
        ),
        ("allowed = [1, 2]", "allowed = []", "either 'allowed' values or a 'range'"),
        ("allowed = [1, 2]", "allowed = [[1], 2]", r"`array` - at `\$.unknown\[0\].allowed"),
        ("allowed = [1, 2]", "allowed = [2, 2]", "allowed twice"),
        ("allowed = [1, 2]", "range = [2, 1]", "not two finite numbers that rise"),
        ("allowed = [1, 2]", "range = [1]", "of length 2"),
        ("allowed = [1, 2]", "range = [1, inf]", "two finite numbers"),
        ('reason = "because"', 'reason = " "', r"regex .* at `\$.unknown\[0\].reason"),
        ('reason = "because"', "", "missing required field `reason`"),
        ('reason = "because"', 'reason = "because"\nresaon = ""', "unknown field `resaon`"),
        ('sources = ["v1 3"]', 'sources = ["it fits"]', r"regex .*maker.* at `\$.unknown\[0\].sources"),
        ('source = "v1 3"', 'source = "general: so"', r"regex .* at `\$.stated\[0\].source"),
        ("value = 3", "value = [3]", r"`array` - at `\$.stated\[0\].value"),
        ('setting = "u"', 'setting = "s"', r"s of t stands there twice"),
        ("later = [9]", "later = [2, 9]", "allowed twice"),
        ("later = [9]", "later = [8]", "'three of them': 9 is no later value of s of t; there are: 8"),
        ("{ s = 9 }", "{}", r"length >= 1 - at `\$.hypothesis\[0\].settings"),
        ("[[stated]]", "[[known]]", "field `known`"),
        ("[[stated]]", "[[stated", "Expected ']]'"),
    ],
)
def test_a_damaged_file_is_an_error_with_its_place(tmp_path, old, new, message):
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(GOOD)
    assert load_unknowns(good).find("t", "s").ends == (1, 2), "no range covers what was thought of later"
    assert [each.name for each in load_unknowns(good).reasons("t")] == ["three of them"]
    assert GOOD.count(old) == 1
    bad.write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError, match=f"bad.toml: .*{message}"):
        load_unknowns(bad)


def test_a_missing_file_is_an_error_with_its_path(tmp_path):
    with pytest.raises(ValueError, match=r"can't be read from .*unknowns\.toml"):
        load_unknowns(tmp_path / "unknowns.toml")
