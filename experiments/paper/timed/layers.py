"""Seconds of single layers, one after another, with one micro-batch: fits wherever the largest layer does.

A pipeline of single layers keeps the boundaries of all its micro-batches: 71 GiB of ResNet-101 with its 370
layers, where training it takes six. Here a layer gets what the one before it gave, and that is dropped when
it is done. Layers without memory of their own (on the meta device) are given some for as long as they run, so
this also times a model that no device holds.

A layer is called as a stage calls it: its inputs enter the graph as those of a stage do, and the gradients
that come in are made before. So a backward here gives the device the operations of a pipeline's backward.

A GPU does many a layer sooner than Python can ask for it. So it is kept busy before each repeat for as long
as the host needs to ask (`devices.hold`), and what is timed is the device's time. Whether it was still busy
when the host had asked for all is looked at afterwards: a GPU whose clock has risen since its first use is
held for a shorter time than was asked for. Then it is held longer and the repeat is taken again, and a
warning names the layers for which that did not help.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.paper.timed.workloads import Workload, materialized
from gpipe_bench.harness.experiment import Case, Outcome
from gpipe_bench.harness.record import Metric, Record, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedule import Action, Kind

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

REPEATS = 4  # the first warms up
AHEAD, MOST_AHEAD_S = 1.5, 0.5  # of what a repeat takes the host to ask for
LONGER, MOST_TIMES = 2.0, 16.0  # than that, where the device had begun when the host had asked for all
KINDS = (Kind.F, Kind.R, Kind.B)
PART = "layer seconds"
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batches of which layers are timed."""
STAGES = (2, 4, 8)
CONTROL_WIDTH = {"cpu": 256, "accelerator": 8192}

Seconds = dict[Kind, float]
"""Seconds of a forward without a graph, of one with it (a recomputation), and of a backward."""


def alone(
    layers: Sequence[nn.Module],
    compute_loss: Callable[..., Tensor],
    batch: Any,
    target: Any,
    device: torch.device,
    repeats: int = REPEATS,
) -> list[Seconds]:
    """The medians of every layer on one micro-batch, the loss with the last one.

    Args:
        layers: of the whole model, on `device` or on the meta device
        compute_loss: of the output and the target
        batch: a micro-batch on `device`
        target: likewise
        device: where the layers run
        repeats: how often each is taken; the first does not count
    """
    import torch

    found, value, ahead, late = list[Seconds](), batch, _Ahead(device), list[int]()
    for index, layer in enumerate(layers):
        borrowed = any(tensor.is_meta for tensor in chain(layer.parameters(), layer.buffers()))
        if borrowed:
            materialized(layer, device)
        end = partial(_with_loss, compute_loss, target) if index == len(layers) - 1 else _as_it_is
        ahead.failed = False
        found.append(_one(layer, value, end, ahead, repeats, is_first=index == 0))
        if ahead.failed:
            late.append(index)
        if index < len(layers) - 1:
            with torch.no_grad():
                value = layer(value)
        if borrowed:
            layer.to("meta")
    if late:
        warnings.warn(
            f"{device} had begun with layers {', '.join(map(str, late))} before the host had asked for all "
            "of them, so their seconds may be the host's; time them on a host that does nothing else",
            stacklevel=2,
        )
    return found


