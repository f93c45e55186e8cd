"""Checks of model options, so that all builders raise the same errors.

A wrong size that reaches torch becomes a shape error deep inside a forward; these checks raise a `ValueError`
at once that names the option, the value and what is allowed.
"""

from collections.abc import Collection
from typing import Any


def positive_int(name: str, value: Any) -> int:
    """Returns `value` if it is an integer of at least 1, else raises `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not allowed: give an integer of at least 1")
    return value


def probability(name: str, value: Any) -> float:
    """Returns `value` if 0 <= value < 1 (a share that is dropped), else raises `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} is not allowed: give a number with 0 <= {name} < 1")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Returns `value` if it is True or False, else raises `ValueError`."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not allowed: give True or False")
    return value


def one_of(name: str, value: Any, allowed: Collection[Any]) -> Any:
    """Returns `value` if it is among `allowed`, else raises `ValueError` that lists them."""
    if value not in tuple(allowed):
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(map(repr, allowed))}")
    return value


def even_int(name: str, value: Any) -> int:
    """Returns `value` if it is an even integer of at least 2, else raises `ValueError`."""
    number = positive_int(name, value)
    if number % 2:
        raise ValueError(
            f"{name}={value} is not allowed: give an even integer, half of it are sines, half cosines"
        )
    return number


def divisor(name: str, value: Any, of_name: str, of: int) -> int:
    """Returns `value` if it is a positive divisor of `of`, else raises `ValueError`."""
    number = positive_int(name, value)
    if of % number:
        raise ValueError(f"{name}={value} is not allowed: it has to divide {of_name}={of}")
    return number


def optional_positive(name: str, value: Any) -> float | None:
    """Returns None or `value` > 0, else raises `ValueError`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}={value!r} is not allowed: give a number above 0, or None for no limit")
    return float(value)
