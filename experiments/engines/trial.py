"""What `check-engine` asks of an engine, on a model so small that a step takes milliseconds.

Every setting is a step or three of the engine, counted on the layers and held against the plain model in
float64 (`checks.py`). The first one, `BASE`, asks what every engine must do; the others ask for what an
engine may refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.checks import (
    Count,
    check_count,
    counting,
    expected_rows,
    gradient_error,
    gradients_of,
    named_parameters,
    reference,
)
from gpipe_bench.experiments.engines.isolated import Tell
from gpipe_bench.experiments.engines.setup import Engine, NoStepError, Setup, build, clear, resolve
from gpipe_bench.pipeline.stage.microbatch import num_examples, split

NUM_STAGES, NUM_MICROBATCHES, WIDTH, SEED = 2, 4, 6, 1811
_SAME = 1e-6  # two factors that differ by less are one


class Setting(NamedTuple):
    """What is asked in one go."""

    name: str
    remat: str = "never"
    batch_size: int = 8
    tuples: bool = False  # the boundary between the stages passes two tensors


BASE = Setting("base")
SETTINGS = (
    BASE,
    Setting("remat except_last", remat="except_last"),
    Setting("remat always", remat="always"),
    Setting("tuples between stages", tuples=True),
    Setting("uneven micro-batches", batch_size=10),  # the last: what is refused most costs no new processes
)


class Finding(NamedTuple):
    """One check's verdict, `ok` or `failed`, in one process."""

    check: str
    verdict: str
    text: str


class Skip(nn.Module):
    """A layer that passes its input on beside its output, as AmoebaNet's cells do, or joins the two."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.linear, self.joins = nn.Linear(WIDTH, WIDTH), joins

    def forward(self, value: Any) -> Any:
        if self.joins:
            return self.linear(value[0]) + value[1]
        return torch.tanh(self.linear(value)), value


def trial(tell: Tell, name: str, in_process: bool, first: int) -> None:
    """What each process does: tells `("begin", index)` and `("found", index, findings)` of each setting from
    the `first` on; ("unusable", reason) where the name leads nowhere.
    """
    try:
        resolve(name)
    except ValueError as error:
        tell(("unusable", str(error)))
        return
    for index in range(first, len(SETTINGS)):
        tell(("begin", index))
        findings = examine(name, SETTINGS[index], in_process)
        tell(("found", index, findings))
        if findings[0].check == "step" and findings[0].verdict != "ok":
            return  # nothing else can be asked


def examine(name: str, setting: Setting, in_process: bool) -> list[Finding]:
    """All findings of a setting in this process. Whatever the engine raises is raised, but NoStepError."""
    setup, batch, target = subject(setting, in_process)
    expected = reference(setup, batch, target, mean_square)
    try:
        engine = build(name, setup)
    except NoStepError as error:
        return [Finding("step", "failed", str(error))]
    clear(setup.layers)
    engine.step(batch, target, mean_square)  # agrees on shapes, where an engine does that
    clear(setup.layers)
    with counting({stage: setup.stage_layers(stage)[0] for stage in setup.local_stages}) as counted:
        loss = engine.step(batch, target, mean_square)
    counts = _counts(counted(), setup, batch)
    gradients = _gradients(setup, expected)
    if setting != BASE:
        verdicts = {counts.verdict, gradients.verdict}
        verdict = "failed" if "failed" in verdicts else "ok"
        said = [each.text for each in (counts, gradients) if each.verdict == verdict]
        return [Finding(setting.name, verdict, "; ".join(said))]
    step = Finding("step", "ok", f"{type(engine).__name__} has step(batch, target, loss_fn)")
    with torch.no_grad():
        wanted = float(mean_square(nn.Sequential(*setup.layers)(batch), target))
    return [step, counts, gradients, _loss(loss, wanted), _adds_up(engine, setup, batch, target, expected)]


def subject(setting: Setting, in_process: bool) -> tuple[Setup, Tensor, Tensor]:
    """The same model and mini-batch in every process."""
    torch.manual_seed(SEED)
    middle: list[nn.Module] = (
        [Skip(False), Skip(True)] if setting.tuples else [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    )
    layers = [nn.Linear(WIDTH, WIDTH), middle[0], middle[1], nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    for layer in layers:
        layer.double()
    batch, target = (torch.randn(setting.batch_size, WIDTH, dtype=torch.float64) for _ in range(2))
    group = None if in_process else dist.group.WORLD
    spans = (range(2), range(2, len(layers)))
    return Setup(layers, spans, NUM_MICROBATCHES, setting.remat, torch.device("cpu"), group), batch, target


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The loss: the mean over what it is given."""
    return ((output - target) ** 2).mean()


