"""What each stage recomputes: one of three names for all stages, or a name for each.

    "except_last"                       the same for all stages
    ("always", "except_last", "never")  one for each stage, in the model's order
    always,except_last,never            the same as text

A stage of its own needs one: under 1F1B the first stage keeps K micro-batches and the last one only one. Only
the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

REMAT_MODES = ("never", "always", "except_last")

Remat = str | Sequence[str]
"""A name for all stages, or one for each in the model's order."""


def recomputes(name: str, microbatch: int, num_microbatches: int) -> bool:
    """Whether a stage of that name recomputes micro-batch `microbatch` of `num_microbatches`."""
    return name == "always" or (name == "except_last" and microbatch != num_microbatches - 1)


def remat_of(remat: Remat, stage: int) -> str:
    """The name of one stage."""
    return remat if isinstance(remat, str) else remat[stage]


def of_stages(remat: Remat, num_stages: int, num_microbatches: int) -> tuple[frozenset[int], ...]:
    """The micro-batches that each stage recomputes."""
    return tuple(
        frozenset(m for m in range(num_microbatches) if recomputes(name, m, num_microbatches))
        for name in ([remat] * num_stages if isinstance(remat, str) else remat)
    )


def named_like(microbatches: frozenset[int], num_microbatches: int) -> str:
    """The name of a stage that recomputes these. `ValueError` where there is none."""
    for name in REMAT_MODES:
        if microbatches == of_stages(name, 1, num_microbatches)[0]:
            return name
    listed = ", ".join(map(str, sorted(microbatches)))
    raise ValueError(
        f"micro-batches {listed} of {num_microbatches} are recomputed; a stage recomputes all of them, none, "
        "or all but the last"
    )


def check_remat(remat: Remat, num_stages: int) -> None:
    """`ValueError` for a `remat` that no schedule of so many stages has."""
    if not isinstance(remat, (str, Sequence)):
        raise ValueError(
            f"remat is {remat!r}; choose one of {', '.join(REMAT_MODES)}, or give one of them for each stage"
        )
    if not isinstance(remat, str) and len(remat) != num_stages:
        raise ValueError(
            f"remat has {len(remat)} names for {num_stages} stages; give one for each stage, or one for all"
        )
    for stage, name in enumerate([remat] if isinstance(remat, str) else remat):
        if name not in REMAT_MODES:
            what = "remat" if isinstance(remat, str) else f"remat[{stage}]"
            raise ValueError(f"{what} is {name!r}; choose one of {', '.join(REMAT_MODES)}")


def in_one_form(remat: Remat) -> Remat:
    """One name where all stages have the same, so that equal choices are equal."""
    if isinstance(remat, str) or not isinstance(remat, Sequence):
        return remat
    names = tuple(remat)
    return names[0] if len(set(map(repr, names))) == 1 else names


def to_text(remat: Remat) -> str:
    """Writes `remat` as one word that `from_text` reads, such as `always,except_last,never`."""
    return remat if isinstance(remat, str) else ",".join(remat)


def from_text(text: str) -> Remat:
    """Reads what `to_text` writes. `ValueError` for anything else."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in REMAT_MODES:
            raise ValueError(
                f"{name!r} says nothing about recomputation; choose one of {', '.join(REMAT_MODES)}, or give "
                "one for each stage with commas between them"
            )
    return names[0] if len(names) == 1 else names
