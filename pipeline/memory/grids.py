"""The peak memory of a worker whose stages several processes hold: data parallelism and ZeRO.

Computed as in `workers`, plus what replicas or shards add. For n processes that hold a stage, and a stage
with P bytes of parameters and G bytes of gradients:

                      dp                     ZeRO-2                        ZeRO-3
    always            P                      P / n                         P / n
    optimizer state   of P                   of P / n                      of P / n
    in the step       -                      P gathered, from the first F  P of the layer that runs
                                             to the layer's last B
    first F           -                      a message of each layer that  -
                                             is not yet copied
    a gather          -                      its message, until it is      the same
                                             copied
    gradients         G                      G until the last B, G / n     G of the layer that runs, G / n
                                             afterwards                    afterwards
    last B            a bucket more, while   messages of the layers that   in every B the same
                      it is copied           are through, until its end

Each layer is gathered and scattered separately; shards of a tensor are rounded up. Memory of
torch.distributed's backend is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..plan.links import bucket_bytes_of
from ..plan.schedule import Kind, Schedule
from .stage_bytes import Bytes, LayerBytes, StageBytes, StageTrace
from .workers import Ahead, action_bytes, workers_of


@dataclass(frozen=True)
class Sharing:
    """How the processes that hold a stage divide its parameters. `ValueError` for an impossible division.

    Args:
        replicas: processes with all parameters, or with the same shards; the size of dp
        shards: processes with a shard each; the size of fsdp
        level: of ZeRO: 2 gathers once per step, 3 in every pass; ignored with one shard
        bucket_bytes: size of gradient buckets that replicas sum; default: the engine's
        gathered_share: size of a gathered parameter and of its whole gradient, relative to the parameter: 0.5
            where shards of 32 bits are gathered in 16
    """

    replicas: int = 1
    shards: int = 1
    level: int = 2
    bucket_bytes: float | None = None
    gathered_share: float = 1.0

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.shards < 1:
            raise ValueError(f"{self.replicas} replicas and {self.shards} shards; give 1 or more of each")
        if self.level not in (2, 3):
            raise ValueError(f"ZeRO level {self.level}; parameters are sharded at levels 2 and 3")

    def part(self, num_bytes: int) -> int:
        """Bytes that one process holds of a tensor of `num_bytes`."""
        return -(-num_bytes // self.shards)

    def gathered(self, num_bytes: int) -> int:
        """Bytes of parameters of `num_bytes` while they are gathered."""
        return int(self.gathered_share * num_bytes)


@dataclass(frozen=True)
class HeldStage:
    """Bytes that one process holds of a stage that other processes hold as well.

    Args:
        step: bytes in the actions of a step
        rest: bytes in the optimizer's step
        first: bytes to add in the first forward, without and with a graph
        last: bytes to add in the last backward: an only B, a later B, an only W, a later W
    """

    step: StageBytes
    rest: StageBytes
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int, int, int] = (0, 0, 0, 0)


def shared_stage(whole: StageBytes, sharing: Sharing) -> HeldStage:
    """Returns the bytes per process of a stage, from its bytes on a single process."""
    assert whole.trace is not None, "it is made of layers"
    if sharing.shards == sharing.replicas == 1:
        return HeldStage(whole, whole)
    each = _Layers(whole.trace, sharing)
    if sharing.shards == 1:
        return _replicated(whole, each)
    return (_gathered_once if sharing.level == 2 else _gathered_always)(whole, each)


class _Layers:
    """By layer of a stage: bytes of parameters and gradients, and of each pass."""

    def __init__(self, trace: StageTrace, sharing: Sharing) -> None:
        self.sharing = sharing
        self.trained_sizes = [layer.trained_sizes for layer in trace.stage]
        self.parameters = [sharing.gathered(sum(layer.parameter_sizes)) for layer in trace.stage]
        self.gradients = [sharing.gathered(sum(sizes)) for sizes in self.trained_sizes]
        self.shards = [sum(map(sharing.part, sizes)) for sizes in self.trained_sizes]
        self.shard_bytes = sum([sum(map(sharing.part, layer.parameter_sizes)) for layer in trace.stage])
        self.free, self.forward = _pass(trace, trace.free), _pass(trace, trace.with_graph)
        self.first = _pass(trace, trace.first, back=True)
        self.later = _pass(trace, trace.later, back=True)


def _pass(trace: StageTrace, found: Sequence[LayerBytes], *, back: bool = False) -> list[LayerBytes]:
    """A pass over a stage's layers, in the order of the forward; the loss counts in the last layer."""
    *rest, last = found[: len(trace.stage)]
    for loss in found[len(trace.stage) :]:
        fullest = max(last.fullest, loss.fullest, key=lambda each: each.total)
        ends = (loss.before, last.after) if back else (last.before, loss.after)
        last = LayerBytes(ends[0], fullest, ends[1])
    return [*rest, last]


