"""Text to train on: Python's own help topics, any text file, or a pair of parallel files.

The pieces of the tokenizer, the unigram model and the training examples come from the training text alone.
The default text repeats itself (some topics contain others), so a paragraph is used once: otherwise the
held-out part would have been seen in training.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.experiments.consistency.tasks.recipe import TextRecipe, read_text
from gpipe_bench.experiments.consistency.tasks.task import Batch, chosen, derived, even_parts
from gpipe_bench.models import MODELS

HELD_OUT_SHARE = 0.1
BLOCK_CHARACTERS = 2000
"""Held out are blocks of about this length, so that what is predicted has a context of its own."""

_VOCABULARY = re.compile(r"set it to a value <= (\d+)")


def topics() -> str:
    """The text behind Python's `help()`, without repeated paragraphs."""
    from pydoc_data.topics import topics as found

    return "\n\n".join(found[name] for name in sorted(found))


def blocks_of(text: str) -> list[str]:
    """Consecutive paragraphs, each kept the first time only, in blocks of about `BLOCK_CHARACTERS`."""
    blocks: list[list[str]] = [[]]
    size = 0
    for paragraph in dict.fromkeys(part.strip() for part in re.split(r"\n\s*\n", text)):
        if not paragraph:
            continue
        if size >= BLOCK_CHARACTERS:
            blocks.append([])
            size = 0
        blocks[-1].append(paragraph)
        size += len(paragraph)
    return ["\n\n".join(block) for block in blocks if block]


def split_blocks(blocks: Sequence[Any], seed: int, what: str) -> tuple[list[Any], list[Any]]:
    """Training and held-out blocks, both in the text's order. Raises ValueError for fewer than two."""
    if len(blocks) < 2:
        raise ValueError(
            f"{what} is too short: it makes {len(blocks)} block, and one has to be held out; give a "
            f"longer text"
        )
    order = torch.randperm(len(blocks), generator=derived(seed, 5)).tolist()
    held_out = set(order[: max(1, round(len(blocks) * HELD_OUT_SHARE))])
    return (
        [block for i, block in enumerate(blocks) if i not in held_out],
        [block for i, block in enumerate(blocks) if i in held_out],
    )


