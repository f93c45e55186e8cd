"""Sentences at toy size: the protocol, verdicts from records alone, catalogues; no total counts them."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from command_line import call
from msgspec import structs
from records import record
from refused import refused

from gpipe_bench.experiments.directions import protocol as protocol_module
from gpipe_bench.experiments.directions.experiment import EXPERIMENT, LABEL, cases, figures, tables
from gpipe_bench.experiments.directions.protocol import (
    Contrast,
    drawn,
    drawn_seeds,
    interval,
    judged,
    load_protocol,
    power,
)
from gpipe_bench.experiments.directions.training import (
    NoDataError,
    chrf,
    corpus,
    for_test,
    normal,
    read_catalogue,
)
from gpipe_bench.experiments.report.figures import draw
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.record import Quantity, Record

PROTOCOL = load_protocol()
STRIDE = msgspec.structs.replace(PROTOCOL.contrasts["stride"], seeds=5)


def runs(arm: str, values: Sequence[float], metric: str = "accuracy", **changes: Any) -> list[Record]:
    """Finished trainings of an arm with the protocol's seeds."""
    details = {
        "curve": [[1, 50.0], [2, 60.0]], "parameters": 10, "operations": 1e9, "steps": 2, "batch_size": 4,
        "data": "made up", "data_sha256": changes.pop("data_sha256", "0"), "tokens_per_step": 8,
    }  # fmt: skip
    case = {"task": "images", "arm": arm, "protocol": changes.pop("protocol", PROTOCOL.digest(arm))}
    return [
        record(
            experiment="directions", case={**case, "seed": seed}, details=details,
            quantities=(Quantity(name=metric, value=value, unit="%", provenance="measured"),), **changes,
        )
        for seed, value in zip(drawn_seeds(len(values)), values, strict=True)
    ]  # fmt: skip


def both(
    better: Sequence[float], worse: Sequence[float], contrast: Contrast = STRIDE, **changes: Any
) -> list[Record]:
    return [
        *runs(contrast.better, better, contrast.metric, **changes),
        *runs(contrast.worse, worse, contrast.metric, **changes),
    ]


