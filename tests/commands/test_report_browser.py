"""The report in a real browser: numbers equal the records, charts answer to mouse and keyboard.

Needs playwright (`pip install -e .[browser]`) and an installed Chromium; without them the tests are skipped.
With AXE_PATH naming axe-core's `axe.min.js` (`npm pack axe-core`), the accessibility rules are run as well.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from gpipe_bench.experiments import registry
from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.commands.output import DONE
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.units import convert
from gpipe_bench.pipeline import Timeline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the path"),
]
MACHINE = REFERENCE / "cpu-2-cores"
AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PHONE, SCREEN = (390, 844), (1280, 800)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    assert cli.main(["report", "--results", str(folder)]) == DONE
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser, report):
    """Opens the report; whatever the browser complains about or fetches ends up in `page.complaints`."""
    contexts = []

    def go(size=SCREEN, scheme="light", **options):
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, offline=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.complaints = []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith(("file:", "data:")) or page.complaints.append(request.url),
        )
        page.goto(report.as_uri())
        return page

    yield go
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, SCREEN, (320, 600)])
def test_no_errors_no_requests_no_sideways_scrolling(open_page, size, scheme):
    page = open_page(size, scheme)
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0 && i.alt)")


def test_numbers_in_the_page_are_those_of_the_records(open_page):
    shown = open_page().evaluate(
        "Object.fromEntries([...document.querySelectorAll('tr[data-key]')]"
        ".map(row => [row.dataset.key, row.querySelector('.ours data')?.value]))"
    )
    units = {(cell.source, *cell.key): cell.unit for cell in load_paper()}
    compared = 0
    for name in registry.EXPERIMENTS:
        experiment = registry.load(name)
        records = Store(MACHINE).load(name).records
        values = {(q.value, q.unit) for record in records for q in record.metrics if q.value is not None}
        for ours in experiment.cells(records):
            key = "|".join(ours.key)
            if ours.metric is None or (ours.metric.value, ours.metric.unit) not in values:
                continue  # a ratio of records
            number = float(shown[key])
            unit = units.get((ours.source, *ours.place), ours.metric.unit)
            assert number == convert(ours.metric.value, ours.metric.unit, unit), key
            compared += 1
    assert compared >= 40


def test_the_first_screen_answers_in_words_and_then_claim_by_claim(open_page):
    page = open_page((1300, 900))
    for text in ("The algorithm does", "could not be tested", "processor cores", "two small networks"):
        box = page.get_by_text(text).first.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 900, text
    assert page.locator(".claims tbody tr").count() >= 10


def test_on_a_phone_claims_are_cards_and_the_counts_fit(open_page):
    page = open_page(PHONE)
    for each in (*page.locator(".claims tr").all()[1:], *page.locator(".evidence").all()):
        box = each.bounding_box()
        assert box["x"] + box["width"] <= PHONE[0]


def test_the_cells_download_as_they_lie_beside_the_page(open_page, report):
    page = open_page()
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    assert download.value.suggested_filename == "cells.csv.gz"
    unpacked = gzip.decompress(Path(download.value.path()).read_bytes())
    assert unpacked == report.with_name("cells.csv").read_bytes()


def test_pointing_at_an_action_tells_about_it(open_page):
    page = open_page()
    figure = page.locator(".gantt").first
    figure.scroll_into_view_if_needed()
    assert figure.locator("title").count() == 0, "the browser's own tooltips are replaced"
    figure.locator("rect.k-B").first.hover()
    text = figure.locator(".tip").inner_text()
    for word in ("backward", "stage 0", "micro-batch", "from"):
        assert word in text
    page.locator("h1").hover()
    assert figure.locator(".tip").is_hidden()


def test_a_chart_can_be_read_with_the_keyboard(open_page):
    page = open_page()
    figure = page.locator("[id^=chart-figure2]").nth(1)
    figure.locator("svg").focus()
    said = []
    for key in ("Home", "ArrowRight", "ArrowDown", "End", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
        said.append(figure.locator("[role=status]").inner_text())
    assert [text.split(":")[0] for text in said[:3]] == ["0F0", "0F1", "1F0"]
    assert said[3].startswith("1B0")
    assert said[4].startswith("0B")
    assert len(set(said)) == len(said)
    page.keyboard.press("Escape")
    assert figure.locator(".tip").is_hidden()


def test_the_trace_of_a_chart_downloads_as_perfetto_reads_it(open_page):
    page = open_page()
    with page.expect_download() as download:
        page.locator("[id^=chart-figure2] .chartline a").first.click()
    assert download.value.suggested_filename.endswith(".json.gz")
    trace = json.loads(gzip.decompress(Path(download.value.path()).read_bytes()))
    record = next(r for r in Store(MACHINE).load("figure2").records if "timeline" in r.details)
    wanted = Timeline.from_data(record.details["timeline"]).to_chrome()
    assert trace == json.loads(json.dumps(wanted))


def test_verdicts_can_be_filtered(open_page):
    page = open_page()
    rows = page.locator("tr[data-verdict]:visible")
    before, deviating = rows.count(), page.locator("tr[data-verdict=below]:visible").count()
    assert deviating
    page.get_by_role("checkbox", name="below").uncheck()
    assert rows.count() == before - deviating
    every = page.locator("tr[data-verdict]").count()
    below = page.locator("tr[data-verdict=below]").count()
    assert f"{every - below} of {every} rows" in page.locator("#filter-status").inner_text()
    page.get_by_role("checkbox", name="below").check()
    assert rows.count() == before


def test_what_ours_is_can_be_filtered_and_what_is_left_is_counted(open_page):
    page = open_page()
    for name in ("replayed", "modelled", "identity", "no number"):
        page.locator("input[name=evidence]").and_(page.get_by_role("checkbox", name=name)).uncheck()
    shown = page.locator("tr[data-verdict]:not([hidden])")
    evidences = set(shown.evaluate_all("rows => rows.map(row => row.dataset.evidence)"))
    assert evidences == {"measured"}
    verdicts = Counter(shown.evaluate_all("rows => rows.map(row => row.dataset.verdict.replace('-', ' '))"))
    status = page.locator("#filter-status").inner_text()
    for verdict, count in verdicts.items():
        assert f"{count} {verdict}" in status
    assert status.startswith(f"{shown.count()} of ")


def test_tables_without_a_row_to_show_go_and_come_back(open_page):
    page = open_page()
    tables = page.locator("article.table:visible")
    before = tables.count()
    for name in ("reproduced", "identity", "undecided", "above", "not judged", "not comparable", "not run"):
        page.locator("input[name=verdict]").and_(page.get_by_role("checkbox", name=name)).uncheck()
    assert 0 < tables.count() < before
    for table in tables.all():
        assert table.locator("tr[data-verdict]:not([hidden])").count() > 0
    page.get_by_role("button", name="Show all").click()
    assert tables.count() == before
    assert page.locator("input:not(:checked)").count() == 0


def test_a_view_is_in_the_address(open_page, report):
    page = open_page()
    page.locator("input[value=above]").uncheck()
    page.locator("input[value=replayed]").uncheck()
    assert "verdict=" in page.url
    assert "evidence=" in page.url
    shown = page.locator("tr[data-verdict]:not([hidden])").count()
    again = open_page()
    again.goto(page.url)
    assert again.locator("tr[data-verdict]:not([hidden])").count() == shown
    assert not again.locator("input[value=above]").is_checked()
    again.goto(report.as_uri() + "?verdict=better&evidence=guessed")
    assert again.locator("input:not(:checked)").count() == 0, "names of another page hide nothing"
    again.get_by_role("checkbox", name="below").uncheck()
    again.get_by_role("checkbox", name="below").check()
    assert "verdict" not in again.url
    for box in again.locator("input[name=verdict]").all():
        box.uncheck()
    again.reload()
    assert again.locator("input[name=verdict]:checked").count() == 0, "nothing chosen is a view too"


def test_a_link_opens_what_it_leads_to(open_page, report):
    page = open_page()
    note = page.locator("li[id$=-note-1]").first
    place = note.get_attribute("id")
    assert note.is_hidden()
    page.goto(f"{report.as_uri()}?verdict=none#{place}")
    assert page.locator(f"#{place}").is_visible()


def test_on_a_phone_numbers_are_cards_and_long_parts_are_closed(open_page):
    page = open_page(PHONE)
    assert page.evaluate("document.documentElement.scrollHeight") < 40_000
    assert page.locator("tr[data-verdict]:visible").count() == 0
    page.goto(page.url + "?verdict=below")
    cards = page.locator("tr[data-verdict=below]:visible")
    assert cards.count() > 0
    for card in cards.all():
        box = card.bounding_box()
        assert box["width"] <= PHONE[0]
        assert box["x"] >= 0
        verdict = card.locator(".judged .verdict").bounding_box()
        assert verdict["height"] < 30, "a verdict stands in one line"


def test_the_first_tab_skips_to_the_results(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_without_script_everything_is_there(open_page):
    page = open_page(java_script_enabled=False)
    assert page.locator("tr[data-verdict]:visible").count() > 100
    assert page.locator("#filter").is_hidden()
    assert "stage 0" in page.locator(".gantt title").first.text_content()


def test_printed_settings_are_open(open_page):
    page = open_page()
    assert page.pdf(prefer_css_page_size=True)[:5] == b"%PDF-"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:is(.more, .part, .drawn):not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details.more:not([open])").count() > 0


@pytest.mark.skipif("AXE_PATH" not in os.environ, reason="AXE_PATH does not name axe-core's axe.min.js")
@pytest.mark.parametrize(("size", "scheme"), [(SCREEN, "light"), (SCREEN, "dark"), (PHONE, "light")])
def test_no_accessibility_rule_is_broken(open_page, size, scheme):
    page = open_page(size, scheme, bypass_csp=True)
    page.evaluate(Path(os.environ["AXE_PATH"]).read_text(encoding="utf-8"))
    found = page.evaluate("tags => axe.run(document, {runOnly: tags})", AXE_TAGS)
    broken = {rule["id"]: [node["html"][:120] for node in rule["nodes"]] for rule in found["violations"]}
    assert broken == {}
    assert len(found["passes"]) > 30
