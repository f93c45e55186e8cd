"""What is refused inside of a test says what `refused.txt` holds: no test has to.

    python -m tests.refused [tests/test_FILE.py[::TEST] ...]     writes what they say now

For what needs objects that a test makes; calls that stand alone are in `refusals.txt`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_suffix(".txt")
WRITES = "REFUSED_NOW"  # names the file that takes what is said, in place of a comparison
PLACES = re.compile(rf"{re.escape(tempfile.gettempdir())}/[\w./-]*[\w/]|{re.escape(str(ROOT))}|0x[0-9a-f]+")
PARAMETERS = re.compile(r"\[.*\](?= #\d+$)", re.DOTALL)

_seen: Counter[str] = Counter()  # refusals of each test; a test is run once in a process


def on_record() -> dict[str, str]:
    """What is said, by test and number of the refusal; once where it is alike for all parameters."""
    found: dict[str, str] = {}
    name = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            found[name] += line[4:] if not found[name] else f"\n{line[4:]}"
        elif line and not line.startswith("#"):
            name, found[line] = line, ""
    return found


@contextmanager
def refused(kind: type[BaseException]) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """As `pytest.raises`, and the whole text is that on record."""
    with pytest.raises(kind) as caught:
        yield caught
    test = os.environ["PYTEST_CURRENT_TEST"].removeprefix("tests/").removesuffix(" (call)")
    _seen[test] += 1
    name = f"{test} #{_seen[test]}"
    lines = PLACES.sub("PLACE", f"{type(caught.value).__name__}: {caught.value}").splitlines()
    said = "\n".join(line.rstrip() for line in lines if line.strip())
    if WRITES in os.environ:
        with open(os.environ[WRITES], "a", encoding="utf-8") as file:
            print(name, *(f"    {line}" for line in said.splitlines()), sep="\n", file=file)
        return
    known = on_record()
    assert said == known.get(name, known.get(PARAMETERS.sub("", name))), (
        f"{PAGE.name} has not what {name} says"
    )


def main(tests: list[str]) -> int:
    """Of these, or of all files that refuse; what other tests say stays."""
    every = sorted(path for path in PAGE.parent.glob("test_*.py") if "import refused" in path.read_text())
    chosen = tests or [str(path.relative_to(ROOT)) for path in every]
    begins = tuple(each.removeprefix("tests/") for each in chosen)
    found = {name: text for name, text in on_record().items() if tests and not name.startswith(begins)}
    with (
        tempfile.NamedTemporaryFile("r", encoding="utf-8") as now,
        mock.patch(f"{__name__}.PAGE", Path(now.name)),
    ):
        os.environ[WRITES] = now.name
        status = pytest.main(["-q", "--rootdir", str(ROOT), *chosen])
        now_said = on_record()
    for name, text in now_said.items():
        short = PARAMETERS.sub("", name)
        alike = {other for key, other in now_said.items() if PARAMETERS.sub("", key) == short} == {text}
        found[short if alike else name] = text
    lines = [
        line for name in sorted(found) for line in (name, *(f"    {s}" for s in found[name].splitlines()))
    ]
    PAGE.write_text(
        "\n".join(["# What tests see refused; python -m tests.refused writes it anew.", *lines, ""])
    )
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
