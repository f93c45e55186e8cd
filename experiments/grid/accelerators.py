"""Step time and memory of every (dp, pp, tp) of 8, 64 and 512 accelerators, for two models of the paper.

Operations take what the roofline of a TPUv3 core says (`experiments/published/accelerator_steps`), GPipe's
step with every micro-batch recomputed is laid out by the replay, with the collectives of the grid. Examples
per accelerator stay the same, so the batch grows with the accelerators. What the paper does not state, the
share of the peak and the link's bandwidth and latency, is a range; the point is the geometric middle of each.

Tensor parallelism divides a Transformer's layers with sequence parallelism throughout, as evenly as could be:
operations, parameters, activations and messages by tp, and four sums in a layer's forward and backward. The
AmoebaNets have no such plan. Replicas have all parameters each (dp), or divide them (ZeRO-2, ZeRO-3). All
dimensions use links of one kind, which they don't share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, Scalar

if TYPE_CHECKING:
    from gpipe_bench.experiments.published.accelerator_steps.full_size import FullSize
    from gpipe_bench.pipeline.memory.story import LayerProfile
    from gpipe_bench.pipeline.plan.schedule import Action
    from gpipe_bench.planner.accelerators import Accelerator

PART = "grids of accelerators"
COUNTS = {"smoke": (8,), "short": (8, 64, 512), "full": (8, 64, 512)}
MEMORY_BYTES = 16 * 2**30
MOST_STAGES, MOST_TP = 16, 8
PER_STAGE = 4  # micro-batches for each stage, where there are as many examples: the paper's M >= 4K
FORMAT, OPTIMIZER = "float32", "rmsprop"
LEVELS = ("dp", "ZeRO-2", "ZeRO-3")
GIB = 2**30


class Model(NamedTuple):
    """A model at the paper's size; `tp` says whether its layers can be divided."""

    title: str
    examples: int  # for each accelerator
    tp: bool


MODELS = {
    "transformer": Model("Transformer-24", 4, tp=True),
    "amoebanet": Model("AmoebaNet-D (18, 256)", 16, tp=False),
}
ESTIMATE_S = 5.0


class Place(NamedTuple):
    """One grid."""

    dp: int
    pp: int
    tp: int


class Setting(NamedTuple):
    """What is not stated: the share of the peak that operations reach, and the link."""

    share_of_peak: float
    bytes_per_s: float
    latency_s: float


def keys(profile: str) -> list[tuple[dict[str, Scalar], float]]:
    return [
        ({"part": PART, "model": name, "accelerators": count}, ESTIMATE_S)
        for name in (("transformer",) if profile == "smoke" else MODELS)
        for count in COUNTS[profile]
    ]


def run(key: Mapping[str, Scalar], *, quick: bool) -> Outcome:
    """Every grid of a number of accelerators."""
    name, count = str(key["model"]), int(str(key["accelerators"]))
    subject = Laid(name, count, quick=quick)
    quantities, ranges = list[Quantity](), list[dict[str, Any]]()
    for place in places(count, MODELS[name], subject.num_layers):
        for level in LEVELS if place.dp > 1 else LEVELS[:1]:
            where: dict[str, Scalar] = {"dp": place.dp, "pp": place.pp, "tp": place.tp, "level": level}
            steps_s = [subject.step_s(place, level, setting) for setting in settings()]
            quantities += [
                Quantity(
                    name="step", key=where, value=steps_s[0], unit="s", provenance="modelled",
                    higher_is_better=False, note="a roofline's operations, laid out by the replay",
                ),
                Quantity(
                    name="peak memory", key=where, value=subject.peak_bytes(place, level) / GIB, unit="GiB",
                    provenance="modelled", higher_is_better=False, note="of the fullest accelerator",
                ),
            ]  # fmt: skip
            ranges.append({**where, "steps_s": steps_s, "M": subject.number(place)})
    facts = {
        "title": MODELS[name].title, "batch_size": subject.batch_size,
        "accelerator": subject.accelerator.name,
        "settings": [setting._asdict() for setting in settings()], "ranges": ranges,
    }  # fmt: skip
    return Outcome(tuple(quantities), facts)


