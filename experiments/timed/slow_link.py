"""A slow network between two processes of one host, to measure what a pipeline does over one.

Two network namespaces, joined by a pair of virtual devices whose queues let only so many bytes per second
out (`tc`'s token bucket, one per direction). Each process lives in one of them and reaches the other through
that link alone. It needs Linux, root and iproute2; where one is missing, `UnavailableError` says which. Names
carry the process that made them, so whatever a killed run leaves behind is removed by the next one.

    namespace ...-0                            namespace ...-1
    process, rank 0 | slow0 [token bucket] ======= [token bucket] slow0 | process, rank 1

The rates are chosen by the model itself: as multiples of the rate at which a message takes as long as the
forward of the slower stage, so that the points lie where communication stops being hidden on any machine.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
from torch import distributed as dist

from gpipe_bench.experiments.engines.known import OverNetwork
from gpipe_bench.experiments.engines.setup import Setup
from gpipe_bench.experiments.timed.replay import TimedActions
from gpipe_bench.experiments.timed.results import check_ran, samples_of
from gpipe_bench.experiments.timed.steps import bandwidth, latency_s, work
from gpipe_bench.experiments.timed.workloads import Job
from gpipe_bench.harness.rounds import Usage, turns
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.ranks.launch import start_process
from gpipe_bench.planner.timing import CPU, time_step

PREFIX = "gpipe-bench"
INTERFACE = "slow0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # nobody else sees them
BURST_S = 0.002
"""What may leave at once after a pause, as time at the rate: more than the kernel's timers are off."""
LEAST_BURST_BYTES = 4096  # two packets; smaller buckets let nothing out
QUEUE_BYTES = 2**23  # that wait to leave; more than TCP ever queues, so nothing is dropped
_TCP = {"tcp_congestion_control": ("cubic", "reno"), "tcp_slow_start_after_idle": ("0",)}
"""The first value that the system admits. An algorithm that fills the queue and does not stop now and then to
probe the link (bbr), and no slow start after every pause.
"""

LEAST_BYTES_PER_S = 1e5
BULK_S = 0.03  # of a transfer that measures the bandwidth
MOST_BULK_BYTES, LEAST_BULK_BYTES = 2**25, 2**15
ALONE = -1  # among the rates: a step of all stages in each process, which sends nothing


class UnavailableError(Exception):
    """There is no slow link on this machine; the text says why."""


class SlowLink(NamedTuple):
    """The two namespaces of a link."""

    namespaces: tuple[str, str]

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 300.0) -> list[Any]:
        """Runs `function(*arguments)` in a process at each end; returns the results by rank.

        The processes are started like torchrun's, with `torch.distributed` on the link
        (`gpipe_bench.pipeline.ranks.launch`). The function must be importable by name and its results
        picklable. RuntimeError shows what the first process wrote that failed, or says that both took longer
        than `timeout_s`.
        """
        with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-") as folder:
            (Path(folder) / "task").write_bytes(pickle.dumps((function, arguments)))
            processes = [_start(namespace, folder, rank) for rank, namespace in enumerate(self.namespaces)]
            try:
                _wait_for(processes, Path(folder), timeout_s)
            finally:
                for process in processes:
                    _end(process)
            return [pickle.loads((Path(folder) / f"result {rank}").read_bytes()) for rank in range(2)]


@contextmanager
def slow_link() -> Iterator[SlowLink]:
    """Makes the two namespaces and their link, at full speed, and removes them in the end, whatever happens.

    Raises `UnavailableError` with the reason where that can't be done.
    """
    _check()
    remove_leftovers()
    token = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
    link = SlowLink((f"{token}-0", f"{token}-1"))
    try:
        _make(link)
        yield link
    finally:
        for namespace in link.namespaces:
            _remove(namespace)