def tokenizer(lines: Iterable[str], vocab_size: int, what: str) -> Any:
    """A sentencepiece model (byte pairs) of `vocab_size` pieces. Raises ValueError if the text has fewer."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for line in lines if line.strip()]),
            model_writer=model, vocab_size=vocab_size, model_type="bpe", character_coverage=1.0,
            max_sentence_length=1 << 20, num_threads=1, minloglevel=3,
        )  # fmt: skip
    except RuntimeError as error:
        largest = _VOCABULARY.search(str(error))
        limit = f"it supports {largest.group(1)}" if largest else str(error).splitlines()[0]
        raise ValueError(
            f"{what} is too small for a vocabulary of {vocab_size} pieces: {limit}; give a longer text"
        ) from error
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


class TextTask:
    """Transformer-L on text: each token from the ones before it."""

    metric, unit, higher_is_better = "held-out perplexity", "perplexity", False
    average_decay: float | None = None

    def __init__(self, recipe: TextRecipe, text: str, split_seed: int, what: str) -> None:
        self._set_recipe(recipe)
        train, held_out = split_blocks(blocks_of(text), split_seed, what)
        self.pieces = tokenizer((line for b in train for line in b.split("\n")), recipe.vocab_size, what)
        self.train_tokens = torch.tensor(self.pieces.encode("\n\n".join(train)))
        held_out_tokens = torch.tensor(self.pieces.encode("\n\n".join(held_out)))
        for tokens, name in ((self.train_tokens, "training"), (held_out_tokens, "held-out")):
            if len(tokens) < recipe.seq_len + 1:
                raise ValueError(
                    f"{what} is too short: its {name} part has {len(tokens)} tokens, and one example takes "
                    f"{recipe.seq_len + 1}; give a longer text"
                )
        count = (len(held_out_tokens) - 1) // recipe.seq_len
        self.inputs = held_out_tokens[: count * recipe.seq_len].view(count, -1)
        self.targets = held_out_tokens[1 : count * recipe.seq_len + 1].view(count, -1)
        self.unigram = _unigram_perplexity(self.train_tokens, self.targets.flatten(), recipe.vocab_size)
        self.options: dict[str, Any] = {
            "num_layers": recipe.num_layers, "vocab_size": recipe.vocab_size, "d_model": recipe.d_model,
            "ffn_dim": recipe.ffn_dim, "num_heads": recipe.num_heads, "seq_len": recipe.seq_len,
            "dropout": recipe.dropout, "deep_init": recipe.deep_init, "logit_clip": recipe.logit_clip,
        }  # fmt: skip

    def _set_recipe(self, recipe: TextRecipe) -> None:
        self.recipe = recipe
        self.batch_size, self.num_steps = recipe.batch_size, recipe.num_steps
        self.num_microbatches = recipe.num_microbatches
        self.evaluate_every = max(1, math.ceil(recipe.num_steps / 5))

    def build(self) -> nn.Sequential:
        return MODELS["transformer-lm"](**self.options)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        recipe = self.recipe
        return torch.optim.Adam(
            [p for _, p in named], lr=0.0, betas=(recipe.beta1, recipe.beta2), eps=recipe.epsilon
        )

    def learning_rate(self, step: int) -> float:
        return self.recipe.rate(step)

    def batch(self, step: int, seed: int) -> Batch:
        length = self.recipe.seq_len
        starts = torch.randint(
            len(self.train_tokens) - length, (self.batch_size, 1), generator=derived(seed, step, 6)
        )
        tokens = self.train_tokens[starts + torch.arange(length + 1)]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def held_out(self) -> Iterable[Batch]:
        for part in even_parts(len(self.inputs), 2 * self.batch_size):
            yield self.inputs[part.start : part.stop], self.targets[part.start : part.stop]

    def count(self, output: Any, target: Tensor) -> tuple[float, float]:
        loss = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
        return float(loss), float(target.numel())

    def score(self, total: float, number: float) -> float:
        return math.exp(min(total / number, 700.0))  # a diverged model's is finite, and absurd

    @property
    def required(self) -> float:
        return self.recipe.required_ratio * self.unigram

    @property
    def floor(self) -> float:
        return self.required

    @property
    def requirement(self) -> str:
        return (
            f"a held-out perplexity of at most {100 * self.recipe.required_ratio:g} % of the unigram model's "
            f"{self.unigram:.4g}"
        )


class TranslationTask(TextTask):
    """T(L, H, A) on parallel lines: the same training, with a source sentence beside the target.

    Sentences are cut or filled up to `seq_len` tokens. Filled-up positions do not count: the loss divides by
    N x seq_len, the same for every micro-batch, and the perplexity by the real tokens.
    """

    def __init__(self, recipe: TextRecipe, source: str, target: str, split_seed: int, what: str) -> None:
        self._set_recipe(recipe)
        lines, others = source.splitlines(), target.splitlines()
        if len(lines) != len(others):
            raise ValueError(
                f"{what} are not parallel: they have {len(lines)} and {len(others)} lines; "
                "give one translation per line"
            )
        pairs = dict.fromkeys(
            (a.strip(), b.strip()) for a, b in zip(lines, others, strict=True) if a.strip() and b.strip()
        )
        train, held_out = split_blocks(list(pairs), split_seed, what)
        if len(train) < recipe.batch_size:
            raise ValueError(
                f"{what} have {len(train)} pairs of lines for training, and a mini-batch takes "
                f"{recipe.batch_size}; give longer files"
            )
        self.pieces = tokenizer((line for pair in train for line in pair), recipe.vocab_size, what)
        self.train_examples = self._encoded(train)
        self.held_out_examples = self._encoded(held_out)
        seen = self.train_examples[2]
        wanted = self.held_out_examples[2]
        self.unigram = _unigram_perplexity(seen[seen >= 0], wanted[wanted >= 0], recipe.vocab_size)
        self.options = {
            "num_layers": max(1, recipe.num_layers // 2), "vocab_size": recipe.vocab_size,
            "d_model": recipe.d_model, "ffn_dim": recipe.ffn_dim, "num_heads": recipe.num_heads,
            "head_dim": recipe.d_model // recipe.num_heads, "seq_len": recipe.seq_len, "num_tables": 3,
            "dropout": recipe.dropout, "deep_init": recipe.deep_init, "logit_clip": recipe.logit_clip,
        }  # fmt: skip

    def _encoded(self, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor, Tensor]:
        """Source, target input and target, each (pairs, seq_len); -1 in the target is filled up."""
        length, end, begin = self.recipe.seq_len, self.pieces.eos_id(), self.pieces.bos_id()
        sources, inputs, targets = [], [], []
        for source, target in pairs:
            first = [*self.pieces.encode(source), end][:length]
            second = [*self.pieces.encode(target), end][:length]
            sources.append(first + [end] * (length - len(first)))
            inputs.append([begin, *second[:-1]] + [end] * (length - len(second)))
            targets.append(second + [-1] * (length - len(second)))
        return torch.tensor(sources), torch.tensor(inputs), torch.tensor(targets)

    def build(self) -> nn.Sequential:
        return MODELS["transformer-seq2seq"](**self.options)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        total = nn.functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum"
        )
        return total / target.numel()

    def batch(self, step: int, seed: int) -> Batch:
        places = chosen(step, seed, len(self.train_examples[0]), self.batch_size)
        source, inputs, target = (tensor[places] for tensor in self.train_examples)
        return (source, inputs), target

    def held_out(self) -> Iterable[Batch]:
        source, inputs, target = self.held_out_examples
        for part in even_parts(len(source), 2 * self.batch_size):
            cut = slice(part.start, part.stop)
            yield (source[cut], inputs[cut]), target[cut]

    def count(self, output: Any, target: Tensor) -> tuple[float, float]:
        loss = nn.functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum"
        )
        return float(loss), float((target >= 0).sum())


def _unigram_perplexity(train: Tensor, held_out: Tensor, vocab_size: int) -> float:
    """Of the model that knows each token's frequency in training (one added to every count)."""
    counts = torch.bincount(train, minlength=vocab_size).double() + 1
    surprise = -(counts / counts.sum()).log()
    return math.exp(float(surprise[held_out].mean()))


@cache
def topics_task(recipe: TextRecipe, split_seed: int) -> TextTask:
    return TextTask(recipe, topics(), split_seed, "pydoc_data.topics")


@cache
def own_text_task(recipe: TextRecipe, path: str, parallel: str | None, split_seed: int) -> TextTask:
    """Raises ValueError where the files are missing, empty, not parallel or too small for the recipe."""
    text = read_text(path)
    if parallel is None:
        return TextTask(recipe, text, split_seed, f"--text {path}")
    other = read_text(parallel, "--parallel-text")
    what = f"--text {path} and --parallel-text {parallel}"
    return TranslationTask(recipe, text, other, split_seed, what)
