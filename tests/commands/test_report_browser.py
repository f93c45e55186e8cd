"""The report in a real browser: numbers equal the records, and all fits a phone and a screen.

Needs playwright (`pip install -e .[browser]`) and an installed Chromium; without them the tests are skipped.
With AXE_PATH naming axe-core's `axe.min.js` (`npm pack axe-core`), the accessibility rules are run as well.
"""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import pytest

from gpipe_bench.experiments import registry
from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.commands.output import DONE
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.units import convert

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


def test_the_cells_download_as_they_lie_beside_the_page(open_page, report):
    page = open_page()
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    assert download.value.suggested_filename == "cells.csv.gz"
    unpacked = gzip.decompress(Path(download.value.path()).read_bytes())
    assert unpacked == report.with_name("cells.csv").read_bytes()


@pytest.mark.skipif("AXE_PATH" not in os.environ, reason="AXE_PATH does not name axe-core's axe.min.js")
@pytest.mark.parametrize(("size", "scheme"), [(SCREEN, "light"), (SCREEN, "dark"), (PHONE, "light")])
def test_no_accessibility_rule_is_broken(open_page, size, scheme):
    page = open_page(size, scheme, bypass_csp=True)
    page.evaluate(Path(os.environ["AXE_PATH"]).read_text(encoding="utf-8"))
    found = page.evaluate("tags => axe.run(document, {runOnly: tags})", AXE_TAGS)
    broken = {rule["id"]: [node["html"][:120] for node in rule["nodes"]] for rule in found["violations"]}
    assert broken == {}
    assert len(found["passes"]) > 30
