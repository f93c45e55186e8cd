"""The slow link: made, limited, used and removed where this machine allows it, and the reason elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from refused import refused
from torch import distributed as dist

from gpipe_bench.experiments.timed import slow_link
from gpipe_bench.experiments.timed.slow_link import UnavailableError, existing, set_rate, steps_at_rates
from gpipe_bench.experiments.timed.steps import Configuration, Job
from gpipe_bench.experiments.timed.workloads import Workload

pytestmark = pytest.mark.processes  # two of them; what is asserted of times holds however slow the machine is
RATE = 20e6
REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def link() -> Iterator[slow_link.SlowLink]:
    try:
        with slow_link.slow_link() as made:
            yield made
    except UnavailableError as reason:
        pytest.skip(f"no slow link here: {reason}")


def ours() -> list[str]:
    return [name for name in existing() if f"-{os.getpid()}-" in name]


def transfer(num_bytes: int) -> tuple[int, float, str]:
    """In both processes: the first sends over a limited link; rank, seconds and the group's backend."""
    rank = dist.get_rank()
    set_rate(RATE)
    dist.barrier()
    bulk, answer = torch.full((num_bytes,), 7 * (1 - rank), dtype=torch.uint8), torch.empty(1)
    start_s = time.perf_counter()
    if rank == 0:
        dist.send(bulk, 1)
        dist.recv(answer, 1)
    else:
        dist.recv(bulk, 0)
        dist.send(answer, 0)
    taken_s = time.perf_counter() - start_s
    assert bool((bulk == 7).all())
    set_rate(None)
    return rank, taken_s, dist.get_backend()


def fail_on_the_second() -> None:
    if dist.get_rank() == 1:
        raise ValueError("a mistake at the far end")
    dist.barrier()


def test_a_transfer_takes_what_the_rate_says(link: slow_link.SlowLink) -> None:
    """It cannot be faster than the bucket lets out; how much slower is the machine's business."""
    num_bytes = 4_000_000
    (first, taken_s, backend), (second, *_) = link.run(transfer, num_bytes)
    assert (first, second, backend) == (0, 1, "gloo")
    burst = slow_link.BURST_S * RATE
    assert taken_s > (num_bytes - 2 * burst) / RATE


def test_steps_over_a_slow_link_take_at_least_as_long_as_their_messages(link: slow_link.SlowLink) -> None:
    options = {
        "num_layers": 2, "d_model": 32, "ffn_dim": 64, "num_heads": 2, "seq_len": 64, "vocab_size": 50,
        "cut": "sublayer",
    }  # fmt: skip
    job = Job(Workload("", "transformer-lm", options, 4), (Configuration(2, 4, 4),), rounds=1)
    first, second = link.run(steps_at_rates, job, (None, 0.2))
    assert first.rates == second.rates
    assert first.rates[0] is None
    assert first.timed[0].activation_bytes == first.timed[0].gradient_bytes == (64 * 32 * 4,)
    assert len(first.timed) == len(first.measured) == 2  # there and back
    unlimited, limited = first.measured[0]
    rate = first.rates[1]
    assert rate is not None
    messages_s = 2 * 4 * 64 * 32 * 4 / rate  # there and back
    assert max(limited.step_s, second.measured[0][1].step_s) > messages_s / 2 - 4 * slow_link.BURST_S
    assert unlimited.bandwidth_bytes_per_s > limited.bandwidth_bytes_per_s


def test_the_first_failure_is_shown_and_processes_that_take_too_long_are_ended(
    link: slow_link.SlowLink,
) -> None:
    with pytest.raises(RuntimeError, match="rank 1 failed:\n(.|\n)*a mistake at the far end"):
        link.run(fail_on_the_second)
    with refused(RuntimeError):
        link.run(time.sleep, 600, timeout_s=0.5)
    listed = [subprocess.check_output(["ip", "netns", "pids", name], text=True) for name in link.namespaces]
    assert listed == ["", ""]


def test_an_exception_leaves_nothing_behind(link: slow_link.SlowLink) -> None:
    before = set(ours())

    def interrupted() -> None:
        with slow_link.slow_link() as second:
            assert set(ours()) == before | set(second.namespaces)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert set(ours()) == before


def test_what_a_killed_run_leaves_is_removed_by_the_next(link: slow_link.SlowLink) -> None:
    code = (
        "import time\nfrom gpipe_bench.experiments.timed.slow_link import slow_link\n"
        "with slow_link() as made:\n"
        "    print(*made.namespaces, flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert killed.stdout is not None
    names = killed.stdout.readline().split()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert set(names) <= set(existing())
    before = set(ours())
    assert set(names) <= set(slow_link.remove_leftovers())
    assert not set(names) & set(existing())
    assert set(ours()) == before  # a run that lives keeps its own


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        with pytest.raises(UnavailableError) as found, slow_link.slow_link():
            pass
        return str(found.value)

    monkeypatch.setattr(sys, "platform", "darwin")
    assert reason() == "needs Linux's network namespaces; this is darwin"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(slow_link.shutil, "which", lambda name: None if name == "tc" else "/sbin/ip")
    assert "needs tc of iproute2" in reason()
    monkeypatch.setattr(slow_link.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in reason()


def test_a_system_that_forbids_it_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(" ".join(command))
        wrong = 1 if list(command[:3]) == ["ip", "netns", "add"] else 0
        return subprocess.CompletedProcess(
            command, wrong, "", "mount: Operation not permitted\n" if wrong else ""
        )

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(slow_link.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(slow_link.subprocess, "run", refuse)
    refused = "does not allow `ip netns add .*`: mount: Operation not permitted"
    with pytest.raises(UnavailableError, match=refused), slow_link.slow_link():
        pass
    assert sum(line.startswith("ip netns del") for line in asked) == 2  # also what was perhaps never made
