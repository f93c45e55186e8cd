"""What is asked of which trainings, and when an answer counts: results/directions.toml.

The paper's models, data and accelerators are out of reach, so no number of these trainings is held against
one of the paper's. What can be asked is whether a sentence points the right way where everything is small.
Seeds, sizes of models, numbers of runs, the difference that would count and the rule of the verdict stand in
the file, with the figures of a pilot on other seeds. Each task's part of the file is frozen before its first
run: records name that part's digest, and those that were made under another one are not judged.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.record import Record, Status, of_case

PATH = PUBLISHED / "directions.toml"
PAPER = "1811.06965"
"""What seeds are drawn from, with `directions` or `directions pilot` and a number from 1."""

HIGHER_IS_BETTER = {"accuracy": True, "loss": False, "chrF": True}
"""What a training ends with, held out: % of the images, nats for a token, chrF from 0 to 100."""
UNITS = {"accuracy": "points", "loss": "nats", "chrF": "points of chrF"}

Word = Literal["same direction", "opposite", "undecided", "no power at this size", "no data here", "not run"]
Task = Literal["images", "text", "translation", "asynchronous"]


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to train.

    Args:
        task: what is trained, and on what data
        says: what it is, in a few words
        seconds: of one training on a quiet core
        settings: of its recipe, where they differ from those of the task
        pilot: by metric, what the trainings with the first of the pilot's seeds ended with
    """

    task: Task
    says: str
    seconds: float
    settings: dict[str, Any] = {}
    pilot: dict[str, tuple[float, ...]] = {}


class Contrast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sentence of the paper as a difference of two arms, seed by seed.

    Args:
        title: of the direction, in words
        sentence: of the paper, as it stands there, with what it prints
        source: where
        asks: what a yes would mean here, and what it would not
        better, worse: the arms; the sentence says that the first ends better
        metric: what they are compared by
        also: arms that are trained with the same seeds and shown beside these, for which nothing is judged
        seeds: how many, which are drawn by the rule
        counts: the smallest difference that would count, in the metric's unit
    """

    title: str
    sentence: str
    source: str
    asks: str
    better: str
    worse: str
    metric: Literal["accuracy", "loss", "chrF"]
    seeds: int
    counts: float
    also: tuple[str, ...] = ()

    def differences(self, better: Sequence[float], worse: Sequence[float]) -> list[float]:
        """Of pairs of results; positive is the paper's direction."""
        sign = 1 if HIGHER_IS_BETTER[self.metric] else -1
        return [sign * (a - b) for a, b in zip(better, worse, strict=True)]