@pytest.fixture
def with_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pilot said."""
    monkeypatch.setattr(protocol_module.Protocol, "power_of", lambda self, contrast: 0.9)


# The protocol


def test_the_seeds_follow_from_the_papers_number_and_differ_from_the_pilots() -> None:
    for role, seeds in (("directions", PROTOCOL.seeds), ("directions pilot", PROTOCOL.pilot_seeds)):
        assert list(seeds) == [drawn("1811.06965", role, number + 1) for number in range(len(seeds))]
    assert not {*PROTOCOL.seeds} & {*PROTOCOL.pilot_seeds}


def test_a_contrast_compares_arms_of_one_task_over_several_seeds() -> None:
    for contrast in PROTOCOL.contrasts.values():
        arms = [PROTOCOL.arms[arm] for arm in (contrast.better, contrast.worse, *contrast.also)]
        assert len({arm.task for arm in arms}) == 1
        assert contrast.seeds >= 2
        assert contrast.counts > 0
    runs = [len(values) for arm in PROTOCOL.arms.values() for values in arm.pilot.values()]
    assert all(2 <= count <= len(PROTOCOL.pilot_seeds) for count in runs)


def test_what_has_no_power_by_the_pilot_is_not_run() -> None:
    wanted = PROTOCOL.runs()
    found = {name: PROTOCOL.power_of(contrast) for name, contrast in PROTOCOL.contrasts.items()}
    known = {name: power for name, power in found.items() if power is not None}
    assert PROTOCOL.powers == pytest.approx(known, abs=1e-4)
    assert structs.replace(PROTOCOL, powers={}).runs() == {}
    for name, contrast in PROTOCOL.contrasts.items():
        if known.get(name, 0.0) >= PROTOCOL.power:
            for arm in (contrast.better, contrast.worse, *contrast.also):
                assert set(wanted[arm]) >= {*drawn_seeds(contrast.seeds)}
    keys = [case.key for case in cases(RunOptions())]
    assert [(key["arm"], key["seed"]) for key in keys] == [
        (arm, s) for arm, seeds in wanted.items() for s in seeds
    ]
    assert all(key["protocol"] == PROTOCOL.digest(str(key["arm"])) for key in keys)


# The test that it describes


def test_the_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    random = numpy.random.default_rng(0)
    samples = random.normal(1.0, 2.0, size=(4000, 5)).tolist()
    inside = [low <= 1.0 <= high for _, low, high in (interval(each, 0.95) for each in samples)]
    assert numpy.mean(inside) == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize(("deviation", "runs_"), [(1.0, 5), (2.0, 3)])
def test_the_power_is_that_of_repeated_experiments(deviation: float, runs_: int) -> None:
    samples = numpy.random.default_rng(0).normal(2.0, deviation, size=(4000, runs_)).tolist()
    beside = [low > 0 or high < 0 for _, low, high in (interval(each, 0.95) for each in samples)]
    assert power(deviation, 2.0, runs_, 0.95) == pytest.approx(numpy.mean(beside), abs=0.025)


@pytest.mark.usefixtures("with_power")
@pytest.mark.parametrize(
    ("better", "word"),
    [
        ((93.0, 94.0, 93.0, 94.0, 93.5), "same direction"),
        ((83.0, 84.0, 83.0, 84.0, 83.5), "opposite"),
        ((99.0, 81.0, 99.0, 81.0, 92.0), "undecided"),
    ],
)
def test_the_word_is_where_the_interval_lies(better: Sequence[float], word: str) -> None:
    found = judged(STRIDE, both(better, (90.0, 90.0, 90.0, 90.0, 90.0)))
    assert found.word == word
    assert found.differences == tuple(value - 90 for value in better)


@pytest.mark.usefixtures("with_power")
def test_a_smaller_loss_is_the_better_one_and_what_an_undecided_one_excludes_is_said() -> None:
    batch = PROTOCOL.contrasts["batch-steps"]
    assert judged(batch, both([3.0, 3.1, 3.0, 3.1, 3.0], [4.0] * 5, batch)).word == "same direction"
    found = judged(batch, both([3.99, 4.01, 3.99, 4.01, 4.0], [4.0] * 5, batch))
    assert (found.word, found.reason) == ("undecided", "excludes +0.1 and -0.1")
    small = judged(batch, both([3.97, 3.98, 3.97, 3.98, 3.97], [4.0] * 5, batch))
    assert (small.word, small.reason) == ("same direction", "but by less than what would count")


@pytest.mark.usefixtures("with_power")
def test_runs_that_lack_or_are_of_something_else_are_not_judged() -> None:
    fine = ([93.0, 94.0, 93.0, 94.0, 93.5], [90.0] * 5)
    assert (
        judged(STRIDE, both(fine[0], fine[1][:4])).reason == "4 of 5 runs of 'original strides' are finished"
    )
    other = judged(STRIDE, both(*fine, protocol="another"))
    assert (other.word, "under another protocol" in other.reason) == ("not run", True)
    mixed = [*runs(STRIDE.better, fine[0], data_sha256="1"), *runs(STRIDE.worse, fine[1])]
    assert "several data sets" in judged(STRIDE, mixed).reason
    lacking = both(*fine, status="skipped", reason="no data here: it takes 20 languages")
    assert judged(STRIDE, lacking).word == "no data here"


def test_without_power_there_is_no_verdict_whatever_the_runs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_module.Protocol, "power_of", lambda self, contrast: 0.3)
    found = judged(STRIDE, both([93.0, 94.0, 93.0, 94.0, 93.5], [90.0] * 5))
    assert (found.word, found.difference) == ("no power at this size", None)
    assert "in 30 of 100" in found.reason


# What is shown


@pytest.mark.usefixtures("with_power")
def test_nobody_can_take_it_for_a_reproduction(tmp_path: Path) -> None:
    count = PROTOCOL.contrasts["stride"].seeds
    records = both(([93.0, 94.0] * count)[:count], [90.0] * count)
    text = " ".join(tables(records).split())
    assert text.count("(toy size)") == len(PROTOCOL.contrasts), "with every verdict"
    assert text.startswith("TOY SIZE, AND NO REPRODUCTION")
    for contrast in PROTOCOL.contrasts.values():
        assert contrast.sentence in text
        assert contrast.source in text
    assert EXPERIMENT.cells(records) == []
    assert EXPERIMENT.paper_tables == ()
    paths = draw(EXPERIMENT, records, tmp_path)
    assert {path.stem for path in paths} == {"directions", "directions-curves"}
    assert all(LABEL in plot.caption and not plot.on_page for plot in figures(records))
    assert "............|.....-o-...." in text, "3.5 points, where 2 count"
    assert figures([]) == []


# Catalogues


def mo(pairs: Mapping[str, str]) -> bytes:
    """GNU's binary format."""
    originals, translations = b"", b""
    tables: list[list[bytes]] = [[], []]
    start = 28 + 16 * len(pairs)
    for key in sorted(pairs):
        for place, text in enumerate((key, pairs[key])):
            content = text.encode()
            tables[place].append(struct.pack("<2I", len(content), start + len(originals)))
            originals += content + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    return head + b"".join(tables[0]) + b"".join(tables[1]) + originals + translations


def write(folder: Path, language: str, pairs: Mapping[str, str], name: str = "tool") -> None:
    path = folder / language / "LC_MESSAGES" / f"{name}.mo"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(mo({"": "Content-Type: text/plain; charset=UTF-8\n", **pairs}))


