"""Configurations that others measured, in the order of our predictions.

A plan needs no right number to be right, only the right order. zero-bubble prints the seconds of its layers,
so its settings are predicted as a measured machine's would be; of torchtitan and Primus only the model and
the workers are known, so their layers are taken to be alike and a backward twice a forward; torchgpipe's
settings are those of the roofline of a P40 in the middle of what is unknown. What they measured is in
results/paper.csv, or stands here with its source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpipe_bench.experiments.plan.rules import rank_correlation
from gpipe_bench.experiments.schedules.published import SETTINGS
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Quantity
from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.planner.candidate import Candidate
from gpipe_bench.planner.costs import Costs, SizeCosts
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.request import Request

PART = "elsewhere"
SECONDS = {"zero-bubble": 2.0, "torchtitan": 1.0, "Primus": 1.0, "torchgpipe": 25.0}
"""By source: how long its case takes."""
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_8B = "torchtitan, issue 773: Llama 3 8B on 8 GPUs, pipeline of 8, mini-batch of 16, tokens per second"
ALIKE = {"F": 1.0, "G": 1.0, "R": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Seconds of a worker's layers: a backward is twice a forward, each of its halves is one."""


class Ordered(NamedTuple):
    """Configurations of one source that can be compared with each other.

    `speeds` and `predicted` are in units of their own, larger is faster.
    """

    group: str
    source: str
    names: Sequence[str]
    speeds: Sequence[float]
    predicted: Sequence[float]

    @property
    def correlation(self) -> float:
        """Of the ranks."""
        return rank_correlation(self.speeds, self.predicted)

    @property
    def regret(self) -> float:
        """How much longer a step of the one predicted to be the fastest took there than of the fastest."""
        chosen = max(range(len(self.names)), key=self.predicted.__getitem__)
        return max(self.speeds) / self.speeds[chosen] - 1


def run(source: str) -> Outcome:
    """The case of one source: no device, a few seconds."""
    orders = SOURCES[source]()
    quantities = [
        Quantity(
            name=name, key={"group": each.group}, value=value, unit="ratio", provenance="modelled",
            note=each.source,
        )
        for each in orders
        for name, value in (("rank correlation", each.correlation), ("regret", each.regret))
    ]  # fmt: skip
    details = [each._asdict() | {"correlation": each.correlation, "regret": each.regret} for each in orders]
    return Outcome(tuple(quantities), {"orders": details})


def zero_bubble() -> list[Ordered]:
    """Table 4's settings: 1F1B, interleaved, and zero bubble within its memory and within twice as much."""
    speeds = _of_paper("zero-bubble-speed")
    found = []
    for setting in SETTINGS:
        names = ("1F1B", "1F1B-I", "ZB-1p", "ZB-2p")
        rows = [(f"throughput of {name} over 1F1B", setting.column) for name in names[1:]]
        if rows[1] not in speeds:
            continue
        turns = setting.num_layers // setting.num_workers
        ways = (("1f1b", 1), ("interleaved", turns), ("zb-h1", 1), ("zb-h2", 1))
        times_s = {kind.value: ms / 1e3 for kind, ms in setting.times_ms().items()}
        costs = _costs(
            {"G": times_s["F"], **{kind: times_s[kind] for kind in "BIW"}}, turns, setting.num_workers
        )
        link = Link("their messages", setting.message_ms / 1e3)
        sizes = setting.num_workers, setting.num_microbatches
        predicted = [1 / _step_s(costs, link, *sizes, *way, "never") for way in ways]
        source = "arXiv 2401.10241, Table 4; times of Table 5"
        measured = [1.0, *(speeds[row] for row in rows)]
        found.append(Ordered(f"zero bubble, {setting.column}", source, names, measured, predicted))
    return found


