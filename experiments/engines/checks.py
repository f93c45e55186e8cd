"""What an engine really does in a step, counted on the layers themselves and held against the plain model.

A benchmark that forgot its micro-batches or its re-materialization has measured something else, and nothing
in its numbers says so. Therefore every engine is checked before it is timed (`verify`), and the counts stay
in the records: how many examples each forward of a stage had, how often gradients came back to it, and how
far the gradients of the mini-batch are from those of the uncut model.

`check-engine` asks for all of it (`examination`), on a model so small that a step takes milliseconds. Every
setting is a step or three of the engine, in one process and over two. The first one, `BASE`, asks what every
engine must do; the others ask for what an engine may refuse. A setting in which an engine raises, hangs or
ends its processes costs that setting alone: the next ones run in new processes. Only where the base fails so,
nothing else can be asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.isolated import Fault, IsolatedError, Tell, run_isolated
from gpipe_bench.experiments.engines.setup import Engine, LossFn, NoStepError, Setup, build, clear, resolve
from gpipe_bench.pipeline.plan.remat import recomputes
from gpipe_bench.pipeline.stage.trees import num_examples, split, tensors_of

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.1,
}
"""Largest difference of gradients, as a share of the parameter's largest."""
SMALL = 1e-3  # a parameter's gradients below this share of its model's largest are compared with that instead


class Count(NamedTuple):
    """What one stage really did in a step."""

    rows: tuple[int, ...]  # examples of each forward
    backwards: int


@contextmanager
def counting(first_layers: Mapping[int, nn.Module]) -> Iterator[Callable[[], dict[int, Count]]]:
    """Counts the forwards of each stage, given its first layer, and the gradients that come back to that
    layer's outputs.
    """
    rows: dict[int, list[int]] = {stage: [] for stage in first_layers}
    backwards = dict.fromkeys(first_layers, 0)
    hooks = []

    def watch(stage: int, layer: nn.Module) -> None:
        def count(gradient: Tensor) -> None:
            backwards[stage] += 1

        # Counted when it begins: a recomputation may stop inside the layer, once it has what it needs.
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            rows[stage].append(num_examples(inputs[0]))

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            # What a layer hands on unchanged may need a gradient also where there is no graph.
            given = {id(tensor) for tensor in tensors_of(inputs[0])}
            own = [t for t in tensors_of(output) if t.is_floating_point() and id(t) not in given]
            if own and own[0].requires_grad:
                own[0].register_hook(count)  # type: ignore[no-untyped-call]

        hooks.extend([layer.register_forward_pre_hook(before), layer.register_forward_hook(after)])

    for stage, layer in first_layers.items():
        watch(stage, layer)
    try:
        yield lambda: {stage: Count(tuple(rows[stage]), backwards[stage]) for stage in first_layers}
    finally:
        for hook in hooks:
            hook.remove()


def forward_rows(sizes: Sequence[int], remat: str) -> list[int]:
    """Examples of each forward that a stage runs in a step, for micro-batches of these sizes."""
    again = [size for index, size in enumerate(sizes) if recomputes(remat, index, len(sizes))]
    return [*sizes, *again]


def check_counts(
    name: str, counted: Mapping[int, Count], setup: Setup, batch: Any
) -> tuple[Count, list[int]]:
    """What each stage did and the sizes of the micro-batches. RuntimeError unless every stage of `counted`
    ran backward for each of them, and forward in any order, with the recomputations of the setup.

    An engine that can't leave the last micro-batch out under "except_last" may recompute it, too.
    """
    sizes = [num_examples(part) for part in split(batch, setup.num_microbatches)]
    modes = ("except_last", "always") if setup.remat == "except_last" else (setup.remat,)
    expected = [forward_rows(sizes, mode) for mode in modes]
    for stage, count in counted.items():
        right = count.backwards == len(sizes)
        if right and Counter(count.rows) in map(Counter, expected):
            continue
        due = " or ".join(str(len(rows)) for rows in expected)
        if right and sorted(count.rows) == sorted(sizes):
            raise RuntimeError(
                f"{name}: stage {stage} recomputed nothing: {len(sizes)} forwards, and {due} are due with "
                f"setup.remat = {setup.remat!r}; recompute, or refuse it by a ValueError in the factory"
            )
        forwards, backwards = _number(len(count.rows), "forward"), _number(count.backwards, "backward")
        raise RuntimeError(
            f"{name}: stage {stage} ran {forwards} of {_all_of(count.rows)} examples and {backwards}; "
            f"{len(sizes)} micro-batches of {_all_of(sizes)} with setup.remat = {setup.remat!r} take {due} "
            f"forwards and {_number(len(sizes), 'backward')}"
        )
    return count, sizes


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _all_of(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(set(sizes))))


