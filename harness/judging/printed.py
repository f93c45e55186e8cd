"""A number as a paper prints it, and the interval that its digits stand for.

"82M" is anything from 81.5 to 82.5 million. The interval follows from the printed form and not from a
tolerance that somebody chose, so the file of the paper's numbers keeps each of them as text.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

COUNTS = ("parameters", "tokens", "examples")
"""Units of which a printed number may carry a suffix that scales it."""

_SUFFIXES = {"": 0, "K": 3, "k": 3, "M": 6, "B": 9, "million": 6, "billion": 9}
_POWER = re.compile(r"10\^(\d{1,2})")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def parse_printed(printed: str, unit: str) -> tuple[float, float]:
    """Value and half a unit of the last printed digit, in `unit`.

    `("82M", "parameters")` is `(82e6, 0.5e6)`, `("3.8GB", "GB")` is `(3.8, 0.05)`; `("1.0e-5", ...)`,
    `("25 billion", "examples")`, `("1,281,167", ...)` and `("10^4", ...)` work too. Raises ValueError where
    the text is no number with at most a suffix.
    """
    if power := _POWER.fullmatch(printed.strip()):
        value = 10.0 ** int(power[1])
        return value, value / 2
    body = _THOUSANDS.sub("", printed.strip())
    number, suffix = body, ""
    for cut in range(len(body), 0, -1):
        head = body[:cut].rstrip()
        try:
            Decimal(head)
        except InvalidOperation:
            continue
        number, suffix = head, body[cut:].strip()
        break
    else:
        raise ValueError(f"printed form {printed!r} does not begin with a number")
    decimal = Decimal(number)
    if not decimal.is_finite():
        raise ValueError(f"printed form {printed!r} is not a finite number")
    if unit in COUNTS:
        if suffix.lstrip("-") not in _SUFFIXES:
            raise ValueError(f"printed form {printed!r} ends in {suffix!r}; known: {', '.join(_SUFFIXES)}")
        decimal = decimal.scaleb(_SUFFIXES[suffix.lstrip("-")])
    exponent = decimal.as_tuple().exponent
    assert isinstance(exponent, int)  # finite, see above
    return float(decimal), float(Decimal(5).scaleb(exponent - 1))
