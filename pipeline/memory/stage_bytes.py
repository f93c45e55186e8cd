"""The bytes that a stage holds of one micro-batch, computed from the profiles of its layers.

Layers' peaks cannot be added: neighbours keep the same storage (a ReLU's output is the next convolution's
input), and the peak of a backward depends on what earlier layers still hold. So the traces of the layers are
replayed one after another. A storage that crosses from layer to layer has one name in the stage:

    forward      x0 --[layer 0]--> x1 --[layer 1]--> x2        kept by 0: x1;  kept by 1: x1, a
    backward     g0 <--[layer 0]-- g1 <--[layer 1]-- g2        layer 1 frees a, layer 0 frees x1

A storage counts once, with the size it was allocated with (a layer may pass on a slice of it), until its last
holder frees it. Storages that serve only outputs without a gradient count as freed; at the end of a stage the
engine does keep them, until B.

Where a schedule splits the backward, action I computes gradients of inputs and W those of weights. Until W
stay inputs of operations with weights, gradients of their outputs, and parameter gradients that I has made.
W's bytes are an upper estimate: all of these, all gradients it makes, and the most one layer adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import add, attrgetter
from typing import Any, NamedTuple

from ..stage.split_backward import MANY_BYTES
from .trace import BufferRole, LayerProfile, Received, SplitTrace, Trace


class Bytes(NamedTuple):
    """Peak memory of one action on one micro-batch, without the inputs of the stage."""

    activations: int = 0  # bytes held by the graph
    gradients: int = 0  # bytes of parameter gradients that appeared in this action
    transients: int = 0  # outputs passed on, gradients of activations, temporaries

    @property
    def total(self) -> int:
        return sum(self)

    def without(self, num_bytes: int) -> Bytes:
        """Returns this peak where `num_bytes` of its transients are counted elsewhere."""
        return self._replace(transients=self.transients - num_bytes)


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage for one micro-batch. The `Bytes` of its actions never contain the stage's inputs."""

    parameter_bytes: int
    trained_sizes: tuple[int, ...]  # bytes of each parameter tensor that gets a gradient
    buffer_bytes: int
    gradient_bytes: int
    input_bytes: int
    kept_input_bytes: int  # part of input_bytes that a graph keeps from F or R to the end of B
    target_bytes: int
    output_gradient_bytes: int
    saved_bytes: int  # held by the graph from the end of F or R to the end of B
    free: Bytes  # F without a graph
    forward: Bytes  # F with a graph, and R
    backward_first: Bytes  # B that creates the parameter gradients
    backward: Bytes  # every later B
    # Messages between worker processes: a sender keeps a tensor until it has waited for the send.
    sent_bytes: int = 0  # outputs of F for the next stage, without inputs that the stage passes on
    of_graph_bytes: int = 0  # part of sent_bytes that F's graph holds, too
    sent_back_bytes: int = 0  # gradients that B or I sends to the stage before
    received_bytes: int = 0  # gradients of the stage's outputs, held throughout a B or I
    summed_gradient_bytes: int = 0  # part of gradient_bytes added to another layer's before the update
    copied_input_bytes: int = 0  # inputs that layers overwrite: copied where F and R both need them
    kept_copied_bytes: int = 0  # part of copied_input_bytes that stays from R to the end of B
    changing_buffer_bytes: int = 0  # buffers that a forward changes: copied per micro-batch between F and R
    still_buffer_bytes: int = 0  # other buffers: copied once per step if any micro-batch is recomputed
    halves: Halves | None = None  # bytes of I and W; None: the profiles have no split backward
    trace: StageTrace | None = field(default=None, repr=False, compare=False)  # of all layers