def named_parameters(setup: Setup) -> dict[str, nn.Parameter]:
    """The parameters of this process's stages, named by layer index: "3.weight"."""
    return {
        f"{index}.{name}": parameter
        for stage in setup.local_stages
        for index in setup.partition[stage]
        for name, parameter in setup.layers[index].named_parameters()
        if parameter.requires_grad
    }


def reference(setup: Setup, batch: Any, target: Any, loss_fn: LossFn) -> dict[str, Tensor]:
    """The gradients that a step of any engine must leave in this process: those of the plain model, taken
    micro-batch by micro-batch. All layers must be on the setup's device. Clears `.grad`.
    """
    clear(setup.layers)
    total, count = num_examples(batch), setup.num_microbatches
    for inputs, wanted in zip(split(batch, count), split(target, count), strict=True):
        value: Any = inputs
        for layer in setup.layers:
            value = layer(value)
        (loss_fn(value, wanted) * (num_examples(inputs) / total)).backward()  # type: ignore[no-untyped-call]
    gradients = gradients_of(named_parameters(setup), "the plain model")
    clear(setup.layers)
    return gradients


def gradients_of(parameters: Mapping[str, nn.Parameter], name: str) -> dict[str, Tensor]:
    """Copies of the gradients. RuntimeError for a parameter without one."""
    without = [each for each, parameter in parameters.items() if parameter.grad is None]
    if without:
        raise RuntimeError(
            f"{name} left {len(without)} of {len(parameters)} parameters without a gradient, "
            f"such as {without[0]}"
        )
    return {each: p.grad.clone() for each, p in parameters.items() if p.grad is not None}


def gradient_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], name: str) -> float:
    """The largest relative difference. RuntimeError where it is more than rounding, naming the parameter."""
    floor = SMALL * max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    largest = 0.0
    for each, wanted in expected.items():
        scale = max(float(wanted.abs().max()), floor) or 1.0
        error = float((found[each] - wanted).abs().max()) / scale
        if not error < TOLERANCE.get(wanted.dtype, 1e-3):
            raise RuntimeError(
                f"the gradients of {name} are wrong: {each} differs by {error:.1e} of its largest value; "
                "a step must leave the gradients of the mean loss over the mini-batch"
            )
        largest = max(largest, error)
    return largest


def counted_step(
    engine: Engine, setup: Setup, batch: Any, target: Any, loss_fn: LossFn
) -> tuple[dict[int, Count], Any]:
    """What each stage of this process did in an engine's second step, which leaves its gradients, and the
    loss that it returned. In processes, all must call.
    """
    clear(setup.layers)
    engine.step(batch, target, loss_fn)  # agrees on shapes, where an engine does that
    clear(setup.layers)
    with counting({stage: setup.stage_layers(stage)[0] for stage in setup.local_stages}) as counted:
        loss = engine.step(batch, target, loss_fn)
    return counted(), loss


def verify(
    name: str,
    engine: Engine,
    setup: Setup,
    batch: Any,
    target: Any,
    loss_fn: LossFn,
    expected: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Two steps of an engine: how often its stages ran forward and backward, on how many examples, and how
    far its gradients are from `expected`, by default the plain model's (`reference`, not possible where the
    model is too large for one device); what is not among them is not compared. In processes, all must call.

    RuntimeError where a micro-batch is missing or of another size, where a recomputation is missing, and
    where gradients are wrong. For a record's details.
    """
    if expected is None:
        expected = reference(setup, batch, target, loss_fn)
    counts, _ = counted_step(engine, setup, batch, target, loss_fn)
    count, _ = check_counts(name, counts, setup, batch)
    found: dict[str, Any] = {
        "forwards": len(count.rows), "backwards": count.backwards, "examples": max(count.rows),
    }  # fmt: skip
    gradients = gradients_of(named_parameters(setup), name)
    if expected:
        found["gradient error"] = gradient_error(gradients, expected, name)
    clear(setup.layers)
    return found


NUM_STAGES, NUM_MICROBATCHES, WIDTH, SEED = 2, 4, 6, 1811
PLACES = {"one process": 1, "two processes": NUM_STAGES}
OK, FAILED, BROKEN, CANNOT, UNTRIED = "ok", "failed", "broken", "can't", "not tried"
"""Verdicts. `broken`: it raised, hung or ended its process; `can't`: it says so itself, by a ValueError."""
AS_BEFORE = "as before"
"""Of a setting where gradients alone are wrong, which says nothing new if they are wrong without it, too."""
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


@dataclass(frozen=True)
class Row:
    """What one check found in one place."""

    place: str
    check: str
    verdict: str
    text: str


def examination(name: str, timeout_s: float) -> list[Row]:
    """Every check in every place. ValueError where the name leads to no engine."""
    return [row for place in PLACES for row in _in_place(name, place, timeout_s)]


def faults(rows: Sequence[Row]) -> list[Row]:
    """What is wrong, the engine's own errors first. An engine that can do nothing at all is wrong, too."""
    bad = [row for verdict in (BROKEN, FAILED) for row in rows if row.verdict == verdict]
    if not bad and not any(row.verdict == OK for row in rows):
        return [row for row in rows if row.verdict == CANNOT][:1]
    return bad