def test_both_formats_give_the_same_entries(tmp_path: Path) -> None:
    (tmp_path / "a.mo").write_bytes(
        mo({"Open the file": "Datei öffnen", "menu\x04Close all\0Close %d": "Alle schließen\0x"})
    )
    (tmp_path / "a.po").write_text(
        'msgid ""\nmsgstr "header"\n\nmsgid "Open "\n"the file"\nmsgstr "Datei öffnen"\n\n'
        'msgctxt "menu"\nmsgid "Close all"\nmsgid_plural "Close %d"\n'
        'msgstr[0] "Alle schließen"\nmsgstr[1] "x"\n\n'
        '#, fuzzy\nmsgid "Not sure"\nmsgstr "?"\n'
    )
    wanted = {("Open the file", "Datei öffnen"), ("Close all", "Alle schließen")}
    assert {*read_catalogue(tmp_path / "a.mo")} == wanted
    assert {*read_catalogue(tmp_path / "a.po")} - {("", "header")} == wanted
    for content in (b"", b"\xde\x12\x04\x95", mo({"a": "b"})[:40], b"\xde\x12\x04\x95" + b"\xff" * 24):
        (tmp_path / "b.mo").write_bytes(content)
        assert [*read_catalogue(tmp_path / "b.mo")] == []


WORDS = ("open", "close", "file", "folder", "window", "print", "image", "page", "colour", "font")


def languages(folder: Path, names: Sequence[str], count: int = 400) -> None:
    """Made-up translations of the same messages."""
    messages = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS][:count]
    for language in names:
        write(folder, language, {text.capitalize(): f"{language} {text[::-1]}" for text in messages})


def test_no_language_trains_on_what_another_one_is_tested_with(tmp_path: Path) -> None:
    languages(tmp_path, ["aa", "bb", "cc_DD", "en_GB", "zh_CN"])
    write(tmp_path, "cc", {"Open it": "cc"})  # the smaller variant
    write(tmp_path, "aa", {"OPEN, open: open!": "aa anders", "Say %s to me": "aa %s", "Single": "aa"}, "more")
    write(tmp_path, "aa", {"Printland": "aa"}, "iso_3166")
    write(tmp_path, "bb", {"Open Window": "bb"}, "iso_639")
    found = corpus(str(tmp_path), 3, (2,), 100, 10)
    assert list(found.train) == ["aa", "bb", "cc"]
    assert found.low == ("bb",)
    assert [len(found.train[language]) > 300 for language in found.train] == [True, False, True]
    assert len(found.train["bb"]) == 100
    tested = {normal(english) for _, english in found.test["bb"]}
    trained = {normal(english) for pairs in found.train.values() for _, english in pairs}
    assert len(tested) == 10
    assert not tested & trained
    assert not any("open window" in english for english in tested), "a name of a language"
    assert all(for_test(english) for english in tested)
    assert not any("%" in english or english == "single" for english in trained)


def test_a_machine_without_catalogues_says_so(tmp_path: Path) -> None:
    languages(tmp_path, ["aa", "bb"])
    with refused(NoDataError) as raised:
        corpus(str(tmp_path), 3, (1,), 100, 10)
    assert f"in {tmp_path} there are 2; give a folder of catalogues with --data" in str(raised.value)


def test_chrf_is_that_of_the_definition() -> None:
    assert chrf(["the cat"], ["the cat"]) == pytest.approx(100)
    assert chrf(["xyz"], ["the cat"]) == chrf([""], ["the cat"]) == 0
    precision, recall = 1.0, (2 / 3 + 1 / 2) / 2  # of one and of two letters
    assert chrf(["a b"], ["abc"]) == pytest.approx(500 * precision * recall / (4 * precision + recall))


# Runs


@pytest.mark.usefixtures("undrawn")
def test_a_smoke_run_takes_every_path_and_a_second_one_goes_on_from_there(tmp_path: Path) -> None:
    syllables = ("ba", "ke", "di", "mo", "nu", "ra", "se", "ti", "vo", "wu")
    words = [a + b + c for a in syllables for b in syllables for c in syllables]
    english = [f"{words[7 * n % 1000]} {words[(13 * n + 5) % 1000]} {words[n % 997]}" for n in range(1500)]
    for number in range(20):
        write(tmp_path / "catalogues", f"l{number}", {text: f"{number} {text[::-1]}" for text in english})
    asked = ("run", "directions", "--profile", "smoke", "--results", str(tmp_path / "out"), "--jobs", 1,
             "--data", str(tmp_path / "catalogues"))  # fmt: skip
    status, out, err = call(*asked, "--only", "task=translation")
    assert status == 0, err
    assert "TOY SIZE" in out
    status, out, err = call(*asked)
    assert status == 0, err
    assert "2 of 8 cases were on record already" in err
    from gpipe_bench.harness.store import Store

    found = Store(tmp_path / "out").load("directions").records
    assert {each.case["task"] for each in found} == {*PROTOCOL.tasks}
    for each in found:
        assert each.status == "done", each.reason
        assert all(math.isfinite(quantity.value or math.nan) for quantity in each.quantities)
    moved = {each.case["arm"]: each.details for each in found if each.case["task"] == "images"}
    assert moved["moved stride"]["parameters"] == moved["original strides"]["parameters"]
    assert moved["moved stride"]["operations"] > 2 * moved["original strides"]["operations"]


def test_wrong_data_is_one_line(tmp_path: Path) -> None:
    status, _, err = call(
        "run", "directions", "--data", str(tmp_path / "nowhere"), "--results", str(tmp_path)
    )
    assert status == 2
    assert "there is no such folder" in err