def stage_bytes(layers: Sequence[LayerProfile], loss: LayerProfile | None = None) -> StageBytes:
    """Add up the profiles of a stage's layers; ``loss`` is the loss of the last stage, as one more layer."""
    trace = StageTrace(layers, loss)
    inputs, last = layers[0].inputs, layers[-1]
    targets = loss.inputs.tensors[len(last.outputs.tensors) :] if loss is not None else ()
    kept = [i for i in inputs.distinct if inputs.tensors[i].requires_grad or i in trace.holders]
    changing = still = 0  # bytes of buffers copied per micro-batch, and once per step
    for layer in trace.layers:
        for role, size in zip(layer.buffer_roles, layer.buffer_sizes, strict=False):
            still += size * (role is BufferRole.STILL)
            changing += size * (role in (BufferRole.CHANGING, BufferRole.REPLACED))
    sent = set() if loss is not None else trace.outputs - trace.boundary
    received = () if loss is not None else last.first.output_gradients
    return StageBytes(
        parameter_bytes=sum([layer.parameter_bytes for layer in layers]),
        trained_sizes=tuple(chain.from_iterable([layer.trained_sizes for layer in layers])),
        buffer_bytes=sum([layer.buffer_bytes for layer in layers]),
        gradient_bytes=sum([layer.gradient_bytes for layer in layers]),
        input_bytes=inputs.num_bytes,
        kept_input_bytes=sum([inputs.tensors[i].num_bytes for i in kept]),
        target_bytes=sum([target.num_bytes for target in targets]),
        output_gradient_bytes=0 if loss is not None else last.output_gradient_bytes,
        saved_bytes=trace.saved_bytes,
        free=_fullest(trace.free),
        forward=_fullest(trace.with_graph),
        backward_first=_fullest(trace.first),
        backward=_fullest(trace.later),
        copied_input_bytes=sum([trace.sizes[name] for name in trace.copied if name < len(inputs.tensors)]),
        kept_copied_bytes=sum([trace.sizes[name] for name in trace.copied.intersection(kept)]),
        changing_buffer_bytes=changing,
        still_buffer_bytes=still,
        sent_bytes=sum([trace.sizes[name] for name in sent]),
        of_graph_bytes=sum([trace.sizes[name] for name in sent & trace.holders.keys()]),
        sent_back_bytes=trace.sent_back_bytes,
        received_bytes=sum([last.first.sizes[storage] for storage in received if storage is not None]),
        halves=Halves.of(trace),
        trace=trace,
    )


class LayerBytes(NamedTuple):
    """Bytes of a stage, without its inputs, before, during and after one of its layers runs."""

    before: int
    fullest: Bytes
    after: int


def _fullest(layers: Iterable[LayerBytes]) -> Bytes:
    """Returns the fullest moment of all layers, the first one among equals."""
    return max([each.fullest for each in layers], key=sum)