def set_rate(bytes_per_s: float | None) -> None:
    """Limits what this process's end of the link sends; None takes the limit away. To be called by a process
    that `SlowLink.run` started, while nothing is on its way: what waits to leave is dropped, and repeated by
    TCP. Raises OSError if tc refuses.
    """
    # Not replaced: a packet larger than the new bucket would stay at the head of the queue for ever.
    subprocess.run(_tc("del"), capture_output=True, check=False)  # there may be none
    if bytes_per_s is None:
        return
    burst = max(LEAST_BURST_BYTES, round(BURST_S * bytes_per_s))
    limits = ("rate", f"{round(8 * bytes_per_s)}bit", "burst", str(burst), "limit", str(QUEUE_BYTES))
    done = subprocess.run([*_tc("add"), "tbf", *limits], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(
            f"tc does not accept a limit of {bytes_per_s:g} bytes per second: {done.stderr.strip()}"
        )


def remove_leftovers() -> list[str]:
    """Removes the namespaces of runs that no longer live, and returns their names."""
    found = [name for name in existing() if not psutil.pid_exists(int(name.split("-")[-3]))]
    for name in found:
        _remove(name)
    return found


def existing() -> list[str]:
    """The names of all namespaces that were made here, of this run and of others."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    pattern = re.compile(rf"{PREFIX}-\d+-[0-9a-f]+-[01]")
    return [name for line in listed.splitlines() if pattern.fullmatch(name := line.split(" ")[0])]


def _check() -> None:
    if not sys.platform.startswith("linux"):
        raise UnavailableError(f"needs Linux's network namespaces; this is {sys.platform}")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise UnavailableError(f"needs {' and '.join(missing)} of iproute2 (apt install iproute2)")
    if os.geteuid() != 0:
        raise UnavailableError("needs root to make network namespaces and to limit a link's rate")


def _make(link: SlowLink) -> None:
    first, second = link.namespaces
    for namespace in link.namespaces:
        _command("ip", "netns", "add", namespace)
        _command("ip", "-n", namespace, "link", "set", "lo", "up")
    pair = ("type", "veth", "peer", "name", INTERFACE, "netns", second)
    _command("ip", "link", "add", INTERFACE, "netns", first, *pair)
    for namespace, address in zip(link.namespaces, ADDRESSES, strict=True):
        _command("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", INTERFACE)
        _command("ip", "-n", namespace, "link", "set", INTERFACE, "up")
        # The kernel may lack the token bucket, so it is tried before anybody relies on it.
        _command(
            "tc", "-n", namespace, *_tc("add")[1:], "tbf", "rate", "1gbit", "burst", "64kb", "limit", "1mb"
        )
        _command("tc", "-n", namespace, *_tc("del")[1:])


def _tc(verb: str) -> list[str]:
    return ["tc", "qdisc", verb, "dev", INTERFACE, "root"]


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise UnavailableError(f"this system does not allow `{' '.join(command)}`: {said}")


def _remove(namespace: str) -> None:
    """Ends what still runs in a namespace and removes it; the link goes with it. It need not exist."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _start(namespace: str, folder: str, rank: int) -> subprocess.Popen[bytes]:
    """One process in its namespace, in a session of its own: a keyboard's interrupt is the parent's."""
    environment = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }  # fmt: skip
    with (Path(folder) / f"errors {rank}").open("wb") as errors:
        inside = ("ip", "netns", "exec", namespace)
        return subprocess.Popen(
            [*inside, sys.executable, "-m", "gpipe_bench.experiments.timed.slow_link", folder, str(rank)],
            env=environment, stdin=subprocess.PIPE, stdout=errors, stderr=errors, start_new_session=True,
        )  # fmt: skip


