"""How to cite: the file that says so is valid, of this version, and named where a reader looks."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_citation_has_what_the_format_requires_and_names_the_paper() -> None:
    found = yaml.safe_load(CITATION)
    assert found["cff-version"] == "1.2.0"
    for required in ("message", "title", "authors"):
        assert found[required], required
    assert found["type"] == "software"
    (paper,) = found["references"]
    assert paper["title"].startswith("GPipe: Efficient Training of Giant Neural Networks")
    assert paper["url"].endswith("1811.06965")
    assert (paper["type"], paper["year"], len(paper["authors"])) == ("conference-paper", 2019, 11)
    for person in paper["authors"]:
        assert person.keys() == {"family-names", "given-names"}


def test_the_readme_and_the_page_say_how_to_cite() -> None:
    for page in ("README.md", "harness/report/templates/report.html.j2"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "How to cite" in text
        assert "CITATION.cff" in text
