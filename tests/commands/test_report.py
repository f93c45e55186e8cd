"""The report: every published number is on it, as the records have it, and nothing is invented or fetched."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_experiment import EXPERIMENT as FAKE
from records import metric, record

from gpipe_bench.experiments import registry
from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.commands import report as report_build
from gpipe_bench.experiments.commands.output import DONE
from gpipe_bench.experiments.commands.report import answers, build, readings, table_infos
from gpipe_bench.experiments.drawing import draw, drawn
from gpipe_bench.experiments.paper.predictions import DIRECT_SKIPS
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.compare import differences
from gpipe_bench.harness.paper import load_paper, of_the_paper
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.report.page import PATH, cells_csv, first_screen, html
from gpipe_bench.harness.store import Store

ROOT = Path(__file__).resolve().parents[2]
MACHINE = REFERENCE / "cpu-2-cores"
EXPERIMENTS = [registry.load(name) for name in registry.EXPERIMENTS]


class Parsed(HTMLParser):
    """What the tests need of a page: the keys of its rows, addresses, identifiers, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: set[str] = set()
        self.row = ""
        self.values: dict[str, float] = {}
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
            self.row = found["data-key"]
            self.rows.add(self.row)
        if tag == "data":
            self.values[self.row] = float(found["value"])

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


def test_every_number_of_the_paper_that_counts_is_on_the_page_once(parsed):
    shown = Counter(map(place_of, parsed.rows))
    assert {(*cell.key, "paper") for cell in of_the_paper().values() if cell.counted} <= shown.keys()
    assert max(shown.values()) <= 2, "once for each question"


def test_every_number_of_ours_stands_on_the_page_and_in_the_download_as_it_is(page, parsed):
    ours = {"|".join(cell.key): cell.ours for cell in page.cells if cell.ours is not None}
    assert parsed.values == ours
    lines = csv.DictReader(io.StringIO(cells_csv(page.tables)))
    assert sorted(float(line["ours"]) for line in lines if line["ours"]) == sorted(ours.values())
    assert len(ours) > 100


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
    assert DIRECT_SKIPS in {row.reason for row in page.cells}, (
        "others' numbers that are not predicted say why"
    )
    assert "theory" not in {row.source for row in page.cells}, "nobody is asked for what is not the paper's"
    said = {table.name: (table.location, table.hardware) for table in page.tables}
    assert said["table2-amoebanet"] == ("v5 Table 2", "TPU"), "the paper's alone"


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
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "cells.csv"}
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".report")] == []


def test_json_has_a_line_for_each_cell(tmp_path, capsys):
    assert cli.main(["report", "--results", str(tmp_path), "--json"]) == DONE
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    published = {place for place, cell in of_the_paper().items() if cell.counted}
    assert {(line["table"], line["row"], line["column"]) for line in lines} >= published
    assert {line["machine"] for line in lines} == {None, "cpu-2-cores"}
    assert not (tmp_path / "report.html").exists()


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
    found, problems = readings(FAKE, [(place.name, place) for place in places])
    return {a.column: a for a in answers(found)}, problems


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


def test_a_smoke_run_counts_only_where_there_is_nothing_else(tmp_path):
    own = put(tmp_path / "own", fake(1, 1, profile="smoke"), fake(2, 2, profile="smoke"))
    reference = put(tmp_path / "reference", fake(1, 82_000_000))
    found, _ = chosen(own, reference)
    assert [(found[c].machine, found[c].profile) for c in ("naive-1", "pipeline-1")] == [
        ("reference", "short"),
        ("own", "smoke"),
    ]


def test_records_that_an_experiment_cannot_read_cost_only_themselves(tmp_path, monkeypatch):
    some = {"fake": "fake_experiment", "table1": registry.EXPERIMENTS["table1"]}
    monkeypatch.setattr(report_build, "EXPERIMENTS", some)
    broken = dataclasses.replace(FAKE, cells=lambda records: [records[0].details["a key of long ago"]])
    monkeypatch.setattr("fake_experiment.EXPERIMENT", broken)
    monkeypatch.setitem(registry.EXPERIMENTS, "fake", "fake_experiment")
    page = build(put(tmp_path / "own", fake(1, 82_000_000)), figures=False)
    assert page.warnings == (f"{tmp_path / 'own'}: fake can't be shown: KeyError: 'a key of long ago'",)
    assert page.warnings[0] in Parsed(html(page)).text
    assert "follows" in {cell.answer for cell in page.cells}, "the reference records of the others are there"
    assert "fake" not in [view.experiment.name for view in page.experiments]


@pytest.mark.usefixtures("alone")
def test_text_of_records_cannot_become_markup(tmp_path):
    evil = '"><script>alert(1)</script>|\x1b[2J\x9b2J\x7f'
    environment = {"cpu_model": evil}
    put(tmp_path / "own", fake(1, 82_000_000, command=evil, environment=environment))
    put(tmp_path / "own", fake(2, None, status="failed", reason=evil))
    page = build(tmp_path / "own", figures=False)
    text = html(page)
    assert "alert(1)&lt;/script&gt;|\\x1b[2J\\x9b2J\\x7f" in text
    assert Parsed(text).tags["script"] == 0
    for written in (text, cells_csv(page.tables)):
        assert not {"\x1b", "\x9b", "\x7f"} & {*written}


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


@pytest.mark.parametrize("machine", sorted(path.name for path in REFERENCE.iterdir() if path.is_dir()))
def test_the_reference_records_are_of_one_clean_commit_and_machine_and_the_figures_show_them(machine):
    kept = []
    for name in registry.EXPERIMENTS:
        kept += Store(REFERENCE / machine).load(name).records
        found, _ = readings(experiment := registry.load(name), [(machine, REFERENCE / machine)])
        if found and (REFERENCE / machine / "figures" / f"{name}.json").exists():
            assert drawn(experiment, found[0].records, found[0].folder / "figures"), f"draw {name} again"
    made = {(each.environment["git_commit"], each.environment["git_dirty"]) for each in kept}
    assert [dirty for _, dirty in made] == [False], made
    assert not differences([each.environment for each in kept])


@pytest.mark.parametrize("name", registry.EXPERIMENTS)
def test_the_figures_of_the_reference_records_can_be_drawn_again(name, tmp_path, monkeypatch):
    """As small as they can be: what they show is looked at, and here only that they can be made."""
    monkeypatch.setattr("gpipe_bench.experiments.drawing.DOTS_PER_INCH", 10)
    experiment = registry.load(name)
    found, _ = readings(experiment, [("reference", MACHINE)])
    paths = draw(experiment, found[0].records, tmp_path)
    if paths:
        assert drawn(experiment, found[0].records, tmp_path) == paths
    else:
        assert not (MACHINE / "figures" / f"{name}.json").exists()


# The first screen


def test_every_number_of_the_first_screen_is_of_a_record(page):
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
    counts = Counter(
        cell.answer
        for name in reproduced.SECONDS
        for cells, _ in reproduced.cells(Store(MACHINE).load(name).records).values()
        for cell in cells
    )
    tested = counts["agrees"] + counts["differs"]
    assert f"of {tested} speeds {counts['agrees']} agree" in shown


def test_without_records_it_claims_nothing():
    found = first_screen([], {})
    assert {line[-1] for line in found.claims} == {"not run"}
    assert "of - speeds - agree" in found.markdown()