class _Ahead:
    """How long a device is kept busy, in `LONGER` steps where it turns out to have been too short."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times, self.failed = device, 1.0, False

    def hold(self, asked_s: float) -> None:
        from gpipe_bench.pipeline import devices

        devices.hold(self.device, self.times * min(AHEAD * asked_s, MOST_AHEAD_S))

    def was_enough(self, started: Any) -> bool:
        """Whether the device is still busy; `started` is the mark behind what it was busy with."""
        from gpipe_bench.pipeline import devices

        if not devices.is_accelerator(self.device) or not started.query():
            return True
        if self.times < MOST_TIMES:
            self.times *= LONGER
            return False
        self.failed = True
        return True


def _with_loss(compute_loss: Callable[..., Tensor], target: Any, output: Any) -> Any:
    return compute_loss(output, target)


def _as_it_is(output: Any) -> Any:
    return output


def _one(
    layer: nn.Module,
    value: Any,
    end: Callable[[Any], Any],
    ahead: _Ahead,
    repeats: int,
    *,
    is_first: bool,
) -> Seconds:
    from gpipe_bench.pipeline.clock import Clock
    from gpipe_bench.pipeline.stage.trees import Message, flatten

    tensors, structure = flatten(value, "a layer's input")
    tensors = tuple([tensor.detach() for tensor in tensors])
    # A mini-batch needs no gradient.
    needed = tuple([tensor.is_floating_point() and not is_first for tensor in tensors])
    taken = _Taken(layer, end, Message(tensors, structure, needed))
    actions = [Action(0, kind, number) for number in range(repeats) for kind in KINDS]
    clock = Clock(actions, [ahead.device])
    clock.begin()
    asked_s = 0.0
    for first in range(0, len(actions), len(KINDS)):
        while True:
            if first:
                ahead.hold(asked_s)
            begun_s = perf_counter()
            for position in range(first, first + len(KINDS)):
                clock.start(position)
                taken.take(actions[position].kind)
                clock.stop(position)
            asked_s = perf_counter() - begun_s
            if not first or ahead.was_enough(clock.times[2 * first]):
                break
    clock.complete = True
    samples: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for event in clock.events():
        if event.action.microbatch > 0 or repeats == 1:
            samples[event.action.kind].append(event.duration_s)
    layer.zero_grad(set_to_none=True)
    return {kind: median(of_kind) for kind, of_kind in samples.items()}


class _Taken:
    """A layer as a stage of its own takes it: forward, recomputation, backward."""

    def __init__(self, layer: nn.Module, end: Callable[[Any], Any], message: Any) -> None:
        self._layer, self._end, self._message = layer, end, message
        self._kept: Any = None
        self._seeds: tuple[Tensor, ...] = ()  # made once, as the gradients of a pipeline come from elsewhere

    def take(self, kind: Kind) -> None:
        import torch

        from gpipe_bench.pipeline.stage.split_backward import run_engine
        from gpipe_bench.pipeline.stage.tensors import MicrobatchState
        from gpipe_bench.pipeline.stage.trees import tensors_of

        if kind is Kind.B:
            if self._seeds:
                run_engine(self._kept.edges, self._seeds)
            self._kept = None
            return
        kept = MicrobatchState(self._message)
        with torch.set_grad_enabled(kind is Kind.R):
            outputs = tuple(tensors_of(self._end(self._layer(kept.enter()))))
        if kind is Kind.R:
            kept.keep_graph(outputs, (True,) * len(outputs))
            self._kept = kept
            if not self._seeds:
                self._seeds = tuple([torch.ones_like(t) for t in outputs if t.requires_grad])


# How efficient a micro-batch of each size is, which much of Table 2 turns on


def cases(model: str) -> list[Case]:
    """One case per size, so that finished sizes stay finished when a run is cut."""
    return [Case({"part": PART, "model": model, "examples": size}, 10.0 + size / 2) for size in SIZES]


def run(workload: Workload, examples: int, device: str) -> Outcome:
    """The layers of a model at its own size with a micro-batch of so many examples. `MemoryError`'s kin where
    one layer finds no room.
    """
    from gpipe_bench.pipeline import devices
    from gpipe_bench.planner.timing import settle

    where = devices.current(device)
    layers = list(workload.build("meta"))
    batch, target = workload.example(examples, where)
    settle()
    before_s = _control_s(where)
    devices.reset_peak(where)
    found = alone(layers, workload.loss(), batch, target, where)
    by_kind = {kind: [1e3 * each[kind] for each in found] for kind in KINDS}
    whole_s = [sum(each.values()) for each in found]
    metrics = [
        _measured("seconds of all layers", 1e3 * sum(whole_s), "ms"),
        _measured("seconds of an example", 1e3 * sum(whole_s) / examples, "ms"),
        _measured("peak memory", devices.peak_bytes(where), "bytes"),
        _measured("control", _control_s(where) / before_s, "ratio"),
        *(_measured("balance", _balance(whole_s, k), "ratio", K=k) for k in STAGES if k <= len(layers)),
    ]
    facts = {**workload.facts(), "device": devices.name(where), "repeats": REPEATS}
    return Outcome(
        tuple(metrics), {**facts, "layers_ms": {str(kind): of_kind for kind, of_kind in by_kind.items()}}
    )


def _control_s(device: torch.device) -> float:
    """Seconds of a layer that is always the same: behind the others it takes what it took before them, unless
    the device's clock has changed meanwhile.
    """
    import torch

    width = CONTROL_WIDTH["cpu" if device.type == "cpu" else "accelerator"]
    layer = torch.nn.Linear(width, width, device=device)
    x = torch.ones(width, width, device=device)
    (found,) = alone([layer], lambda y, _: y.sum(), x, x, device)
    return sum(found.values())


def _measured(name: str, value: float, unit: str, **key: int) -> Metric:
    return Metric(name, value, unit, "measured", key=key)


def _balance(layers_s: Sequence[float], num_stages: int) -> float:
    """The mean stage over the fullest, of stages cut by these seconds."""
    stages_s = [sum(layers_s[layer] for layer in span) for span in partition(layers_s, num_stages)]
    return sum(stages_s) / num_stages / max(stages_s)


def text(records: Sequence[Record]) -> str:
    """A line for each size on record; nothing without any."""
    found = sorted(of_case(records, part=PART), key=lambda record: int(str(record.case["examples"])))
    done = {record.case["examples"]: record for record in found if record.status == "done"}
    if not found:
        return ""

    def value(record: Record, name: str, **key: int) -> float:
        metric = record.metric(name, **key)
        assert metric is not None
        assert metric.value is not None
        return float(metric.value)

    best = min((value(record, "seconds of an example") for record in done.values()), default=0.0)
    lines = []
    for record in found:
        examples = str(record.case["examples"])
        if record.status != "done":
            lines.append([examples, record.status.replace("_", " "), *("",) * (3 + len(STAGES))])
            continue
        each = value(record, "seconds of an example")
        lines.append(
            [
                examples, f"{value(record, 'seconds of all layers'):.1f}", f"{each:.2f}",
                f"{best / each:.2f}",
                f"{value(record, 'peak memory') / 2**30:.1f}",
                *(f"{value(record, 'balance', K=k):.2f}" for k in STAGES),
            ]
        )  # fmt: skip
    columns = [
        "micro-batch", "all layers (ms)", "an example (ms)", "efficiency", "GiB",
        *(f"balance, K={k}" for k in STAGES),
    ]  # fmt: skip
    titles = {str(record.details.get("title", "")) for record in done.values()}
    title = (
        f"{', '.join(sorted(titles))}: forward, recomputation and backward of every layer, one at a time\n"
        "  efficiency: of a micro-batch of this size, the best is 1; balance: mean stage over the fullest"
    )
    return numbers_text(title, columns, lines)
