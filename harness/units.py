"""Numbers and their units: as the paper prints them, and as ours are brought to them and shown.

The paper prints decimal GB in one half of a table and GiB in the other, so the two are units of their own
here. "82M" is anything from 81.5 to 82.5 million: the interval follows from the printed form and not from a
tolerance that somebody chose.
"""

from __future__ import annotations

import functools
import re
from decimal import Decimal

_GIB = 2**30

_COUNTED = (
    "parameters", "layers", "filters", "stages", "micro-batches", "examples", "tokens", "pixels", "epochs",
    "runs", "heads", "standard deviations", "classes", "languages", "steps", "BLEU", "nats", "perplexity",
    "updates", "versions",
)  # fmt: skip
"""Units that measure nothing but themselves."""

# unit -> (what it measures, how many base units one of it is)
UNITS: dict[str, tuple[str, float]] = {
    "bytes": ("memory", 1),
    "MB": ("memory", 1e6),
    "MiB": ("memory", 2**20),
    "GB": ("memory", 1e9),
    "GiB": ("memory", _GIB),
    "bytes/parameter": ("bytes per parameter", 1),
    "s": ("time", 1),
    "ms": ("time", 1e-3),
    "us": ("time", 1e-6),
    "ratio": ("ratio", 1),  # a normalized throughput, a speed-up, how many times larger
    "%": ("ratio", 1e-2),
    **{name: (name, 1) for name in _COUNTED},
    "samples/s": ("throughput", 1),
    "GB/s": ("bandwidth", 1e9),
    "number": ("number", 1),  # a setting without a unit, such as a learning rate
}

COUNTS = ("parameters", "tokens", "examples")
"""Units of which a printed number may carry a suffix that scales it."""

_SUFFIXES = {"": 0, "K": 3, "k": 3, "M": 6, "B": 9, "million": 6, "billion": 9}
_POWER = re.compile(r"10\^(\d{1,2})")
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")

_LETTERED = ("parameters", "tokens")  # shown with one: `81.79M`
_SCALES = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def convert(value: float, unit: str, to: str) -> float:
    """The value in another unit of the same kind. Raises ValueError for any other unit."""
    if unit == to:
        return value
    for name in (unit, to):
        if name not in UNITS:
            raise ValueError(f"unknown unit {name!r}; known: {', '.join(UNITS)}")
    (kind, scale), (wanted_kind, wanted_scale) = UNITS[unit], UNITS[to]
    if kind != wanted_kind:
        raise ValueError(
            f"{unit!r} measures {kind} and {to!r} measures {wanted_kind}; they can't be compared"
        )
    return value * (scale / wanted_scale)


def show(value: float, unit: str, digits: int = 4) -> str:
    """A number as a person reads it, to so many significant digits: `81.79M`, `3.819 GB`, `65.60 %`."""
    if unit in _LETTERED:
        for scale, suffix in _SCALES:
            if abs(value) >= scale:
                return _digits(value / scale, digits) + suffix
        return _digits(value, digits)
    number = _digits(value, digits)
    if unit in ("ratio", "number"):
        return number
    return f"{number} {unit}"


def show_with_interval(value: float, low: float | None, high: float | None, unit: str) -> str:
    """`0.752 [0.739, 0.765]`, `34.51 [34.2, 34.8] GB`: the unit once, behind the interval if there is one."""
    if low is None or high is None:
        return show(value, unit)
    end = f" {unit}" if show(value, unit).endswith(f" {unit}") else ""
    return f"{show(value, unit).removesuffix(end)} {show_interval(low, high, unit)}{end}"


def show_interval(low: float, high: float, unit: str) -> str:
    """`[34.2, 34.8]`, to stand beside a number that names the unit; scaled counts keep their letter."""
    end = f" {unit}"
    return f"[{show(low, unit).removesuffix(end)}, {show(high, unit).removesuffix(end)}]"


def percent(error: float) -> str:
    """`55 %`, `7.6 %`: so many digits that a reader can check an answer."""
    return f"{100 * error:.{0 if error >= 0.1 else 1}f} %"


def _digits(value: float, digits: int) -> str:
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:.0f}"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    before_point = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    return f"{value:.{max(0, digits - before_point)}f}"


@functools.cache
def parse_printed(printed: str, unit: str) -> tuple[float, float]:
    """Value and half a unit of the last printed digit, in `unit`.

    `("82M", "parameters")` is `(82e6, 0.5e6)`, `("3.8GB", "GB")` is `(3.8, 0.05)`; `("1.0e-5", ...)`,
    `("25 billion", "examples")`, `("1,281,167", ...)` and `("10^4", ...)` work too. The zeros at the end of a
    whole count with a suffix are no digits: "400M" is `(400e6, 50e6)`. Raises ValueError where the text is no
    number with at most a suffix.
    """
    if power := _POWER.fullmatch(printed.strip()):
        value = 10.0 ** int(power[1])
        return value, value / 2
    found = _NUMBER.match(_THOUSANDS.sub("", printed.strip()))
    if found is None:
        raise ValueError(f"printed form {printed!r} does not begin with a number")
    number, suffix = found[1], found[2]
    decimal = Decimal(number)
    if unit in COUNTS:
        if suffix.lstrip("-") not in _SUFFIXES:
            raise ValueError(f"printed form {printed!r} ends in {suffix!r}; known: {', '.join(_SUFFIXES)}")
        decimal = decimal.scaleb(_SUFFIXES[suffix.lstrip("-")])
    scaled = unit in COUNTS and suffix and "." not in number
    exponent = (decimal.normalize() if scaled else decimal).as_tuple().exponent
    assert isinstance(exponent, int)  # finite, see above
    return float(decimal), float(Decimal(5).scaleb(exponent - 1))
