"""Configurations that others measured, in the order of our predictions.

A plan needs no right number to be right, only the right order. zero-bubble prints the seconds of its layers,
so its settings are predicted as a measured machine's would be; of torchtitan and Primus only the model and
the workers are known, so their layers are taken to be alike and a backward twice a forward; torchgpipe's
settings are those of the roofline of a P40 in the middle of what is unknown. What they measured is in
results/paper.csv, or stands here with its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpipe_bench.experiments.plan.measures import rank_correlation
from gpipe_bench.experiments.schedules.zero_bubble import SETTINGS, Setting
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.planner.candidate import Candidate
from gpipe_bench.planner.costs import Costs, SizeCosts
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.request import Request

TITAN_8B = "torchtitan, issue 773: Llama 3 8B on 8 GPUs, pipeline of 8, mini-batch of 16, tokens per second"
_ROOM = 2**60  # bytes: memory is not what is asked


@dataclass(frozen=True, slots=True)
class Ordered:
    """Configurations of one source that can be compared with each other.

    `speeds` and `predicted` are in units of their own, larger is faster.
    """

    group: str
    source: str
    names: tuple[str, ...]
    speeds: tuple[float, ...]
    predicted: tuple[float, ...]

    @property
    def correlation(self) -> float:
        """Of the ranks."""
        return rank_correlation(self.speeds, self.predicted)

    @property
    def regret(self) -> float:
        """How much longer a step of the one predicted to be the fastest took there than of the fastest."""
        chosen = max(range(len(self.names)), key=self.predicted.__getitem__)
        return max(self.speeds) / self.speeds[chosen] - 1


def zero_bubble() -> list[Ordered]:
    """Table 4's settings: 1F1B, interleaved, and zero bubble within its memory and within twice as much."""
    speeds = {
        (cell.row, cell.column): cell.value for cell in load_paper() if cell.table == "zero-bubble-speed"
    }
    ways = (
        ("1F1B", "1f1b", 1), ("1F1B-I", "interleaved", 0), ("ZB-1p", "zb-h1", 1), ("ZB-2p", "zb-h2", 1),
    )  # fmt: skip
    found = []
    for setting in SETTINGS:
        rows = {name: f"throughput of {name} over 1F1B" for name, _, _ in ways[1:]}
        if (rows["ZB-1p"], setting.column) not in speeds:
            continue
        costs, request = of_setting(setting)
        turns = setting.num_layers // setting.num_workers
        steps = [
            _step_s(name, setting.num_workers, per or turns, setting.num_microbatches, costs, request)
            for _, name, per in ways
        ]
        published = [1.0, *(float(speeds[rows[name], setting.column]) for name, _, _ in ways[1:])]
        found.append(
            Ordered(
                f"zero bubble, {setting.column}", "arXiv 2401.10241, Table 4; times of Table 5",
                tuple(name for name, _, _ in ways), tuple(published), tuple(1 / step for step in steps),
            )
        )  # fmt: skip
    return found


def of_setting(setting: Setting) -> tuple[Costs, Request]:
    """The costs that zero-bubble prints, spread over the layers of a worker."""
    per_worker = setting.num_layers // setting.num_workers
    layers = per_worker * setting.num_workers

    def each(milliseconds: float) -> tuple[float, ...]:
        return (milliseconds / 1e3 / per_worker,) * layers

    inputs, weights = setting.input_backward_ms, setting.weight_backward_ms
    size = SizeCosts(
        layers_s={
            "G": each(setting.forward_ms), "B": each(inputs + weights), "I": each(inputs), "W": each(weights),
        }
    )  # fmt: skip
    link = Link("their messages", setting.message_ms / 1e3)
    return Costs(sizes={1: size}), _request(setting.num_workers, setting.num_microbatches, link)


def alike(layers: int) -> Costs:
    """Layers of equal cost: a backward is twice a forward, each of its halves is one."""
    seconds = {kind: (times / layers,) * layers for kind, times in _TIMES.items()}
    return Costs(sizes={1: SizeCosts(layers_s=seconds)})