def _in_place(name: str, place: str, timeout_s: float) -> list[Row]:
    rows: list[Row] = []
    first = 0
    while first < len(SETTINGS):
        told, last, fault = _told(name, place, first, timeout_s)
        for _, by_rank in sorted(told.items()):
            if len(by_rank) == PLACES[place]:
                rows += _joined([found for _, found in sorted(by_rank.items())])
        is_wrong = any(row.check == "gradients" and row.verdict == FAILED for row in rows)
        for index, row in enumerate(rows):
            if row.verdict == AS_BEFORE and is_wrong:
                rows[index] = replace(row, verdict=UNTRIED, text="its gradients are wrong without that, too")
            elif row.verdict == AS_BEFORE:
                rows[index] = replace(row, verdict=FAILED)
        if fault is None:
            break
        check = "step" if SETTINGS[last] == BASE else SETTINGS[last].name
        verdict = CANNOT if fault.refused else BROKEN
        rows.append(Row(place, check, verdict, fault.reason.removeprefix("ValueError: ")))
        if SETTINGS[last] == BASE:
            if not fault.refused:
                rows += [Row(place, each.name, UNTRIED, "its step is broken") for each in SETTINGS[1:]]
            break
        first = last + 1
    return rows


def _told(
    name: str, place: str, first: int, timeout_s: float
) -> tuple[dict[int, dict[int, list[Row]]], int, Fault | None]:
    """What the processes find from the `first` setting on, by setting and rank; the last setting that one has
    begun, and what ended them there.
    """
    told: dict[int, dict[int, list[Row]]] = {}
    begun = [first]

    def hear(rank: int, news: tuple[int | None, Any]) -> None:
        index, found = news
        if index is None:
            raise ValueError(found)
        begun.append(index)
        if found is not None:
            told.setdefault(index, {})[rank] = found

    try:
        run_isolated(trial, PLACES[place], name, place, first, timeout_s=timeout_s, on_news=hear)
    except IsolatedError as error:
        return told, max(begun), error.fault
    return told, max(begun), None


