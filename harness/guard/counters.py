"""Exact numbers that may only change on purpose: compared for equality with a committed file.

A number that needs no clock needs no tolerance either. It may not get better unnoticed: an unexplained win is
as often something that was forgotten as something that was gained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

Counters = Mapping[str, Mapping[str, Any]]
"""case -> quantity -> whole number, or text where it is a fraction or one number per stage."""


def differences(expected: Counters, found: Counters) -> list[str]:
    """One line for everything that differs; none where the two are equal."""
    lines = [f"{case}: missing, but in the file" for case in expected if case not in found]
    lines += [f"{case}: new, not in the file" for case in found if case not in expected]
    for case, counters in found.items():
        if case in expected:
            lines += [f"{case}: {line}" for line in _of_case(expected[case], counters)]
    return lines


def _of_case(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    lines = [f"{name} is missing, but in the file" for name in expected if name not in found]
    lines += [f"{name} = {found[name]} is new, not in the file" for name in found if name not in expected]
    for name, value in found.items():
        # A file may say 4.0 or true where 4 was counted; equality alone would let it.
        if name in expected and (expected[name] != value or type(expected[name]) is not type(value)):
            lines.append(f"{name} {expected[name]} -> {value}{_share(expected[name], value)}")
    return lines


def _share(before: Any, after: Any) -> str:
    try:
        old, new = Fraction(before), Fraction(after)
    except (TypeError, ValueError):
        return ""
    return f" ({float(new / old - 1):+.3%})" if old else ""


def encode(content: Mapping[str, Any]) -> str:
    """The file's text: one quantity per line, so that a review shows what changed."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def load(path: Path) -> dict[str, Any]:
    """The file's content. Raises ValueError, naming file and remedy, where there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; write it with --update") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}; write it anew with --update") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; write it anew with --update")
    return content