_TIMES = {"F": 1.0, "G": 1.0, "R": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def torchtitan() -> list[Ordered]:
    """Llama 3 405B on 512 GPUs, and 8B on eight."""
    (ratio,) = _of_paper("interleaved over 1F1B, throughput", "torchtitan, 405B, K=8")
    # 126 layers on 8 workers; float8 and tensor parallelism change the seconds of all alike.
    large = _order(
        "torchtitan, 405B, K = 8", "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md", 128, 8, 32,
        (("1F1B", "1f1b", 1, "always", 1.0), ("interleaved", "interleaved", 2, "always", ratio)),
    )  # fmt: skip
    small = _order(
        "torchtitan, 8B, K = 8", TITAN_8B, 32, 8, 16,
        (
            ("interleaved", "interleaved", 2, "never", 304.0),
            ("zero bubble, two stages per worker", "zb-v", 2, "never", 339.0),
            ("interleaved, recomputed", "interleaved", 2, "always", 243.0),
        ),
    )  # fmt: skip
    return [large, small]


def primus() -> list[Ordered]:
    """Llama 2 7B on eight GPUs, relative to 1F1B."""
    names = ("interleaved", "zb-v", "v-half", "v-min")
    ways = [("1F1B", "1f1b", 1, "never", 1.0)]
    for name in names:
        (ratio,) = _of_paper(f"{name} over 1F1B, throughput", "Primus, Llama2-7B, K=8")
        ways.append((name, name, 2, "never", ratio))
    return [_order("Primus, 7B, K = 8", "AMD, Primus-pipeline: Llama2-7B on 8 stages", 32, 8, 32, ways)]


def torchgpipe() -> list[Ordered]:
    """The speeds of its benchmarks, by the roofline of a P40."""
    from gpipe_bench.experiments.published import torchgpipe as published

    measured = {cell.key: float(cell.value) for cell in load_paper() if cell.source == "torchgpipe"}
    found = []
    for model, settings in published.SETTINGS.items():
        walk = published.predict(model, quick=True)
        cells = [(each.table, each.row, each.column) for each in settings]
        known = [cell for cell in cells if cell in measured]
        if len(known) < 2:
            continue
        found.append(
            Ordered(
                f"torchgpipe, {published.TITLES[model]}", "torchgpipe documentation, benchmarks",
                tuple(f"{row.removesuffix(' throughput')} {column}" for _, row, column in known),
                tuple(measured[cell] for cell in known), tuple(float(walk.middle(cell)) for cell in known),
            )
        )  # fmt: skip
    return found


SOURCES: dict[str, Callable[[], list[Ordered]]] = {
    "zero-bubble": zero_bubble, "torchtitan": torchtitan, "Primus": primus, "torchgpipe": torchgpipe,
}  # fmt: skip


def _order(
    group: str,
    source: str,
    layers: int,
    workers: int,
    microbatches: int,
    ways: Iterable[tuple[str, str, int, str, float]],
) -> Ordered:
    costs, request, ways = alike(layers), _request(workers, microbatches, FREE), list(ways)
    steps = [
        _step_s(name, workers, per_worker, microbatches, costs, request, remat)
        for _, name, per_worker, remat, _ in ways
    ]
    return Ordered(
        group, source, tuple(each[0] for each in ways), tuple(each[4] for each in ways),
        tuple(1 / step for step in steps),
    )  # fmt: skip


def _step_s(
    name: str,
    workers: int,
    per_worker: int,
    microbatches: int,
    costs: Costs,
    request: Request,
    remat: str = "never",
) -> float:
    stages = workers * per_worker
    candidate = Candidate(
        cut=partition([1.0] * costs.num_layers, stages), schedule=name, num_microbatches=microbatches,
        remat=(remat,) * stages, num_workers=workers, stages_per_worker=per_worker,
    )  # fmt: skip
    return predict(candidate, costs, request, parts=False).step_s


def _request(workers: int, microbatches: int, link: Link) -> Request:
    return Request(accelerators=workers, memory_bytes=_ROOM, batch_size=microbatches, link=link)


def _of_paper(row: str, column: str) -> Sequence[float]:
    return [float(cell.value) for cell in load_paper() if (cell.row, cell.column) == (row, column)]