def _joined(by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """Of each check the worst that any process found; what it says names the process if not all say so."""
    joined = []
    for rows in zip(*by_rank, strict=False):  # one without `step` says no more
        bad = [rank for rank, row in enumerate(rows) if row.verdict != OK]
        if bad and len(rows) > 1:
            said = rows[bad[0]]
            joined.append(replace(said, text=f"process {bad[0]}: {said.text}"))
        else:
            joined.append(rows[-1])  # the last stage knows the loss
    return joined


# In the processes


def trial(tell: Tell, name: str, place: str, first: int) -> None:
    """What each process does: tells `(index, None)` before each setting from the `first` on and
    `(index, rows)` after it; `(None, reason)` where the name leads nowhere.
    """
    try:
        resolve(name)
    except ValueError as error:
        tell((None, str(error)))
        return
    for index in range(first, len(SETTINGS)):
        tell((index, None))
        rows = examine(name, SETTINGS[index], place)
        tell((index, rows))
        if rows[0].check == "step" and rows[0].verdict != OK:
            return  # nothing else can be asked


def examine(name: str, setting: Setting, place: str) -> list[Row]:
    """All findings of a setting in this process. Whatever the engine raises is raised, but NoStepError."""
    setup, batch, target = subject(setting, alone=PLACES[place] == 1)
    expected = reference(setup, batch, target, mean_square)
    try:
        engine = build(name, setup)
    except NoStepError as error:
        return [Row(place, "step", FAILED, str(error))]
    counted, loss = counted_step(engine, setup, batch, target, mean_square)
    counts, gradients = _counts(counted, setup, batch), _gradients(setup, expected, batch, target)
    if setting != BASE:
        verdict = FAILED if counts[0] else AS_BEFORE if gradients[0] else OK
        said = "; ".join(text for wrong, text in (counts, gradients) if wrong == (verdict != OK))
        return [Row(place, setting.name, verdict, said)]
    with torch.no_grad():
        wanted = float(mean_square(nn.Sequential(*setup.layers)(batch), target))
    checks = {
        "step": (False, f"{type(engine).__name__} has step(batch, target, loss_fn)"),
        "micro-batches": counts,
        "gradients": gradients,
        "loss": _loss(loss, wanted),
        "adds up": _adds_up(engine, setup, batch, target),
    }
    return [Row(place, check, FAILED if wrong else OK, text) for check, (wrong, text) in checks.items()]


def subject(setting: Setting, *, alone: bool) -> tuple[Setup, Tensor, Tensor]:
    """The same model and mini-batch in every process."""
    torch.manual_seed(SEED)
    middle: list[nn.Module] = (
        [Skip(False), Skip(True)] if setting.tuples else [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    )
    layers = [nn.Linear(WIDTH, WIDTH), *middle, nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    for layer in layers:
        layer.double()
    batch, target = (torch.randn(setting.batch_size, WIDTH, dtype=torch.float64) for _ in range(2))
    group = None if alone else dist.group.WORLD
    spans = (range(2), range(2, len(layers)))
    return Setup(layers, spans, NUM_MICROBATCHES, setting.remat, torch.device("cpu"), group), batch, target


class Skip(nn.Module):
    """A layer that passes its input on beside its output, as AmoebaNet's cells do, or joins the two."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.linear, self.joins = nn.Linear(WIDTH, WIDTH), joins

    def forward(self, value: Any) -> Any:
        if self.joins:
            return self.linear(value[0]) + value[1]
        return torch.tanh(self.linear(value)), value


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The loss: the mean over what it is given."""
    return ((output - target) ** 2).mean()


Said = tuple[bool, str]
"""Whether something is wrong, and what is said about it."""


def _counts(counted: Mapping[int, Count], setup: Setup, batch: Tensor) -> Said:
    try:
        count, sizes = check_counts("the engine", counted, setup, batch)
    except RuntimeError as error:
        return True, str(error).partition(": ")[2]
    text = f"each stage ran {len(count.rows)} forwards and {count.backwards} backwards"
    return False, f"{text} of {', '.join(map(str, sorted(set(sizes))))} examples"


def _gradients(setup: Setup, expected: Mapping[str, Tensor], batch: Tensor, target: Tensor) -> Said:
    found: dict[str, Tensor] = {}
    try:
        found = gradients_of(named_parameters(setup), "the engine")
        error_share = gradient_error(found, expected, "the engine")
    except RuntimeError as error:
        return True, (_of_which(setup, found, batch, target) if found else "") or str(error)
    return False, f"all {len(found)} are the plain model's, to {error_share:.0e}"


def _of_which(setup: Setup, found: Mapping[str, Tensor], batch: Tensor, target: Tensor) -> str:
    """Which micro-batches count how often, where the gradients are sums of theirs with other factors."""
    count, alone = setup.num_microbatches, replace(setup, num_microbatches=1)
    parts = [
        reference(alone, *part, mean_square)
        for part in zip(batch.tensor_split(count), target.tensor_split(count), strict=True)
    ]
    mine = torch.cat([found[name].flatten() for name in found])
    theirs = torch.stack([torch.cat([each[name].flatten() for name in found]) for each in parts], dim=1)
    theirs *= torch.tensor([len(part) / len(batch) for part in batch.tensor_split(count)])
    factors = torch.linalg.lstsq(theirs, mine[:, None]).solution.flatten()
    if not torch.allclose(theirs @ factors, mine, rtol=_SAME, atol=_SAME * float(theirs.abs().max())):
        return ""
    times = [round(float(factor), 6) for factor in factors]
    if set(times) == {1}:  # wrong by something else, and little
        return ""
    if len(set(times)) == 1:
        is_sum = times[0] == count
        reason = ": the losses of the micro-batches are added up, not averaged" if is_sum else ""
        return f"every gradient is {times[0]:.6g} times that of the mean loss over the mini-batch{reason}"
    wrong = [f"micro-batch {m} counts {each:.6g} times" for m, each in enumerate(times) if each != 1]
    return (
        f"{' and '.join(wrong)} in the gradients, where each should count once, by its share of the examples"
    )


def _loss(found: Any, wanted: float) -> Said:
    if found is None:
        return False, "not returned by this process, which is allowed"
    value = float(found.detach() if isinstance(found, Tensor) else found)
    if abs(value - wanted) > _SAME * abs(wanted):
        return True, f"returned {value:.6g}; the mean over the mini-batch is {wanted:.6g}"
    return False, "what it returns is the mean over the mini-batch"


def _adds_up(engine: Engine, setup: Setup, batch: Tensor, target: Tensor) -> Said:
    """A further step must add to the gradients that are there, right or wrong, as for several steps of one
    update.
    """
    try:
        clear(setup.layers)
        engine.step(batch, target, mean_square)
        once = gradients_of(named_parameters(setup), "the engine")
        engine.step(batch, target, mean_square)
        twice = gradients_of(named_parameters(setup), "the engine")
        gradient_error(twice, {name: 2 * gradient for name, gradient in once.items()}, "the engine")
    except RuntimeError:
        return True, "two steps do not leave the sum of their gradients; a step must add to .grad"
    return False, "two steps leave the sum of their gradients"
