"""What users see, text by text, against the digests of `golden.txt`; `python -m tests.golden` says how to
look at a difference and how to take one in.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from golden import SCHEDULES, VERBS, commands, digests, known, texts

from gpipe_bench.experiments.registry import EXPERIMENTS

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="sums of other versions of Python differ in their last digits"
)
GROUPS = {
    "help": lambda name: name.endswith("--help"),
    "list": lambda name: name.startswith("list --json"),
    "schedule": lambda name: name.startswith(tuple(f"schedule {each} " for each in SCHEDULES)),
    "plans": lambda name: name.startswith("plan ") and not {"--help", "--bytes"} & {*name.split()},
    "sizes": lambda name: name.startswith("plan ") and "--bytes" in name,
    "report": lambda name: name.startswith("report") and "--help" not in name,
} | {
    experiment: lambda name, which=experiment: name.split()[1:2] == [which] and "--results" in name
    for experiment in EXPERIMENTS
}


@pytest.mark.parametrize("group", GROUPS)
def test_texts_are_those_on_record(group: str) -> None:
    expected = {name: digest for name, digest in known().items() if GROUPS[group](name)}
    with TemporaryDirectory() as folder:  # whose name the texts leave out
        found = digests(texts(GROUPS[group], Path(folder)))
    assert expected, group
    assert {name for name in expected | found if expected.get(name) != found.get(name)} == set()


def test_every_text_is_of_one_group(tmp_path: Path) -> None:
    for name in known() | commands(tmp_path):
        assert sum(chosen(name) for chosen in GROUPS.values()) == 1, name
    assert {f"{verb} --help".strip() for verb in ("", *VERBS)} <= known().keys()
