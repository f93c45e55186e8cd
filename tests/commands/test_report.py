"""The report: every published number is on it, as the records have it, and nothing is invented or fetched."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_experiment import EXPERIMENT as FAKE
from records import metric, record

from gpipe_bench.experiments import registry
from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.commands.output import BAD_USAGE, DONE
from gpipe_bench.experiments.report import build as report_build
from gpipe_bench.experiments.report.build import (
    answers,
    build,
    facts_of,
    folders,
    idle_share,
    readings,
    sources,
    speed,
    table_infos,
)
from gpipe_bench.experiments.report.figures import draw, drawn
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.compare import judge
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.paper import PaperTable, load_paper
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.report.html import html, markdown
from gpipe_bench.harness.report.page import PATH, cells_csv, first_screen, page_of
from gpipe_bench.harness.report.table import answer
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.verdict import Result

ROOT = Path(__file__).resolve().parents[2]
MACHINE = REFERENCE / "cpu-2-cores"
EXPERIMENTS = [registry.load(name) for name in registry.EXPERIMENTS]
INFO = {"t": PaperTable(title="T", short="T", about="", missing="nobody ran it")}


class Parsed(HTMLParser):
    """What the tests need of a page: the keys of its rows, addresses, identifiers, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: set[str] = set()
        self.peers: list[str] = []
        self.addresses: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.tags: Counter[str] = Counter()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags[tag] += 1
        if "id" in found:
            self.ids.append(found["id"])
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            if name in found and not (name == "href" and tag == "a"):
                self.addresses.append((tag, found[name]))
        if tag == "a" and found.get("href", "").startswith("#"):
            self.targets.append(found["href"][1:])
        if tag == "tr" and found.get("data-key"):
            self.rows.add(found["data-key"])
        if tag == "tr" and "data-peer" in found:
            self.peers.append(found["data-peer"])

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a fresh clone: reference records and nothing else."""
    return build(tmp_path_factory.mktemp("empty"), figures=False)


@pytest.fixture(scope="module")
def parsed(page):
    return Parsed(html(page))


def place_of(key):
    """Table, row, column and source of a row of the page."""
    return tuple(key.split("|")[:-1])


def test_every_published_number_is_on_the_page_once(page, parsed):
    paper = load_paper()
    shown = Counter(map(place_of, parsed.rows))
    assert {(*cell.key, "paper") for cell in paper if cell.source == "paper"} <= shown.keys()
    assert max(shown.values()) <= 2, "once for each question"
    answered = {row.key[:-1] for table in page.tables for row in table.rows}
    others = {(*cell.key, cell.source) for cell in paper if cell.source != "paper"} - answered
    assert Counter(map(place_of, parsed.peers)) == Counter(others)


def test_counted_is_each_number_of_the_paper_once(page):
    paper = {cell.key for cell in load_paper() if cell.source == "paper" and cell.counted}
    counted = {cell.place for cell in page.cells if cell.counted}
    assert counted == paper, "each result, claim and identity, and a number that is printed twice once"


def test_a_computed_number_has_the_answer_of_the_declared_rule(page):
    """One rule in two places: that of the page, and that of the tables that `compare` computes."""
    found = {(cell.place, cell.question): answer(cell) for cell in page.cells if cell.is_computed}
    compared = 0
    for name in reproduced.SECONDS:
        for (table, _), (cells, _) in reproduced.cells(Store(MACHINE).load(name).records).items():
            for cell in cells:
                assert found[(table, cell.row, cell.column), "as published"] == cell.answer, cell
                compared += 1
    assert compared > 50
    assert {*found.values()} >= {"agrees", "differs", "no test", "follows"}


def test_a_table_that_is_not_run_says_why(page):
    for table in page.tables:
        reasons = {row.reason for row in table.rows if row.verdict == "not run"}
        for reason in reasons:
            assert reason not in ("", "there is no record of this case"), table.name
    infos = table_infos(EXPERIMENTS, {"table1": {"short"}, "table2": {"smoke"}})
    assert "only a smoke run" in infos["table2-amoebanet"].missing
    assert "nox -s figure2" in infos["formulas"].missing
    assert "do not report" in infos["claims"].missing
    assert {cell.table for cell in load_paper()} == set(infos)


def test_the_page_holds_all_it_needs(page, parsed):
    assert all(address.startswith(("data:", "#")) for _, address in parsed.addresses), (
        "nothing is fetched from anywhere"
    )
    assert "@import" not in html(page)
    assert "url(http" not in html(page)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert set(parsed.targets) <= set(parsed.ids)
    assert parsed.tags["h1"] == parsed.tags["main"] == 1


def test_no_torch_and_quick_from_the_command_line(tmp_path):
    code = (
        "import sys\n"
        "class NotInstalled:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NotInstalled)\n"
        "from gpipe_bench.experiments.commands.cli import main\n"
        f"sys.exit(main(['report', '--results', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert done.stdout.startswith("Does GPipe do what its paper says?\n")
    assert "<img" in written, "the reference figures are inlined"
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.md", "cells.csv"}
    assert (tmp_path / "report.md").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".report")] == []


def test_json_has_a_line_for_each_cell(tmp_path, capsys):
    assert cli.main(["report", "--results", str(tmp_path), "--json"]) == DONE
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    published = {cell.key for cell in load_paper() if cell.source == "paper"}
    assert {(line["table"], line["row"], line["column"]) for line in lines} >= published
    assert {line["machine"] for line in lines} == {None, "cpu-2-cores"}
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert cli.main(["report", "--output", str(tmp_path / "file"), "--no-figures"]) == BAD_USAGE
    assert "choose another folder with --output" in capsys.readouterr().err


def fake(step, value, **changes):
    changes = {"options": {"device": "cpu", "engine": None, "seed": 0}, **changes}
    number = metric(value, name="parameters", unit="parameters", provenance="modelled")
    return record(step, metrics=(number,), **changes)


@pytest.fixture
def alone(monkeypatch):
    """There is no other experiment than the fake one."""
    monkeypatch.setitem(registry.EXPERIMENTS, "fake", "fake_experiment")
    monkeypatch.setattr(report_build, "EXPERIMENTS", {"fake": "fake_experiment"})


def put(folder, *records):
    for each in records:
        Store(folder).append(each)
    return folder


def chosen(*places):
    found, problems = sources(FAKE, [(place.name, place) for place in places])
    return {a.column: a for a in answers(readings(FAKE, found)[0])}, problems


def test_own_records_come_first_and_references_fill_in(tmp_path):
    own = put(tmp_path / "own", fake(1, 82_000_000), fake(2, None, status="failed", reason="broke"))
    reference = put(tmp_path / "reference", fake(1, 81_000_000), fake(2, 318_000_000), fake(3, 542_000_000))
    found, _ = chosen(own, reference)
    assert {column: (a.machine, a.entry.metric.value) for column, a in found.items()} == {
        "naive-1": ("own", 82_000_000),
        "pipeline-1": ("reference", 318_000_000),
        "pipeline-2": ("reference", 542_000_000),
    }
    assert found["naive-1"].entry.record == Store(own).load("fake").records[0]


@pytest.mark.usefixtures("alone")
def test_a_report_asks_each_experiment_once(tmp_path, monkeypatch):
    """Judged, laid out and drawn in one pass: cells and text of each group of records are made once."""
    asked: Counter[str] = Counter()

    def cells(records):
        asked["cells"] += 1
        return FAKE.cells(records)

    def tables(records):
        asked["tables"] += 1
        return "the text"

    monkeypatch.setattr("fake_experiment.EXPERIMENT", dataclasses.replace(FAKE, cells=cells, tables=tables))
    other = put(tmp_path / "references" / "other", fake(1, 41_000_000))
    own = put(tmp_path / "own", fake(1, 82_000_000), fake(2, 318_000_000))
    monkeypatch.setattr(report_build, "folders", lambda results: folders(results, other.parent))
    page = build(own, figures=False)
    (experiment,) = page.experiments
    assert experiment.text == "the text"
    assert asked == {"cells": 2, "tables": 2}, "for each machine's records"


def test_a_smoke_run_counts_only_where_there_is_nothing_else(tmp_path):
    own = put(tmp_path / "own", fake(1, 1, profile="smoke"), fake(2, 2, profile="smoke"))
    reference = put(tmp_path / "reference", fake(1, 82_000_000))
    found, _ = chosen(own, reference)
    assert [(found[c].machine, found[c].profile) for c in ("naive-1", "pipeline-1")] == [
        ("reference", "short"),
        ("own", "smoke"),
    ]


@pytest.mark.usefixtures("alone")
def test_what_a_smoke_run_gave_is_marked_wherever_it_stands(tmp_path, monkeypatch):
    none = tmp_path / "references"
    monkeypatch.setattr(report_build, "folders", lambda results: folders(results, none))
    smoke = build(put(tmp_path / "smoke", fake(1, 1, profile="smoke")), figures=False)
    assert smoke.smoke == 1
    marks = html(smoke).count('<strong class="smoke">')
    assert marks == 4, "the banner, the row, its table's command and the experiment's runs"
    short = build(put(tmp_path / "short", fake(1, 1)), figures=False)
    assert short.smoke == 0
    assert '<strong class="smoke">' not in html(short)


def test_records_of_another_revision_or_engine_are_not_mixed_in(tmp_path):
    experiment = dataclasses.replace(FAKE, engines=("ours", "peer"))
    old = fake(1, 1, revision=FAKE.revision + 1)
    peer = fake(1, 2, options={"device": "cpu", "engine": "peer", "seed": 0})
    ours = fake(1, 3, options={"device": "cpu", "engine": "ours", "seed": 0})
    found, _ = sources(experiment, [("own", put(tmp_path / "own", old, ours, peer))])
    assert [[r.metrics[0].value for r in source.records] for source in found] == [[3], [2]]


def test_damaged_lines_are_named_and_the_rest_is_used(tmp_path):
    own = put(tmp_path / "own", fake(1, 82_000_000), fake(2, 318_000_000))
    path = Store(own).path("fake")
    path.write_bytes(path.read_bytes().replace(b"82000000", b"1e999"))
    found, problems = chosen(own)
    assert list(found) == ["pipeline-1"]
    assert [problem.line for problem in problems] == [1]


def test_each_folder_of_records_is_named_once(tmp_path):
    assert [name for name, _ in folders(MACHINE)].count("cpu-2-cores") == 1, "it is no reference of its own"
    assert [name for name, _ in folders(tmp_path / "mine", tmp_path / "nowhere")] == ["mine"]
    names = [name for name, _ in folders(tmp_path / "cpu-2-cores")]
    assert names[:2] == ["cpu-2-cores (yours)", "cpu-2-cores"]


def test_records_that_an_experiment_cannot_read_cost_only_themselves(tmp_path, monkeypatch):
    some = {"fake": "fake_experiment", "table1": registry.EXPERIMENTS["table1"]}
    monkeypatch.setattr(report_build, "EXPERIMENTS", some)
    broken = dataclasses.replace(FAKE, cells=lambda records: [records[0].details["a key of long ago"]])
    monkeypatch.setattr("fake_experiment.EXPERIMENT", broken)
    monkeypatch.setitem(registry.EXPERIMENTS, "fake", "fake_experiment")
    page = build(put(tmp_path / "own", fake(1, 82_000_000)), figures=False)
    assert page.warnings == (f"{tmp_path / 'own'}: fake can't be shown: KeyError: 'a key of long ago'",)
    assert page.warnings[0] in Parsed(html(page)).text
    assert "follows" in map(answer, page.cells), "the reference records of the others are there"
    assert "fake" not in [experiment.name for experiment in page.experiments]


@pytest.mark.usefixtures("alone")
def test_text_of_records_cannot_become_markup(tmp_path):
    evil = '"><script>alert(1)</script>|\x1b[2J\x9b2J\x7f'
    environment = {"cpu_model": evil}
    put(tmp_path / "own", fake(1, 82_000_000, command=evil, environment=environment))
    put(tmp_path / "own", fake(2, None, status="failed", reason=evil))
    page = build(tmp_path / "own", figures=False)
    text = html(page)
    assert "alert(1)" in text
    assert Parsed(text).tags["script"] == 0
    for written in (text, markdown(page), cells_csv(page.tables)):
        assert "<script>alert" not in written
        assert not {"\x1b", "\x9b", "\x7f"} & {*written}
    assert "alert(1)&lt;/script>\\|\\x1b[2J\\x9b2J\\x7f" in markdown(page)


def test_two_answers_for_a_cell_are_refused():
    entry = Result(table="t", row="r", column="c", metric=metric(1))
    answer = dataclasses.replace(judge(None, entry), machine="m", profile="short")
    with pytest.raises(ValueError, match="two answers"):
        page_of([answer, answer], [], INFO)
    (view,) = page_of([answer], [], INFO).tables
    (row,) = view.rows
    assert (row.kind, row.counted) == ("ours", False)
    assert view.parts[0].counts == "nothing counted"


def test_figures_are_kept_only_for_the_records_they_show(tmp_path):
    records = [fake(1, 1), fake(2, 2)]
    paths = draw(FAKE, records, tmp_path)
    assert drawn(FAKE, records[::-1], tmp_path) == paths
    assert drawn(FAKE, records[:1], tmp_path) is None
    assert drawn(FAKE, [fake(1, 1), fake(2, 3)], tmp_path) is None
    (plot,) = FAKE.figures(records)
    renamed = dataclasses.replace(FAKE, figures=lambda records: [dataclasses.replace(plot, name="other")])
    assert drawn(renamed, records, tmp_path) is None, "the experiment draws another figure now"
    paths[0].unlink()
    assert drawn(FAKE, records, tmp_path) is None
    (tmp_path / "fake.json").write_text("[]")
    assert drawn(FAKE, records, tmp_path) is None


def test_a_plot_is_drawn_and_saved_in_its_own_style(tmp_path):
    seen = []

    @contextlib.contextmanager
    def style(name):
        seen.append(f"enter {name}")
        yield
        seen.append(f"leave {name}")

    class Drawing:
        def savefig(self, path, /, *, dpi):
            seen.append(path.name)

    def plot(name, suffixes):
        return Plot(
            name=name, caption="", alt="", suffixes=suffixes, style=partial(style, name),
            draw=lambda: seen.append(f"draw {name}") or Drawing(),
        )  # fmt: skip

    plots = [plot("a", ("png", "svg")), plot("b", ("png",))]
    draw(dataclasses.replace(FAKE, figures=lambda records: plots), [fake(1, 1)], tmp_path)
    assert seen == ["enter a", "draw a", "a.png", "a.svg", "leave a", "enter b", "draw b", "b.png", "leave b"]


@pytest.mark.parametrize("machine", sorted(path.name for path in REFERENCE.iterdir() if path.is_dir()))
def test_the_reference_figures_show_the_reference_records(machine):
    for name in registry.EXPERIMENTS:
        experiment = registry.load(name)
        found, _ = sources(experiment, [(machine, REFERENCE / machine)])
        if (
            found
            and experiment.figures is not None
            and (REFERENCE / machine / "figures" / f"{name}.json").exists()
        ):
            shown = drawn(experiment, found[0].records, found[0].folder / "figures")
            assert shown, f"the figures of {name} on {machine} are of other records; draw them again"


@pytest.mark.parametrize("name", registry.EXPERIMENTS)
def test_the_figures_of_the_reference_records_can_be_drawn_again(name, tmp_path, monkeypatch):
    """As small as they can be: what they show is looked at, and here only that they can be made."""
    monkeypatch.setattr("gpipe_bench.experiments.report.figures.DOTS_PER_INCH", 10)
    experiment = registry.load(name)
    found, _ = sources(experiment, [("reference", MACHINE)])
    paths = draw(experiment, found[0].records, tmp_path)
    if paths:
        assert drawn(experiment, found[0].records, tmp_path) == paths
    else:
        assert not (MACHINE / "figures" / f"{name}.json").exists()


# The first screen

WRITTEN_FOR = {
    "the algorithm does": (
        ("consistency", "distance to the sequential mean", "pipeline-8"),
        "here",
        "agrees",
    ),
    "AmoebaNet differs": (("table2-amoebanet", "M=32", "K=8"), "as published", "differs"),
    "memory is no test": (
        ("table1-amoebanet", "peak activation memory", "pipeline-8"),
        "as published",
        "no test",
    ),
}
"""The answers that the words of results/answer.toml stand for; with others they need new words."""


def test_the_words_are_those_of_the_answers_on_record(page):
    at = {(cell.place, cell.question): answer(cell) for cell in page.cells if cell.source == "paper"}
    for what, (place, question, word) in WRITTEN_FOR.items():
        assert at[place, question] == word, f"{what}: write results/answer.toml anew"
    known = facts_of({"consistency": Store(MACHINE).load("consistency").records})
    done, of = known["same_runs"].split(" of ")
    assert done == of, "from one seed they all end with the same weights"
    same = [r.case for r in Store(MACHINE).load("consistency").records if r.case["part"] == "same seed"]
    assert {case["model"] for case in same} == {"images", "text"}, "two networks"
    assert {case["num_stages"] for case in same} == {2, 4, 8}, "against one stage"


def test_every_number_of_the_first_screen_is_of_a_record(page, tmp_path):
    """What the file spells out is no number of ours, and what it leaves to the records is there."""
    text = PATH.read_text(encoding="utf-8")
    assert len(" ".join(page.first.paragraphs).split()) <= 120
    assert len(page.first.claims) <= 12
    shown = page.first.markdown()
    assert "{" not in shown
    spelled = re.findall(r'^(?:ours|how) = "(.*)"$', text, re.M) + re.findall(
        r'^  """(.*?)"""', text, re.M | re.S
    )
    without = [re.sub(r"\{[^}]*\}", "", each) for each in spelled]
    known = {"1,", "2,", "4", "8", "32"}
    assert {*re.findall(r"\d[\d.,]*", " ".join(without))} <= known, "numbers of stages and micro-batches"
    printed = {cell.printed for cell in load_paper()}
    for each in re.findall(r'^paper = "(.*)"$', text, re.M):
        for number in re.findall(r"\d[\d.]*", re.sub(r"\{[^}]*\}", "", each)):
            assert printed & {number, f"{number}x"}, number
    for each in ("{computed_faster}", "{error.bytes}", "{same_runs}"):
        assert each in text
    place = ("claims-text", "Transformer-48: speed-up with four times the accelerators", "K=8 / K=2, M=32")
    (ours,) = [c for c in page.cells if (c.place, c.question) == (place, "as published")]
    (record,) = [
        r for r in Store(MACHINE).load("table2").records
        if r.case == {"part": "reproduction", "model": "transformer"}
    ]  # fmt: skip
    assert ours.ours in [metric.value for metric in record.metrics]
    assert f"{ours.ours:.2f} times as fast" in shown
    counts = Counter(
        cell.answer
        for name in reproduced.SECONDS
        for cells, _ in reproduced.cells(Store(MACHINE).load(name).records).values()
        for cell in cells
    )
    tested = counts["agrees"] + counts["differs"]
    assert f"of {tested} numbers {counts['agrees']} agree" in shown


def test_every_column_of_the_claims_stands_under_its_name(page):
    table = html(page).partition('<table class="claims cards">')[2].partition("</table>")[0]
    names = re.findall('<th scope="col">(.+?)</th>', table)
    assert names == list(page.first.CLAIMS)
    assert re.findall('data-label="(.+?)"', table) == names[1:] * len(page.first.claims)


def test_the_formula_is_the_closed_form_of_even_stages():
    assert speed(8, 32) / speed(2, 32) == pytest.approx(3.517, abs=1e-3)
    assert [idle_share(k, 4 * k) for k in (2, 8)] == pytest.approx([3 / 35, 21 / 149])


def test_without_records_it_claims_nothing():
    found = first_screen([], {})
    assert {line[-1] for line in found.claims} == {"not run"}
    assert "of - numbers - agree" in found.markdown()


def test_one_s_own_numbers_change_nothing_of_it(page, tmp_path):
    for name in ("table2", "consistency"):
        lines = (MACHINE / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:2]))
    own = build(tmp_path, figures=False)
    assert {cell.machine for cell in own.cells} > {"", "cpu-2-cores"}, "own numbers are in the tables"
    assert own.first == page.first
