"""What a stage holds in I, in W and in between, from its layers' profiles, to the byte.

I goes back through the layers as a backward does (`footprint`), but leaves behind what waits for W: inputs of
operations with weights, which may be storages that two layers hold, the gradients of their outputs, which may
be one that a later layer made and passed on or one that came from the next stage, and the gradients of
parameters that I has computed. W goes forward through the layers, from operation to operation:

    W   a's gradients computed   b's gradients computed, a let go   ...   1 MiB: added up   ...

A bias' gradient is that of the output itself until the engine has added it up, so that one is held longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_bench.pipeline.memory.stages.links import Links, names_in
from gpipe_bench.pipeline.memory.stages.moments import Halves, Moment
from gpipe_bench.pipeline.memory.story import Deferred, LayerProfile, Received, SplitStory, Story
from gpipe_bench.pipeline.stage.split_backward import MANY_BYTES

_Name = tuple[Any, ...]
"""Of a storage within a stage: at the ends of layers, inside a layer, or come from the next stage."""
_RECEIVED = "from the next stage"


def halves_of(
    chain: Sequence[LayerProfile], links: Links, holder: dict[int, int], saved_bytes: int
) -> Halves | None:
    """What the halves hold; None where the profiles say nothing of them. The other arguments are as in
    `footprint`: what the layers pass to one another, who frees what, and bytes of the graph.
    """
    stories = [layer.halves for layer in chain if layer.halves is not None]
    if len(stories) < len(chain):
        return None
    if any(story.whole for story in stories):
        nothing = Moment()
        return Halves(True, 0, 0, nothing, nothing, nothing, nothing, nothing)
    walk = _Inputs(chain, stories, links, holder)
    walk.go(saved_bytes)
    # The targets, and the inputs of the first stage, are the user's and stay.
    num_inputs = len(chain[0].inputs.same_as)
    users = {("end", name) for name in links.boundary}
    received = {("end", name) for name in links.boundary if name < num_inputs}

    def halves(sizes: Mapping[_Name, int], inputs: Moment, apart: Halves | None) -> Halves:
        own = {name: 0 if name in users else size for name, size in sizes.items()}
        theirs = {name: size if name in received else own[name] for name, size in sizes.items()}
        return Halves(
            whole=False,
            kept_input_bytes=sum(theirs.values()) - sum(own.values()),
            saved_bytes=sum(own.values()),
            inputs=inputs,
            weights_first=_weights(walk.parts, theirs, first=True),
            weights=_weights(walk.parts, theirs, first=False),
            own_weights_first=_weights(walk.parts, own, first=True),
            own_weights=_weights(walk.parts, own, first=False),
            apart=apart,
        )

    sizes = {name: 0 if name[0] == _RECEIVED else size for name, size in walk.sizes.items()}
    return halves(
        walk.sizes, walk.fullest, halves(sizes, walk.fullest.without(walk.received_bytes), apart=None)
    )


@dataclass(frozen=True)
class _Part:
    """What `Deferred` says, with its storages by their names in the stage."""

    costs: Deferred
    releases: frozenset[_Name]
    keeps: frozenset[_Name]
    is_last: bool


class _Inputs:
    """I: its fullest moment, the parts that it leaves for W, and the sizes of the storages that wait."""

    def __init__(
        self,
        chain: Sequence[LayerProfile],
        stories: Sequence[SplitStory],
        links: Links,
        holder: dict[int, int],
    ) -> None:
        self._chain, self._stories, self._links, self._holder = chain, stories, links, holder
        self.fullest = Moment()
        self.received_bytes = 0  # of gradients, which are held throughout
        self.parts: list[_Part] = []  # in the order in which W takes them
        self.sizes: dict[_Name, int] = {}
        self._held: dict[_Name, int] = {}  # gradients that somebody holds, by now
        self._awaited: set[int] = set()  # storages at the ends of layers that W needs

    def go(self, saved: int) -> None:
        """Back through the layers; ``saved`` is what the graph holds."""
        story = self._stories[-1].inputs
        received: list[tuple[_Name, int] | None] = [
            None if storage is None else ((_RECEIVED, position), story.sizes[storage])
            for position, storage in enumerate(story.output_gradients)
        ]
        self._held = dict(each for each in received if each is not None)
        self.received_bytes = sum(self._held.values())
        for index in range(len(self._chain) - 1, -1, -1):
            story = self._stories[index].inputs
            names = names_in(story, self._chain[index].first, self._links.names[index])
            received = received[: len(story.outputs)]  # without the target's place
            saved = self._layer(index, story, names, received, saved)
            known = {
                storage: each
                for storage, each in zip(story.output_gradients, received, strict=True)
                if storage is not None
            }
            self._leave(index, story, names, known)
            received = [
                None
                if storage is None
                else known.get(storage, (("inside", index, storage), story.sizes[storage]))
                for storage in story.input_gradients
            ]
        singles = [part for part in self.parts if not part.is_last]
        self.parts = singles[::-1] + [part for part in self.parts if part.is_last]

    def _layer(
        self,
        index: int,
        story: Story,
        names: dict[int, int],
        received: Sequence[tuple[_Name, int] | None],
        saved: int,
    ) -> int:
        """I of one layer; returns what is saved after it."""
        loose = dict(each for each in received if each is not None and each[0] not in self._held)
        other = sum(self._held.values()) + sum(loose.values())
        numbers: dict[_Name, int] = {}
        given = tuple(
            [
                None
                if each is None
                else Received(numbers.setdefault(each[0], len(numbers)), each[1], each[0] in self._held)
                for each in received
            ]
        )
        holds = Counter(names[storage] for storage in story.kept_ends)
        for stretch in story.stretches(given):
            if saved + other + stretch.peak > self.fullest.total:
                self.fullest = Moment(saved + stretch.peak_saved, 0, other + stretch.peak_other)
            saved += stretch.saved
            other += stretch.other
            if stretch.released is not None:
                name = names[stretch.released]
                holds[name] -= 1
                if self._holder.get(name) == index and holds[name] == 0 and name not in self._awaited:
                    saved -= self._links.sizes[name]
        return saved

    def _leave(
        self,
        index: int,
        story: Story,
        names: dict[int, int],
        known: Mapping[int, tuple[_Name, int] | None],
    ) -> None:
        """What a layer leaves for W; ``known`` are the gradients that it was given."""
        of: dict[int, _Name] = {}
        halves = self._stories[index]
        for part in halves.parts:
            for storage in part.releases:
                if storage in names:
                    of[storage], size = ("end", names[storage]), self._links.sizes[names[storage]]
                    self._awaited.add(names[storage])
                else:
                    given = known.get(storage, (("inside", index, storage), story.sizes[storage]))
                    if given is None:  # nobody sent it
                        continue
                    of[storage], size = given
                    if storage not in story.kept:
                        self._held[of[storage]] = size
                self.sizes[of[storage]] = size
        for part in reversed(halves.parts):
            releases = frozenset(of[storage] for storage in part.releases if storage in of)
            keeps = frozenset(of[storage] for storage in part.keeps if storage in of)
            self.parts.append(_Part(part, releases, keeps, part is halves.last))


def _weights(parts: Sequence[_Part], sizes: Mapping[_Name, int], *, first: bool) -> Moment:
    """W at its fullest, where parameters have no gradients yet, and later."""
    w = _Weights(parts, sizes, first)
    before: list[_Part] = []  # the operation at hand, then all that W does at its end
    for part in parts:
        if not part.is_last or (before and not before[0].is_last and part.costs.result):
            w.release(before)
            before = []
        w.compute(part)
        if part.is_last:
            before.append(part)
        else:
            before = [part]
            w.add_up_if_many()
    w.release([part for part in before if part.is_last])
    w.add_up()
    return w.fullest


class _Weights:
    """W as it goes on: what waits, and the gradients that the engine is yet to add."""

    def __init__(self, parts: Sequence[_Part], sizes: Mapping[_Name, int], first: bool) -> None:
        self._sizes, self._first = sizes, first
        self._users = Counter(name for part in parts for name in part.releases)
        self._live = sum(sizes[name] for name in self._users)
        self._made = self._results = 0
        self._group: list[_Part] = []
        self.fullest = Moment()
        self._note(0)

    def _note(self, extra: int) -> None:
        if self._live + self._made + self._results + extra > self.fullest.total:
            self.fullest = Moment(self._live, self._made, self._results + extra)

    def release(self, parts: Sequence[_Part]) -> None:
        """Lets go of what no other part needs, and is no gradient that is yet to be added."""
        kept = frozenset[_Name]().union(*(each.keeps for each in self._group))
        for name in (name for part in parts for name in part.releases):
            self._users[name] -= 1
            if self._users[name] == 0 and name not in kept:
                self._live -= self._sizes[name]

    def compute(self, part: _Part) -> None:
        """The gradients of one part's weights."""
        self._note(part.costs.formula_peak)
        self._results += part.costs.result
        self._group.append(part)

    def add_up_if_many(self) -> None:
        """As the engine is called inside W."""
        if sum(part.costs.counted for part in self._group) > MANY_BYTES:
            self.add_up()

    def add_up(self) -> None:
        """A pass of the engine."""
        costs = [part.costs for part in self._group]
        if self._first:
            self._note(sum(each.first_peak for each in costs))
            self._made += sum(each.made for each in costs)
        else:
            beyond = max((each.later_peak - each.entering for each in costs), default=0)
            self._note(sum(each.entering for each in costs) + beyond)
        self._results = 0
        for name in frozenset[_Name]().union(*(each.keeps for each in self._group)):
            if self._users[name] == 0:
                self._live -= self._sizes[name]
        self._group = []