def _wait_for(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            time.sleep(1.0)  # the first to fail may not be the first to end
            break
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the two processes on the slow link took more than {timeout_s:g} s")
        time.sleep(0.02)
    wrong = [rank for rank, process in enumerate(processes) if process.poll()]
    if wrong:
        texts = [(folder / f"errors {rank}").read_text(errors="replace").strip()[-3000:] for rank in wrong]
        raise RuntimeError(
            "\n".join(f"rank {rank} failed:\n{text}" for rank, text in zip(wrong, texts, strict=True))
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _exit_with_parent() -> None:
    """Ends this process when its parent is gone: then nobody holds the other end of its input."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _choose(setting: Path, values: Sequence[str]) -> None:
    """Writes the first value that is admitted; where none is, the system's own stays."""
    for value in values:
        with suppress(OSError):
            setting.write_text(value)
            return


def main(folder: str, rank: str) -> None:
    """One of the two processes."""
    _exit_with_parent()
    for name, values in _TCP.items():
        _choose(Path("/proc/sys/net/ipv4") / name, values)
    function, arguments = pickle.loads((Path(folder) / "task").read_bytes())
    with start_process(device="cpu"):  # both processes are on this host, whose network is measured
        result = function(*arguments)
    (Path(folder) / f"result {rank}").write_bytes(pickle.dumps(result))


# Steps over the link


class Measured(NamedTuple):
    """One turn of one rate."""

    bandwidth_bytes_per_s: float  # of a bulk transfer; the slower direction
    latency_s: float  # one way, half of a round trip of four bytes
    step_s: float  # without the optimizer


class LinkFound(NamedTuple):
    """What one process found."""

    rates: tuple[float | None, ...]  # bytes per second, in the order of the multiples
    timed: tuple[TimedActions, ...]  # by turn; without updates, which the steps have not either
    measured: tuple[tuple[Measured, ...], ...]  # by turn and rate
    congestion_control: str
    usage: Usage  # over all rounds


def steps_at_rates(job: Job, multiples: tuple[float | None, ...]) -> LinkFound:
    """Steps of the one configuration of a job, of two stages, over links of several rates. Runs in both
    processes at once; rank is the stage.

    All rates take turns there and back within a round, and so does a step of all stages in each process, from
    which the replay of the same turn gets its action times. `multiples` are of the rate at which a message
    takes a forward; None is the link without a limit.
    """
    (configuration,) = job.configurations
    num_microbatches, remat = configuration.num_microbatches, configuration.remat
    first = replace(work(job._replace(rounds=1)).steps[0].turns[0], update_s=())
    layers = list(job.workload.build(seed=job.seed))
    compute_loss = job.workload.loss()
    batch, target = job.workload.example(configuration.batch_size, seed=job.seed)
    program = gpipe(2, num_microbatches, remat)

    def engine(group: Any) -> OverNetwork:
        return OverNetwork(Setup(layers, first.partition, num_microbatches, remat, CPU, group))

    alone, shared = engine(None), engine(dist.group.WORLD)
    rates = _rates(first, multiples)

    def step(of: OverNetwork, stage: int | None) -> float:
        step_s = time_step(partial(of.step, batch, target, compute_loss), layers)
        check_ran(of.timeline, program, stage)
        return step_s

    def in_process() -> TimedActions:
        _set_rate(None)
        step(alone, None)
        return replace(first, samples_s=samples_of([alone.timeline]))

    def over_link(rate: float | None) -> Measured:
        _set_rate(rate)
        found = _bandwidth(rate), latency_s((0, 1))
        return Measured(*found, step(shared, dist.get_rank()))

    in_process()  # warms up, as does the next
    over_link(rates[0])  # the fastest
    timed: list[TimedActions] = []
    measured: list[list[Measured]] = [[] for _ in rates]
    start = Usage.now()
    for index in turns((ALONE, *range(len(rates))), job.rounds, job.seed):
        if index == ALONE:
            timed.append(in_process())
        else:
            measured[index].append(over_link(rates[index]))
    used = Usage.now().since(start)
    _set_rate(None)
    congestion_control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return LinkFound(rates, tuple(timed), tuple(zip(*measured, strict=True)), congestion_control, used)


def _set_rate(rate: float | None) -> None:
    """At both ends, while nothing is on its way."""
    dist.barrier()
    set_rate(rate)
    dist.barrier()


def _rates(timed: TimedActions, multiples: tuple[float | None, ...]) -> tuple[float | None, ...]:
    """The first process decides, so that both ends agree."""
    forward_s = max(median(timed.samples_s[stage, Kind.F]) for stage in range(2))
    unit = timed.activation_bytes[0] / forward_s
    rates = [None if each is None else max(LEAST_BYTES_PER_S, each * unit) for each in multiples]
    dist.broadcast_object_list(rates, src=0)
    return tuple(rates)


def _bandwidth(rate: float | None) -> float:
    """Bytes per second of one transfer that nothing else disturbs, the slower direction."""
    size = MOST_BULK_BYTES if rate is None else round(BULK_S * rate)
    return bandwidth((0, 1), min(max(size, LEAST_BULK_BYTES), MOST_BULK_BYTES))


if __name__ == "__main__":
    main(*sys.argv[1:])
