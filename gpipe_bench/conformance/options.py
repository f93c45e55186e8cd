"""The options of the conformance tests, which pytest must know before it looks for tests."""

from __future__ import annotations

import contextlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpipe-bench", "a pipeline engine's conformance")
    with contextlib.suppress(ValueError):  # another plugin's option of that name, which is not ours to break
        group.addoption("--engine", metavar="MODULE:ATTRIBUTE", help="the engine under test")
        group.addoption(
            "--engine-timeout-s", type=float, default=30.0, metavar="S",
            help="after which its steps count as hung; default: 30",
        )  # fmt: skip