class StageTrace:
    """Replays the traces of a stage's layers, and of the loss on the last stage, one after another. Every
    pass returns its layers in the order of the forward.
    """

    def __init__(self, stage: Sequence[LayerProfile], loss: LayerProfile | None = None) -> None:
        self.stage = tuple(stage)
        self.layers = (*stage, loss) if loss is not None else self.stage
        self.sizes: dict[int, int] = {}  # bytes of each storage at the ends of layers, by its name
        self.boundary = set[int]()  # names of the stage's inputs and targets, held by others
        self.copied = set[int]()  # those of them that a layer overwrites; F and R work on copies
        self._inputs: list[frozenset[int]] = []  # names at the entry of each layer
        self._names: list[dict[int, int]] = []  # its name by its number in `layer.first`
        names: tuple[int, ...] = tuple(self.layers[0].inputs.same_as)
        self.boundary.update(names)
        self.sizes.update({name: self.layers[0].inputs.tensors[name].num_bytes for name in names})
        unused = len(names)
        for index, layer in enumerate(self.layers):  # follows storages from layer to layer
            trace = layer.first
            for target in layer.inputs.tensors[len(names) :] if index else ():  # the loss: its last inputs
                self.sizes[unused] = target.num_bytes
                self.boundary.add(unused)
                names = (*names, unused)
                unused += 1
            known = dict(zip(trace.inputs, names, strict=True))
            self.copied.update([names[position] for position in layer.overwritten])
            for storage in trace.outputs:
                if storage not in known:
                    known[storage], self.sizes[unused] = unused, trace.sizes[storage]
                    unused += 1
            self._inputs.append(frozenset(names))
            self._names.append(known)
            names = tuple([known[storage] for storage in trace.outputs])
        self.copied &= self.boundary
        self.outputs = set(names)
        self.saved_bytes = 0  # held by the graph
        self.holders: dict[int, int] = {}  # by name: how many layers' graphs hold the storage
        self.with_graph = self.forward()
        self.later, self.sent_back_bytes = self.backward(_LATER)

    @cached_property
    def free(self) -> list[LayerBytes]:
        """A forward without a graph."""
        found, boundary = list[LayerBytes](), self.boundary - self.copied
        for layer, inputs in zip(self.layers, self._inputs, strict=True):
            passing = sum([self.sizes[name] for name in inputs - boundary])
            found.append(LayerBytes(passing, Bytes(transients=passing + layer.free.forward_peak), passing))
        return found

    def forward(self) -> list[LayerBytes]:
        """A forward with a graph; sets `saved_bytes` and `holders`."""
        saved = 0
        holders, found = dict[int, int](), list[LayerBytes]()
        for index, layer in enumerate(self.layers):
            trace, names = layer.first, self._names[index]
            loose = self._inputs[index] - self.boundary - holders.keys()
            passing = sum([self.sizes[name] for name in loose])
            before, fullest = saved + passing, Bytes(saved, 0, passing + trace.forward_peak)
            saved += trace.kept_inside
            for storage in trace.kept_ends:
                name = names[storage]
                if name not in holders and name not in self.boundary:
                    saved += self.sizes[name]
                holders[name] = holders.get(name, 0) + 1
            found.append(LayerBytes(before, fullest, saved))
        self.saved_bytes, self.holders = saved, holders
        return found

    @cached_property
    def first(self) -> list[LayerBytes]:
        """A backward that creates the parameter gradients, which count in it."""
        return self.backward(_FIRST)[0]

    def backward(
        self,
        trace_of: Callable[[LayerProfile], Trace],
        waiting: dict[_Name, int] | None = None,
    ) -> tuple[list[LayerBytes], int]:
        """Replays B or I. `trace_of` picks the trace of a layer; `waiting` collects what I leaves to W.
        Returns the layers, and bytes of the gradients of the stage's inputs.
        """
        holders, now = self.holders.copy(), [self.saved_bytes, 0, 0]
        for name in self.boundary:
            holders[name] = holders.get(name, 0) + 1
        last, found = trace_of(self.layers[-1]), list[LayerBytes]()
        received: list[_Gradient | None] = [
            None if storage is None else ((_RECEIVED, position), last.sizes[storage])
            for position, storage in enumerate(last.output_gradients)
        ]
        held = dict([each for each in received if each is not None])  # the caller of autograd holds them
        for index in range(len(self.layers) - 1, -1, -1):
            trace = trace_of(self.layers[index])
            names, plain = self._names[index], self.layers[index].first
            if (trace.inputs, trace.outputs) != (plain.inputs, plain.outputs):  # numbered otherwise
                ends = [names[storage] for storage in plain.inputs + plain.outputs]
                names = dict(zip(trace.inputs + trace.outputs, ends, strict=True))
            received = received[: len(trace.outputs)]  # without the target's place
            loose = {each for each in received if each is not None and each[0] not in held}
            now[2] = sum(held.values()) + sum([size for _, size in loose])
            numbers: dict[_Name, int] = {}  # equal layers receive equal gradients wherever they stand
            given = tuple(
                [
                    each and Received(numbers.setdefault(each[0], len(numbers)), each[1], each[0] in held)
                    for each in received
                ]
            )
            before, moments = sum(now), list[Bytes]()
            for segment in trace.segments(given):
                moments.append(Bytes(*map(add, now, segment.peak)))
                now = [*map(add, now, segment.end)]
                if segment.released is not None:
                    name = names[segment.released]
                    holders[name] = holders.get(name, 0) - 1
                    if holders[name] == 0:
                        now[0] -= self.sizes[name]
            found.append(LayerBytes(before, max(moments, key=sum), sum(now)))
            known = dict(zip(trace.output_gradients, received, strict=True))
            if waiting is not None:
                held |= self._wait(index, names, known, waiting)
            received = [
                None if storage is None else known.get(storage, ((index, storage), trace.sizes[storage]))
                for storage in trace.input_gradients
            ]
        back = {each for each in received if each is not None and each[0] not in held}
        return found[::-1], sum([size for _, size in back])

    def _wait(
        self,
        index: int,
        names: Mapping[int, int],
        known: Mapping[int | None, _Gradient | None],
        waiting: dict[_Name, int],
    ) -> dict[_Name, int]:
        """Adds to `waiting` what layer `index` leaves to W; returns the gradients that are held for W.
        `names` are the storages at its ends, `known` the gradients that it was given.
        """
        halves, held = self.layers[index].halves, dict[_Name, int]()
        assert halves is not None, "it was looked at"
        for storage in halves.waiting:
            if storage in names:
                waiting["end", names[storage]] = self.sizes[names[storage]]
            elif (given := known.get(storage, ((index, storage), halves.inputs.sizes[storage]))) is not None:
                waiting[given[0]] = given[1]
                if storage not in halves.inputs.kept:
                    held[given[0]] = given[1]
        return held