def grid_peak_bytes(
    stages: Sequence[HeldStage],
    schedule: Schedule,
    optimizer: str = "rmsprop",
    *,
    receive_ahead: Ahead = 1,
) -> tuple[int, ...]:
    """Peak bytes of each worker in a training step; arguments and errors are those of `workers.peak_bytes`,
    and `ValueError` for split backwards at ZeRO level 3.
    """
    in_step = action_bytes([stage.step for stage in stages], schedule, optimizer, receive_ahead=receive_ahead)
    for index, stage in enumerate(stages):
        row = schedule.row(index)
        first, last = row[0], row[-1]
        in_step[first] += stage.first[not schedule.recomputes(first.microbatch, index)]
        only = sum(action.kind is last.kind for action in row) == 1
        in_step[last] += stage.last[2 * (last.kind is Kind.W) + (not only)]
    rests = [stage.rest for stage in stages]
    workers = workers_of(rests, schedule, optimizer, receive_ahead)
    return tuple(
        max(worker.update().peak, *[in_step[action] for action in row])
        for worker, row in zip(workers, schedule.actions, strict=True)
    )


def _replicated(whole: StageBytes, each: _Layers) -> HeldStage:
    """A bucket is a copy of gradients that are freed after it is made."""
    buckets = _buckets(each.trained_sizes, each.sharing.bucket_bytes)

    def last(found: Sequence[LayerBytes], moment: Bytes) -> int:
        most = max((found[layer].after + size for layer, size in buckets), default=0)
        return max(most - moment.total, 0)

    # W computes the gradients of many layers at once; autograd takes them in bucket by bucket.
    most = max((size for _, size in buckets), default=0)
    ends = (last(each.first, whole.backward_first), last(each.later, whole.backward), most, most)
    return HeldStage(whole, whole, last=ends)


def _buckets(sizes: Sequence[Sequence[int]], bucket_bytes: float | None) -> list[tuple[int, int]]:
    """The layer whose backward closes each bucket, and the bucket's bytes, in the order of a backward."""
    enough_bytes = bucket_bytes_of(sum(map(sum, sizes))) if bucket_bytes is None else bucket_bytes
    found, size = [], 0
    for layer in range(len(sizes) - 1, -1, -1):
        for num_bytes in reversed(sizes[layer]):
            size += num_bytes
            if size >= enough_bytes:
                found.append((layer, size))
                size = 0
    return [*found, (0, size)] if size else found


def _gathered_once(whole: StageBytes, each: _Layers) -> HeldStage:
    parameters, rest = each.parameters, _with_shards(whole, each)
    step = replace(
        rest,
        parameter_bytes=rest.parameter_bytes + sum(parameters),
        gradient_bytes=each.sharing.gathered(whole.gradient_bytes),
    )

    def first(found: Sequence[LayerBytes], moment: Bytes) -> int:
        """Bytes of the first forward beyond `moment`, while gathered messages are copied."""
        most = max(one.before + own for one, own in zip(found, parameters, strict=True))
        return max(most - moment.total, 0)

    def last(found: Sequence[LayerBytes], moment: Bytes) -> int:
        """Bytes of the last backward beyond `moment`; messages with gradients stay until B ends."""
        most, gone, message = 0, 0, 0
        for layer in range(len(parameters) - 1, -1, -1):
            most = max(most, found[layer].fullest.total - gone + message)
            if not parameters[layer]:
                continue
            gone += parameters[layer]  # freed before the gradients are copied
            most = max(most, found[layer].after - gone + message + each.gradients[layer])
            message += each.gradients[layer]
            gone += each.gradients[layer] - each.shards[layer]
            most = max(most, found[layer].after - gone + message)
        return most - moment.total

    begins = (first(each.free, whole.free), first(each.forward, whole.forward))
    ends = (last(each.first, whole.backward_first), last(each.later, whole.backward), 0, 0)
    return HeldStage(step, rest, begins, ends)


def _gathered_always(whole: StageBytes, each: _Layers) -> HeldStage:
    parameters, rest = each.parameters, _with_shards(whole, each)

    def ahead(found: Sequence[LayerBytes]) -> Bytes:
        most = 0
        for one, own in zip(found, parameters, strict=True):  # a message and its copy are alive together
            most = max(most, one.before + 2 * own, one.fullest.total + own)
        return Bytes(transients=most)

    def back(*, first: bool) -> Bytes:
        """A layer's whole gradients live until they are scattered, shards from the first B on."""
        found, most, message = each.first, 0, 0
        gone = 0  # whole gradients of layers that are done
        for layer in range(len(parameters) - 1, -1, -1):
            most = max(most, found[layer].fullest.total - gone + parameters[layer] + message)
            if not parameters[layer]:
                continue
            most = max(most, found[layer].before - gone + 2 * parameters[layer] + message)
            most = max(most, found[layer].after - gone + each.gradients[layer] + message)
            message += each.gradients[layer]
            gone += each.gradients[layer] - (each.shards[layer] if first else 0)
            most = max(most, found[layer].after - gone + message + (0 if first else each.shards[layer]))
        return Bytes(transients=most)

    step = replace(
        rest,
        free=ahead(each.free),
        forward=ahead(each.forward),
        backward_first=back(first=True),
        backward=back(first=False),
        halves=None,
    )
    return HeldStage(step, rest)


def _with_shards(whole: StageBytes, each: _Layers) -> StageBytes:
    """The stage with only the shards of its parameters, gradients and optimizer state."""
    trained = tuple(map(each.sharing.part, whole.trained_sizes))
    return replace(
        whole, parameter_bytes=each.shard_bytes, trained_sizes=trained, gradient_bytes=sum(trained)
    )
