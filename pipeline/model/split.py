"""Any module as a sequence of layers, cut where it is told to or where it balances.

The forward is traced twice, in training and in evaluation mode, because what it does between its modules may
depend on the mode; a layer follows its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from gpipe_bench.pipeline.memory.cost import layer_costs
from gpipe_bench.pipeline.model.cut import cuttable, parts_between
from gpipe_bench.pipeline.model.parts import OwnLayers
from gpipe_bench.pipeline.model.trace import Place, Trace, inputs_of, trace
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.stage.microbatch import Tree


def split(
    model: nn.Module,
    at: Sequence[str] | None = None,
    *,
    num_layers: int | None = None,
    inputs: Sequence[str] | None = None,
    example: Tree | None = None,
) -> OwnLayers:
    """A model as the layers that a `Pipeline` takes, with what is alive at a cut passed from one to the next,
    or as a portal to the one that uses it.

    Args:
        model: any module whose forward takes tensors. It is not changed, and shares its modules with the
            layers: what is trained is the model. Parameters and buffers keep their names.
        at: names of modules in the model, before whose first calls it is cut. Only what contains these
            modules is looked into; everything else stays as it is.
        num_layers: instead of `at`: how many layers to cut it into, balanced by parameters, or by what the
            parts cost on `example`.
        inputs: which arguments of the model's forward a batch holds, in its order: a tensor for one, a tuple
            for several. Default: those that have no default.
        example: a micro-batch, also on the meta device.

    `ValueError` if a name is not a module or is not called, and where the forward to be cut does what a graph
    cannot hold, with what to do then.
    """
    if (at is None) == (num_layers is None):
        raise ValueError("give either at=, the names of modules to cut before, or num_layers=")
    if at is not None and example is not None:
        raise ValueError("example= is for balancing, with num_layers=; at= says where the cuts are")
    names = inputs_of(model, inputs)
    if at is not None:
        opened = _around(model, at)
        traces = {mode: trace(model, names, opened, mode) for mode in (True, False)}
        places = _named(traces, at)
    else:
        assert num_layers is not None
        traces = {mode: trace(model, names, None, mode) for mode in (True, False)}
        places = _balanced(model, traces, num_layers, example)
    return _layers(model, traces, places)


def _layers(
    model: nn.Module, traces: Mapping[bool, Trace], places: Sequence[Place], *, portals: bool = True
) -> OwnLayers:
    starts = {mode: [found.calls[place] for place in places] for mode, found in traces.items()}
    parts = parts_between(model, traces, starts, portals=portals)
    titles = [name if call == 0 else f"{name}, call {call + 1}" for name, call in places]
    first = f"what comes before {titles[0]}" if titles else "the model"
    return OwnLayers(model, dict(zip([first, *titles], parts, strict=True)))


def _around(model: nn.Module, at: Sequence[str]) -> set[str]:
    """The names of all that contains one of these modules."""
    if isinstance(at, str) or not at or len(set(at)) < len(at):
        raise ValueError(f"at is {at!r}; give names of modules, each once")
    known = dict(model.named_modules())
    for name in at:
        if not name or name not in known:
            some = ", ".join(list(known)[1:9])
            raise ValueError(f"the model has no module {name!r}; it has {some} and so on (named_modules)")
    return {name[:i] for name in at for i, letter in enumerate(name) if letter == "."}


def _named(traces: Mapping[bool, Trace], at: Sequence[str]) -> list[Place]:
    """The first calls of these modules, in the order of the forward."""
    for found in traces.values():
        for name in at:
            if (name, 0) not in found.calls:
                raise ValueError(f"module {name!r} is not called by itself in the forward; cut at another")
            if (name, 0) not in cuttable(found):
                raise ValueError(
                    f"the forward cannot be cut before {name!r}: nothing is computed before it, or a value "
                    "from before it is changed in place behind it, where it may have another name; cut "
                    "elsewhere"
                )
    places = list(cuttable(traces[True]))
    return sorted([(name, 0) for name in at], key=places.index)


def _balanced(
    model: nn.Module, traces: Mapping[bool, Trace], num_layers: int, example: Tree | None
) -> list[Place]:
    """Where to cut into layers of which the largest is smallest."""
    places: list[Place] = []
    order = {place: i for i, place in enumerate(cuttable(traces[False]))}
    nodes = set()
    for place, node in cuttable(traces[True]).items():
        if node not in nodes and place in order and (not places or order[place] > order[places[-1]]):
            places.append(place)
            nodes.add(node)
    if not 1 <= num_layers <= len(places) + 1:
        raise ValueError(
            f"num_layers is {num_layers}, but this model can be cut into 1 to {len(places) + 1} layers; what "
            "is not looked into stays in one piece"
        )
    pieces = list(_layers(model, traces, places, portals=False))
    if example is None:
        costs = [1.0 + sum(parameter.numel() for parameter in piece.parameters()) for piece in pieces]
    else:
        costs = list(layer_costs(pieces, example))
    return [places[span.start - 1] for span in partition(costs, num_layers)[1:]]
