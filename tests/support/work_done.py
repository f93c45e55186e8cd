"""How much Python a call executes: a measure of cost that is the same on every machine, however busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(function: Callable[[], object], package: str) -> int:
    """Lines that `function` executes in modules of the package, each time counted. Work inside a built-in
    counts nothing; `nox -s bench` has the seconds.
    """
    count = 0

    def inside(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return inside

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        return inside if name == package or name.startswith(f"{package}.") else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