class Protocol(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole file.

    Args:
        confidence: of the interval of a mean difference
        power: the least probability of an interval beside zero, where the true difference is the one that
            counts, from which on a contrast is run
        seeds, pilot_seeds: the first ones, each for initial weights, order of the examples and dropout alike
        tasks: settings that all arms of a task share
        smoke: those of a run that only shows that everything runs
        powers: what `power_of` gives, by contrast: whoever lists cases computes nothing
    """

    rule: dict[str, str]
    confidence: float
    power: float
    seeds: tuple[int, ...]
    pilot_seeds: tuple[int, ...]
    tasks: dict[Task, dict[str, Any]]
    smoke: dict[Task, dict[str, Any]]
    powers: dict[str, float]
    arms: dict[str, Arm]
    contrasts: dict[str, Contrast]

    def digest(self, arm: str) -> str:
        """Of all that decides about the runs of an arm and their verdicts: the rule, and arms and contrasts
        of its task, with their pilot. Keys of records have it.
        """
        task = self.arms[arm].task
        part = {
            "rule": [self.rule["verdict"], self.confidence, self.power, self.seeds, self.pilot_seeds],
            "settings": self.tasks[task],
            "arms": {name: each for name, each in self.arms.items() if each.task == task},
            "contrasts": {name: c for name, c in self.contrasts.items() if self.arms[c.better].task == task},
        }  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(part, order="deterministic")).hexdigest()[:12]

    def select(self, records: Sequence[Record], arm: str, status: Status | None = None) -> list[Record]:
        """Those of an arm that were made under this protocol."""
        return of_case(records, status, arm=arm, protocol=self.digest(arm))

    def power_of(self, contrast: Contrast) -> float | None:
        """By the pilot's deviation of the differences; None before the pilot."""
        better, worse = (self.arms[arm].pilot.get(contrast.metric, ()) for arm in _pair(contrast))
        count = min(len(better), len(worse))
        if count < 2:
            return None
        deviation = statistics.stdev(contrast.differences(better[:count], worse[:count]))
        return power(deviation, contrast.counts, contrast.seeds, self.confidence)

    def runs(self) -> dict[str, tuple[int, ...]]:
        """Seeds by arm: of the arms that a contrast with enough power compares, in the file's order."""
        most = dict.fromkeys(self.arms, 0)
        for name, contrast in self.contrasts.items():
            if self.powers.get(name, 0.0) >= self.power:
                for arm in (*_pair(contrast), *contrast.also):
                    most[arm] = max(most[arm], contrast.seeds)
        return {arm: drawn_seeds(count) for arm, count in most.items() if count}


def drawn(text: str, *what: object) -> int:
    """The seed that the rule gives: the first 31 bits of the SHA-256 of the words, joined by spaces."""
    words = " ".join(map(str, (text, *what)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4]) >> 1


def drawn_seeds(count: int) -> tuple[int, ...]:
    """The first so many by the rule of the file, which names the first few."""
    return tuple(drawn(PAPER, "directions", number) for number in range(1, count + 1))


def _pair(contrast: Contrast) -> tuple[str, str]:
    return contrast.better, contrast.worse


@cache
def load_protocol(path: Path = PATH) -> Protocol:
    """The file. That its seeds are those of its rule and its contrasts of arms that there are is tested.

    Raises ValueError with the file and what is wrong: it can't be read, or has something of another kind.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Protocol)
    except OSError as error:
        raise ValueError(f"the protocol can't be read from {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


# The test: a paired t


def interval(differences: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """Mean of the differences and its interval by Student's t. Raises ValueError for fewer than two."""
    from scipy.special import stdtrit

    if len(differences) < 2:
        raise ValueError(f"{len(differences)} differences have no interval; give two or more")
    mean = statistics.fmean(differences)
    reach = stdtrit(len(differences) - 1, (1 + confidence) / 2) * statistics.stdev(differences)
    reach = float(reach) / math.sqrt(len(differences))
    return mean, mean - reach, mean + reach


def power(deviation: float, difference: float, runs: int, confidence: float) -> float:
    """How often the interval of a mean over `runs` pairs does not hold zero, if the true difference is
    `difference` and single ones vary about it with that standard deviation.
    """
    from scipy.special import nctdtr, stdtrit

    if deviation == 0:
        return 1.0
    edge = float(stdtrit(runs - 1, (1 + confidence) / 2))
    away = difference / deviation * math.sqrt(runs)
    found = float(1 - nctdtr(runs - 1, away, edge) + nctdtr(runs - 1, away, -edge))
    return 1.0 if math.isnan(found) else found  # beyond what the function can tell from 1


class Means(NamedTuple):
    """Of an arm's runs."""

    better: float
    worse: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the records say of a contrast.

    `difference` is the mean over pairs of equal seeds with its interval, positive in the paper's direction;
    `reason` says why there is no verdict, what an undecided one excludes, or that a difference is small.
    """

    word: Word
    power: float | None = None
    differences: tuple[float, ...] = ()
    difference: tuple[float, float, float] | None = None
    means: Means | None = None
    reason: str = ""


def judged(contrast: Contrast, records: Sequence[Record]) -> Finding:
    """The rule of the protocol, on the records under it."""
    protocol = load_protocol()
    able = protocol.power_of(contrast)
    if able is None:
        return Finding(word="not run", reason="its arms have no pilot, so nothing is known of its power")
    if able < protocol.power:
        what = f"{contrast.seeds} pairs of runs would show {contrast.counts:g} {UNITS[contrast.metric]}"
        least = f"{100 * protocol.power:.0f} are needed, so they are not run"
        reason = f"by the pilot {what} in {100 * able:.0f} of 100 repetitions; {least}"
        return Finding(word="no power at this size", power=able, reason=reason)
    seeds = drawn_seeds(contrast.seeds)
    found: list[dict[object, Record]] = []
    for arm in _pair(contrast):
        runs = protocol.select(records, arm)
        missing = [run.reason for run in runs if run.status == "skipped"]
        if missing:
            return Finding(word="no data here", power=able, reason=missing[0])
        found.append({run.case["seed"]: run for run in runs if run.status == "done"})
        count = sum(seed in found[-1] for seed in seeds)
        if count < len(seeds):
            of_others = of_case(records, arm=arm) if not runs else ()
            reason = f"{count} of {len(seeds)} runs of {arm!r} are finished"
            if of_others:
                reason = "the records were made under another protocol than results/directions.toml is now"
            return Finding(word="not run", power=able, reason=reason)
    data = {run.details.get("data_sha256") for runs in found for seed, run in runs.items() if seed in seeds}
    if len(data) > 1:
        return Finding(word="not run", power=able, reason="the runs are of several data sets; run again")
    better, worse = ([_value(runs[seed], contrast.metric) for seed in seeds] for runs in found)
    differences = contrast.differences(better, worse)
    mean, low, high = interval(differences, protocol.confidence)
    word: Word = "same direction" if low > 0 else "opposite" if high < 0 else "undecided"
    sides = (("+", high < contrast.counts), ("-", -contrast.counts < low))
    excluded = [f"{sign}{contrast.counts:g}" for sign, out in sides if out]
    reason = f"excludes {' and '.join(excluded)}" if word == "undecided" and excluded else ""
    if word != "undecided" and len(excluded) == len(sides):
        reason = "but by less than what would count"
    return Finding(
        word=word, power=able, differences=tuple(differences), difference=(mean, low, high),
        means=Means(statistics.fmean(better), statistics.fmean(worse)),
        reason=reason,
    )  # fmt: skip


def _value(record: Record, metric: str) -> float:
    quantity = record.quantity(metric)
    if quantity is None or quantity.value is None:
        raise ValueError(f"the record of {record.label} has no {metric}")
    return float(quantity.value)
