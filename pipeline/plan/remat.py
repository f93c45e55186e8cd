"""Which micro-batches each stage recomputes, as data.

One word for a whole model is too coarse where memory is short: under 1F1B the first stage keeps K
micro-batches and the last one only one, so what must be recomputed differs from stage to stage, and within a
stage from micro-batch to micro-batch. So the choice is one of a stage and a micro-batch, which is what a
schedule is made of. A stage's choice is a name or the micro-batches themselves:

    "except_last"                                   the same for all stages
    ("always", "except_last", (0, 1, 2), "never")   one choice for each stage, in the model's order
    always,except_last,0-2,never                    the same as text

Only the standard library is imported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

REMAT_MODES = ("never", "always", "except_last")

Choice = str | Collection[int]
"""What one stage recomputes: a name, or the micro-batches."""
Remat = str | Sequence[Choice]
"""What all stages recompute: a name for all, or a choice for each in the model's order."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def recomputes(choice: Choice, microbatch: int, num_microbatches: int) -> bool:
    """Whether a stage with that choice recomputes micro-batch `microbatch` of `num_microbatches`."""
    if not isinstance(choice, str):
        return microbatch in choice
    return choice == "always" or (choice == "except_last" and microbatch != num_microbatches - 1)


def choice_of(remat: Remat, stage: int) -> Choice:
    """The choice of one stage."""
    return remat if isinstance(remat, str) else remat[stage]


def of_stages(remat: Remat, num_stages: int, num_microbatches: int) -> tuple[frozenset[int], ...]:
    """The micro-batches that each stage recomputes."""
    return tuple(
        frozenset(m for m in range(num_microbatches) if recomputes(choice, m, num_microbatches))
        for choice in ([remat] * num_stages if isinstance(remat, str) else remat)
    )


def check_remat(remat: Remat, num_stages: int, num_microbatches: int) -> None:
    """`ValueError` for a `remat` that no schedule of that size has."""
    if isinstance(remat, str):
        _check_name("remat", remat)
        return
    if not isinstance(remat, Sequence):
        raise ValueError(
            f"remat is {remat!r}; choose one of {', '.join(REMAT_MODES)}, or give one choice per stage"
        )
    if len(remat) != num_stages:
        raise ValueError(
            f"remat has {len(remat)} choices for {num_stages} stages; give one per stage, or one name for all"
        )
    for stage, choice in enumerate(remat):
        what = f"remat[{stage}]"
        if isinstance(choice, str):
            _check_name(what, choice)
            continue
        if not isinstance(choice, Collection):
            raise ValueError(
                f"{what} is {choice!r}; choose one of {', '.join(REMAT_MODES)}, or give the micro-batches "
                "that the stage recomputes"
            )
        strangers = [m for m in choice if not isinstance(m, int) or not 0 <= m < num_microbatches]
        if strangers:
            raise ValueError(
                f"{what} has micro-batch {strangers[0]!r}; they are the numbers 0 to {num_microbatches - 1}"
            )


def _check_name(what: str, name: str) -> None:
    if name not in REMAT_MODES:
        raise ValueError(f"{what} is {name!r}; choose one of {', '.join(REMAT_MODES)}")


def in_one_form(remat: Remat, num_stages: int, num_microbatches: int) -> Remat:
    """The same choice in the one form that equal choices have in common: names where there are any, and a
    single one if it is that of all stages. What `check_remat` refuses stays as it is.
    """
    if isinstance(remat, str):
        return remat
    try:
        check_remat(remat, num_stages, num_microbatches)
    except ValueError:
        return remat
    choices = [_named(choice, num_microbatches) for choice in remat]
    first = choices[0]
    if isinstance(first, str) and all(choice == first for choice in choices):
        return first
    return tuple(choices)


def _named(choice: Choice, num_microbatches: int) -> Choice:
    """A name for the choice, if it has one, or else its micro-batches in order."""
    found = tuple(m for m in range(num_microbatches) if recomputes(choice, m, num_microbatches))
    if len(found) == num_microbatches:
        return "always"
    if not found:
        return "never"
    return "except_last" if found == tuple(range(num_microbatches - 1)) else found


def to_text(remat: Remat) -> str:
    """As one word, which `from_text` reads: `always,except_last,0-2+5,never`."""
    if isinstance(remat, str):
        return remat
    return ",".join(
        choice if isinstance(choice, str) else "+".join(_ranges(sorted(choice))) or "never"
        for choice in remat
    )


def _ranges(microbatches: Iterable[int]) -> Iterator[str]:
    # What follows one another keeps its distance to its position.
    for _, run in groupby(enumerate(microbatches), lambda each: each[1] - each[0]):
        first, *rest = [m for _, m in run]
        yield f"{first}-{rest[-1]}" if rest else str(first)


def from_text(text: str) -> Remat:
    """Reads what `to_text` writes; a single name is that of all stages. `ValueError` for anything else."""
    choices = [_choice(part.strip()) for part in text.split(",")]
    if len(choices) == 1 and isinstance(choices[0], str):
        return choices[0]
    return tuple(choices)


def _choice(text: str) -> Choice:
    if text in REMAT_MODES:
        return text
    found: list[int] = []
    for part in text.split("+"):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{text!r} says nothing about recomputation; choose one of {', '.join(REMAT_MODES)}, or give "
                "one choice per stage with commas between them, a name or micro-batches such as 0-2+5"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first > 1_000_000:
            raise ValueError(f"{part!r} are more micro-batches than any schedule has; give a smaller range")
        found += range(first, last + 1)
    return tuple(found)