def torchtitan() -> list[Ordered]:
    """Llama 3 405B on 512 GPUs, and 8B on eight."""
    ratio = _of_paper()["interleaved over 1F1B, throughput", "torchtitan, 405B, K=8"]
    # 126 layers on 8 workers; float8 and tensor parallelism change the seconds of all alike.
    large = [("1F1B", "1f1b", 1, "always", 1.0), ("interleaved", "interleaved", 2, "always", ratio)]
    small = [
        ("interleaved", "interleaved", 2, "never", 304.0),
        ("zero bubble, two stages per worker", "zb-v", 2, "never", 339.0),
        ("interleaved, recomputed", "interleaved", 2, "always", 243.0),
    ]
    return [
        _alike("torchtitan, 405B, K = 8", TITAN, 128, 32, large),
        _alike("torchtitan, 8B, K = 8", TITAN_8B, 32, 16, small),
    ]


def primus() -> list[Ordered]:
    """Llama 2 7B on eight GPUs, relative to 1F1B."""
    printed, column = _of_paper(), "Primus, Llama2-7B, K=8"
    ways = [("1F1B", "1f1b", 1, "never", 1.0)]
    ways += [
        (name, name, 2, "never", printed[f"{name} over 1F1B, throughput", column])
        for name in ("interleaved", "zb-v", "v-half", "v-min")
    ]
    source = "AMD, Primus-pipeline: Llama2-7B on 8 stages"
    return [_alike("Primus, 7B, K = 8", source, 32, 32, ways)]


def torchgpipe() -> list[Ordered]:
    """The speeds of its benchmarks, by the roofline of a P40."""
    from gpipe_bench.experiments.predicted import torchgpipe as published

    measured = {cell.key: float(cell.value) for cell in load_paper() if cell.source == "torchgpipe"}
    found = []
    for model, settings in published.SETTINGS.items():
        found_there = published.predict(model, quick=True)
        known = [each.cell for each in settings if each.cell in measured]
        if len(known) > 1:
            names = [f"{row.removesuffix(' throughput')} {column}" for _, row, column in known]
            speeds, predicted = (
                [measured[cell] for cell in known],
                [float(found_there.middle(cell)) for cell in known],
            )
            group = f"torchgpipe, {published.TITLES[model]}"
            found.append(Ordered(group, "torchgpipe documentation, benchmarks", names, speeds, predicted))
    return found


SOURCES: dict[str, Callable[[], list[Ordered]]] = {
    "zero-bubble": zero_bubble, "torchtitan": torchtitan, "Primus": primus, "torchgpipe": torchgpipe,
}  # fmt: skip
WORKERS = 8


def _alike(
    group: str, source: str, layers: int, number: int, ways: Sequence[tuple[str, str, int, str, float]]
) -> Ordered:
    """Of layers that are alike on eight workers; ways are names, schedules, stages per worker,
    re-materialization and speeds.
    """
    costs = _costs(ALIKE, layers, 1)
    predicted = [1 / _step_s(costs, FREE, WORKERS, number, *way[1:4]) for way in ways]
    return Ordered(group, source, [way[0] for way in ways], [way[4] for way in ways], predicted)


def _costs(seconds: dict[str, float], layers: int, workers: int) -> Costs:
    """Seconds of a worker's layers by kind, spread over them."""
    size = SizeCosts(layers_s={kind: (each / layers,) * layers * workers for kind, each in seconds.items()})
    return Costs(sizes={1: size})


def _step_s(
    costs: Costs, link: Link, workers: int, number: int, name: str, per_worker: int, remat: str
) -> float:
    stages = workers * per_worker
    candidate = Candidate(
        cut=partition([1.0] * costs.num_layers, stages), schedule=name, num_microbatches=number,
        remat=(remat,) * stages, num_workers=workers, stages_per_worker=per_worker,
    )  # fmt: skip
    request = Request(accelerators=workers, memory_bytes=2**60, batch_size=number, link=link)
    return predict(candidate, costs, request, parts=False).step_s


def _of_paper(table: str = "") -> dict[Any, float]:
    """Numbers of others, by row and column."""
    cells = [cell for cell in load_paper() if cell.source == "others" and table in ("", cell.table)]
    return {(cell.row, cell.column): float(cell.value) for cell in cells}