_Name = tuple[Any, ...]
"""Name of a storage in a backward: its layer and number, or its position among received gradients."""
_Gradient = tuple[_Name, int]
"""Name of a gradient's storage, and its bytes."""
_RECEIVED = "from the next stage"
_FIRST, _LATER, _INPUTS = map(attrgetter, ("first", "later", "halves.inputs"))
"""Pick a layer's trace: of the first B, which creates parameter gradients, of a later B, and of I."""


@dataclass(frozen=True, eq=False)
class Halves:
    """Bytes that a stage holds in I, in W and in between, for one micro-batch."""

    whole: bool = False  # I does all of a backward, and W has nothing to do
    inputs: Bytes = field(default_factory=Bytes)  # I
    kept_input_bytes: int = 0  # part of the stage's inputs that stays from I to W
    layers: Sequence[SplitTrace] = ()
    sizes: Mapping[_Name, int] = field(default_factory=dict)  # bytes of each storage that waits for W

    @classmethod
    def of(cls, trace: StageTrace) -> Halves | None:
        """None where the profiles have no split backward."""
        halves = [layer.halves for layer in trace.layers if layer.halves is not None]
        if len(halves) < len(trace.layers):
            return None
        if any(each.whole for each in halves):
            return cls(whole=True)
        waiting = dict[_Name, int]()
        layers, _ = trace.backward(_INPUTS, waiting)
        # The user holds the targets in any case: they count as 0.
        given = len(trace.layers[0].inputs.same_as)
        ends = {name: ("end", name) for name in trace.boundary if ("end", name) in waiting}
        inputs = frozenset([end for name, end in ends.items() if name < given])
        sizes = waiting | dict.fromkeys([end for name, end in ends.items() if name >= given], 0)
        return cls(
            inputs=_fullest(reversed(layers)),
            kept_input_bytes=sum([sizes[end] for end in inputs]),
            layers=halves,
            sizes=sizes,
        )

    @cached_property
    def saved_bytes(self) -> int:
        """Held from the end of I to W, beyond the boundary inputs."""
        return sum(self.sizes.values()) - self.kept_input_bytes

    def apart(self, received_bytes: int) -> Halves:
        """The same where gradients from the next stage arrive in buffers that are counted elsewhere."""
        sizes = {name: 0 if name[0] == _RECEIVED else size for name, size in self.sizes.items()}
        return replace(self, inputs=self.inputs.without(received_bytes), sizes=sizes)

    def weights(self, *, first: bool, own: bool = False) -> Bytes:
        """Upper estimate of W's peak, with what waited for it. The `first` W creates the parameter gradients;
        with `own` the stage's inputs are counted elsewhere.
        """
        live = self.saved_bytes + (0 if own else self.kept_input_bytes)
        made = sum([each.made for each in self.layers])
        # The engine accumulates gradients of several layers together, once they are MANY_BYTES.
        together = min(made, MANY_BYTES)
        if first:
            return Bytes(live, made, together + max([each.first_peak - each.made for each in self.layers]))
        return Bytes(live, 0, together + max([each.later_peak for each in self.layers]))