def _counts(counted: Mapping[int, Count], setup: Setup, batch: Tensor) -> Finding:
    sizes = [num_examples(part) for part in split(batch, setup.num_microbatches)]
    for stage, count in counted.items():
        try:
            check_count("the engine", stage, count, expected_rows(sizes, setup.remat), len(sizes))
        except RuntimeError as error:
            return Finding("micro-batches", "failed", str(error).partition(": ")[2])
    text = f"each stage ran {len(count.rows)} forwards and {count.backwards} backwards"
    return Finding("micro-batches", "ok", f"{text} of {', '.join(map(str, sorted(set(sizes))))} examples")


def _gradients(setup: Setup, expected: Mapping[str, Tensor]) -> Finding:
    try:
        found = gradients_of(named_parameters(setup), "the engine")
    except RuntimeError as error:
        return Finding("gradients", "failed", str(error))
    try:
        error_share = gradient_error(found, expected, "the engine")
    except RuntimeError as error:
        scaled = _scaled(found, expected, setup.num_microbatches)
        return Finding("gradients", "failed", scaled or str(error))
    return Finding("gradients", "ok", f"all {len(found)} are the plain model's, to {error_share:.0e}")


def _scaled(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], count: int) -> str:
    """That all gradients are wrong by one factor, if they are."""
    factors = [
        float((found[name] * wanted).sum() / (wanted * wanted).sum())
        for name, wanted in expected.items()
        if float(wanted.abs().max()) > 0
    ]
    factor = factors[0] if factors else 1.0
    off = {name: found[name] - factor * wanted for name, wanted in expected.items()}
    floor = _SAME * max(float(wanted.abs().max()) for wanted in expected.values())
    if abs(factor - 1) < _SAME or any(float(each.abs().max()) > floor * abs(factor) for each in off.values()):
        return ""
    is_sum = abs(factor - count) < _SAME * count
    reason = ": the losses of the micro-batches are added up, not averaged" if is_sum else ""
    return f"every gradient is {factor:.6g} times that of the mean loss over the mini-batch{reason}"


def _loss(found: Any, wanted: float) -> Finding:
    if found is None:
        return Finding("loss", "ok", "not returned by this process, which is allowed")
    value = float(found.detach() if isinstance(found, Tensor) else found)
    if abs(value - wanted) > _SAME * abs(wanted):
        return Finding(
            "loss", "failed", f"returned {value:.6g}; the mean over the mini-batch is {wanted:.6g}"
        )
    return Finding("loss", "ok", "what it returns is the mean over the mini-batch")


def _adds_up(
    engine: Engine, setup: Setup, batch: Tensor, target: Tensor, expected: Mapping[str, Tensor]
) -> Finding:
    """A further step must add to the gradients that are there, as for several steps of one update."""
    clear(setup.layers)
    for _ in range(2):
        engine.step(batch, target, mean_square)
    twice = {name: 2 * wanted for name, wanted in expected.items()}
    try:
        gradient_error(gradients_of(named_parameters(setup), "the engine"), twice, "the engine")
    except RuntimeError:
        return Finding(
            "adds up", "failed", "two steps do not leave the sum of their gradients; a step must add to .grad"
        )
    return Finding("adds up", "ok", "two steps leave the sum of their gradients")
