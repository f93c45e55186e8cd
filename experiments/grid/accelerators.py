"""Step time and memory of every (dp, pp, tp) of 8, 64 and 512 accelerators, for two models of the paper.

Operations take what the roofline of a TPUv3 core says (`experiments/predicted/sizes.py`), GPipe's
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
from collections.abc import Mapping
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.harness.experiment import Case, Outcome
from gpipe_bench.harness.record import Quantity, Scalar
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import Partition, partition

if TYPE_CHECKING:
    from gpipe_bench.experiments.predicted.sizes import FullSize

PART = "grids of accelerators"
COUNTS = {"smoke": (8,), "short": (8, 64, 512), "full": (8, 64, 512)}
ESTIMATE_S = 5.0
CAP_GIB = 16.0
MOST_STAGES, MOST_TP = 16, 8
PER_STAGE = 4  # micro-batches for each stage, where there are as many examples: the paper's M >= 4K
FORMAT, OPTIMIZER = "float32", "rmsprop"
SHARED = {"ZeRO-2": 2, "ZeRO-3": 3}
LEVELS = ("dp", *SHARED)
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


def cases(profile: str) -> list[Case]:
    return [
        Case({"part": PART, "model": name, "accelerators": count}, ESTIMATE_S)
        for name in (("transformer",) if profile == "smoke" else MODELS)
        for count in COUNTS[profile]
    ]


def run(key: Mapping[str, Scalar], *, quick: bool) -> Outcome:
    """Every grid of a number of accelerators."""
    grids = Grids(str(key["model"]), int(str(key["accelerators"])), quick=quick)
    quantities, ranges, tried = list[Quantity](), list[dict[str, Any]](), settings()
    for place in grids.places():
        for level in LEVELS if place.dp > 1 else LEVELS[:1]:
            where: dict[str, Scalar] = {**place._asdict(), "level": level}
            steps_s = [grids.step_s(place, level, setting) for setting in tried]
            quantities += [
                Quantity(
                    "step", steps_s[0], "s", "modelled", key=where,
                    note="a roofline's operations, laid out by the replay",
                ),
                Quantity(
                    "peak memory", grids.peak_bytes(place, level) / GIB, "GiB", "modelled", key=where,
                    note="of the fullest accelerator",
                ),
            ]  # fmt: skip
            ranges.append({**where, "steps_s": steps_s, "M": grids.number(place)})
    facts = {
        "title": grids.model.title, "batch_size": grids.batch_size, "accelerator": grids.accelerator.name,
        "settings": [setting._asdict() for setting in tried], "ranges": ranges,
    }  # fmt: skip
    return Outcome(tuple(quantities), facts)


def settings() -> list[Setting]:
    """The middle first, then every corner of what is not stated."""
    from gpipe_bench.harness.unknowns import load_unknowns, points

    names = ("share_of_peak", "link_bytes_per_s", "link_latency_s")
    known = [points(load_unknowns().find("table2-transformer", name)) for name in names]
    ends = [(float(low), float(high)) for low, _, high in known]
    return [
        Setting(*(float(middle) for _, middle, _ in known)),
        *(Setting(*corner) for corner in product(*ends)),
    ]


class Grids:
    """The grids of a model on a number of accelerators; `quick` takes a tiny one of its kind."""

    def __init__(self, name: str, count: int, *, quick: bool = False) -> None:
        from gpipe_bench.experiments.predicted.sizes import of_the_paper
        from gpipe_bench.planner.accelerators import TPU_V3

        table = "table3" if name == "transformer" else "table2"
        self.model, self.count, self.accelerator = MODELS[name], count, TPU_V3
        self.full: FullSize = of_the_paper(table, name, quick=quick)
        self.batch_size = self.model.examples * count

    def places(self) -> list[Place]:
        """Powers of two."""
        most_pp = min(self.count, MOST_STAGES, len(self.full.layers))
        most_tp = MOST_TP if self.model.tp else 1
        powers = [2**power for power in range(self.count.bit_length())]
        return [
            Place(self.count // pp // tp, pp, tp)
            for pp in powers
            for tp in powers
            if pp <= most_pp and tp <= most_tp and pp * tp <= self.count
        ]

    def number(self, place: Place) -> int:
        """Micro-batches of a replica: four for each stage, where it has as many examples."""
        return min(self.batch_size // place.dp, PER_STAGE * place.pp)

    def examples(self, place: Place) -> int:
        """Of a micro-batch."""
        return self.batch_size // place.dp // self.number(place)

    def cut(self, pp: int) -> Partition:
        return partition([float(each) for each in self.full.flops(1)], pp)

    @cached_property
    def divided(self) -> frozenset[int]:
        """The layers of the Transformer that are alike, which sum twice forward and twice back."""
        usual, _ = Counter(self.full.parameters).most_common(1)[0]
        return frozenset(index for index, each in enumerate(self.full.parameters) if each == usual)

    def step_s(self, place: Place, level: str, setting: Setting) -> float:
        """Seconds of a step whose replicas have all parameters, or have divided them."""
        from gpipe_bench.planner.accelerators import UPDATE_BYTES
        from gpipe_bench.planner.candidate import Candidate
        from gpipe_bench.planner.costs import Costs, SizeCosts
        from gpipe_bench.planner.predict import Layout
        from gpipe_bench.planner.request import Request

        full, examples, cut, (dp, pp, tp) = self.full, self.examples(place), self.cut(place.pp), place
        layers = full.seconds(self.accelerator, FORMAT, examples, (setting.share_of_peak,))
        ahead_s, behind_s = ([float(way[0]) for way in ways] for ways in zip(*layers, strict=True))
        every = range(len(full.layers))
        sent = [full.sent_bytes(layer, examples, FORMAT) for layer in every]
        size = SizeCosts(
            layers_s={"F": ahead_s, "R": ahead_s, "B": behind_s},
            activation_bytes=[each / tp for each in sent[:-1]],
            gradient_bytes=[full.returned_bytes(layer, examples, FORMAT) / tp for layer in every[:-1]],
            sum_bytes={layer: sent[layer] for layer in self.divided},
        )
        moved = UPDATE_BYTES[OPTIMIZER] / self.accelerator.bytes_per_s
        costs = Costs(
            sizes={examples: size},
            update_s=[moved * each for each in full.parameters],
            parameter_bytes=[(4 * each,) for each in full.parameters],
        )
        request = Request(
            accelerators=self.count, memory_bytes=int(CAP_GIB * GIB), batch_size=self.batch_size,
            link=Link("link", setting.latency_s, setting.bytes_per_s), device_type="tpuv3",
        )  # fmt: skip
        replicas = {"dp": dp} if level == "dp" else {"fsdp": dp, "fsdp_level": SHARED[level]}
        candidate = Candidate(
            cut=cut, schedule="gpipe", num_microbatches=self.number(place), remat=("always",) * pp,
            num_workers=pp, tp=tp, **replicas,
        )  # fmt: skip
        return float(Layout(candidate, costs, request).timeline().makespan_s)

    def peak_bytes(self, place: Place, level: str) -> float:
        """Of the fullest accelerator, its layers divided evenly by tp."""
        from gpipe_bench.pipeline.memory.grids import Sharing, grid_peak_bytes, held_stage

        sharing = Sharing(place.dp)
        if level in SHARED:
            sharing = Sharing(shards=place.dp, level=SHARED[level])
        *layers, loss = self.full.profiles(FORMAT, self.examples(place))
        stages = [
            held_stage(layers[span.start : span.stop], loss if span.stop == len(layers) else None, sharing)
            for span in self.cut(place.pp)
        ]
        schedule = gpipe(place.pp, self.number(place), "always")
        return max(grid_peak_bytes(stages, schedule, OPTIMIZER)) / place.tp
