"""The trainings: one for each arm and seed, on data that a machine has.

Images are scikit-learn's digits or the user's (`--data`), the text is Python's help or the user's (`--text`).
Translations are the message catalogues (.mo, .po) of installed programs, from other languages into English,
or those under `--data`. Models, optimizers and loops are those of the consistency experiment.

    python -m gpipe_bench.experiments.directions.training           the pilot of the protocol, as JSON lines
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
import struct
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.experiments.consistency.asynchronous import train_asynchronously
from gpipe_bench.experiments.consistency.recipes import DIGITS, TOPICS, TextRecipe, read_text
from gpipe_bench.experiments.consistency.tasks import (
    Batch,
    Images,
    ImageTask,
    TextTask,
    TranslationTask,
    derived,
    digits,
    own_images,
    tokenizer,
    topics,
)
from gpipe_bench.experiments.consistency.training import Setting, Trained, evaluate, train
from gpipe_bench.experiments.directions.protocol import Arm, load_protocol
from gpipe_bench.harness.experiment import RunOptions

Curve = list[tuple[int, float | None]]


@dataclass(frozen=True)
class Ran:
    """What a training ended with.

    Args:
        metrics: on held-out examples; losses in nats for a token, accuracy in %, chrF from 0 to 100
        curve: steps done and the first metric, which is the one that is followed
        details: what tables say of it, as plain data
    """

    metrics: dict[str, float]
    curve: Curve
    details: dict[str, Any]


class NoDataError(Exception):
    """The machine has none for this arm; the message says what is missing."""


def ran(arm: Arm, seed: int, options: RunOptions) -> Ran:
    """Trains the arm with a seed, for initial weights, order of the examples and dropout alike.

    Raises NoDataError where the machine has no data for it.
    """
    protocol, smoke = load_protocol(), options.profile == "smoke"
    settings = protocol.tasks[arm.task] | arm.settings | (protocol.smoke[arm.task] if smoke else {})
    return _TASKS[arm.task](settings, seed, options)


def _sequential(task: Any, seed: int) -> Trained:
    """The plain model without a pipeline: what is asked is not about one."""
    with tempfile.TemporaryDirectory(prefix="directions-") as folder:
        return train(task, Setting("sequential", seed=seed), Path(folder))


def _size(task: Any) -> dict[str, float]:
    """Parameters, and operations of the whole training: forward and backward of one mini-batch, counted."""
    model: nn.Module = task.build()
    inputs, target = task.batch(0, 0)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(task.loss(model(inputs), target))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "operations": float(counter.get_total_flops()) * task.num_steps,
        "steps": task.num_steps,
        "batch_size": task.batch_size,
    }


def _sha256(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


# Images


def _images(settings: dict[str, Any], seed: int, options: RunOptions) -> Ran:
    settings = dict(settings)
    moved, num_train = settings.pop("moved_stride", None), settings.pop("num_train")
    recipe = replace(DIGITS, **settings)
    task = ImageTask(recipe, _chosen(options.data, recipe.image_size, num_train))
    task.options |= {"aux_head": False, "moved_stride": moved}  # the head needs larger maps
    found = _sequential(task, seed)
    images = task.images
    data = {
        "data": f"{len(images.train)} images of {'digits' if options.data is None else options.data}",
        "data_sha256": _sha256(options.data, len(images.train), len(images.held_out)),
    }
    curve: Curve = [(step, 100 * score) for step, _, score in found.curve]
    return Ran({"accuracy": 100 * found.score}, curve, _size(task) | data)


@cache
def _chosen(data: str | None, image_size: int, num_train: int) -> Images:
    """So many to train on, and more held out than a recipe needs: noise of the test is what costs power."""
    if data is not None and not holds_catalogues(data):
        found = own_images(data, image_size, False, 0, 4 * num_train)
        found.train = found.train[:num_train]
        return found
    whole = digits(image_size, 0)
    order = [*whole.held_out, *whole.train]
    count = len(order) - num_train
    classes = [whole.load(index, None)[1] for index in range(len(order))]
    return Images(whole.load, order[count:], order[:count], classes, whole.num_classes)


# Text


def _text_task(settings: dict[str, Any], options: RunOptions) -> TextTask:
    text, what = (
        (topics(), "pydoc_data.topics") if options.text is None else (read_text(options.text), options.text)
    )
    return TextTask(replace(TOPICS, **settings), text, 0, what)


def _of_text(curve: Iterable[tuple[int, float, float]], task: TextTask, details: dict[str, Any]) -> Ran:
    """Losses from perplexities. One that is worse than naming all pieces alike counts as that, so that a
    training that diverged is a bad one and no end of the world.
    """
    worst = math.log(task.recipe.vocab_size)

    def loss(perplexity: float) -> float:
        return min(worst, math.log(perplexity)) if math.isfinite(perplexity) else worst

    points = [(step, loss(score)) for step, _, score in curve]
    data = {
        "data": f"{len(task.train_tokens):,} tokens of text",
        "data_sha256": _sha256(task.train_tokens.tolist()),
    }
    return Ran({"loss": points[-1][1]}, [*points], _size(task) | data | details)


def _text(settings: dict[str, Any], seed: int, options: RunOptions) -> Ran:
    task = _text_task(settings, options)
    task.evaluate_every = max(1, math.ceil(task.num_steps / 8))
    tokens = task.batch_size * task.recipe.seq_len
    return _of_text(_sequential(task, seed).curve, task, {"tokens_per_step": tokens})


def _asynchronous(settings: dict[str, Any], seed: int, options: RunOptions) -> Ran:
    settings = dict(settings)
    num_stages, stash, rate = (settings.pop(name) for name in ("num_stages", "stash", "rate"))
    task = _text_task(settings, options)
    found = train_asynchronously(task, num_stages, seed, stash=stash, rate=rate)
    one = sum(p.numel() * p.element_size() for p in task.build().parameters())
    kept = {"staleness": max(found.staleness), "kept": sum(found.weight_bytes) / one}
    return _of_text(found.curve, task, kept)


# Translation, from message catalogues

NO_ROOM = ("zh", "ja", "ko")
"""Languages whose signs alone are more than the pieces of a small vocabulary."""
NAMES = "iso_"
"""Catalogues with names of countries, languages, scripts and currencies begin with this: they are not trained
on, and no message with one of their names is tested."""
LEFT_OUT = (NAMES, "xkeyboard-config")
_ENGLISH = re.compile(r"[A-Za-z][A-Za-z ,.:;'()?!-]*")
MOST_CHARACTERS, FEWEST_WORDS, MOST_WORDS = 70, 2, 8
HELD_OUT = 10
"""One English message of so many is for the test, whatever the language."""


def holds_catalogues(folder: str | Path) -> bool:
    """Whether there is a message catalogue in the folder, at any depth."""
    return any(next(Path(folder).rglob(f"*.{ending}"), None) for ending in ("mo", "po"))


def _places(data: str | None) -> list[Path]:
    if data is not None and holds_catalogues(data):
        return [Path(data)]
    return [
        Path("/usr/share/locale"),
        Path("/usr/share/locale-langpack"),
        Path(sysconfig.get_path("purelib")),
    ]


def read_catalogue(path: Path) -> Iterator[tuple[str, str]]:
    """English message and translation of each entry that has one; nothing of a file that is damaged.

    Of plural forms the first; contexts are left away.
    """
    try:
        content = path.read_bytes()
        pairs = [*(_mo(content) if path.suffix == ".mo" else _po(content.decode()))]
    except (OSError, struct.error, UnicodeDecodeError):
        return
    for english, other in pairs:
        yield english.rpartition("\x04")[2].partition("\0")[0], other.partition("\0")[0]


def _mo(content: bytes) -> Iterator[tuple[str, str]]:
    """GNU's binary format: after the magic number and the version the number of entries and where the tables
    of (length, place) of the originals and of the translations begin.
    """
    order = "<" if content[:4] == b"\xde\x12\x04\x95" else ">"
    _, _, count, *tables = struct.unpack_from(f"{order}5I", content)
    if count > len(content) // 16:
        raise struct.error("more entries than bytes")
    for entry in range(count):
        texts = []
        for table in tables:
            length, start = struct.unpack_from(f"{order}2I", content, table + 8 * entry)
            texts.append(content[start : start + length].decode())
        yield texts[0], texts[1]


def _po(content: str) -> Iterator[tuple[str, str]]:
    """The text format: entries between empty lines; a line of quotes alone goes on with the one before."""
    for block in re.split(r"\n\s*\n", content):
        found: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if match := re.match(r'(msgid|msgstr|msgid_plural|msgctxt|msgstr\[\d+\])\s+"(.*)"\s*$', line):
                name, found[match[1]] = match[1], match[2]
            elif name and (match := re.match(r'"(.*)"\s*$', line)):
                found[name] += match[1]
        if not re.search(r"(?m)^#,.*\bfuzzy\b", block):
            yield found.get("msgid", ""), found.get("msgstr", found.get("msgstr[0]", ""))


def normal(english: str) -> str:
    """What two messages have in common that differ in capitals and marks alone."""
    return " ".join(re.sub(r"[^a-z ]", " ", english.lower()).split())


def _place(*words: str) -> int:
    """A number that any machine gives for these words: which part a message is in, and the order of each."""
    return int.from_bytes(hashlib.sha256("\n".join(words).encode()).digest()[:6])


def for_test(english: str) -> bool:
    """By the English message alone, so that no language trains on what another one is tested with."""
    return _place(normal(english)) % HELD_OUT == 0


def _usable(english: str, other: str) -> tuple[str, str] | None:
    """Whole words without places for values, without accelerators; None of all else."""
    if not other or max(len(english), len(other)) > MOST_CHARACTERS:
        return None
    english = re.sub(r"[_&](?=\w)", "", english).strip()
    if not _ENGLISH.fullmatch(english) or not FEWEST_WORDS <= len(english.split()) <= MOST_WORDS:
        return None
    other = re.sub(r"\s*\([_&]\w\)|[_&](?=\w)", "", other).strip()
    if not other or re.search(r"[%<>{}\\\n]", other) or normal(english) == normal(other):
        return None
    return english, other


@dataclass(frozen=True)
class Corpus:
    """Pairs (translation, English). `low` are the languages that were cut; `test` has theirs alone."""

    train: dict[str, list[tuple[str, str]]]
    test: dict[str, list[tuple[str, str]]]
    low: tuple[str, ...]
    sha256: str


@cache
def corpus(data: str | None, num_languages: int, ranks: tuple[int, ...], low: int, num_test: int) -> Corpus:
    """The languages with most messages, those at the `ranks` cut to `low` messages.

    Of several variants of a language (pt, pt_BR) the one with most messages. Raises NoDataError where there
    are not so many languages with enough of them.
    """
    paths = [
        path for folder in _places(data) for path in sorted([*folder.rglob("*.mo"), *folder.rglob("*.po")])
    ]
    listing = {path.name: path for path in sorted(paths, key=lambda path: path.stat().st_size)}
    names = {
        normal(english)
        for name, path in listing.items() if name.startswith(NAMES)
        for english, _ in read_catalogue(path)
    }  # fmt: skip
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        variant = path.parents[1].name if path.parent.name == "LC_MESSAGES" else path.stem
        if path.name.startswith(LEFT_OUT) or re.split("[_@]", variant)[0] in ("en", *NO_ROOM):
            continue
        pairs = found.setdefault(variant, {})
        for english, other in read_catalogue(path):
            if usable := _usable(english, other):
                pairs.setdefault(*usable)
    largest: dict[str, dict[str, str]] = {}
    for variant, pairs in sorted(found.items(), key=lambda each: (-len(each[1]), each[0])):
        largest.setdefault(re.split("[_@]", variant)[0], pairs)
    order = sorted(largest, key=lambda language: (-len(largest[language]), language))[:num_languages]
    train = {
        language: sorted(
            ((other, english) for english, other in largest[language].items() if not for_test(english)),
            key=lambda pair: _place(pair[1], "order"),
        )
        for language in order
    }
    names -= {""}
    test = {}
    for language in (order[rank - 1] for rank in ranks if rank <= len(order)):
        named = (
            (other, english) for english, other in largest[language].items()
            if for_test(english) and not _has_name(english, names)
        )  # fmt: skip
        test[language] = sorted(named, key=lambda pair: _place(pair[1], "order"))[:num_test]
    enough = [language for language in order if len(train[language]) >= low]
    if len(enough) < num_languages or any(len(pairs) < num_test for pairs in test.values()):
        where = ", ".join(map(str, _places(data)))
        raise NoDataError(
            f"no data here: it takes {num_languages} languages with {low:,} messages or more, and in {where} "
            f"there are {len(enough)}; give a folder of catalogues with --data"
        )
    train = {language: train[language][: low if language in test else None] for language in order}
    return Corpus(train, test, tuple(test), _sha256(train, test))


def _has_name(english: str, names: set[str]) -> bool:
    words = normal(english).split()
    return any(" ".join(words[i:j]) in names for i in range(len(words)) for j in range(i + 1, len(words) + 1))


@cache
def _pieces(found: tuple[object, ...], vocab_size: int) -> Any:
    """One vocabulary for all arms, so that models have equal parameters and losses count the same pieces."""
    train = corpus(*found).train
    lines = (line for pairs in train.values() for pair in pairs[:2000] for line in pair)
    return tokenizer(lines, vocab_size, "the message catalogues")


class CatalogueTask(TranslationTask):
    """Into English from several languages, which are drawn by their number of messages to the power
    1 / `temperature`. Nothing tells the model which language it reads.
    """

    def __init__(
        self,
        recipe: TextRecipe,
        train: dict[str, list[tuple[str, str]]],
        test: Sequence[tuple[str, str]],
        pieces: Any,
        temperature: float,
    ) -> None:
        self._set_recipe(recipe)
        self.pieces = pieces
        self.train = [pair for pairs in train.values() for pair in pairs]
        self.held_out_examples = self._encoded(test)
        sizes = torch.tensor([len(pairs) for pairs in train.values()])
        self.sizes, self.starts = sizes, sizes.cumsum(0) - sizes
        self.shares = sizes.double() ** (1 / temperature)
        self.options |= {
            "num_layers": recipe.num_layers // 2, "head_dim": 16, "num_tables": 3,
        }  # fmt: skip

    def batch(self, step: int, seed: int) -> Batch:
        generator = derived(seed, step, 7)
        languages = torch.multinomial(self.shares, self.batch_size, replacement=True, generator=generator)
        within = (torch.rand(self.batch_size, generator=generator) * self.sizes[languages]).long()
        chosen = (self.starts[languages] + within).tolist()
        source, inputs, target = self._encoded([self.train[place] for place in chosen])
        return (source, inputs), target


def _translation(settings: dict[str, Any], seed: int, options: RunOptions) -> Ran:
    """All languages at once, or with `bilingual` each of those that were cut alone; results are means over
    these.
    """
    settings = dict(settings)
    names = ("num_languages", "ranks", "low", "num_test")
    what = (options.data, *(settings.pop(name) for name in names))
    what = (what[0], what[1], tuple(what[2]), *what[3:])
    bilingual, temperature, decoded = (
        settings.pop(name) for name in ("bilingual", "temperature", "num_decoded")
    )
    recipe, found = replace(TOPICS, **settings), corpus(*what)
    pieces = _pieces(what, recipe.vocab_size)
    tested = [pair for pairs in found.test.values() for pair in pairs]
    losses, scores, curves, shown, size = {}, {}, [], {}, {}
    parts = [[language] for language in found.low] if bilingual else [[*found.train]]
    for languages in parts:
        test = found.test[languages[0]] if bilingual else tested
        train_pairs = {language: found.train[language] for language in languages}
        task = CatalogueTask(recipe, train_pairs, test, pieces, temperature)
        trained = _sequential(task, seed)
        curves.append([(step, math.log(score)) for step, _, score in trained.curve])
        model = task.build()
        model.load_state_dict(trained.weights)
        for language in languages if bilingual else found.low:
            pairs = found.test[language]
            task.held_out_examples = task._encoded(pairs)
            losses[language] = math.log(evaluate(task, model))
            english = [pair[1] for pair in pairs[:decoded]]
            said = translated(task, model, task.held_out_examples[0][:decoded])
            scores[language] = chrf(said, english)
            shown[language] = [[pairs[i][0], english[i], said[i]] for i in range(3)]
        size = _size(task)
    curve = [
        (points[0][0], statistics.fmean(loss for _, loss in points)) for points in zip(*curves, strict=True)
    ]
    details = {
        "data": f"{sum(map(len, found.train.values())):,} messages in {len(found.train)} languages, "
        f"{', '.join(found.low)} cut to {what[3]:,}",
        "data_sha256": found.sha256, "loss": losses, "chrF": scores, "examples": shown,
        "messages": {language: len(pairs) for language, pairs in found.train.items()},
    }  # fmt: skip
    metrics = {"loss": statistics.fmean(losses.values()), "chrF": statistics.fmean(scores.values())}
    return Ran(metrics, [*curve], size | details)


@torch.no_grad()
def translated(task: TranslationTask, model: nn.Module, source: Tensor) -> list[str]:
    """The likeliest piece after the likeliest piece, for sources (N, T)."""
    model.eval()
    length, end = task.recipe.seq_len, task.pieces.eos_id()
    said = torch.full((len(source), length + 1), end)
    said[:, 0] = task.pieces.bos_id()
    going = torch.ones(len(source), dtype=torch.bool)
    for place in range(length):
        following = model((source, said[:, : place + 1]))[:, place].argmax(dim=1)
        said[:, place + 1] = torch.where(going, following, end)
        going &= said[:, place + 1] != end
        if not going.any():
            break
    return [task.pieces.decode([piece for piece in line if piece != end]) for line in said[:, 1:].tolist()]


def chrf(said: Sequence[str], wanted: Sequence[str], order: int = 6, beta: float = 2.0) -> float:
    """chrF2 (Popovic, 2015) of a corpus from 0 to 100: precision and recall of runs of 1 to `order` letters
    without spaces, each averaged over the lengths that occur on both sides.
    """
    precisions, recalls = [], []
    for length in range(1, order + 1):
        matched = ours = theirs = 0
        for one, other in zip(said, wanted, strict=True):
            a, b = (_runs("".join(text.split()), length) for text in (one, other))
            matched, ours, theirs = matched + (a & b).total(), ours + a.total(), theirs + b.total()
        if ours and theirs:
            precisions.append(matched / ours)
            recalls.append(matched / theirs)
    precision, recall = (statistics.fmean(each) if each else 0.0 for each in (precisions, recalls))
    if not precision + recall:
        return 0.0
    return 100 * (1 + beta**2) * precision * recall / (beta**2 * precision + recall)


def _runs(text: str, length: int) -> Counter[str]:
    return Counter(text[place : place + length] for place in range(len(text) - length + 1))


_TASKS = {"images": _images, "text": _text, "translation": _translation, "asynchronous": _asynchronous}


def pilot(names: Sequence[str]) -> None:
    """Trains every arm, or those that are named, with the pilot's seeds; prints a line for each."""
    torch.set_num_threads(1)
    protocol = load_protocol()
    for name in names or protocol.arms:
        for seed in protocol.pilot_seeds:
            found = ran(protocol.arms[name], seed, RunOptions())
            print(
                json.dumps({"arm": name, "seed": seed} | found.metrics | {"curve": found.curve}), flush=True
            )


if __name__ == "__main__":
    pilot(sys.argv[1:])
