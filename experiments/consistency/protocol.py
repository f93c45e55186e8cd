"""How consistent training is run and judged, read from a file that was frozen before the runs.

A number of runs, a seed or a margin that may change after a look at the results makes any verdict possible.
So all of them stand in results/consistency-protocol.toml; the runs take them from there and from nowhere
else, every record names the file's digest, and records made under another file are not judged.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpipe_bench.harness.places import PUBLISHED

PATH = PUBLISHED / "consistency-protocol.toml"

DIGITS_OF_DIGEST = 12
"""Of the file's SHA-256, as the cases' keys and the pages name it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The runs of one model.

    Args:
        sequential: seeds of the sequential runs
        initial: seeds of the initial weights: run number i of the sequential ones and of every K begins with
            the weights of number i
        stages: number of stages K -> seeds of its runs
        joint: whether `power` is that of all K together, not of one
    """

    sequential: tuple[int, ...]
    initial: tuple[int, ...]
    stages: Mapping[int, tuple[int, ...]]
    joint: bool

    @property
    def runs(self) -> int:
        """Of each number of stages."""
        return len(next(iter(self.stages.values())))

    @property
    def seeds(self) -> tuple[int, ...]:
        """All of them, in the file's order."""
        return (*self.initial, *self.sequential, *(seed for seeds in self.stages.values() for seed in seeds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """The whole file.

    Args:
        margin: distance in standard deviations of the sequential runs up to which accuracies are the same
        alpha: of each of the two one-sided tests; the interval that must lie inside the margin has the
            confidence 1 - 2 alpha
        power: the least probability of finding equal what is equal
        split_seed: of the choice of held-out examples
        plans: by model
        sha256: of the file's bytes
    """

    margin: float
    alpha: float
    power: float
    split_seed: int
    plans: Mapping[str, Plan]
    sha256: str

    @property
    def digest(self) -> str:
        """The beginning of `sha256`, as records' keys have it."""
        return self.sha256[:DIGITS_OF_DIGEST]


def drawn(text: str, *what: object) -> int:
    """The seed that the rule gives: the first 31 bits of the SHA-256 of the words, joined by spaces."""
    words = " ".join(map(str, (text, *what)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4]) >> 1


@cache
def load_protocol(path: Path = PATH) -> Protocol:
    """The file, checked.

    Raises ValueError with the file and what is wrong: a seed that the rule does not give, that stands twice
    or that was used before the protocol; numbers of runs that do not agree; a margin, alpha or power that is
    none.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"the protocol can't be read from {path}: {error.strerror or error}") from error
    try:
        return _checked(tomllib.loads(content.decode()), hashlib.sha256(content).hexdigest())
    except KeyError as error:
        raise ValueError(f"{path}: it lacks {error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _checked(content: Mapping[str, Any], sha256: str) -> Protocol:
    text, before = content["draw"]["text"], content["before"]
    plans = {model: _plan(content[model]) for model in ("images", "text")}
    for model, plan in plans.items():
        _check_counts(model, plan)
        _check_seeds(model, plan, text, before[model])
    every = [seed for plan in plans.values() for seed in plan.seeds]
    if len(set(every)) != len(every):
        twice = next(seed for seed in every if every.count(seed) > 1)
        raise ValueError(f"the seed {twice} stands twice; every run has one of its own")
    judged = content["judged"]
    protocol = Protocol(
        margin=float(judged["margin"]), alpha=float(judged["alpha"]), power=float(judged["power"]),
        split_seed=int(content["draw"]["split_seed"]), plans=plans, sha256=sha256,
    )  # fmt: skip
    if not (protocol.margin > 0 and 0 < protocol.alpha < 0.5 and 0 < protocol.power < 1):
        raise ValueError(
            f"margin {protocol.margin:g}, alpha {protocol.alpha:g}, power {protocol.power:g}: the margin is "
            "positive, alpha lies between 0 and 0.5, power between 0 and 1"
        )
    return protocol


def _plan(content: Mapping[str, Any]) -> Plan:
    return Plan(
        sequential=tuple(content["sequential"]),
        initial=tuple(content["initial"]),
        stages={int(count): tuple(seeds) for count, seeds in content["stages"].items()},
        joint=content["power_of"] == "all K together",
    )


def _check_counts(model: str, plan: Plan) -> None:
    counts = {len(seeds) for seeds in plan.stages.values()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            f"{model}: the numbers of stages have {sorted(counts)} runs; all need the same number"
        )
    if len(plan.sequential) != len(plan.initial) or plan.runs > len(plan.initial):
        raise ValueError(
            f"{model}: {len(plan.initial)} initial weights for {len(plan.sequential)} sequential runs and "
            f"{plan.runs} of each number of stages; there is one for each sequential run, and no fewer than "
            "runs of a number of stages"
        )
    if len(plan.sequential) < 3:
        raise ValueError(
            f"{model}: {len(plan.sequential)} sequential runs make no standard deviation worth the name; "
            "3 are the least"
        )


def _check_seeds(model: str, plan: Plan, text: str, before: list[list[int]]) -> None:
    roles = [("initial", plan.initial), ("sequential", plan.sequential)]
    roles += [(f"K={count}", seeds) for count, seeds in plan.stages.items()]
    for role, seeds in roles:
        for number, seed in enumerate(seeds, start=1):
            for low, high in before:
                if low <= seed <= high:
                    raise ValueError(
                        f"{model}: {role} run {number} has the seed {seed}, and {low} to {high} were used "
                        "before the protocol; a seed must be new"
                    )
            wanted = drawn(text, model, role, number)
            if seed != wanted:
                raise ValueError(f"{model}: {role} run {number} has the seed {seed}; the rule gives {wanted}")
