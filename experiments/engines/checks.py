"""What an engine really does in a step, counted on the layers themselves and held against the plain model.

A benchmark that forgot its micro-batches or its re-materialization has measured something else, and nothing
in its numbers says so. Therefore every engine is checked before it is timed (`verify`), and the counts stay
in the records: how many examples each forward of a stage had, how often gradients came back to it, and how
far the gradients of the mini-batch are from those of the uncut model. `check-engine` asks more (`cases`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_bench.experiments.engines.setup import Engine, LossFn, Setup, clear
from gpipe_bench.pipeline.plan.schedule import recomputes
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
    """Number of forwards and backwards that one stage ran in a step."""

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
            # A tensor that a layer hands on unchanged may require a gradient even where there is no graph.
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
    """What a stage did and the sizes of the micro-batches. RuntimeError unless every stage of `counted`
    ran backward for each of them, and forward in any order, with the recomputations of the setup.

    An engine that can't leave the last micro-batch out under "except_last" may recompute it, too, and a
    backward in two halves may bring a gradient in both: twice M are counted as M.
    """
    sizes = [num_examples(part) for part in split(batch, setup.num_microbatches)]
    modes = ("except_last", "always") if setup.remat == "except_last" else (setup.remat,)
    expected = [forward_rows(sizes, mode) for mode in modes]
    for stage, count in counted.items():
        if count.backwards == 2 * len(sizes):
            count = count._replace(backwards=len(sizes))
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


def gradient_error(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], name: str, tolerance: float | None = None
) -> float:
    """The largest relative difference. RuntimeError where it is more than rounding, or than `tolerance`,
    naming the parameter.
    """
    floor = SMALL * max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    largest = 0.0
    for each, wanted in expected.items():
        scale = max(float(wanted.abs().max()), floor) or 1.0
        error = float((found[each] - wanted).abs().max()) / scale
        if not error < (tolerance or TOLERANCE.get(wanted.dtype, 1e-3)):
            raise RuntimeError(
                f"the gradients of {name} are wrong: {each} differs by {error:.1e} of its largest value; "
                "a step must leave the gradients of the mean loss over the mini-batch"
            )
        largest = max(largest, error)
    return largest


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
    clear(setup.layers)
    engine.step(batch, target, loss_fn)  # agrees on shapes, where an engine does that
    clear(setup.layers)
    with counting({stage: setup.stage_layers(stage)[0] for stage in setup.local_stages}) as counted:
        engine.step(batch, target, loss_fn)
    count, _ = check_counts(name, counted(), setup, batch)
    found: dict[str, Any] = {
        "forwards": len(count.rows), "backwards": count.backwards, "examples": max(count.rows),
    }  # fmt: skip
    gradients = gradients_of(named_parameters(setup), name)
    if expected:
        found["gradient error"] = gradient_error(gradients, expected, name)
    clear(setup.layers)
    return found
