"""The first screen: true of the records, answers ten questions, says nothing without a number for it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import pytest

from gpipe_bench.experiments.report.build import build, idle_share, speed
from gpipe_bench.harness.places import REFERENCE
from gpipe_bench.harness.report.page import PATH, first_screen
from gpipe_bench.harness.store import Store

MACHINE = REFERENCE / "cpu-2-cores"
FACTS = {"hardware": "It ran on a machine."}


@pytest.fixture(scope="module")
def page():
    return build(MACHINE, figures=False)


def test_every_sentence_holds_under_the_verdicts_that_it_was_written_for(page):
    """One that does not is left out; then results/answer.toml needs new words."""
    assert page.first.stale == ()


TEN = {
    "Is training unchanged by the partitions?": r"same weights as one of a single stage .* In \d+ trainings",
    "Does it scale?": r"It scales\. .* trains [\d.]+ times as fast \(.*the paper: 3\.5x",
    "Does it scale for uneven layers?": r"AmoebaNet, whose layers are uneven, reaches \d+ % of a linear",
    "How long do devices wait?": r"even stages stand idle for [\d.]+ to [\d.]+ % of the time",
    "Do more micro-batches help?": r"more micro-batches are not always faster: .* \d+ % fewer",
    "How much room does re-materialization make?": r"model 2\.7x as large +\| .* \| [\d.]+ \([\d.]+ to",
    "What does re-materialization cost?": r"it takes [\d.]+ % more time here",
    "What could not be confirmed, and why?": r"What we cannot confirm are .* stay open: the paper leaves out",
    "Is 25 times larger true?": r"25x larger rests on the memory that a network takes \*without\* GPipe",
    "Which hardware, and what was not trained?": r"not trained for\. Everything that ran here ran on 2 "
    r"processor cores \(.*\), none of it on a GPU or TPU",
}


@pytest.mark.parametrize("question", TEN)
def test_a_reader_s_question_is_answered(page, question):
    assert re.search(TEN[question], page.first.markdown()), question


def test_each_number_is_that_of_its_record(page):
    """Worked out again from the rows of the page, whatever the screen says."""
    words = tomllib.loads(PATH.read_text(encoding="utf-8"))
    at = {cell.key: cell for cell in page.cells}
    text = page.first.markdown()
    for name, number in words["numbers"].items():
        cell = at[(*number["place"], number.get("source", "paper"), number.get("question", "here"))]
        if cell.ours is not None and f"{{{name}}}" in str(words):
            shown = f"{cell.ours:.3g}" if cell.unit in ("ratio", "%") else f"{cell.ours / 1e9:.3g}"
            assert shown in text or f"{cell.ours / 1e6:.3g}" in text, name
    records = Store(MACHINE).load("consistency").records
    same = [record for record in records if record.case["part"] == "same seed"]
    assert f"In {len(same)} trainings" in text
    found = {
        name: sum(r.quantity(name).value for r in same)
        for name in ("numbers compared", "numbers that differ")
    }
    assert f"none of {found['numbers compared']:,} weights" in text
    assert found["numbers that differ"] == 0
    for counts, line in zip(page.questions, page.first.evidence, strict=False):
        assert [int(each) for each in line[1:3]] == [
            counts.scores[0].judged_as(verdict) for verdict in ("reproduced", "undecided")
        ]


def test_the_formula_is_the_closed_form_of_even_stages():
    assert speed(8, 32) / speed(2, 32) == pytest.approx(3.517, abs=1e-3)
    assert [idle_share(k, 4 * k) for k in (2, 8)] == pytest.approx([3 / 35, 21 / 149])


def test_a_sentence_whose_verdict_has_changed_is_left_out_and_named(page):
    place = ("claims-text", "bubble at M >= 4K", "largest over K")
    changed = [
        replace(c, verdict="reproduced") if (c.place, c.question) == (place, "here") else c
        for c in page.cells
    ]
    found = first_screen(changed, FACTS)
    assert not any("too strong" in sentence for sentence in found.sentences)
    assert any("'idle': 'reproduced'" in each for each in found.stale)
    (line,) = [line for line in found.claims if line[0].startswith("Idle time")]
    assert line[2] == "yes"


def test_without_records_it_claims_nothing():
    found = first_screen([], {})
    assert {line[2] for line in found.claims} == {"not tried"}
    assert found.evidence == ()
    assert "scales" not in found.text()


def test_one_s_own_numbers_change_nothing_of_it(page, tmp_path):
    for name in ("table2", "consistency"):
        lines = (MACHINE / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:2]))
    own = build(tmp_path, figures=False)
    assert {cell.machine for cell in own.cells} > {"", "cpu-2-cores"}, "own numbers are in the tables"
    assert own.first == page.first
