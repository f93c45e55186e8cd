"""What the runtime without a device has been asked for by this process."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = "launches", "syncs", "copies", "pageable", "mallocs", "frees", "pinned", "connections"
# What holds up a host, or the device: none of it belongs into a step.
HELD_UP = ("syncs", "pageable", "mallocs", "frees", "pinned")


@functools.cache
def runtime() -> Any | None:
    """The library; None where a process runs without it."""
    try:
        library = ctypes.CDLL("libfake_cuda.so")
    except OSError:
        return None
    library.fake_count.restype = ctypes.c_ulonglong
    return library


def counts() -> dict[str, int]:
    """Since the process began."""
    library = runtime()
    assert library is not None, "this needs the runtime without a device; see nox -s cuda-without-gpu"
    return {name: library.fake_count(name.encode()) for name in NAMES}


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """What was asked for in the block, once it is over."""
    found: dict[str, int] = {}
    before = counts()
    yield found
    found.update({name: count - before[name] for name, count in counts().items()})


def held_up(found: dict[str, int]) -> dict[str, int]:
    """Of the counts those that hold up, but for none."""
    return {name: found[name] for name in HELD_UP if found[name]}
