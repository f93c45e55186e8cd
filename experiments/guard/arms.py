"""The processes of the three arms: base, head, and the base once more as the control."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gpipe_bench.experiments.guard.benchmarks import BENCHMARKS
from gpipe_bench.harness.guard.judge import Sample
from gpipe_bench.harness.guard.process import Worker
from gpipe_bench.harness.guard.rounds import ARMS
from gpipe_bench.harness.rounds import SAMPLE_S, repeats_for

WORKER = Path(__file__).with_name("worker.py")
START_S, BUILD_S, ANSWER_S = 120.0, 180.0, 60.0  # an answer that takes longer is a hang
CALIBRATION_SAMPLES = 4


class Timed(Protocol):
    """What the guard must know of a benchmark; the processes know the rest."""

    @property
    def describe(self) -> str: ...

    @property
    def num_processes(self) -> int: ...


@dataclass(frozen=True)
class Program:
    """What the processes run: a script, its own arguments, and the folders of a revision that it imports
    from.
    """

    script: Path = WORKER
    arguments: tuple[str, ...] = ()
    folders: tuple[str, ...] = (".",)

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-P", str(self.script), *map(str, arguments), *self.arguments]


class Built(NamedTuple):
    """What came of building a benchmark."""

    loss: float | None  # of its first step, where that is known
    refused: str = ""  # why the revision can't run it


class Arm:
    """One revision, loaded in a process per stage where a benchmark wants that, else all in the first."""

    def __init__(
        self,
        name: str,
        tree: Path,
        num_processes: int,
        store: Path,
        slow_down: float,
        stack: ExitStack,
        *,
        benchmarks: Mapping[str, Timed] = BENCHMARKS,
        program: Program | None = None,
    ) -> None:
        self.name = name
        self._benchmarks = benchmarks
        self._workers = []
        program = program or Program()
        for rank in range(num_processes):
            command = program.command(tree, rank, num_processes, store, slow_down)
            worker = Worker(f"{name} ({tree})", command, environment_of(tree, program.folders))
            stack.callback(worker.kill)
            self._workers.append(worker)

    def wait_until_started(self) -> None:
        for worker in self._workers:
            worker.receive(START_S)

    def names(self) -> dict[str, str]:
        """The benchmarks that the revision's own file declares, with what they are."""
        self._workers[0].send({"do": "names"})
        found: dict[str, str] = self._workers[0].receive(ANSWER_S)["names"]
        return found

    def build(self, benchmark: str) -> Built:
        """Builds it and takes its first step."""
        replies = self._ask(benchmark, {"do": "build", "benchmark": benchmark}, BUILD_S)
        return Built(
            next((reply["loss"] for reply in replies if reply.get("loss") is not None), None),
            next((reply["refused"] for reply in replies if "refused" in reply), ""),
        )

    def sample(self, benchmark: str, repeats: int) -> Sample:
        """A step takes as long as its slowest process, and the processor time of all."""
        found = self._ask(benchmark, {"do": "sample", "benchmark": benchmark, "repeats": repeats}, ANSWER_S)
        return Sample(max(each["wall_s"] for each in found), sum(each["cpu_s"] for each in found))

    def _ask(self, benchmark: str, request: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        workers = self._workers[: self._benchmarks[benchmark].num_processes]
        for worker in workers:
            worker.send(request)
        return [worker.receive(timeout_s) for worker in workers]


@contextmanager
def arms_of(
    base: Path,
    head: Path,
    benchmarks: Mapping[str, Timed],
    *,
    slow_down: float = 0.0,
    program: Program | None = None,
) -> Iterator[dict[str, Arm]]:
    """The arms, in fresh processes that are gone afterwards.

    `slow_down` delays the head's engine by that share. Raises WorkerError where a revision can't be loaded.
    """
    num_processes = max(benchmark.num_processes for benchmark in benchmarks.values())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="guard-")))
        arms = {
            name: Arm(
                name, head if name == "head" else base, num_processes, folder / name,
                slow_down if name == "head" else 0.0, stack, benchmarks=benchmarks, program=program,
            )
            for name in ARMS
        }  # fmt: skip
        for arm in arms.values():
            arm.wait_until_started()
        yield arms


def environment_of(tree: Path, folders: Sequence[str] = (".",)) -> dict[str, str]:
    """This environment with one thread, no GPU, the packages in `folders` of `tree` first, and nothing
    written into it.
    """
    first = [str(tree / folder) for folder in folders]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **threads,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([*first, *([before] if before else [])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }


def calibrate(arm: Arm, benchmark: str, sample_s: float = SAMPLE_S) -> int:
    """Steps per sample, equal for all arms: as many as the base needs to fill it when undisturbed."""
    return repeats_for([arm.sample(benchmark, 1).wall_s for _ in range(CALIBRATION_SAMPLES)], sample_s)