def places(count: int, model: Model, num_layers: int) -> Iterator[Place]:
    """Powers of two."""
    pp = 1
    while pp <= min(count, MOST_STAGES, num_layers):
        tp = 1
        while pp * tp <= count and tp <= (MOST_TP if model.tp else 1):
            yield Place(count // pp // tp, pp, tp)
            tp *= 2
        pp *= 2


def settings() -> list[Setting]:
    """The middle first, then every corner of what is not stated."""
    from gpipe_bench.experiments.published.walk import points
    from gpipe_bench.harness.unknowns import load_unknowns

    table = "table2-transformer"
    names = ("share_of_peak", "link_bytes_per_s", "link_latency_s")
    found = [[float(value) for value in points(load_unknowns().find(table, name))] for name in names]
    corners = product(*((low, high) for low, _, high in found))
    return [Setting(*(middle for _, middle, _ in found)), *(Setting(*corner) for corner in corners)]


@dataclass
class Laid:
    """A model on a number of accelerators."""

    name: str
    count: int
    quick: bool = False

    @cached_property
    def full(self) -> FullSize:
        from gpipe_bench.experiments.published.accelerator_steps import paper_models

        make = paper_models.table3 if self.name == "transformer" else paper_models.table2
        return make(self.name, quick=self.quick)

    @cached_property
    def accelerator(self) -> Accelerator:
        from gpipe_bench.planner.accelerators import TPU_V3

        return TPU_V3

    @property
    def num_layers(self) -> int:
        return len(self.full.work.layers)

    @property
    def batch_size(self) -> int:
        return MODELS[self.name].examples * self.count

    def number(self, place: Place) -> int:
        """Micro-batches of a replica: four for each stage, where it has as many examples."""
        return min(self.batch_size // place.dp, PER_STAGE * place.pp)

    def examples(self, place: Place) -> int:
        return self.batch_size // place.dp // self.number(place)

    def cut(self, pp: int) -> Sequence[range]:
        from gpipe_bench.pipeline.plan.partition import partition

        work = self.full.work
        return partition([float(layer.flops(1)) for layer in work.layers], pp)

    @cached_property
    def divided(self) -> frozenset[int]:
        """The layers of the Transformer that are alike, which sum twice forward and twice back."""
        parameters = self.full.work.parameters
        usual, _ = Counter(parameters).most_common(1)[0]
        return frozenset(index for index, each in enumerate(parameters) if each == usual)

    def step_s(self, place: Place, level: str, setting: Setting) -> float:
        """Seconds of a step whose replicas have all parameters, or have divided them."""
        from gpipe_bench.pipeline.plan.links import Link
        from gpipe_bench.pipeline.plan.reductions import (
            data_parallel,
            every_pass_s,
            fetched,
            pass_s,
            sharded,
            tensor_parallel_s,
        )
        from gpipe_bench.pipeline.plan.replay import replay
        from gpipe_bench.pipeline.plan.schedule import Kind, gpipe
        from gpipe_bench.planner.accelerators import UPDATE_BYTES

        work, examples, cut = self.full.work, self.examples(place), self.cut(place.pp)
        link = Link("link", setting.latency_s, setting.bytes_per_s)
        layers = work.seconds(self.accelerator, FORMAT, examples, (setting.share_of_peak,))
        forward_s = [float(each.forward[0]) / place.tp for each in layers]
        backward_s = [float(each.backward[0]) / place.tp for each in layers]
        gradients = [[4 * each / place.tp] for each in work.parameters]
        sent = [layer.output_bytes(examples, FORMAT) for layer in work.layers]
        back = [layer.gradient_bytes(examples, FORMAT) for layer in work.layers]
        sums = [[sent[layer] for layer in span for _ in range(2) if layer in self.divided] for span in cut]
        times: dict[tuple[int, Kind], float] = {}
        for stage, span in enumerate(cut):
            times[stage, Kind.F] = times[stage, Kind.R] = sum(forward_s[layer] for layer in span)
            times[stage, Kind.B] = sum(backward_s[layer] for layer in span)
        ends = [span.stop - 1 for span in cut[:-1]]
        schedule = gpipe(place.pp, self.number(place), "always")
        waits: list[Callable[[Action], float]] = []
        if place.tp > 1:
            waits.append(tensor_parallel_s(sums, place.tp, link))
        parts = [[gradients[layer] for layer in span] for span in cut]
        held = [[sum(layer) for layer in span] for span in parts]
        ahead = [[forward_s[layer] for layer in span] for span in cut]
        behind = [[backward_s[layer] for layer in span] for span in cut]
        if level == "ZeRO-3":
            passes = [
                pass_s(sizes, seconds, place.dp, link, ahead=True)
                for sizes, seconds in zip(held, ahead, strict=True)
            ]
            passes_back = [
                pass_s(sizes[::-1], seconds[::-1], place.dp, link, ahead=True, scattered=True)
                for sizes, seconds in zip(held, behind, strict=True)
            ]
            waits.append(every_pass_s(schedule, passes, passes_back))
        divided = 1 if level == "dp" else place.dp
        pairs = list(zip(parts, behind, strict=True))
        buckets = {
            "dp": [data_parallel(sizes, place.dp, link, backward_s=seconds) for sizes, seconds in pairs],
            "ZeRO-2": [sharded(sizes, place.dp, link, backward_s=seconds) for sizes, seconds in pairs],
        }
        timeline = replay(
            schedule,
            times,
            link,
            activation_bytes=[sent[end] / place.tp for end in ends],
            gradient_bytes=[back[end] / place.tp for end in ends],
            update_s=[
                sum(work.parameters[layer] for layer in span)
                * UPDATE_BYTES[OPTIMIZER] / place.tp / divided / self.accelerator.bytes_per_s
                for span in cut
            ],
            gathers=[
                fetched(sizes, place.dp, link, forward_s=seconds)
                for sizes, seconds in zip(held, ahead, strict=True)
            ] if level == "ZeRO-2" else (),
            reductions=buckets.get(level, ()),
            collective_s=(lambda action: sum(each(action) for each in waits)) if waits else None,
        )  # fmt: skip
        return float(timeline.makespan_s)

    def peak_bytes(self, place: Place, level: str) -> float:
        """Of the fullest accelerator, its layers divided evenly by tp."""
        from gpipe_bench.pipeline.memory.stages.grids import Sharing, grid_peak_bytes, held_stage
        from gpipe_bench.pipeline.plan.schedule import gpipe

        sharing = (
            Sharing(replicas=place.dp)
            if level == "dp"
            else Sharing(shards=place.dp, level=2 if level == "ZeRO-2" else 3)
        )
        *layers, loss = self._profiles(self.examples(place))
        cut = self.cut(place.pp)
        stages = [
            held_stage(layers[span.start : span.stop], loss if span.stop == len(layers) else None, sharing)
            for span in cut
        ]
        schedule = gpipe(place.pp, self.number(place), "always")
        return max(grid_peak_bytes(stages, schedule, OPTIMIZER)) / place.tp

    def _profiles(self, examples: int) -> tuple[LayerProfile, ...]:
        return self.full.memory(FORMAT).layers(examples)
