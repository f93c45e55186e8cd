"""A Transformer's step as it is beside its step with compiled layers: gradients, seconds, bytes.

    python -m gpipe_bench.experiments.gpu.compiled_step --device cpu

Fails if gradients differ by more than rounding, or if the compiled step's memory is more than 5 % off the
memory model's; the ratio of times is printed and judged by nobody. Bytes are those that the allocator gave
out within a step, beyond what was there before it (weights, gradients, the mini-batch).
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline, Profiler, devices, pipeline_memory
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.plan.schedule import gpipe

MODEL = "transformer-lm"
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"num_layers": 2, "d_model": 64, "ffn_dim": 256, "num_heads": 4, "vocab_size": 128, "seq_len": 64},
    "cuda": {
        "num_layers": 12, "d_model": 1024, "ffn_dim": 4096, "num_heads": 16, "vocab_size": 8192,
        "seq_len": 512,
    },
}  # fmt: skip
BATCH_SIZE, NUM_MICROBATCHES, NUM_SAMPLES = 8, 2, 7
MOST_OFF, MOST_DIFFERENT = 0.05, 1e-5


class Work:
    """The model, its mini-batch, and pipelines of one stage over it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.options = {**SIZES[device.type], "attention": "explicit"}
        torch.manual_seed(0)
        self.model: nn.Sequential = MODELS[MODEL](**self.options).to(device)
        self.compute_loss = loss_fn(MODEL, **self.options)
        batch, target = example_batch(MODEL, BATCH_SIZE, **self.options)
        self.batch, self.target = batch.to(device), target.to(device)

    def pipeline(self, remat: str, compile: bool | str) -> Pipeline:
        return Pipeline(
            self.model, num_stages=1, num_microbatches=NUM_MICROBATCHES, remat=remat, compile=compile
        )

    def step(self, pipeline: Pipeline) -> Tensor:
        return pipeline.step(self.batch, self.target, self.compute_loss)

    def gradients(self, pipeline: Pipeline) -> list[Tensor]:
        self.model.zero_grad()
        self.step(pipeline)
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def seconds(self, pipelines: list[Pipeline]) -> list[float]:
        """The median step of each, taken in turns."""
        samples: list[list[float]] = [[] for _ in pipelines]
        for _ in range(NUM_SAMPLES):
            for pipeline, found in zip(pipelines, samples, strict=True):
                devices.synchronize(self.device)
                start_s = time.perf_counter()
                self.step(pipeline)
                devices.synchronize(self.device)
                found.append(time.perf_counter() - start_s)
        return [median(found) for found in samples]

    def peak_bytes(self, pipeline: Pipeline) -> int:
        """Given out within a step, at the fullest moment."""
        self.step(pipeline)  # gradients are there from now on
        if devices.is_accelerator(self.device):
            devices.synchronize(self.device)
            devices.reset_peak(self.device)
            before = devices.peak_bytes(self.device)
            self.step(pipeline)
            devices.synchronize(self.device)
            return devices.peak_bytes(self.device) - before
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            self.step(pipeline)
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        return peak

    def modelled_bytes(self, remat: str, *, compiled: bool) -> int:
        size = BATCH_SIZE // NUM_MICROBATCHES
        batch, target = example_batch(MODEL, size, device="meta", **self.options)
        with torch.device("meta"):
            model = MODELS[MODEL](**self.options)
        layers, loss = Profiler(compiled=compiled).model(
            model, self.compute_loss, Boundary.of(batch), Boundary.of(target)
        )
        schedule = gpipe(1, NUM_MICROBATCHES, remat)
        (stage,) = pipeline_memory(layers, loss, (range(len(layers)),), schedule)
        return stage.working_set


def compare(work: Work, remat: str, compile: bool | str) -> bool:
    """Prints a line each about gradients, seconds and bytes; whether they are as they should be."""
    plain, compiled = (work.pipeline(remat, each) for each in (False, compile))
    wanted, found = work.gradients(plain), work.gradients(compiled)
    scale = max(float(a.abs().max()) for a in wanted)  # some gradients are zero but for rounding
    largest = max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True)) / scale
    as_it_is_s, compiled_s = work.seconds([plain, compiled])
    peak, modelled = work.peak_bytes(compiled), work.modelled_bytes(remat, compiled=True)
    off = peak / modelled - 1
    print(f"remat {remat}: gradients differ by {largest:.1e} of the largest")
    print(
        f"remat {remat}: {1e3 * as_it_is_s:.2f} ms as it is, {1e3 * compiled_s:.2f} ms compiled, "
        f"{as_it_is_s / compiled_s:.2f} times as fast"
    )
    print(f"remat {remat}: {peak:,} bytes compiled, modelled {modelled:,}: {100 * off:+.2f} %", flush=True)
    return largest <= MOST_DIFFERENT and abs(off) <= MOST_OFF


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if gradients or bytes are off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--backend", help="of torch.compile; default: torch's own")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)
    work = Work(devices.current(options.device))
    fine = [compare(work, remat, options.backend or True) for remat in ("never", "always")]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
